from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_check.py"


def dry_run(*flags: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    """The finished process, and its JSON line."""
    command = [sys.executable, str(SCRIPT), "--dry-run", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode in (0, 1), done.stderr
    return done, json.loads(done.stdout.splitlines()[-1])


def test_a_part_runs_alone_and_a_run_that_was_cut_goes_on(tmp_path: Path) -> None:
    """Cases in the state file are shown and not run again; the others are."""
    state = tmp_path / "state.json"
    flags = ("--part", "prefill", "--state", str(state))
    done, found = dry_run(*flags)
    assert done.returncode == 0
    (name,) = found["cases"]
    assert json.loads(state.read_text()) == found
    found["cases"][name]["step_ms"] = 12345.0
    found["cases"]["left from before"] = {"ok": False}
    state.write_text(json.dumps(found))
    done, again = dry_run(*flags)
    assert again == found
    assert "step_ms=1.234e+04" in done.stdout
    assert done.returncode == 1  # a case that failed stays failed


@pytest.mark.slow
def test_every_part_runs() -> None:
    """Without a flag every part gives its cases, none of which failed."""
    done, found = dry_run()
    assert done.returncode == 0, done.stdout
    for start in ("attention float32", "rows", "decode", "prefill", "attention decode", "engine"):
        assert any(name.startswith(start) for name in found["cases"])
    assert all("raised" not in figures for figures in found["cases"].values())
