"""A step that was launched, and its result when the device has it.

    launch ─> Pending ── wait (any thread) ──> result (the runner's thread) ─> StepResult
                                                  └─> the row table gets the tokens

Invariants: results settle in the order of the steps, whichever is asked for; a result does not
depend on when it is asked for. Launching: `model_runner`. Waiting: `worker`.
"""

from __future__ import annotations

import time
from dataclasses import fields
from typing import NamedTuple

import numpy as np
import torch

from minivllm.batch import RowLogprobs, StepPlan, StepResult
from minivllm.device import Readback
from minivllm.rows import RowTable, spread
from minivllm.sampling import NOT_FINITE, Logprobs, SampleOutput, failures
from minivllm.spec import num_standing

_LOGPROBS = [field.name for field in fields(Logprobs)]


class Drafted(NamedTuple):
    """The drafts of a step with S sampling rows."""

    num_drafts: np.ndarray  # [S]
    draft_ids: np.ndarray  # [S + all drafts] int64; -1 behind the last of each row


class Pending:
    """A step that was launched."""

    def __init__(
        self,
        plan: StepPlan,
        table: RowTable,
        output: SampleOutput,
        finite: torch.Tensor,
        prompt_logprobs: list[tuple[int, Logprobs]],
        drafted: Drafted | None,
        *,
        previous: Pending | None,
        start_s: float,
    ) -> None:
        """`finite` [R]: whether each row's hidden state is; `drafted`: the drafts that the step
        verifies, if any; `previous`: the step before."""
        self._plan = plan
        self._drafted = drafted
        self._table = table
        self._raised = output.raised
        self._prompt_rows = [row for row, _ in prompt_logprobs]
        logprobs = [found for _, found in prompt_logprobs]
        if output.logprobs is not None:
            logprobs.insert(0, output.logprobs)
        self._has_logprobs = output.logprobs is not None
        tensors = [output.token_ids, output.status, finite]
        for found in logprobs:
            tensors += [getattr(found, name) for name in _LOGPROBS]
        self._readback = Readback(tensors)
        self._rows = np.array(plan.rows)[plan.samples]
        self._positions = table.num_computed[self._rows]
        self._previous = previous
        self._start_s = start_s
        self._end_s = 0.0
        self._result: StepResult | None = None

    @property
    def must_wait(self) -> bool:
        """Whether `result` may take a while."""
        return self._readback.must_wait

    def wait(self) -> None:
        """Return when the device has done the step. May be called by any thread."""
        self._readback.wait()
        self._end_s = self._end_s or time.perf_counter()

    def result(self) -> StepResult:
        """What the step produced. Waits for it, and tells the row table."""
        if self._result is None:
            if self._previous is not None:
                self._previous.result()
                self._start_s = max(self._start_s, self._previous._end_s)
                self._previous = None
            self.wait()
            self._result = self._finish()
        return self._result

    def _finish(self) -> StepResult:
        token_ids, status, finite, *rest = self._readback.tensors
        parts = (rest[i : i + len(_LOGPROBS)] for i in range(0, len(rest), len(_LOGPROBS)))
        logprobs = [Logprobs(**dict(zip(_LOGPROBS, part, strict=True))) for part in parts]
        why = failures(status) | self._raised
        num_drafts, num_new = self._settle(token_ids.numpy(), list(why))
        starts = (np.cumsum(num_drafts + 1) - (num_drafts + 1)).tolist()
        ids = token_ids.tolist()
        spans = [slice(i, i + n) for i, n in zip(starts, num_new.tolist(), strict=True)]
        sampled_idx = np.flatnonzero(self._plan.samples)
        is_finite = finite.numpy().copy()
        is_finite[sampled_idx[num_drafts > 0]] = True  # a bad draft alone; `why` knows if not
        failed = dict.fromkeys(np.flatnonzero(~is_finite).tolist(), NOT_FINITE)
        failed |= {
            idx: why[start]
            for idx, start in zip(sampled_idx.tolist(), starts, strict=True)
            if start in why
        }
        sampled: list[list[RowLogprobs]] = []
        if self._has_logprobs:
            num_logprobs = np.repeat(self._table.num_logprobs[self._rows], num_drafts + 1)
            per_position = _row_logprobs(logprobs.pop(0), num_logprobs)
            sampled = [[one for one in per_position[span] if one is not None] for span in spans]
        return StepResult(
            generation=self._plan.generation,
            step=self._plan.step,
            tokens=[ids[span] for span in spans],
            logprobs=sampled,
            prompt_logprobs=[
                (row, _as_rows(found))
                for row, found in zip(self._prompt_rows, logprobs, strict=True)
            ],
            failed=failed,
            seconds=self._end_s - self._start_s,
            num_drafts=[] if self._drafted is None else num_drafts.tolist(),
        )

    def _settle(self, token_ids: np.ndarray, failed: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tell the row table; returns drafts and new tokens per sampling row.

        Shapes: token_ids [S + all drafts]; out [S], [S]
        """
        if self._drafted is None:
            self._table.arrive(self._rows, self._positions, token_ids)
            return np.zeros_like(self._rows), np.ones_like(self._rows)
        num_drafts, draft_ids = self._drafted
        is_failed = np.zeros(len(token_ids), bool)
        is_failed[failed] = True
        num_new = num_standing(token_ids, is_failed, draft_ids, num_drafts)
        starts = np.cumsum(num_drafts + 1) - (num_drafts + 1)
        self._table.arrive(self._rows, self._positions, token_ids[spread(starts, num_new)], num_new)
        return num_drafts, num_new


def _row_logprobs(found: Logprobs, num_logprobs: np.ndarray) -> list[RowLogprobs | None]:
    """Per position that was sampled, what its row asked for."""
    per_row: list[RowLogprobs | None] = [None] * len(num_logprobs)
    for row, one in zip(found.rows.tolist(), _as_rows(found), strict=True):
        count = 1 + int(num_logprobs[row])
        per_row[row] = RowLogprobs(one.token_ids[:count], one.logprobs[:count], one.rank)
    return per_row


def _as_rows(found: Logprobs) -> list[RowLogprobs]:
    columns = (found.token_ids.tolist(), found.logprobs.tolist(), found.ranks.tolist())
    return [RowLogprobs(*row) for row in zip(*columns, strict=True)]
