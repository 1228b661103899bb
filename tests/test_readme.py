from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


def test_there_are_snippets() -> None:
    """The README shows how to use the package from Python."""
    assert SNIPPETS


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippet_runs(code: str) -> None:
    """Every Python example of the README runs as it stands and prints something."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
