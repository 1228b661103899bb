"""Decides, step by step, which requests compute how many tokens, and who waits.

No prefill, no decode: a step lets each request catch its computed tokens up to its known ones. A
row that catches up samples. So batching, chunked prefill, resumption and verifying are one path.

    waiting ──admit──> running ──finish──> ended         waiting: a heap in order of service
       ^  │               │                              parked: waiting for KV that a running
       │  └─park──> parked│                                      row is computing right now
       └────preempt───────┘                              running: sorted, oldest first

A step serves running requests, oldest first, each leaving one token of the budget to every row
behind it; then it admits waiting ones, whole prompts' blocks reserved at once. When a running
request finds no block, the youngest other one is preempted: its blocks are freed (what is full
stays cached) and it waits in its old place. The oldest is never a victim: something finishes.

Overlap: `num_scheduled` counts tokens in flight as done, `num_pending` those sampled but unseen. A
request in flight is no victim; one that ends in flight frees its blocks in `complete`, later.

Failure: `restart` turns the death of the workers into everyone's preemption. Rows in flight without
progress are suspects: they resume apart, in halves of the group that died, until all moved on.

Invariants: a step never exceeds its budget; one end per request; with unfinished requests and
nothing in flight, `plan` always returns a step. Blocks: `blocks`. Text and stops: `engine`.
"""

from __future__ import annotations

import bisect
import heapq
import time
from collections import deque
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from minivllm.batch import NewRow, RowLogprobs, StepPlan, StepResult
from minivllm.blocks import BlockManager
from minivllm.config import SchedulerConfig
from minivllm.request import Request, RequestState

MAX_STRIKES = 3

_by_age = attrgetter("number")


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the engine started."""

    num_preemptions: int = 0
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache by requests admitted for the first time."""
    prefix_hits: int = 0
    """Of those, the tokens found."""
    num_steps: int = 0


class Update(NamedTuple):
    """What one applied step means for one request; `tokens` is None when its row failed."""

    request: Request
    tokens: list[int] | None
    logprobs: RowLogprobs | None


class _InFlight(NamedTuple):
    plan: StepPlan
    requests: list[Request]


class _Step:
    """A plan being built."""

    __slots__ = ("budget", "new_blocks", "new_rows", "query_lens", "requests", "samples")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.requests: list[Request] = []
        self.query_lens: list[int] = []
        self.samples: list[bool] = []
        self.new_rows: list[NewRow] = []
        self.new_blocks: list[tuple[int, list[int]]] = []


class Scheduler:
    """Owns every request's state and the block manager; see the module header."""

    def __init__(self, config: SchedulerConfig, num_blocks: int) -> None:
        self.config = config
        self.blocks = BlockManager(
            num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self.stats = SchedulerStats()
        self.generation = 0
        self.in_flight: deque[_InFlight] = deque()
        self.running: list[Request] = []
        self._waiting: list[tuple[bool, int, Request]] = []
        self._num_dead = 0  # entries of _waiting whose request has ended
        self._parked: dict[bytes, list[Request]] = {}
        self._requests: dict[str, Request] = {}  # every request that has not ended
        self._free_rows = list(range(config.max_num_seqs))[::-1]
        self._next_step = 0
        self._suspects: set[Request] = set()
        self._quarantine_size = 0

    # ---- requests in and out ----------------------------------------------------------------

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and compute."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, parked ones included."""
        return len(self._requests) - len(self.running)

    @property
    def quarantined(self) -> bool:
        """Whether suspects of a worker's death are being tried apart from everybody else."""
        return bool(self._suspects)

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of that id."""
        return self._requests.get(request_id)

    def unfinished(self) -> list[Request]:
        """Every request that has not ended, in order of arrival."""
        return sorted(self._requests.values(), key=_by_age)

    def add(self, request: Request) -> None:
        """Accept a new request; from here on it gets exactly one end."""
        self._requests[request.id] = request
        self.blocks.open(request.id, request.tokens, request.cache_salt)
        self._enqueue(request)

    def finish(self, request: Request, reason: str, stop_reason: str | int | None = None) -> None:
        """The one end of a request, in any state. Its blocks are freed now, or, while a plan in
        flight names them, when that plan is applied."""
        assert not request.finished, f"request {request.id} ended twice"
        if request.state is RequestState.RUNNING:
            self._stop_running(request)
        else:
            self._num_dead += 1  # its entry in the heap or the park is skipped later
            if 2 * self._num_dead > len(self._waiting) > 64:
                alive = [r for _, _, r in self._waiting if not r.finished and r is not request]
                self._requeue(alive)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.stats.finished_s = time.monotonic()
        self._suspects.discard(request)
        del self._requests[request.id]
        if not _is_in_flight(request):
            self._forget(request)

    def _forget(self, request: Request) -> None:
        self._unpark(self.blocks.release(request.id))
        self.blocks.close(request.id)

    def _enqueue(self, request: Request) -> None:
        request.state = RequestState.WAITING
        heapq.heappush(self._waiting, (not request.suspect, request.number, request))

    def _requeue(self, requests: list[Request]) -> None:
        self._waiting = [(not r.suspect, r.number, r) for r in requests]
        heapq.heapify(self._waiting)
        self._num_dead = 0

    def _unpark(self, keys: list[bytes]) -> None:
        for key in keys:
            for request in self._parked.pop(key, ()):
                if request.finished:
                    self._num_dead -= 1
                else:
                    self._enqueue(request)

    def _stop_running(self, request: Request) -> None:
        self.running.pop(bisect.bisect_left(self.running, request.number, key=_by_age))
        assert request.row is not None, "a running request has a row"
        self._free_rows.append(request.row)
        request.row = None

    # ---- planning ---------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute until a result arrives."""
        step = _Step(self.config.max_num_batched_tokens)
        if self._serve_running(step):
            self._admit_waiting(step)
        if not step.requests:
            return None
        plan = StepPlan(
            generation=self.generation,
            step=self._next_step,
            new_rows=step.new_rows,
            rows=[r.row for r in step.requests if r.row is not None],
            query_lens=step.query_lens,
            samples=step.samples,
            new_blocks=step.new_blocks,
        )
        self._next_step += 1
        self.stats.num_steps += 1
        self.in_flight.append(_InFlight(plan, step.requests))
        return plan

    def _serve_running(self, step: _Step) -> bool:
        """Schedule running requests, oldest first. Returns whether waiting ones may be admitted:
        not in a step in which a running one found no block."""
        may_admit = True
        if self._suspects:
            candidates = [r for r in self.running if r in self._suspects]
        else:
            candidates = list(self.running)
        for idx, request in enumerate(candidates):
            if step.budget == 0:
                break
            if request.state is not RequestState.RUNNING:
                continue  # preempted by an older one in this very step
            num_behind = len(candidates) - idx - 1
            num_tokens = self._num_tokens(request, max(1, step.budget - num_behind))
            if num_tokens == 0:
                continue
            new_blocks = self._grow(request, request.num_scheduled + num_tokens)
            if new_blocks is None:
                may_admit = False
                if request.state is RequestState.RUNNING:
                    break  # those behind must come to rest, so that one of them can be a victim
                continue
            if len(new_blocks) > 0:
                assert request.row is not None, "a running request has a row"
                step.new_blocks.append((request.row, new_blocks))
            self._schedule(step, request, num_tokens)
        return may_admit and all(r.state is RequestState.RUNNING for r in candidates)

    def _num_tokens(self, request: Request, budget: int) -> int:
        """Tokens that the request computes in this step; 0 when it will end without another."""
        known = len(request.tokens) + request.num_pending
        if known >= request.max_len:
            return 0
        cap = self.config.long_prefill_token_threshold
        if cap and len(self._requests) > 1:
            budget = min(budget, cap)
        return min(known - request.num_scheduled, budget)

    def _schedule(self, step: _Step, request: Request, num_tokens: int) -> None:
        request.num_scheduled += num_tokens
        samples = request.num_scheduled == len(request.tokens) + request.num_pending
        request.num_pending += samples
        step.budget -= num_tokens
        step.requests.append(request)
        step.query_lens.append(num_tokens)
        step.samples.append(samples)

    def _grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks for a running request, preempting others for them; None when there are none:
        the request itself was preempted, or every possible victim is in flight."""
        while (new_blocks := self.blocks.grow(request.id, num_tokens)) is None:
            victim = self._victim()
            if victim is None:
                return None
            self._preempt(victim)
            if victim is request:
                return None
        return new_blocks

    def _victim(self) -> Request | None:
        """The youngest running request that is not in flight; never the oldest, except that those
        who pause while suspects are tried come first."""
        paused = [r for r in self.running if r not in self._suspects] if self._suspects else []
        for request in (*reversed(paused), *reversed(self.running[1:])):
            if not _is_in_flight(request):
                return request
        return None

    def _preempt(self, request: Request) -> None:
        self._stop_running(request)
        self._unpark(self.blocks.release(request.id))
        request.num_computed = request.num_scheduled = 0
        request.stats.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._enqueue(request)

    def _admit_waiting(self, step: _Step) -> None:
        while self._waiting and step.budget > 0 and self._may_run_more():
            request = self._waiting[0][2]
            if request.finished:
                heapq.heappop(self._waiting)
                self._num_dead -= 1
                continue
            if self._suspects and request not in self._suspects:
                return
            num_tokens = len(request.tokens)
            num_hit = self.blocks.match(request.id, num_tokens)
            key = self.blocks.claimed_key(request.id, num_hit, num_tokens)
            if key is not None:
                heapq.heappop(self._waiting)
                self._parked.setdefault(key, []).append(request)
                continue
            if not self.blocks.admit(request.id, num_hit, num_tokens):
                paused = self._victim() if self._suspects else None
                if paused is None or paused in self._suspects:
                    return
                self._preempt(paused)
                continue
            heapq.heappop(self._waiting)
            self._start_running(step, request, num_hit * self.config.block_size)

    def _may_run_more(self) -> bool:
        if self._suspects:
            return sum(r in self._suspects for r in self.running) < self._quarantine_size
        return len(self.running) < self.config.max_num_seqs

    def _start_running(self, step: _Step, request: Request, num_cached: int) -> None:
        if request.stats.scheduled_s is None:
            request.stats.scheduled_s = time.monotonic()
            request.stats.num_cached_tokens = num_cached
            self.stats.prefix_queries += len(request.tokens)
            self.stats.prefix_hits += num_cached
        request.state = RequestState.RUNNING
        request.row = self._free_rows.pop()
        request.num_computed = request.num_scheduled = num_cached
        bisect.insort(self.running, request, key=_by_age)
        params = request.params
        step.new_rows.append(
            NewRow(
                row=request.row,
                token_ids=request.tokens.tobytes(),
                num_computed=num_cached,
                temperature=params.temperature,
                top_k=max(0, params.top_k),
                top_p=params.top_p,
                min_p=params.min_p,
                seed=request.seed,
                num_logprobs=-1 if params.logprobs is None else params.logprobs,
            )
        )
        step.new_blocks.append((request.row, self.blocks.block_ids(request.id)))
        self._schedule(step, request, self._num_tokens(request, step.budget))

    # ---- results ----------------------------------------------------------------------------

    def complete(self, result: StepResult) -> list[Update]:
        """Apply the result of the oldest plan in flight; returns what it means for each request
        that sampled or failed and has not ended meanwhile."""
        plan, requests = self.in_flight.popleft()
        if (result.generation, result.step) != (plan.generation, plan.step):
            got = f"{result.generation}.{result.step}"
            raise AssertionError(f"result {got} does not answer {plan.generation}.{plan.step}")
        updates = []
        sampled = iter(result.tokens)
        logprobs = iter(result.logprobs or [None] * len(result.tokens))
        for idx, request in enumerate(requests):
            samples = plan.samples[idx]
            tokens, row_logprobs = (next(sampled), next(logprobs)) if samples else ([], None)
            request.num_computed += plan.query_lens[idx]
            request.num_pending -= samples
            if request.finished:
                if not _is_in_flight(request):
                    self._forget(request)
            elif idx in result.failed:
                updates.append(Update(request, None, None))
            else:
                request.tokens.extend(tokens)
                self._unpark(self.blocks.commit(request.id, request.tokens, request.num_computed))
                if samples:
                    self._clear(request)
                    updates.append(Update(request, tokens, row_logprobs))
        return updates

    def _clear(self, request: Request) -> None:
        """A suspect that made progress is one no more."""
        if request.suspect:
            request.suspect = False
            self._suspects.discard(request)

    # ---- failure ----------------------------------------------------------------------------

    def blame(self) -> list[Request]:
        """The workers died: mark the rows in flight that made no progress since their last
        restart. Returns those that have now failed for good, not yet finished."""
        named = {r for entry in self.in_flight for r in entry.requests if not r.finished}
        stuck = [r for r in named if len(r.tokens) <= r.num_seen]
        if len(named) == 1:
            for request in stuck:
                request.strikes += 1
        for request in stuck:
            request.suspect = True
        self._suspects.update(stuck)
        self._quarantine_size = max(1, len(stuck) // 2)
        return [r for r in stuck if r.strikes >= MAX_STRIKES]

    def restart(self, num_blocks: int) -> None:
        """Start over with new workers and an empty pool: every unfinished request waits, in order
        of arrival, and will be sent in full; nothing is in flight."""
        for entry in self.in_flight:
            for request in entry.requests:
                if request.finished and _is_in_flight(request):
                    request.num_computed = request.num_scheduled
                    self._forget(request)
        self.in_flight.clear()
        self.generation += 1
        self._next_step = 0
        for request in self.running:
            request.row = None
            request.num_computed = request.num_scheduled = request.num_pending = 0
            request.stats.num_restarts += 1
            request.state = RequestState.WAITING
        self.running.clear()
        self._parked.clear()
        self._free_rows = list(range(self.config.max_num_seqs))[::-1]
        self.blocks.reset_pool(num_blocks)
        for request in self._requests.values():
            request.num_seen = len(request.tokens)
        self._requeue(list(self._requests.values()))


def _is_in_flight(request: Request) -> bool:
    return request.num_scheduled > request.num_computed
