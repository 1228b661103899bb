"""Decides, step by step, which requests compute how many tokens, and who waits.

No prefill, no decode: a step lets each request catch its computed tokens up to its known ones; a
row that catches up samples. So batching, chunked prefill and resumption are one path.

    waiting ──admit──> running ──finish──> ended         waiting: a heap in order of service
       ^  │               │                              parked: waiting for KV that a running
       │  └─park──> parked│                                      row of no worse class computes
       └────preempt───────┘                              running: sorted, first served first

A step serves by class (`policy`), in a class running requests, oldest first, before waiting ones.
It leaves a token of the budget to every running row behind; a prompt gets all its blocks at once.
Growth: a running row without a block preempts the worst, cheapest victim, and the step admits
nobody. The oldest of the best class is never a victim, so something finishes. Eviction: a waiting
request takes seat and blocks from strictly worse classes if it then starts in the same step; one
whom only aging put ahead spares those without a new token, so that both get on, turn by turn.

Overlap: `num_scheduled` counts tokens in flight as done, `num_pending` those sampled but unseen; a
request in flight is no victim (to be evicted, it first sits out a step) and frees blocks later.
Drafts in flight (`num_drafted`) get blocks, and count as rejected until the result says better.
Failure: `restart` turns the death of the workers into everyone's preemption. Rows in flight without
progress are suspects: they resume apart, in halves of the group that died, until all moved on.
Invariants: a step never exceeds its budget; one end per request; with unfinished requests and
nothing in flight, `plan` always returns a step. Blocks: `blocks`. Text and stops: `core`.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minivllm.batch import NewRow, RowLogprobs, StepPlan, StepResult
from minivllm.blocks import BlockManager
from minivllm.config import SchedulerConfig
from minivllm.drafting import DraftLengths
from minivllm.errors import EngineBusyError
from minivllm.policy import (
    Aging,
    Deadlines,
    Pace,
    Rank,
    StepTimes,
    WaitingQueue,
    fewest,
    recompute_cost,
)
from minivllm.request import Request, RequestState
from minivllm.steps import InFlight, OpenStep

MAX_STRIKES = 3


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the engine started."""

    num_preemptions: int = 0
    num_evictions: int = 0
    """Preemptions for a waiting request of a better class; they count as preemptions too."""
    num_timeouts: int = 0
    num_dropped: int = 0
    """Requests ended because they could not have their first token in time."""
    num_demoted: int = 0
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache by requests admitted for the first time."""
    prefix_hits: int = 0
    """Of those, the tokens found."""
    num_steps: int = 0


class Update(NamedTuple):
    """What one applied step means for one request."""

    request: Request
    tokens: list[int]
    """Sampled; already appended to the request."""
    logprobs: list[RowLogprobs]
    """Theirs, if the request asked."""
    prompt_logprobs: list[RowLogprobs]
    """Of the next prompt tokens."""
    num_drafts: int
    """Drafts that were verified; all tokens but the last are accepted ones."""
    error: str | None
    """Why the row failed; then there is nothing else."""


class Scheduler:
    """Owns every request's state and the block manager; see the module header."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.clock = clock
        self.blocks = BlockManager(
            num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self.stats = SchedulerStats()
        self.generation = 0
        self.in_flight: deque[InFlight] = deque()
        self.running: list[Request] = []
        self.waiting = WaitingQueue()
        self._deadlines = Deadlines(clock, self._shortest_s)
        self._parked: dict[bytes, list[Request]] = {}
        self._requests: dict[str, Request] = {}  # every request that has not ended
        self._unanswered: set[Request] = set()  # those without a first token
        self._num_unanswered_tokens = 0  # of their prompts
        self._aging = Aging(config.aging_s, clock)
        self._times = StepTimes()
        self._draft_lengths: DraftLengths | None = None
        if config.speculative is not None:
            most = config.speculative.num_speculative_tokens
            self._draft_lengths = DraftLengths(most, self._times)
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
        """Requests that wait, parked and held ones included."""
        return len(self._requests) - len(self.running)

    @property
    def quarantined(self) -> bool:
        """Whether suspects of a worker's death are being tried apart from everybody else."""
        return bool(self._suspects)

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of that id."""
        return self._requests.get(request_id)

    def check_room(self, num_reqs: int, num_tokens: int) -> None:
        """Refuse so many requests, with so many prompt tokens together, if they are too many.

        Raises: `EngineBusyError`
        """
        for name, more, now in (
            ("max_num_queued_reqs", num_reqs, len(self._requests)),
            ("max_num_queued_tokens", num_tokens, self._num_unanswered_tokens),
        ):
            limit = getattr(self.config, name)
            if limit is not None and now + more > limit:
                text = f"{name} is {limit}: {now} are queued, {more} more came"
                raise EngineBusyError(name, text)

    def add(self, request: Request) -> None:
        """Accept a new request; from here on it gets exactly one end."""
        request.stats.arrival_s = self.clock()
        self._requests[request.id] = request
        self._unanswered.add(request)
        self._num_unanswered_tokens += request.prompt_len
        self.blocks.open(request, request.tokens, request.cache_salt)
        self._aging.arrive(request)
        self.waiting.arrive(request)
        self._deadlines.add(request)

    def admitted(self) -> list[Request]:
        """The unfinished requests that are not held at the door."""
        return [r for r in self._requests.values() if not self.waiting.holds(r)]

    def finish(self, request: Request, reason: str, stop_reason: str | int | None = None) -> None:
        """The one end of a request, in any state. Its blocks are freed now, or, while a plan in
        flight names them, when that plan is applied."""
        assert not request.finished, f"request {request.id} ended twice"
        if request.state is RequestState.RUNNING:
            self._stop_running(request)
        request.state = RequestState.FINISHED  # its entry in the heap or the park is skipped later
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.stats.finished_s = self.clock()
        self._suspects.discard(request)
        self._answered(request)
        del self._requests[request.id]
        self.waiting.leave(request, self.num_waiting)
        self._deadlines.prune(len(self._requests))
        if not _is_in_flight(request):
            self._forget(request)

    def _answered(self, request: Request) -> None:
        if request in self._unanswered:
            self._unanswered.remove(request)
            self._num_unanswered_tokens -= request.prompt_len

    def _forget(self, request: Request) -> None:
        self._unpark(self.blocks.release(request))
        self.blocks.close(request)

    def _enqueue(self, request: Request) -> None:
        request.state = RequestState.WAITING
        self.waiting.push(request)

    def _unpark(self, keys: list[bytes]) -> None:
        for key in keys:
            for request in self._parked.pop(key, ()):
                if not request.finished:
                    self._enqueue(request)

    def _order(self, request: Request) -> tuple[Rank, int]:
        """Running requests in order: by rank, which is frozen, then by age."""
        return self._aging.rank(request), request.number

    def _stop_running(self, request: Request) -> None:
        idx = bisect.bisect_left(self.running, self._order(request), key=self._order)
        assert self.running.pop(idx) is request, "the running requests are out of order"
        assert request.row is not None, "a running request has a row"
        self._free_rows.append(request.row)
        request.row = None

    # ---- deadlines --------------------------------------------------------------------------

    @property
    def next_deadline_s(self) -> float | None:
        """When `overdue` should be asked next, on the scheduler's clock."""
        return self._deadlines.next_s

    def overdue(self) -> list[tuple[Request, str]]:
        """The requests whose time is over, and for what: "timeout" or "ttft". The caller ends
        them. Those that are demoted instead are not among them."""
        over = []
        for request, deadline in self._deadlines.overdue():
            if deadline == "timeout":
                self.stats.num_timeouts += 1
            elif self.config.ttft_policy == "drop":
                self.stats.num_dropped += 1
            else:
                self._demote(request)
                continue
            over.append((request, deadline))
        return over

    def _shortest_s(self, request: Request) -> float:
        """The least time to the request's first token: what the cache lacks of its prompt, in steps
        of its own."""
        if self._times.max_tokens == 0:
            return 0.0
        num_hit = self.blocks.match(request, self._num_readable(request), claimed=True)
        num_cached = num_hit * self.config.block_size
        num_tokens, budget = request.prompt_len - num_cached, self.config.max_num_batched_tokens
        return self._times.shortest(num_tokens, num_cached, budget)

    def _demote(self, request: Request) -> None:
        """From now on the request is served after all others."""
        is_running = request.state is RequestState.RUNNING
        if is_running:
            self.running.remove(request)
        request.stats.demoted = True
        if is_running:
            bisect.insort(self.running, request, key=self._order)
        self.stats.num_demoted += 1
        self._deadlines.add(request)

    # ---- planning ---------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute until a result arrives."""
        unserved = deque(r for r in self.running if not self._is_paused(r))
        if self._draft_lengths is not None:
            self._draft_lengths.begin_step()
        step = OpenStep(self.config.max_num_batched_tokens, self._pace(unserved))
        while step.may_admit and step.budget > 0 and (head := self._head()) is not None:
            rank = self._aging.rank(head)
            while unserved and self._aging.rank(unserved[0]) <= rank:
                self._serve(step, unserved)
            if not step.may_admit or step.budget == 0 or not self._admit(step, head, unserved):
                break
        while unserved:
            self._serve(step, unserved)
        if not step.requests:
            return None
        entry = step.close(self.generation, self._next_step)
        self._next_step += 1
        self.stats.num_steps += 1
        self.in_flight.append(entry)
        return entry.plan

    def _pace(self, unserved: Iterable[Request]) -> Pace | None:
        """What the requests that decode leave to prompts; None: everything."""
        target_ms = self.config.itl_target_ms
        if target_ms is None:
            return None
        context_lens = [r.num_scheduled for r in unserved if self._num_missing(r) == 1]
        if not context_lens:
            return None
        return Pace(self._times, target_ms / 1000, context_lens, self.config.block_size)

    def _serve(self, step: OpenStep, unserved: deque[Request]) -> None:
        """Schedule the first of the running requests that are left."""
        request = unserved.popleft()
        if step.budget == 0 or request in step.held or request.state is not RequestState.RUNNING:
            return
        budget = max(1, step.budget - len(unserved))
        num_tokens = self._num_tokens(step, request, budget)
        if num_tokens == 0:
            return
        num_drafts = self._num_drafts(request, budget - num_tokens)
        # Every draft in flight may be accepted; the workers stop at `max_len`.
        end = request.num_scheduled + request.num_drafted + num_tokens
        if not self.blocks.can_grow(request, min(end + num_drafts, request.max_len)):
            num_drafts = 0  # nobody is preempted for them
        new_blocks = self._grow(step, request, min(end + num_drafts, request.max_len))
        if new_blocks is None:
            if request.state is RequestState.RUNNING:
                unserved.clear()  # they must come to rest, so that one of them can be a victim
            return
        if len(new_blocks) > 0:
            assert request.row is not None, "a running request has a row"
            step.new_blocks.append((request.row, new_blocks))
        self._schedule(step, request, num_tokens, num_drafts)

    def _num_missing(self, request: Request) -> int:
        """Known tokens that are not computed yet; 0 when the request will end without them."""
        known = len(request.tokens) + request.num_pending
        return 0 if known >= request.max_len else known - request.num_scheduled

    def _num_tokens(self, step: OpenStep, request: Request, budget: int) -> int:
        """Tokens that the request computes in this step."""
        num_missing = self._num_missing(request)
        if step.pace is not None and num_missing > 1:
            budget = min(budget, step.pace.most(request.num_scheduled))
        cap = self.config.long_prefill_token_threshold
        if cap and len(self._requests) > 1:
            budget = min(budget, cap)
        return min(num_missing, budget)

    def _num_drafts(self, request: Request, budget: int) -> int:
        """Drafts to verify for a request that decodes, none of them past its end."""
        lengths = self._draft_lengths
        num_left = request.max_len - len(request.tokens) - request.num_pending
        most = min(num_left - 1, budget)
        if lengths is None or most <= 0 or self._num_missing(request) != 1:
            return 0
        return min(most, lengths.choose(request, len(self.running)))

    def _schedule(
        self, step: OpenStep, request: Request, num_tokens: int, num_drafts: int = 0
    ) -> None:
        if step.pace is not None and self._num_missing(request) > 1:
            step.pace.spend(num_tokens, request.num_scheduled)
        request.num_scheduled += num_tokens
        samples = request.num_scheduled == len(request.tokens) + request.num_pending
        request.num_pending += samples
        request.num_drafted += num_drafts
        step.add(request, num_tokens, num_drafts, samples=samples)

    def _grow(self, step: OpenStep, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks for a running request, preempting others for them; None when there are none: the
        request itself was preempted, or nobody can be, now."""
        while (new_blocks := self.blocks.grow(request, num_tokens)) is None:
            step.may_admit = False
            victim = None if step.new_rows else self._victim()
            if victim is None:
                return None
            self._preempt(victim)
            if victim is request:
                return None
        return new_blocks

    def _victim(self) -> Request | None:
        """The running request to preempt so that another can grow: those first who pause while
        suspects are tried, then the worst class, then the cheapest, then the youngest."""

        def preference(request: Request) -> tuple[bool, Rank, float, int]:
            rank, number = self._order(request)
            return self._is_paused(request), rank, -self._cost(request, 1), number

        best = self.running[0]  # the oldest of the best class
        candidates = [
            r
            for r in self.running
            if not _is_in_flight(r) and (r is not best or self._is_paused(r))
        ]
        return max(candidates, key=preference, default=None)

    def _is_paused(self, request: Request) -> bool:
        return bool(self._suspects) and request not in self._suspects

    def _cost(self, request: Request, num_needed: int) -> float:
        """What it costs to preempt the request (`policy.recompute_cost`)."""
        num_freed = self.blocks.num_exclusive(request)
        num_shared = self.blocks.num_held(request) - num_freed
        num_lost = request.num_computed - num_shared * self.config.block_size
        return recompute_cost(num_lost, num_freed, num_needed, request.stats.num_preemptions)

    def _preempt(self, request: Request) -> None:
        request.stats.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._set_aside(request)

    def _set_aside(self, request: Request) -> None:
        self._stop_running(request)
        self._aging.wait(request)
        self._unpark(self.blocks.release(request))
        request.num_computed = request.num_scheduled = 0
        self._enqueue(request)

    def _head(self) -> Request | None:
        """The waiting request to be admitted next; while suspects are tried, one of them."""
        head = self.waiting.head()
        return None if head is None or self._is_paused(head) else head

    def _admit(self, step: OpenStep, head: Request, unserved: deque[Request]) -> bool:
        """Start the first waiting request, or park it; False when it must wait, and so must those
        behind it. `unserved`: the running requests of a worse class."""
        num_tokens = len(head.tokens)
        num_readable = self._num_readable(head)
        num_hit = self.blocks.match(head, num_readable)
        key = self.blocks.claimed_key(head, num_hit, num_readable)
        if key is not None and not self._is_slower(self.blocks.claimant(key), head):
            self.waiting.pop()
            self._parked.setdefault(key, []).append(head)
            return True
        num_cached = num_hit * self.config.block_size
        if head in step.held or (step.pace is not None and step.pace.most(num_cached) == 0):
            return False
        victims = self._make_room(step, head, num_hit, unserved)
        if victims is None:
            return False
        step.held.update(victims)
        if any(_is_in_flight(victim) for victim in victims):
            return False
        self.waiting.pop()
        for victim in victims:
            self._preempt(victim)
            self.stats.num_evictions += 1
        admitted = self.blocks.admit(head, num_hit, num_tokens)
        assert admitted, "the victims' blocks were not enough"
        self._start_running(step, head, num_cached, len(unserved))
        return True

    def _is_slower(self, claimant: Hashable, head: Request) -> bool:
        """Whether a request that computes what `head` could hit is of a worse class: then `head`
        does not wait for it."""
        assert isinstance(claimant, Request), "the block manager knows requests as such"
        return not claimant.finished and self._aging.rank(claimant) > self._aging.rank(head)

    def _make_room(
        self, step: OpenStep, head: Request, num_hit: int, unserved: Iterable[Request]
    ) -> list[Request] | None:
        """Whom to evict so that `head` can start: nobody when it can already, None when it could
        not even then. The worst class first, then who is not in flight, then the cheapest."""

        def num_short(victims: Sequence[Request]) -> int:
            return self.blocks.num_short(head, num_hit, len(head.tokens), victims)

        def fits(victims: Sequence[Request]) -> bool:
            return self._has_seat(len(victims)) and num_short(victims) <= 0

        if fits([]):
            return []
        if self._suspects:
            candidates = [r for r in self.running if self._is_paused(r)]
        else:
            candidates = [r for r in unserved if r not in step.held and self._may_evict(head, r)]
        num_needed = num_short([])
        candidates.sort(key=lambda r: (_is_in_flight(r), self._cost(r, num_needed), -r.number))
        candidates.sort(key=self._aging.rank, reverse=True)
        return fewest(candidates, fits)

    def _may_evict(self, head: Request, request: Request) -> bool:
        """Whether a running request of a worse class gives way: at once to a better priority; to
        one that is only older, when it has a new token."""
        is_better = (head.stats.demoted, head.priority) < (request.stats.demoted, request.priority)
        return is_better or len(request.tokens) > request.num_started

    def _num_readable(self, request: Request) -> int:
        """Tokens whose KV may be taken from the cache, as the number of which the last is computed
        for its logits. Prompt log-probabilities are computed once: up to where they are known, the
        cache will do, and from there on they come from logits, which the cache does not keep."""
        if request.num_scored < request.prompt_len:
            return request.num_scored
        if request.params.skip_reading_prefix_cache and request.num_output_tokens == 0:
            return 1
        return len(request.tokens)

    def _has_seat(self, num_evicted: int) -> bool:
        """Whether one more request may run when so many are evicted."""
        if self._suspects:
            return sum(r in self._suspects for r in self.running) < self._quarantine_size
        return len(self.running) - num_evicted < self.config.max_num_active_seqs

    def _start_running(
        self, step: OpenStep, request: Request, num_cached: int, num_behind: int
    ) -> None:
        if request.stats.scheduled_s is None:
            request.stats.scheduled_s = self.clock()
            request.stats.num_cached_tokens = num_cached
            self.stats.prefix_queries += len(request.tokens)
            self.stats.prefix_hits += num_cached
        self._aging.run(request)
        request.state = RequestState.RUNNING
        request.num_started = len(request.tokens)
        request.row = self._free_rows.pop()
        request.num_computed = request.num_scheduled = num_cached
        bisect.insort(self.running, request, key=self._order)
        step.new_rows.append(
            NewRow(
                row=request.row,
                token_ids=request.tokens.tobytes(),
                num_computed=num_cached,
                num_scored=request.num_scored,
                inputs=request.inputs,
            )
        )
        step.new_blocks.append((request.row, self.blocks.block_ids(request)))
        budget = max(1, step.budget - num_behind)
        self._schedule(step, request, self._num_tokens(step, request, budget))

    # ---- results ----------------------------------------------------------------------------

    def complete(self, result: StepResult) -> list[Update]:
        """Apply the result of the oldest plan in flight; returns what it means for each request
        that sampled or failed and has not ended meanwhile."""
        plan, requests = self.in_flight.popleft()
        if (result.generation, result.step) != (plan.generation, plan.step):
            got = f"{result.generation}.{result.step}"
            raise AssertionError(f"result {got} does not answer {plan.generation}.{plan.step}")
        updates, query_lens, context_lens = [], [], []
        sampled = iter(result.tokens)
        logprobs = iter(result.logprobs or [[]] * len(result.tokens))
        num_verified = iter(result.num_drafts or [0] * len(result.tokens))
        prompt_logprobs = dict(result.prompt_logprobs)
        for idx, request in enumerate(requests):
            samples = plan.samples[idx]
            tokens, row_logprobs = (next(sampled), next(logprobs)) if samples else ([], [])
            num_drafts = next(num_verified) if samples else 0
            query_lens.append(plan.query_lens[idx] + num_drafts)
            context_lens.append(request.num_computed)
            num_accepted = max(0, len(tokens) - 1)
            request.num_computed += plan.query_lens[idx] + num_accepted
            request.num_scheduled += num_accepted
            request.num_pending -= samples
            request.num_drafted -= plan.num_drafts[idx] if plan.num_drafts else 0
            if request.finished:
                if not _is_in_flight(request):
                    self._forget(request)
            elif idx in result.failed:
                updates.append(Update(request, [], [], [], 0, result.failed[idx]))
            else:
                request.tokens.extend(tokens)
                self._unpark(self.blocks.commit(request, request.num_computed))
                scored = prompt_logprobs.get(idx, [])
                if num_drafts and self._draft_lengths is not None:
                    self._draft_lengths.observe(request, num_drafts, num_accepted)
                if samples:
                    self._clear(request)
                if samples or scored:
                    updates.append(Update(request, tokens, row_logprobs, scored, num_drafts, None))
        self._times.observe(query_lens, context_lens, result.seconds)
        return updates

    def _clear(self, request: Request) -> None:
        """A request with a new token has been answered, and is a suspect no more."""
        self._answered(request)
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

    def set_all_aside(self) -> None:
        """Take the blocks of every running request, as its KV is about to go; nothing may be in
        flight. They wait in their old places. No memory was short, so it counts as no preemption.
        """
        assert not self.in_flight, "set_all_aside() with a plan in flight"
        for request in list(self.running):
            self._set_aside(request)

    def raise_epoch(self) -> None:
        """The weights have changed: see `BlockManager.raise_epoch`."""
        self._unpark(self.blocks.raise_epoch())

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
            request.num_drafted = 0
            request.stats.num_restarts += 1
            request.state = RequestState.WAITING
            self._aging.wait(request)
        self.running.clear()
        self._parked.clear()
        self._free_rows = list(range(self.config.max_num_seqs))[::-1]
        self.blocks.reset_pool(num_blocks)
        for request in self._requests.values():
            request.num_seen = len(request.tokens)
        self.waiting.reset(self._requests.values())


def _is_in_flight(request: Request) -> bool:
    return request.num_scheduled > request.num_computed
