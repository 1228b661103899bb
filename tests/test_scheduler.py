from __future__ import annotations

import random
from collections import deque

import pytest
from fakes import FakeModel, expected_output
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.batch import StepPlan, StepResult
from minivllm.config import SchedulerConfig
from minivllm.request import Request, SamplingParams
from minivllm.scheduler import MAX_STRIKES, Scheduler

VOCAB = 997


def limits(**changes: int | bool) -> SchedulerConfig:
    values = {
        "block_size": 4,
        "max_model_len": 60,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "long_prefill_token_threshold": 0,
        "enable_prefix_caching": True,
    }
    return SchedulerConfig(**(values | changes))


class Host:
    """A scheduler, a fake model and `depth` plans in flight: the engine without its shell."""

    def __init__(self, config: SchedulerConfig, num_blocks: int, *, depth: int = 1, **fake) -> None:
        self.scheduler = Scheduler(config, num_blocks)
        self.config = config
        self.num_blocks = num_blocks
        self.depth = depth
        self.fake = fake
        self.number = 0
        self.ended: list[Request] = []
        self.results: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.new_model()

    def new_model(self) -> None:
        self.model = FakeModel(
            num_blocks=self.num_blocks,
            block_size=self.config.block_size,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=self.config.max_num_seqs,
            vocab_size=VOCAB,
            **self.fake,
        )

    def add(self, prompt: list[int], max_tokens: int = 5) -> Request:
        request = Request(
            id=f"r{self.number}",
            number=self.number,
            prompt=None,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens),
            seed=0,
            max_len=min(len(prompt) + max_tokens, self.config.max_model_len),
            stop_ids=frozenset(),
        )
        self.number += 1
        self.scheduler.add(request)
        return request

    def finish(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request, reason)
        self.ended.append(request)

    def fill(self) -> None:
        while len(self.scheduler.in_flight) < self.depth:
            plan = self.scheduler.plan()
            if plan is None:
                break
            self.plans.append(plan)
            self.results.append(self.model.step(plan))
        busy = self.scheduler.num_running + self.scheduler.num_waiting
        assert self.results or not busy, "unfinished requests, and nothing to do"

    def turn(self) -> bool:
        """Plan, apply one result; False when there was nothing to do."""
        self.fill()
        if not self.results:
            return False
        for request, tokens, _ in self.scheduler.complete(self.results.popleft()):
            if tokens is None:
                self.finish(request, "error")
            elif len(request.tokens) >= request.max_len:
                self.finish(request, "length")
        return True

    def drain(self) -> None:
        while self.turn():
            pass

    def restart(self) -> None:
        self.results.clear()
        for request in self.scheduler.blame():
            self.finish(request, "error")
        self.new_model()
        self.scheduler.restart(self.num_blocks)

    def check_idle(self) -> None:
        blocks = self.scheduler.blocks
        blocks.check_integrity()
        assert blocks.num_free == self.num_blocks - 1
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0


def output_of(request: Request) -> list[int]:
    return request.tokens[request.prompt_len :].tolist()


def check_output(request: Request) -> None:
    prompt = request.tokens[: request.prompt_len].tolist()
    output = output_of(request)
    assert output == expected_output(prompt, len(output), VOCAB)


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
)
def test_any_traffic_ends_whole(
    seed: int, num_blocks: int, depth: int, budget: int, cap: int, caching: bool
) -> None:
    """Random arrivals, aborts and restarts in a small pool: one end each, right tokens, no leak."""
    rng = random.Random(seed)
    config = limits(
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=cap,
        enable_prefix_caching=caching,
        max_model_len=4 * min(num_blocks - 1, 15),
    )
    host = Host(config, num_blocks, depth=depth)
    storm(host, rng, num_requests=40)


def storm(host: Host, rng: random.Random, num_requests: int, restarts: float = 0.02) -> None:
    requests: list[Request] = []
    stems = [[rng.randrange(VOCAB) for _ in range(30)] for _ in range(3)]
    while len(requests) < num_requests or any(not r.finished for r in requests):
        for _ in range(rng.choice([0, 0, 1, 3]) if len(requests) < num_requests else 0):
            length = rng.randrange(1, host.config.max_model_len)
            prompt = (rng.choice(stems) + [rng.randrange(VOCAB) for _ in range(99)])[:length]
            requests.append(host.add(prompt, max_tokens=rng.randrange(1, 20)))
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
