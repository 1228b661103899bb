"""CUDA graphs for steps in which every row computes equally many tokens, as in decoding.

Launching a forward pass kernel by kernel takes the host longer than a GPU needs to run it for a few
rows. A graph is the whole pass recorded once and launched as one. It replays on fixed addresses and
shapes, so there is one per number of rows in a ladder, and a step takes the next larger:

    rows in the step   3                       ladder   1  2  4  8  16  24 ...
    graph              4 = 3 rows + 1 null row                ^

A null row computes a token of the null block; its results are not looked at. The inputs are at the
same addresses for every step of one size (`device.Staging`), and block tables have one fixed width.

A graph ends with the last hidden states. Logits stay outside: each size would keep an output of
rows x vocabulary numbers of its own, gigabytes over a ladder, to save three launches.

Invariants: neither model nor kernels know of graphs or padding; a graph is recorded at first use
and is valid until weights or KV cache move (`clear`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

_STEP = 8  # between the ladder's sizes; twice that where it wastes as little
_WIDE_STEP_FROM = 256


class Forwarded(NamedTuple):
    """What a forward pass leaves: for T tokens of R rows."""

    hidden: torch.Tensor  # [T, E]
    finite: torch.Tensor  # [R] bool: whether a row's last hidden state is


class Captured(NamedTuple):
    """A recorded forward pass."""

    outputs: Forwarded
    replay: Callable[[], None]
    """Computes `outputs` again, at the same addresses, from what the inputs hold now."""


Run = Callable[[], Forwarded]
Capture = Callable[[Run], Captured]
"""Records what a forward pass does; whether it has also been done once is left open."""


def ladder(max_rows: int) -> list[int]:
    """Sizes up to `max_rows`, itself among them.

    >>> ladder(20)
    [1, 2, 4, 8, 16, 20]
    >>> ladder(300)[-5:]
    [248, 256, 272, 288, 300]
    """
    sizes = [1, 2, 4, *range(_STEP, _WIDE_STEP_FROM + 1, _STEP)]
    sizes += range(_WIDE_STEP_FROM + 2 * _STEP, max_rows, 2 * _STEP)
    return [size for size in sizes if size < max_rows] + [max_rows]


class CudaCapture:
    """Records with `torch.cuda.CUDAGraph`, all graphs in one pool of memory, which ends with the
    last of them and cannot be used again."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Captured:
        # Once without recording: kernels are compiled and libraries set up, which cannot be
        # recorded. It writes the same keys and values that the replay writes again.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may be waiting for the step before this one.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = run()
        return Captured(outputs, graph.replay)


class StepGraphs:
    """The recorded passes, by number of rows."""

    def __init__(
        self, sizes: Sequence[int], query_len: int, make_capture: Callable[[], Capture]
    ) -> None:
        """`query_len`: tokens per row in the steps that these graphs are for."""
        self._sizes = sorted(sizes)
        self._query_len = query_len
        self._make_capture = make_capture
        self._capture = make_capture()
        self._captured: dict[int, tuple[Captured, list[int]]] = {}

    @property
    def sizes(self) -> list[int]:
        """The ladder, rising."""
        return self._sizes

    def size_for(self, query_lens: np.ndarray) -> int | None:
        """Rows of the smallest graph that the step fits in; None: it must run without one."""
        if (query_lens != self._query_len).any():
            return None
        return next((size for size in self._sizes if size >= len(query_lens)), None)

    def run(self, size: int, inputs: Mapping[str, torch.Tensor], forward: Run) -> Forwarded:
        """The outputs of `forward`, recorded if it is the first of its size, else replayed.

        Needs: `inputs`, which `forward` reads, at the addresses of the first time
        """
        addresses = [tensor.data_ptr() for tensor in inputs.values()]
        if size not in self._captured:
            self._captured[size] = self._capture(forward), addresses
        captured, recorded_addresses = self._captured[size]
        assert addresses == recorded_addresses, "a replay reads where the recording read"
        captured.replay()
        return captured.outputs

    def clear(self) -> None:
        """Forget all of them: what they point at has moved."""
        self._captured.clear()
        self._capture = self._make_capture()
