from __future__ import annotations

import random

import msgspec
import pytest
from hosts import Host, drafting, limits

from minivllm.drafting import DraftLengths, best_length
from minivllm.policy import StepTimes
from minivllm.request import Request


@pytest.fixture
def request_() -> Request:
    return Host(limits(), 20).add([1, 2, 3], max_tokens=5)


def costs(fixed_s: float, per_token_s: float) -> StepTimes:
    times = StepTimes()
    for n in (1, 2, 4, 8, 16):
        times.observe([n], [0], fixed_s + per_token_s * n)
    return times


def settled(lengths: DraftLengths, request: Request, p: float, num_rows: int) -> float:
    """The mean length over 200 steps, when drafts stand with probability p."""
    rng = random.Random(0)
    chosen = []
    for _ in range(400):
        lengths.begin_step()
        chosen.append(lengths.choose(request, num_rows))
        num_accepted = 0
        while num_accepted < chosen[-1] and rng.random() < p:
            num_accepted += 1
        if chosen[-1]:
            lengths.observe(request, chosen[-1], num_accepted)
    return sum(chosen[200:]) / 200


@pytest.mark.parametrize(
    ("p", "num_rows", "least", "most"),
    [(0.98, 1, 7, 8), (0.7, 1, 3, 7), (0.0, 1, 0, 0.6), (0.9, 256, 0, 2), (0.99, 4, 5, 8)],
)
def test_length_follows_acceptance_and_cost(request_, p, num_rows, least, most) -> None:
    """Good drafts make a lone request draft far; bad ones, or many rows that share what a step
    costs anyway, make it stop."""
    lengths = DraftLengths(8, costs(0.05, 0.003))
    assert least <= settled(lengths, request_, p, num_rows) <= most


def test_a_request_tries_again(request_) -> None:
    """Drafting that did not pay is taken up when it does."""
    lengths = DraftLengths(8, costs(0.05, 0.003))
    assert settled(lengths, request_, 0.0, 1) < 1
    assert settled(lengths, request_, 0.97, 1) > 5


def test_best_length_is_the_best_of_all() -> None:
    """No other length has more tokens per second."""
    for p in (0.0, 0.3, 0.6, 0.9, 1.0):
        for fixed in (0.0, 1.0, 20.0):

            def rate(k: int, p: float = p, fixed: float = fixed) -> float:
                return sum(p**i for i in range(k + 1)) / (fixed + (1 + k) * 2.0)

            chosen = best_length(p, fixed, 2.0, 8)
            assert rate(chosen) == pytest.approx(max(rate(k) for k in range(9)))


@pytest.mark.parametrize("stands", [False, True])
def test_a_schedule_drafts_as_it_pays(stands: bool) -> None:
    """Where a step's time grows with its tokens, a request whose drafts all fall soon asks for few
    of them, and one whose drafts stand needs few steps."""
    config = limits(max_model_len=400, speculative=drafting(8))
    host = Host(config, 200, stands=lambda digest: stands)
    host.add([1, 2, 3], max_tokens=300)
    while host.num_unfinished:
        host.fill()
        num_tokens = len(host.plans[-1].rows) + sum(host.results[0].num_drafts)
        seconds = 0.02 + 0.01 * num_tokens
        host.results[0] = msgspec.structs.replace(host.results[0], seconds=seconds)
        host.turn()
    num_drafts = sum(sum(plan.num_drafts) for plan in host.plans)
    print(f"{num_drafts} drafts in {len(host.plans)} steps")
    if stands:
        assert len(host.plans) < 60
    else:
        assert num_drafts < 80
