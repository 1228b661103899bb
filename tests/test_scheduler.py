from __future__ import annotations

import random
from typing import Any

import pytest
from fakes import expected_output
from hosts import VOCAB, Host, check_output, drafting, limits, output_of
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.config import SchedulerConfig
from minivllm.errors import EngineBusyError
from minivllm.request import Request
from minivllm.scheduler import MAX_STRIKES


def test_long_prompt_takes_chunks_and_samples_in_the_last() -> None:
    """A prompt of three budgets takes three steps and samples once, in the third."""
    host = Host(limits(max_num_batched_tokens=16), 20)
    host.add(list(range(40)), max_tokens=1)
    host.drain()
    assert [p.query_lens for p in host.plans] == [[16], [16], [8]]
    assert [p.samples for p in host.plans] == [[False], [False], [True]]


def test_decode_goes_on_beside_a_long_prefill() -> None:
    """Every running row keeps one token of each step while a long prompt takes the rest."""
    host = Host(limits(max_num_batched_tokens=8), 40)
    host.add([1, 2], max_tokens=20)
    host.turn()
    host.add(list(range(30)), max_tokens=2)
    host.drain()
    lens = [p.query_lens for p in host.plans[1:6]]
    assert lens == [[1, 7], [1, 7], [1, 7], [1, 7], [1, 2]]


def test_chunk_cap_applies_only_in_company() -> None:
    """`long_prefill_token_threshold` caps a row's tokens, but not those of a lone request."""
    host = Host(limits(long_prefill_token_threshold=6), 40)
    host.add(list(range(20)), max_tokens=1)
    host.drain()
    assert [p.query_lens for p in host.plans] == [[20]]
    host.plans.clear()
    host.add(list(range(100, 120)), max_tokens=1)
    host.add(list(range(200, 220)), max_tokens=1)
    host.drain()
    assert host.plans[0].query_lens == [6, 6]


def test_seventeen_tokens_take_two_blocks_of_sixteen() -> None:
    """A request holds ceil(tokens / block_size) blocks."""
    host = Host(limits(block_size=16), 10)
    host.add(list(range(17)))
    host.fill()
    assert len(host.plans[0].new_blocks[0][1]) == 2


def test_equal_prompts_prefill_once() -> None:
    """64 equal prompts compute their shared blocks once: the others wait for them and hit."""
    host = Host(limits(max_num_batched_tokens=64, max_num_seqs=64), 400)
    prompt = list(range(33))
    requests = [host.add(prompt, max_tokens=2) for _ in range(64)]
    host.drain()
    prefill = sum(n for p in host.plans for n in p.query_lens)
    assert prefill == 33 + 63 * 1 + 64 * 1  # one prompt, each other's last token, the decodes
    assert all(output_of(r) == expected_output(prompt, 2, VOCAB) for r in requests)
    host.check_idle()


def test_fully_cached_prompt_recomputes_one_block_of_its_own() -> None:
    """A prompt that is a multiple of the block size hits all but its last block."""
    host = Host(limits(), 40)
    prompt = list(range(16))
    host.add(prompt)
    host.drain()
    host.plans.clear()
    request = host.add(prompt)
    host.drain()
    assert host.plans[0].query_lens == [4]
    assert request.stats.num_cached_tokens == 12
    check_output(request)


def test_preemption_frees_the_youngest_and_resumes_it() -> None:
    """When the pool runs dry the youngest row waits, is computed again and ends the same."""
    host = Host(limits(), 9)
    requests = [host.add([i, i + 1, i + 2], max_tokens=20) for i in range(3)]
    host.drain()
    assert host.scheduler.stats.num_preemptions > 0
    assert requests[0].stats.num_preemptions == 0
    for request in requests:
        check_output(request)
    host.check_idle()


def test_a_step_that_preempted_admits_nobody() -> None:
    """After a preemption in a step no waiting request takes the freed blocks in that step."""
    host = Host(limits(enable_prefix_caching=False), 9)
    for i in range(6):
        host.add([i, i + 1, i + 2], max_tokens=20)
    before = 0
    while host.turn():
        preempted = host.scheduler.stats.num_preemptions
        if preempted > before and len(host.plans[-1].rows) > 0:
            assert not host.plans[-1].new_rows
        before = preempted
    assert before > 0


def test_blocks_of_a_row_that_ends_in_flight_stay_until_its_plan_is_applied() -> None:
    """A request aborted while a plan names it keeps its blocks until that plan's result."""
    host = Host(limits(), 20, depth=2)
    request = host.add([1, 2, 3, 4, 5], max_tokens=20)
    host.fill()
    assert len(host.scheduler.in_flight) == 2
    held = 19 - host.scheduler.blocks.num_free
    host.finish(request, "abort")
    assert 19 - host.scheduler.blocks.num_free == held > 0
    host.turn()
    assert 19 - host.scheduler.blocks.num_free == held
    host.turn()
    host.check_idle()


def test_failed_row_fails_alone_and_leaves_nothing_in_the_cache() -> None:
    """A row that is not finite ends; its blocks are not hit, its neighbour goes on."""
    bad = list(range(50, 59))
    host = Host(limits(), 40, fails=lambda tokens: tokens[:9] == bad)
    failed, good = host.add(bad), host.add([1, 2, 3])
    host.drain()
    assert failed.finish_reason == "error"
    assert good.finish_reason == "length"
    again = host.add(bad)
    host.drain()
    assert again.stats.num_cached_tokens == 0
    host.check_idle()


def test_restart_resumes_everyone_with_the_same_tokens() -> None:
    """After the death of the workers every request is sent in full and ends as if undisturbed."""
    host = Host(limits(), 30, depth=2)
    requests = [host.add([i] * (3 + i), max_tokens=15) for i in range(6)]
    for turns in (2, 5, 9):
        for _ in range(turns):
            host.turn()
        host.fill()
        host.restart()
    host.drain()
    for request in requests:
        assert request.finish_reason == "length"
        check_output(request)
    host.check_idle()


def test_a_request_that_kills_its_worker_fails_alone() -> None:
    """Suspects resume in halves; the killer gets its strikes alone, all others end well."""
    host = Host(limits(), 60, depth=2)
    killer = host.add([7] * 9, max_tokens=5)
    others = [host.add([i, i, i], max_tokens=30) for i in range(7)]
    deaths = 0
    while host.scheduler.num_running + host.scheduler.num_waiting:
        host.depth = 1 if host.scheduler.quarantined else 2
        host.fill()
        named = {r for entry in host.scheduler.in_flight for r in entry.requests}
        if killer in named and not killer.finished:
            deaths += 1
            assert deaths < 20
            host.restart()
        else:
            host.turn()
    assert killer.finish_reason == "error"
    assert killer.strikes == MAX_STRIKES
    assert all(r.finish_reason == "length" for r in others)
    for request in others:
        check_output(request)


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.integers(9, 40),
    st.sampled_from([1, 2]),
    st.sampled_from([5, 13, 64]),
    st.sampled_from([0, 3]),
    st.booleans(),
    st.fixed_dictionaries(
        {"scheduling_policy": st.just("priority"), "aging_s": st.sampled_from([None, 0.2, 3.0])},
        optional={
            "itl_target_ms": st.sampled_from([50.0, 1000.0]),
            "ttft_policy": st.just("demote"),
        },
    )
    | st.just({}),
    st.sampled_from([0, 1, 3, 8]),
)
def test_any_traffic_ends_whole(
    seed: int,
    num_blocks: int,
    depth: int,
    budget: int,
    cap: int,
    caching: bool,
    policy: dict[str, Any],
    num_drafts: int,
) -> None:
    """Random arrivals, aborts and restarts in a small pool, under any policy and with drafts of
    which some stand: one end each, right tokens, no leak."""
    rng = random.Random(seed)
    config = limits(
        **policy,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=cap,
        enable_prefix_caching=caching,
        max_model_len=4 * min(num_blocks - 1, 15),
        speculative=drafting(num_drafts) if num_drafts else None,
    )
    host = Host(config, num_blocks, depth=depth, step_s=0.1)
    storm(host, rng, num_requests=40)


def random_urgency(rng: random.Random) -> dict[str, Any]:
    return {
        "priority": rng.randrange(-1, 3),
        "timeout_s": rng.choice([None, rng.uniform(0.1, 20)]),
        "ttft_target_s": rng.choice([None, rng.uniform(0.1, 20)]),
    }


def storm(host: Host, rng: random.Random, num_requests: int, restarts: float = 0.02) -> None:
    requests: list[Request] = []
    stems = [[rng.randrange(VOCAB) for _ in range(30)] for _ in range(3)]
    while len(requests) < num_requests or host.num_unfinished:
        for _ in range(rng.choice([0, 0, 1, 3]) if len(requests) < num_requests else 0):
            length = rng.randrange(1, host.config.max_model_len)
            prompt = (rng.choice(stems) + [rng.randrange(VOCAB) for _ in range(99)])[:length]
            urgency = random_urgency(rng) if host.config.scheduling_policy == "priority" else {}
            requests.append(host.add(prompt, max_tokens=rng.randrange(1, 20), **urgency))
        live = [r for r in requests[-50:] if not r.finished]
        if live and rng.random() < 0.05:
            host.finish(rng.choice(live), "abort")
        host.fill()
        if rng.random() < restarts:
            host.restart()
        host.turn()
        if rng.random() < 0.05:
            host.scheduler.blocks.check_integrity()
    host.drain()
    assert len(host.ended) == len(set(host.ended)) == len(requests)
    for request in requests:
        if request.finish_reason != "error":
            check_output(request)
        if request.finish_reason == "length":
            assert len(request.tokens) == request.max_len
    host.check_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_ten_thousand_requests_in_a_tiny_pool(depth: int) -> None:
    """10,000 requests with aborts through a pool of 24 blocks: one end each, always progress."""
    host = Host(limits(max_num_batched_tokens=48, max_model_len=40), 24, depth=depth)
    storm(host, random.Random(depth), num_requests=10_000 if depth == 2 else 2_000, restarts=0.0)
    assert host.scheduler.stats.num_preemptions > 1000 * (depth == 2)
    assert host.scheduler.stats.prefix_hits > 0


# ---- priority ---------------------------------------------------------------------------------


def priority(**changes: Any) -> SchedulerConfig:
    return limits(scheduling_policy="priority", **changes)


def names(requests: list[Request]) -> list[str]:
    return [request.id for request in requests]


def test_the_lower_priority_value_is_served_first_and_arrival_breaks_ties() -> None:
    """With one seat, requests end in order of priority, then of arrival."""
    host = Host(priority(max_num_seqs=1), 40)
    for value in (2, 1, 2, 0, 1):
        host.add([value], max_tokens=1, priority=value)
    host.drain()
    assert names(host.ended) == ["r3", "r1", "r4", "r0", "r2"]


def test_a_better_class_takes_a_seat_at_once() -> None:
    """At the limit of seats a better request starts in the step after its arrival, in place of the
    running one of the worst class, which resumes where it was."""
    host = Host(priority(max_num_seqs=2), 40)
    low, lower = host.add([1, 2], 20, priority=1), host.add([3, 4], 20, priority=2)
    host.turn()
    high = host.add([5, 6], 3, priority=0)
    host.turn()
    assert host.scheduler.running == [high, low]
    assert host.scheduler.stats.num_evictions == 1
    host.drain()
    assert names(host.ended) == ["r2", "r0", "r1"]
    assert (low.stats.num_preemptions, lower.stats.num_preemptions) == (0, 1)
    for request in (low, lower, high):
        check_output(request)


def test_a_better_class_takes_blocks_from_as_few_as_will_do() -> None:
    """When the pool is full, a request of a better class evicts only whom it needs, and starts."""
    host = Host(priority(max_num_batched_tokens=64), 12)
    small, large = host.add([1] * 7, 12, priority=1), host.add([2] * 19, 12, priority=1)
    host.turn()
    assert host.scheduler.blocks.num_free == 4
    high = host.add([3] * 35, 3, priority=0)  # 9 blocks: 4 are free, `large` has 5, `small` 2
    host.turn()
    assert host.scheduler.running == [high, small]
    assert large.stats.num_preemptions == 1
    host.drain()
    for request in (small, large, high):
        check_output(request)


def test_nobody_is_evicted_in_vain() -> None:
    """When evicting every worse request would not make room, all of them go on."""
    host = Host(priority(max_num_batched_tokens=64), 12)
    host.add([1] * 19, 8, priority=0)
    host.add([2] * 7, 8, priority=1)
    host.turn()
    high = host.add([3] * 39, 3, priority=0)
    host.turn()
    assert host.scheduler.stats.num_preemptions == 0
    assert high not in host.scheduler.running
    host.drain()
    check_output(high)


def test_equals_do_not_evict_each_other() -> None:
    """Within a class a later request waits for a seat and for blocks."""
    host = Host(priority(max_num_seqs=2), 40)
    for _ in range(4):
        host.add([1, 2], 10, priority=1)
    host.drain()
    assert host.scheduler.stats.num_preemptions == 0
    assert names(host.ended) == ["r0", "r1", "r2", "r3"]


def test_whom_a_plan_in_flight_names_sits_out_a_step_first() -> None:
    """With overlap the victim is in flight when the better request comes: it is left out of the
    next plan, evicted in the one after, and the others lose nothing."""
    host = Host(priority(max_num_seqs=2), 40, depth=2)
    other, victim = host.add([1, 2], 30, priority=1), host.add([3, 4], 30, priority=2)
    host.turn()
    host.fill()
    high = host.add([5, 6], 3, priority=0)
    host.plans.clear()
    for _ in range(2):
        host.turn()
    host.fill()
    rows = [len(plan.rows) for plan in host.plans]
    assert rows[:2] == [1, 2]
    assert host.scheduler.running == [high, other]
    host.drain()
    for request in (other, victim, high):
        check_output(request)


def test_a_better_request_does_not_wait_for_the_kv_of_a_worse_one() -> None:
    """A prompt that a request of a worse class is computing is computed again, not waited for."""
    host = Host(priority(max_num_batched_tokens=8), 60)
    low = host.add(list(range(30)), 2, priority=1)
    host.turn()
    high = host.add(list(range(30)), 2, priority=0)
    host.drain()
    assert host.ended == [high, low]


def test_max_num_active_seqs_leaves_rows_unused() -> None:
    """No more requests run than `max_num_active_seqs`, though the workers have rows for more."""
    host = Host(limits(max_num_active_seqs=3), 60)
    for i in range(8):
        host.add([i, i], max_tokens=4)
    while host.turn():
        assert max(len(plan.rows) for plan in host.plans) <= 3
    assert len(host.ended) == 8


# ---- victims ----------------------------------------------------------------------------------


def starve(host: Host) -> Request:
    """Run until somebody is preempted; returns who."""
    running = list(host.scheduler.running)
    while not host.scheduler.stats.num_preemptions:
        running = list(host.scheduler.running)
        host.turn()
    (victim,) = (r for r in running if r.stats.num_preemptions)
    return victim


def test_the_victim_is_whose_recompute_costs_least() -> None:
    """The middle request has the fewest tokens of its own, because it shares its prompt's start."""
    host = Host(limits(max_num_batched_tokens=64), 21)
    stem = list(range(24))
    host.add([*stem, 1], 30)
    host.turn()
    cheap = host.add([*stem, 2, 3], 30)
    host.add(list(range(100, 127)), 30)
    assert starve(host) is cheap


def test_a_worse_class_goes_before_a_cheaper_one() -> None:
    """Of two victims the one of the worse class goes, whatever it costs."""
    host = Host(priority(max_num_batched_tokens=64), 14)
    host.add([1] * 3, 40, priority=0)
    host.add([2] * 3, 40, priority=0)
    dear = host.add([3] * 30, 20, priority=1)
    assert starve(host) is dear


def test_a_preemption_doubles_the_cost_of_the_next() -> None:
    """Of two requests alike, the one that was preempted before is spared."""
    host = Host(limits(), 40)
    oldest, younger, youngest = (host.add([i] * 5, 30) for i in range(3))
    host.turn()
    assert host.scheduler._victim() is youngest
    youngest.stats.num_preemptions = 1
    assert host.scheduler._victim() is younger
    younger.stats.num_preemptions = oldest.stats.num_preemptions = 0
    assert oldest in host.scheduler.running


def test_the_oldest_of_the_best_class_is_never_a_victim() -> None:
    """However cheap it is and whatever comes, one request always gets to its end undisturbed."""
    host = Host(priority(), 9)
    first = host.add([1], 30, priority=0)
    for i in range(8):
        host.add([i + 2] * 9, 20, priority=i % 2)
    host.drain()
    assert first.stats.num_preemptions == 0
    assert len(host.ended) == 9


# ---- aging ------------------------------------------------------------------------------------


def flood(aging_s: float | None, seconds: int = 60) -> tuple[Host, Request]:
    """A request of priority 5 under a stream of priority 0 that takes every seat."""
    host = Host(priority(max_num_seqs=2, aging_s=aging_s), 40, step_s=1.0)
    low = host.add([1, 2], 4, priority=5)
    for _ in range(seconds):
        host.add([3, 4], 2, priority=0)
        host.add([5, 6], 2, priority=0)
        host.turn()
    return host, low


def test_aging_ends_starvation_within_its_bound() -> None:
    """Nothing that arrives `aging_s * distance` seconds after a request is served before it."""
    _, low = flood(None)
    assert low.stats.scheduled_s is None
    host, low = flood(4.0)
    assert low.stats.scheduled_s is not None
    assert low.stats.scheduled_s - low.stats.arrival_s > 0
    host.drain()
    later = [r for r in host.ended if r.stats.arrival_s > low.stats.arrival_s + 4.0 * 5]
    assert min(r.stats.scheduled_s or 0 for r in later) >= low.stats.scheduled_s


def test_two_that_overtake_each_other_in_turn_both_end() -> None:
    """With an `aging_s` far below the time of a step, a seat changes hands, but only after each
    holder got a token: nobody computes the same prompt for ever."""
    host = Host(priority(max_num_seqs=1, max_num_batched_tokens=4, aging_s=0.01), 40, step_s=1.0)
    requests = [host.add([i] * 20, 6, priority=0) for i in range(3)]
    turns = 0
    while host.turn():
        turns += 1
        assert turns < 500
    assert {r.finish_reason for r in requests} == {"length"}
    assert all(r.stats.num_preemptions <= r.num_output_tokens for r in requests)
    for request in requests:
        check_output(request)


# ---- deadlines --------------------------------------------------------------------------------


def test_a_timeout_ends_a_request_in_any_state() -> None:
    """Running, waiting and parked requests end at their time, with what they have."""
    host = Host(limits(max_num_seqs=2, max_num_batched_tokens=8), 40, step_s=1.0)
    stem = list(range(30))
    running = host.add(stem, 20, timeout_s=7.5)
    parked = host.add(stem, 20, timeout_s=2.5)
    host.add([7], 40)
    waiting = host.add([8], 20, timeout_s=3.5)
    host.drain()
    for request, time_s, num_tokens in ((running, 8, 4), (parked, 3, 0), (waiting, 4, 0)):
        assert (request.finish_reason, request.stop_reason) == ("abort", "timeout")
        assert request.stats.finished_s == time_s
        assert request.num_output_tokens == num_tokens
    host.check_idle()


def test_a_missed_first_token_is_dropped_or_demoted() -> None:
    """A request late for its first token ends, or goes behind all others of any class."""
    for policy in ("drop", "demote"):
        config = priority(max_num_seqs=1, ttft_policy=policy)
        host = Host(config, 40, step_s=1.0)
        host.add([1], 6, priority=0)
        late = host.add([2], 3, priority=0, ttft_target_s=2.5)
        host.add([3], 3, priority=9)
        host.drain()
        if policy == "drop":
            assert (late.finish_reason, late.stop_reason) == ("abort", "ttft")
            assert host.ended[0] is late
            assert host.scheduler.stats.num_dropped == 1
        else:
            assert late.stats.demoted
            assert names(host.ended) == ["r0", "r2", "r1"]
            assert host.scheduler.stats.num_demoted == 1
            check_output(late)
        host.check_idle()


def test_a_running_request_that_is_demoted_gives_way() -> None:
    """A prompt that runs past its target is served after the others from then on."""
    host = Host(limits(max_num_batched_tokens=4, ttft_policy="demote"), 40, step_s=1.0)
    late = host.add([1] * 30, 2, ttft_target_s=2.5)
    other = host.add([2] * 8, 2)
    host.drain()
    assert host.ended == [other, late]
    check_output(late)


# ---- doors ------------------------------------------------------------------------------------


def test_the_queue_counts_requests_and_unanswered_prompt_tokens() -> None:
    """Both caps count what is in the engine now: requests until they end, prompts until they have
    their first token, through preemption and restart."""
    host = Host(limits(max_num_queued_reqs=3, max_num_queued_tokens=30), 40)
    host.add([1] * 10, 3)
    dropped = host.add([2] * 10, 3)
    host.scheduler.check_room(1, 10)
    with pytest.raises(EngineBusyError, match="max_num_queued_tokens is 30: 20 are queued, 11"):
        host.scheduler.check_room(1, 11)
    with pytest.raises(EngineBusyError, match="max_num_queued_reqs is 3: 2 are queued, 2"):
        host.scheduler.check_room(2, 2)
    host.finish(dropped, "abort")
    host.scheduler.check_room(2, 20)
    host.turn()
    host.scheduler.check_room(2, 30)
    host.restart()
    host.scheduler.check_room(2, 30)
    host.drain()
    host.scheduler.check_room(3, 30)
