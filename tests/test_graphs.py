from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from minivllm.graphs import Captured, Forwarded, StepGraphs, ladder


class Recorder:
    """Replays on the addresses of the recording."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def __call__(self, run):
        self.num_recorded += 1
        outputs = run()

        def replay() -> None:
            self.num_replayed += 1
            for old, new in zip(outputs, run(), strict=True):
                old.copy_(new)

        return Captured(outputs, replay)


def doubled(x: torch.Tensor):
    return lambda: Forwarded(2 * x, x > 0)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 8, 20, 256, 300, 1024])
def test_the_ladder_wastes_little(max_rows: int) -> None:
    """It rises from 1 to the most rows there can be, and no step is padded by 16 rows or more."""
    sizes = ladder(max_rows)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, max_rows)
    assert all(b - a <= (8 if b <= 256 else 16) for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize(
    ("query_lens", "size"),
    [([1], 1), ([1] * 3, 4), ([1] * 4, 4), ([1] * 5, None), ([1, 2], None), ([2, 2], None)],
)
def test_a_step_takes_the_smallest_graph_that_covers_it(query_lens, size) -> None:
    """Rows that compute more than one token, or too many rows, have no graph."""
    graphs = StepGraphs([4, 1], 1, Recorder)
    assert graphs.size_for(np.array(query_lens)) == size


def test_graphs_for_verification_cover_rows_of_that_many_tokens() -> None:
    """With three tokens per row, a step of single tokens is not covered."""
    graphs = StepGraphs([2], 3, Recorder)
    assert graphs.size_for(np.array([3, 3])) == 2
    assert graphs.size_for(np.array([1])) is None


def test_a_replay_reads_what_the_inputs_hold_now() -> None:
    """Recorded once per size; each run computes from the present numbers."""
    recorder = Recorder()
    graphs = StepGraphs([2], 1, lambda: recorder)
    x = torch.tensor([1.0, -1.0])
    for factor in (1, 3, -2):
        x.copy_(torch.tensor([1.0, -1.0]) * factor)
        found = graphs.run(2, {"x": x}, doubled(x))
        assert found.hidden.tolist() == [2.0 * factor, -2.0 * factor]
        assert found.finite.tolist() == [factor > 0, factor < 0]
    assert (recorder.num_recorded, recorder.num_replayed) == (1, 3)


def test_inputs_that_have_moved_are_not_replayed() -> None:
    """A replay would read the old addresses, so it is refused."""
    graphs = StepGraphs([2], 1, Recorder)
    x = torch.ones(2)
    graphs.run(2, {"x": x}, doubled(x))
    with pytest.raises(AssertionError, match="a replay reads"):
        graphs.run(2, {"x": x.clone()}, doubled(x))


def test_cleared_graphs_are_recorded_again() -> None:
    """After `clear` nothing of the old addresses is left."""
    recorder = Recorder()
    graphs = StepGraphs([2], 1, lambda: recorder)
    for _ in range(2):
        x = torch.ones(2)
        graphs.run(2, {"x": x}, doubled(x))
        graphs.clear()
    assert recorder.num_recorded == 2
