"""A step while it is planned, and while it is in flight.

    scheduler ── rows, blocks, drafts ──> OpenStep ── close() ──> StepPlan ──> workers
                                                                     └──────> InFlight

The scheduler decides; here its decisions are written down in the order in which the workers read
them. Invariant: the lists of a step that are per row have one entry for each of its rows.
Who is served, and with how much: `scheduler`. The wire format: `batch`.
"""

from __future__ import annotations

from typing import NamedTuple

from minivllm.batch import NewRow, StepPlan
from minivllm.policy import Pace
from minivllm.request import Request


class InFlight(NamedTuple):
    """A plan that was sent, and whose rows are whose."""

    plan: StepPlan
    requests: list[Request]


class OpenStep:
    """A plan being built."""

    __slots__ = (
        "budget",
        "held",
        "may_admit",
        "new_blocks",
        "new_rows",
        "num_drafts",
        "pace",
        "query_lens",
        "requests",
        "rows",
        "samples",
    )

    def __init__(self, budget: int, pace: Pace | None) -> None:
        self.budget = budget
        self.pace = pace
        self.may_admit = True  # until a running request found no block
        self.held: set[Request] = set()  # evicted, or to be as soon as they are not in flight
        self.requests: list[Request] = []
        self.rows: list[int] = []
        self.query_lens: list[int] = []
        self.samples: list[bool] = []
        self.num_drafts: list[int] = []
        self.new_rows: list[NewRow] = []
        self.new_blocks: list[tuple[int, list[int]]] = []

    def add(self, request: Request, num_tokens: int, num_drafts: int, *, samples: bool) -> None:
        """A row that computes so many known tokens, and verifies so many drafts at most."""
        self.budget -= num_tokens + num_drafts
        assert request.row is not None, "a running request has a row"
        self.requests.append(request)
        self.rows.append(request.row)
        self.query_lens.append(num_tokens)
        self.samples.append(samples)
        self.num_drafts.append(num_drafts)

    def close(self, generation: int, number: int) -> InFlight:
        """The step as it is sent."""
        plan = StepPlan(
            generation=generation,
            step=number,
            new_rows=self.new_rows,
            rows=self.rows,
            query_lens=self.query_lens,
            samples=self.samples,
            new_blocks=self.new_blocks,
            num_drafts=self.num_drafts if any(self.num_drafts) else [],
        )
        return InFlight(plan, self.requests)
