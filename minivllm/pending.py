"""A step that was launched, and its result when the device has it.

    launch ─> Pending ── wait (any thread) ──> result (the runner's thread) ─> StepResult
                                                  └─> the row table gets the tokens

Invariants: results settle in the order of the steps, whichever is asked for; a result does not
depend on when it is asked for. Launching: `model_runner`. Waiting: `worker`.
"""

from __future__ import annotations

import time
from dataclasses import fields

import numpy as np
import torch

from minivllm.batch import RowLogprobs, StepPlan, StepResult
from minivllm.device import Readback
from minivllm.rows import RowTable
from minivllm.sampling import NOT_FINITE, Logprobs, SampleOutput, failures

_LOGPROBS = [field.name for field in fields(Logprobs)]


class Pending:
    """A step that was launched."""

    def __init__(
        self,
        plan: StepPlan,
        table: RowTable,
        output: SampleOutput,
        finite: torch.Tensor,
        prompt_logprobs: list[tuple[int, Logprobs]],
        *,
        previous: Pending | None,
        start_s: float,
    ) -> None:
        """`finite` [R]: whether each row's hidden state is; `previous`: the step before."""
        self._plan = plan
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
        self._num_logprobs = table.num_logprobs[self._rows]
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
        self._table.arrive(self._rows, self._positions, token_ids.numpy())
        sampled_idx = np.flatnonzero(self._plan.samples).tolist()
        failed = dict.fromkeys(np.flatnonzero(~finite.numpy()).tolist(), NOT_FINITE)
        why = failures(status) | self._raised
        failed |= {sampled_idx[row]: text for row, text in why.items()}
        sampled = []
        if self._has_logprobs:
            sampled = _row_logprobs(logprobs.pop(0), self._num_logprobs)
        return StepResult(
            generation=self._plan.generation,
            step=self._plan.step,
            tokens=[[token_id] for token_id in token_ids.tolist()],
            logprobs=sampled,
            prompt_logprobs=[
                (row, _as_rows(found))
                for row, found in zip(self._prompt_rows, logprobs, strict=True)
            ],
            failed=failed,
            seconds=self._end_s - self._start_s,
        )


def _row_logprobs(found: Logprobs, num_logprobs: np.ndarray) -> list[RowLogprobs | None]:
    """Per sampling row what it asked for."""
    per_row: list[RowLogprobs | None] = [None] * len(num_logprobs)
    for row, one in zip(found.rows.tolist(), _as_rows(found), strict=True):
        count = 1 + int(num_logprobs[row])
        per_row[row] = RowLogprobs(one.token_ids[:count], one.logprobs[:count], one.rank)
    return per_row


def _as_rows(found: Logprobs) -> list[RowLogprobs]:
    columns = (found.token_ids.tolist(), found.logprobs.tolist(), found.ranks.tolist())
    return [RowLogprobs(*row) for row in zip(*columns, strict=True)]
