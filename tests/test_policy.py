from __future__ import annotations

import math
import random
import statistics

import pytest
from hosts import Host, limits
from hypothesis import given
from hypothesis import strategies as st

from minivllm.policy import (
    Aging,
    Deadlines,
    Pace,
    StepTimes,
    WaitingQueue,
    fewest,
    num_pairs,
    recompute_cost,
)
from minivllm.request import Request, RequestState


def requests(*priorities: int, **urgency: float) -> list[Request]:
    host = Host(limits(), 20)
    return [host.add([1], priority=priority, **urgency) for priority in priorities]


# ---- order ------------------------------------------------------------------------------------


class Naive:
    """The effective class by its definition: waiting is added up, then divided."""

    def __init__(self, aging_s: int) -> None:
        self.aging_s = aging_s
        self.waited_s: dict[Request, int] = {}

    def rank(self, request: Request) -> int:
        return request.priority - self.waited_s[request] // self.aging_s


@given(
    st.lists(st.integers(-3, 3), min_size=2, max_size=6),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), max_size=30),
)
def test_class_is_priority_less_the_whole_agings_waited(
    priorities: list[int], aging_s: int, events: list[tuple[int, int]]
) -> None:
    """In any history of waiting and running, ranks are those of the definition, and a smaller
    `due` never belongs to a worse class."""
    now_s = 0.0
    aging, naive = Aging(aging_s, lambda: now_s), Naive(aging_s)
    all_requests = requests(*priorities)
    for request in all_requests:
        aging.arrive(request)
        naive.waited_s[request] = 0
    for passed_s, idx in events:
        now_s += passed_s
        for request in all_requests:
            if request.state is RequestState.WAITING:
                naive.waited_s[request] += passed_s
        changed = all_requests[idx % len(all_requests)]
        if changed.state is RequestState.WAITING:
            aging.run(changed)
            changed.state = RequestState.RUNNING
        else:
            aging.wait(changed)
            changed.state = RequestState.WAITING
        for request in all_requests:
            assert aging.rank(request) == (False, naive.rank(request))
        waiting = [r for r in all_requests if r.state is RequestState.WAITING]
        ranks = [naive.rank(r) for r in sorted(waiting, key=lambda r: r.due)]
        assert ranks == sorted(ranks)


def test_a_fraction_of_an_aging_is_exact() -> None:
    """A class falls at the boundary, not a nanosecond earlier, however long the clock has run."""
    now_s = 123_456.789
    aging = Aging(0.1, lambda: now_s)
    (request,) = requests(4)
    aging.arrive(request)
    assert aging.rank(request) == (False, 4)
    now_s += 0.3 - 1e-6
    assert aging.rank(request) == (False, 2)
    now_s += 1e-6
    assert aging.rank(request) == (False, 1)


def test_without_aging_nothing_moves() -> None:
    """Without `aging_s` the class is the priority, at all times."""
    now_s = 0.0
    aging = Aging(None, lambda: now_s)
    (request,) = requests(7)
    aging.arrive(request)
    now_s = 1e9
    assert aging.rank(request) == (False, 7)


def test_the_queue_skips_the_ended_and_moves_the_demoted() -> None:
    """The head is the first that has not ended; a demoted request goes behind all others."""
    queue, aging = WaitingQueue(), Aging(None, lambda: 0.0)
    first, second, third = requests(0, 1, 2)
    for request in (third, first, second):
        aging.arrive(request)
        queue.push(request)
    assert queue.head() is first
    first.state = RequestState.FINISHED
    assert queue.head() is second
    second.stats.demoted = True
    assert queue.head() is third
    queue.pop()
    assert queue.head() is second


# ---- who gives way ----------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 40))
def test_fewest_is_enough_and_no_more(sizes: list[int], needed: int) -> None:
    """What is chosen suffices, and does not when any one of it is left out."""
    candidates = requests(*sizes) if sizes else []

    def fits(chosen: list[Request]) -> bool:
        return sum(r.priority for r in chosen) >= needed

    chosen = fewest(candidates, fits)
    if chosen is None:
        assert sum(sizes) < needed
    else:
        assert fits(chosen)
        assert not any(fits([r for r in chosen if r is not spared]) for spared in chosen)


def test_cost_counts_only_the_blocks_that_are_needed() -> None:
    """Blocks beyond the need buy nothing, shared ones nothing at all; a preemption doubles."""
    assert recompute_cost(100, 10, 1, 0) > recompute_cost(40, 4, 1, 0)
    assert recompute_cost(100, 10, 10, 0) == recompute_cost(40, 4, 10, 0)
    assert recompute_cost(40, 4, 1, 1) == recompute_cost(80, 4, 1, 0)
    assert recompute_cost(40, 0, 1, 0) == math.inf


# ---- deadlines --------------------------------------------------------------------------------


def test_who_cannot_make_it_is_late_before_its_target() -> None:
    """A request that has not started is late when the time left is less than it takes at best; one
    that has started, at its target; both once."""
    now_s, shortest_s = 0.0, 4.0
    deadlines = Deadlines(lambda: now_s, lambda request: shortest_s)
    waiting, started = requests(0, 0, ttft_target_s=10, timeout_s=20)
    for request in (waiting, started):
        request.stats.arrival_s = 0.0
        deadlines.add(request)
    started.stats.scheduled_s = 5.0
    assert deadlines.next_s == 6
    shortest_s = 3.0  # since then, more of the prompt can be found in the cache
    now_s = 6.0
    assert deadlines.overdue() == []
    now_s = 7.0
    assert deadlines.overdue() == [(waiting, "ttft")]
    now_s = 10.0
    assert deadlines.overdue() == [(started, "ttft")]
    assert deadlines.next_s is None


def test_a_first_token_leaves_only_the_timeout() -> None:
    """A request that has its first token is late at its timeout alone."""
    now_s = 0.0
    deadlines = Deadlines(lambda: now_s, lambda request: 0.0)
    (request,) = requests(0, ttft_target_s=10, timeout_s=20)
    request.stats.arrival_s = 0.0
    deadlines.add(request)
    request.tokens.append(5)
    now_s = 10.0
    assert deadlines.overdue() == []
    now_s = 20.0
    assert deadlines.overdue() == [(request, "timeout")]


# ---- how much fits ----------------------------------------------------------------------------

TRUE = (0.02, 5e-4, 2e-7)


def measure(
    times: StepTimes, rng: random.Random, lens: list[int], contexts: list[int], outliers: float
) -> None:
    fixed, per_token, per_pair = TRUE
    seconds = fixed + per_token * sum(lens) + per_pair * sum(map(num_pairs, lens, contexts))
    seconds *= rng.lognormvariate(0, 0.05)
    times.observe(lens, contexts, seconds * (20 if rng.random() < outliers else 1))


def trained(seed: int, outliers: float) -> StepTimes:
    """A prefill that compiled kernels for seconds, decoding, chunks beside it, an hour of it."""
    rng = random.Random(seed)
    times = StepTimes()
    times.observe([512], [0], 9.0)
    for step in range(40):
        measure(times, rng, [1] * 8, [100 + step] * 8, outliers)
        chunk = rng.choice([16, 64, 200, 500])
        measure(times, rng, [1] * 8 + [chunk], [100 + step] * 8 + [rng.randrange(2000)], outliers)
    for step in range(500):
        measure(times, rng, [1] * 8, [200 + step % 300] * 8, outliers)
    return times


@pytest.mark.parametrize("outliers", [0.0, 0.15])
def test_step_times_are_learnt_through_noise(outliers: float) -> None:
    """Predictions over a wide range of steps are within 20 %, with one step in seven 20 times too
    long as without; hours of decoding do not wash out what prompts cost."""
    errors = []
    for seed in range(10):
        times = trained(seed, outliers)
        for num_tokens, context_len in [(8, 200), (100, 0), (300, 1000), (500, 2000)]:
            pairs = num_pairs(num_tokens, context_len)
            expected = TRUE[0] + TRUE[1] * num_tokens + TRUE[2] * pairs
            errors.append(abs(times.seconds(num_tokens, pairs) / expected - 1))
    print(f"error of the prediction: median {statistics.median(errors):.3f}, max {max(errors):.3f}")
    assert max(errors) < 0.2


def test_costs_are_never_negative_and_few_samples_will_do() -> None:
    """From the first step on there is a fit, and more work is never expected to take less."""
    rng = random.Random(3)
    times = StepTimes()
    assert times.costs == (0, 0, 0)
    for _ in range(60):
        num_tokens = rng.randrange(1, 500)
        times.observe([num_tokens], [rng.randrange(1000)], rng.uniform(0.001, 1))
        assert min(times.costs) >= 0
    times.observe([5], [0], 0.0)  # a clock too coarse tells nothing
    assert min(times.costs) >= 0


def test_a_chunk_fills_the_target() -> None:
    """The largest chunk that `most` offers is expected to end the step just under the target."""
    times = trained(1, 0.0)
    for context_len in (0, 500, 3000):
        pace = Pace(times, 0.1, [200] * 8, 16)
        chunk = pace.most(context_len)
        pairs = sum(num_pairs(1, 200) for _ in range(8))
        for num_tokens, is_under in ((chunk, True), (chunk + 1, False)):
            seconds = times.seconds(8 + num_tokens, pairs + num_pairs(num_tokens, context_len))
            assert (seconds <= 0.1) == is_under
        pace.spend(chunk, context_len)
        assert pace.most(0) <= 1


def test_a_target_that_cannot_be_met_still_lets_one_block_through() -> None:
    """When decoding alone takes longer than the target, the first prompt gets `least` tokens."""
    pace = Pace(trained(1, 0.0), 0.001, [200] * 8, 16)
    assert pace.most(0) == 16
    pace.spend(16, 0)
    assert pace.most(0) == 0


def test_nothing_is_predicted_beyond_twice_what_was_measured() -> None:
    """Chunks grow by doubling until they are measured; no estimate is made for larger steps."""
    times = StepTimes()
    times.observe([1] * 8, [100] * 8, 0.02)
    assert Pace(times, 10.0, [100] * 8, 4).most(0) == 16 - 8
    assert times.shortest(17, 0, 100) == 0
    assert times.shortest(16, 0, 100) > 0
