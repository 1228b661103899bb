"""The row table: what the worker knows of each row, and a step's numbers made from it.

    StepPlan ── differences ──> table ── rows, query lengths ──> arrays of one step ──> `device`
                                  ^                                                        │
                                  └── sampled tokens, once they are on the host ───────────┘

Plain arrays with one line per row, so that a step is prepared without a loop over rows. The table
is the worker's own truth about lengths: a step may be prepared before the tokens of the one before
it are known. Such a token stands in the table as a negative number that says where the device will
find it, and `decode_token_ids` puts it in there:

    token_ids of row 2   [ 464 | 3139 | 286 | -3 ]     -3: the last token sampled for row 2

Invariants: the last line is the null row, all zeros, whose blocks are the null block: a step is
padded with it. A row with tokens on their way is not started anew before they have arrived
(`model_runner`). What the tensors mean: `attention`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minivllm.batch import NewRow, SampleInputs

# What a forward pass reads of a step, as `RowTable.flatten` names it.
FORWARD_ARRAYS = ("token_ids", "positions", "slots", "query_starts", "kv_lens", "row_ids")
_SCALARS = ("temperature", "top_k", "top_p", "min_p", "seed", "child", "num_logprobs")


class RowTable:
    """One line per row, and the null row."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, max_blocks: int) -> None:
        self.null_row = num_rows
        self._block_size = block_size
        num_rows += 1
        self.token_ids = np.zeros((num_rows, max_model_len + 1), np.int64)
        self.block_table = np.zeros((num_rows, max_blocks), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.num_computed = np.zeros(num_rows, np.int64)
        self.num_scored = np.zeros(num_rows, np.int64)
        self.num_awaited = np.zeros(num_rows, np.int64)  # tokens that are not on the host yet
        self.prompt_len = np.zeros(num_rows, np.int64)
        self.max_len = np.zeros(num_rows, np.int64)
        self.inputs: list[SampleInputs] = [SampleInputs(seed=0)] * num_rows
        self.is_adjusted = np.zeros(num_rows, bool)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.top_p = np.zeros(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.seed = np.zeros(num_rows, np.uint64)
        self.child = np.zeros(num_rows, np.int64)
        self.num_logprobs = np.zeros(num_rows, np.int64)

    def start(self, new: NewRow) -> None:
        """A row in full."""
        row = new.row
        token_ids = np.frombuffer(new.token_ids, np.int32)
        self.token_ids[row, : len(token_ids)] = token_ids
        self.block_table[row] = 0
        self.num_blocks[row] = 0
        self.num_computed[row] = new.num_computed
        self.num_scored[row] = new.num_scored
        inputs = new.inputs
        self.inputs[row] = inputs
        self.is_adjusted[row] = inputs.adjusts or bool(inputs.logprob_token_ids)
        for name in ("prompt_len", "max_len", *_SCALARS):
            getattr(self, name)[row] = getattr(inputs, name)

    def add_blocks(self, new_blocks: Sequence[tuple[int, list[int]]]) -> np.ndarray:
        """Append to block tables.

        Shapes: out [U, 2] int64, the changes: (index into the flattened tables, block id)
        """
        changes = [np.empty((0, 2), np.int64)]
        for row, block_ids in new_blocks:
            start = self.num_blocks[row]
            self.block_table[row, start : start + len(block_ids)] = block_ids
            self.num_blocks[row] += len(block_ids)
            first = row * self.block_table.shape[1] + start
            places = np.arange(first, first + len(block_ids))
            changes.append(np.stack((places, np.array(block_ids, np.int64)), axis=1))
        return np.concatenate(changes)

    def draft(self, row: int, known_len: int, draft_ids: np.ndarray) -> None:
        """Put drafts behind the row's known tokens, for one step: they become known as they arrive.

        Shapes: draft_ids [n]
        """
        self.token_ids[row, known_len : known_len + len(draft_ids)] = draft_ids

    def flatten(self, rows: np.ndarray, query_lens: np.ndarray) -> dict[str, np.ndarray]:
        """The tokens of a step in one sequence: row i contributes `query_lens[i]` of them. The
        names, shapes and types are those of `ForwardBatch`; `row_ids` choose the block tables."""
        P = self._block_size
        ends = np.cumsum(query_lens)
        context_lens = self.num_computed[rows]
        row_of_token = np.repeat(rows, query_lens)
        positions = spread(context_lens, query_lens)
        blocks = self.block_table[row_of_token, positions // P].astype(np.int64)
        return {
            "token_ids": self.token_ids[row_of_token, positions],
            "positions": positions,
            "slots": blocks * P + positions % P,
            "query_starts": np.concatenate(([0], ends)).astype(np.int32),
            "kv_lens": (context_lens + query_lens).astype(np.int32),
            "row_ids": rows,
        }

    def advance(self, rows: np.ndarray, query_lens: np.ndarray, sampling_rows: np.ndarray) -> None:
        """A step was launched; the tokens that it samples are on their way.

        Shapes: rows, query_lens [R]; sampling_rows [S]
        """
        self.num_computed[rows] += query_lens
        positions = self.num_computed[sampling_rows]
        self.token_ids[sampling_rows, positions] = -1 - sampling_rows
        self.num_awaited[sampling_rows] += 1

    def arrive(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        token_ids: np.ndarray,
        num_new: np.ndarray | None = None,
    ) -> None:
        """The tokens of a launched step are on the host: one per row, or as many as stood, of which
        all but the last are drafts and so computed.

        Shapes: rows, positions [S]; token_ids [S], or [sum of num_new]; num_new [S]
        """
        self.num_awaited[rows] -= 1
        if num_new is not None:
            self.num_computed[rows] += num_new - 1
            positions = spread(positions, num_new)
            rows = np.repeat(rows, num_new)
        self.token_ids[rows, positions] = token_ids


def spread(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """From each start on, as many numbers as its count.

    Shapes: starts, counts [S]; out [sum of counts]

    >>> spread(np.array([7, 2]), np.array([1, 3])).tolist()
    [7, 2, 3, 4]
    """
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)


def decode_token_ids(token_ids: torch.Tensor, last_token_ids: torch.Tensor) -> torch.Tensor:
    """Token ids with those in place that the host did not know.

    Shapes: token_ids [T] int64; last_token_ids [rows] int64; out [T]

    >>> decode_token_ids(torch.tensor([7, -3, 8]), torch.tensor([0, 10, 20])).tolist()
    [7, 20, 8]
    """
    row_ids = (-1 - token_ids).clamp_(min=0)
    return torch.where(token_ids < 0, last_token_ids[row_ids], token_ids)
