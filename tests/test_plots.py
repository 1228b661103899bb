from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from minivllm import plots
from minivllm.errors import ConfigError
from minivllm.measures import Answer
from minivllm.roofline import Step

STEPS = [Step(i, 4, 4 + 60 * (i % 3 == 0), 4, 100, 100, 0.1) for i in range(9)]
ANSWERS = [Answer(8, i / 2, ttft_s=0.5, latency_s=2.0, output_len=9) for i in range(4)]
RUN = {"output_throughput": 5.0, "p99_ttft_ms": 80.0, "p99_tpot_ms": 9.0}
FOUND = [
    {"settings": {"max_num_seqs": size}, "runs": [RUN | {"request_rate": rate} for rate in (1, 2)]}
    for size in (4, 8)
]


PANELS = [("a", "ms", {"x": [1.0, 2.0]}), ("b", "s", {"y": [3.0, 4.0]})]
PICTURES = {
    "timeline": lambda file: plots.timeline(STEPS, file),
    "requests": lambda file: plots.requests(ANSWERS, file),
    "no requests": lambda file: plots.requests([], file),
    "load curves": lambda file: plots.load_curves(
        {"goodput": {"ttft": 50.0}, "found": FOUND}, file
    ),
    "pareto": lambda file: plots.pareto(FOUND, file),
    "lines": lambda file: plots.lines(file, PANELS, [1, 2], "rows", xlog=True),
    "bars": lambda file: plots.bars(file, [("a", "ms", {"x": 1.0, "y": 2.0})]),
}


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_a_picture_is_written(tmp_path: Path, draw: Any) -> None:
    """Each picture is a PNG in a directory that is made for it."""
    file = draw(tmp_path / "pictures" / "one.png")
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_front() -> None:
    """Only points that no other beats in both are on the front, and equal ones once."""
    points = [(5, 9), (5, 7), (5, 7), (6, 8), (1, 1), (0, 1)]
    assert plots.pareto_front(points) == [(1, 1), (5, 7), (6, 8)]
    assert plots.pareto_front([]) == []


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where matplotlib is missing, how to get it is told."""
    real_import = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match="needs matplotlib: pip install"):
        plots.timeline(STEPS, tmp_path / "one.png")
