"""Who goes first, who gives way, and how much fits in a step: the scheduler's rules as arithmetic.

Order. The effective class of a request is `priority - floor(waited / aging_s)`; lower goes first.
It falls while the request waits and is frozen while it runs. With `due` the moment at which the
class of a waiting request reaches 0, in whole nanoseconds,

    class = ceil((due - now) / aging)        due = start of its wait + priority * aging

so a smaller `due` is never a worse class, whatever the time: a heap by `due` stays in order as the
classes drift, nothing is sorted again, and whole numbers make it exact. Within a class, requests of
one priority go in order of arrival, others in the order in which they reach the next class. Without
aging `due` is the priority itself and nothing moves.

Who gives way. Preempting a request costs the tokens that it alone holds: when blocks are short they
are the next to be handed out, while shared ones are found again. It yields the blocks that it alone
holds, as far as they are needed. `recompute_cost` is the ratio, doubled by each earlier preemption.

How much fits. `StepTimes` learns what a step costs; `Pace` sizes chunks of prompts by it.

Blocks are counted, rows served and requests moved by `scheduler`.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from minivllm.request import Request, RequestState

Rank = tuple[bool, int]
"""Demoted or not, then the effective class: the smaller is served first."""

_SAMPLES_PER_SIZE = 16
_NUM_FITS = 6
_NOISE = 0.02  # relative errors below this weigh alike


class Aging:
    """The effective class of waiting and running requests; see the module header."""

    def __init__(self, aging_s: float | None, clock: Callable[[], float]) -> None:
        self._aging_ns = 1 if aging_s is None else max(1, round(aging_s * 1e9))
        self._clock = clock if aging_s is not None else lambda: 0.0

    def _now_ns(self) -> int:
        return round(self._clock() * 1e9)

    def arrive(self, request: Request) -> None:
        """Set what the class of a new request is counted from."""
        request.slack = request.priority * self._aging_ns
        self.wait(request)

    def wait(self, request: Request) -> None:
        """From now on the request waits: its class goes on falling."""
        request.due = self._now_ns() + request.slack

    def run(self, request: Request) -> None:
        """From now on the request runs: its class is frozen."""
        request.slack = request.due - self._now_ns()

    def rank(self, request: Request) -> Rank:
        """The request's place among all, now."""
        running = request.state is RequestState.RUNNING
        slack = request.slack if running else request.due - self._now_ns()
        return request.stats.demoted, -(-slack // self._aging_ns)


class WaitingQueue:
    """Requests to be admitted: suspects of a worker's death first, then by rank, then by age.

    A request that ends stays in the heap until it comes up or the ended are too many; one that is
    demoted keeps its place, which is too early, until it comes up. While the queue is shut, new
    requests are held at its door.
    """

    def __init__(self) -> None:
        self.is_shut = False
        self._heap: list[tuple[bool, bool, int, int, Request]] = []
        self._held: dict[Request, None] = {}

    def arrive(self, request: Request) -> None:
        """Add a new request, or hold it."""
        if self.is_shut:
            self._held[request] = None
        else:
            self.push(request)

    def holds(self, request: Request) -> bool:
        """Whether the request is held at the door."""
        return request in self._held

    def shut(self) -> None:
        """Hold what arrives from here on."""
        self.is_shut = True

    def open(self) -> None:
        """Let in what was held."""
        self.is_shut = False
        for request in self._held:
            self.push(request)
        self._held.clear()

    def push(self, request: Request) -> None:
        """Add a request."""
        heapq.heappush(self._heap, self._entry(request))

    def _entry(self, request: Request) -> tuple[bool, bool, int, int, Request]:
        return not request.suspect, request.stats.demoted, request.due, request.number, request

    def reset(self, requests: Iterable[Request]) -> None:
        """Start over with these, but for those that are held."""
        self._heap = [self._entry(request) for request in requests if request not in self._held]
        heapq.heapify(self._heap)

    def leave(self, request: Request, num_alive: int) -> None:
        """A request has ended; forget all that have if most have: at most `num_alive` have not."""
        self._held.pop(request, None)
        if len(self._heap) > 2 * num_alive + 64:
            self.reset([entry[-1] for entry in self._heap if not entry[-1].finished])

    def head(self) -> Request | None:
        """Who is next."""
        while self._heap:
            _, demoted, _, _, request = self._heap[0]
            if request.finished:
                heapq.heappop(self._heap)
            elif demoted != request.stats.demoted:
                heapq.heapreplace(self._heap, self._entry(request))
            else:
                return request
        return None

    def pop(self) -> None:
        """Remove the head."""
        heapq.heappop(self._heap)


class Deadlines:
    """Whose time is over, and when to look again: a request is late at its timeout, and for its
    first token at its target or, before it has started, when even all to itself it could not have
    it by then."""

    def __init__(self, clock: Callable[[], float], shortest_s: Callable[[Request], float]) -> None:
        """`shortest_s`: the least time from now to the first token of a request."""
        self._clock = clock
        self._shortest_s = shortest_s
        self._heap: list[tuple[float, int, Request]] = []

    @property
    def next_s(self) -> float | None:
        """When the next look is due."""
        return self._heap[0][0] if self._heap else None

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline."""
        time_s = min(_timeout_s(request), self._ttft_limit_s(request))
        if time_s < math.inf:
            heapq.heappush(self._heap, (time_s, request.number, request))

    def overdue(self) -> list[tuple[Request, str]]:
        """Who is late, and for what: "timeout" or "ttft". They are not watched any more."""
        now_s = self._clock()
        late = []
        while self._heap and self._heap[0][0] <= now_s:
            request = heapq.heappop(self._heap)[-1]
            if request.finished:
                continue
            if _timeout_s(request) <= now_s:
                late.append((request, "timeout"))
            elif self._ttft_limit_s(request) <= now_s:
                late.append((request, "ttft"))
            else:
                self.add(request)
        return late

    def _ttft_limit_s(self, request: Request) -> float:
        target_s, stats = request.ttft_target_s, request.stats
        if target_s is None or request.num_output_tokens > 0 or stats.demoted:
            return math.inf
        has_started = stats.scheduled_s is not None
        return stats.arrival_s + target_s - (0.0 if has_started else self._shortest_s(request))

    def prune(self, num_alive: int) -> None:
        """Forget the ended ones if most are."""
        if len(self._heap) > 2 * num_alive + 64:
            self._heap = [entry for entry in self._heap if not entry[-1].finished]
            heapq.heapify(self._heap)


def _timeout_s(request: Request) -> float:
    timeout_s = request.timeout_s
    return math.inf if timeout_s is None else request.stats.arrival_s + timeout_s


def recompute_cost(num_lost: int, num_freed: int, num_needed: int, num_preemptions: int) -> float:
    """What it costs to preempt a request, as a logarithm: `num_lost` tokens to compute again per
    block freed that is needed, doubled by each earlier preemption.

    >>> recompute_cost(32, 4, 8, 0)
    3.0
    >>> recompute_cost(32, 4, 1, 2)
    7.0
    """
    if num_freed == 0:
        return math.inf
    return num_preemptions + math.log2(max(1, num_lost) / max(1, min(num_freed, num_needed)))


def fewest(
    candidates: list[Request], fits: Callable[[Sequence[Request]], bool]
) -> list[Request] | None:
    """As few candidates as will do, the first ones preferred; None when all are not enough.

    `fits` tells whether some are enough, and stays true when more are added.
    """
    most = 1  # doubled, because what takes few candidates should not look at all
    while not fits(candidates[:most]):
        if most >= len(candidates):
            return None
        most *= 2
    count = bisect.bisect_left(range(most), True, key=lambda num: fits(candidates[:num]))
    chosen = candidates[:count]
    for candidate in candidates[: count - 1]:  # an early one may be spared by a later one
        others = [other for other in chosen if other is not candidate]
        if fits(others):
            chosen = others
    return chosen


def num_pairs(query_len: int, context_len: int) -> float:
    """KV tokens attended, summed over `query_len` tokens behind `context_len` others.

    >>> num_pairs(3, 10)  # 11 + 12 + 13
    36.0
    """
    return query_len * (context_len + (query_len + 1) / 2)


class StepTimes:
    """Seconds of a step as a fixed cost, a cost per token and a cost per KV token attended.

    The last steps of each size (a power of two of tokens) are kept, so that hours of decoding do
    not wash out what a prefill costs. The fit minimizes the absolute *relative* error: half the
    samples may be off, and a step that took a hundred times too long counts no more than one.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[float, float, float]]] = {}
        self._costs: tuple[float, float, float] | None = None
        self.max_tokens = 0
        """Twice the largest step measured: beyond that, nothing is predicted."""

    def observe(
        self, query_lens: Sequence[int], context_lens: Sequence[int], seconds: float
    ) -> None:
        """A step of these rows took so long."""
        if not seconds > 0:
            return
        num_tokens = sum(query_lens)
        pairs = sum(map(num_pairs, query_lens, context_lens))
        size = self._samples.setdefault(num_tokens.bit_length(), deque(maxlen=_SAMPLES_PER_SIZE))
        size.append((num_tokens, pairs, seconds))
        self.max_tokens = max(self.max_tokens, 2 * num_tokens)
        self._costs = None

    @property
    def costs(self) -> tuple[float, float, float]:
        """Seconds per step, per token, per KV token attended; zeros before the first step."""
        if self._costs is None:
            self._costs = self._fit()
        return self._costs

    def _fit(self) -> tuple[float, float, float]:
        samples = np.array([s for size in self._samples.values() for s in size])
        if len(samples) == 0:
            return 0.0, 0.0, 0.0
        seconds = samples[:, 2:]
        features = np.hstack([np.ones_like(seconds), samples[:, :2]]) / seconds
        scale = features.max(axis=0)
        features /= scale
        weights = np.ones(len(samples))
        costs = np.zeros(3)
        for _ in range(_NUM_FITS):
            costs = _non_negative_fit(features, weights)
            weights = 1 / np.maximum(np.abs(features @ costs - 1), _NOISE)
        fixed, per_token, per_pair = (costs / scale).tolist()
        return fixed, per_token, per_pair

    def seconds(self, num_tokens: int, pairs: float) -> float:
        """The expected time of a step."""
        fixed, per_token, per_pair = self.costs
        return fixed + per_token * num_tokens + per_pair * pairs

    def shortest(self, num_tokens: int, context_len: int, budget: int) -> float:
        """Seconds to compute so many tokens when a request has every step to itself: it cannot be
        done in less. 0 when no step of that size has been measured."""
        if min(num_tokens, budget) > self.max_tokens:
            return 0.0
        fixed, per_token, per_pair = self.costs
        num_steps = -(-num_tokens // budget)
        pairs = num_pairs(num_tokens, context_len)
        return fixed * num_steps + per_token * num_tokens + per_pair * pairs


def _non_negative_fit(features: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted least squares for `features @ costs == 1`; a cost that would be negative is 0."""
    active = [0, 1, 2]
    while active:
        chosen = features[:, active]
        weighted = chosen.T * weights
        ridge = 1e-9 * np.trace(weighted @ chosen) * np.eye(len(active))
        solved = np.linalg.solve(weighted @ chosen + ridge, weighted.sum(axis=1))
        if solved.min() >= 0:
            costs = np.zeros(3)
            costs[active] = solved
            return costs
        active.pop(int(solved.argmin()))
    return np.zeros(3)


class Pace:
    """How many prefill tokens one step may take beside rows that decode.

    The first prompt always gets `least` tokens, so it never starves; the step may then take longer
    than the target. Predictions hold for steps up to twice as large as any measured.
    """

    def __init__(
        self, times: StepTimes, target_s: float, context_lens: Sequence[int], least: int
    ) -> None:
        """`context_lens`: of the rows that decode."""
        _, self._per_token, self._per_pair = times.costs
        pairs = sum(num_pairs(1, context_len) for context_len in context_lens)
        self._seconds = target_s - times.seconds(len(context_lens), pairs)
        self._num_tokens = times.max_tokens - len(context_lens)
        self._least = least

    def most(self, context_len: int) -> int:
        """Tokens that a prompt with so many computed already may take."""
        linear = self._per_token + self._per_pair * (context_len + 0.5)
        root = math.sqrt(linear**2 + 2 * self._per_pair * max(0.0, self._seconds))
        fits = 2 * self._seconds / (linear + root) if linear > 0 else math.inf
        return max(self._least, int(min(fits, self._num_tokens)), 0)

    def spend(self, num_tokens: int, context_len: int) -> None:
        """Take what `most` offered."""
        pairs = num_pairs(num_tokens, context_len)
        self._seconds -= self._per_token * num_tokens + self._per_pair * pairs
        self._num_tokens -= num_tokens
        self._least = 0
