"""What the host costs, without a model: a step's plan and result, blocks, keys, text."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from minivllm.batch import Ready, StepPlan, StepResult
from minivllm.blocks import BlockManager
from minivllm.checkpoint import find_checkpoint
from minivllm.config import EngineConfig
from minivllm.core import EngineCore
from minivllm.detokenizer import Detokenizer
from minivllm.request import SamplingParams
from minivllm.tokenizer import Tokenizer

pytestmark = pytest.mark.benchmark

PROMPT_LEN = 512


@pytest.fixture(scope="module")
def tokenizer(embedded_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(embedded_dir)


def core_of(embedded_dir: Path, tokenizer: Tokenizer, num_rows: int, **settings: Any) -> EngineCore:
    config = EngineConfig(
        model=str(embedded_dir), max_num_seqs=num_rows, max_num_batched_tokens=8192, **settings
    )
    ready = Ready(0, 200_000, 49152, {}, {})
    return EngineCore(config, find_checkpoint(str(embedded_dir)), tokenizer, ready)


def answer(plan: StepPlan) -> StepResult:
    token = 1000 + plan.step % 1000
    return StepResult(
        plan.generation, plan.step, [[token] for s in plan.samples if s], [], [], {}, 0.01
    )


@pytest.mark.parametrize("detokenize", [False, True], ids=["ids", "text"])
@pytest.mark.parametrize("num_rows", [64, 256, 1024])
def test_a_decoding_step(
    benchmark: Any, embedded_dir: Path, tokenizer: Tokenizer, num_rows: int, detokenize: bool
) -> None:
    """`plan` and `apply` of one step in which every row decodes."""
    core = core_of(embedded_dir, tokenizer, num_rows)
    params = SamplingParams(max_tokens=4000, ignore_eos=True, detokenize=detokenize)
    for number in range(num_rows):
        core.add(f"r{number}", [number + 1] * 32, params)

    def step() -> StepPlan:
        plan = core.plan()
        assert plan is not None, "requests run"
        core.apply(answer(plan))
        return plan

    while len(step().rows) < num_rows or core.scheduler.num_waiting:
        pass
    plan = benchmark.pedantic(step, rounds=100, warmup_rounds=10)
    assert plan.query_lens == [1] * num_rows


@pytest.mark.parametrize("kind", ["new", "cached"])
def test_admission(benchmark: Any, embedded_dir: Path, tokenizer: Tokenizer, kind: str) -> None:
    """64 prompts of 512 tokens from `add` to the plans that start them."""
    core = core_of(embedded_dir, tokenizer, 64)
    params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    number = 0

    def prompts() -> tuple[tuple[list[list[int]]], dict[str, Any]]:
        nonlocal number
        number += kind == "new"
        return ([[1 + number, row + 1, *range(PROMPT_LEN - 2)] for row in range(64)],), {}

    def admit(prompts: list[list[int]]) -> None:
        for row, prompt in enumerate(prompts):
            core.add(f"r{row}", prompt, params)
        while core.scheduler.num_waiting or core.scheduler.num_running:
            plan = core.plan()
            assert plan is not None, "requests run"
            core.apply(answer(plan))

    benchmark.pedantic(admit, setup=prompts, rounds=20, warmup_rounds=2)
    hits = core.scheduler.stats.prefix_hits
    assert (hits > 0) == (kind == "cached")


@pytest.mark.parametrize("num_blocks", [1_000, 10_000, 100_000, 1_000_000])
def test_block_operations(benchmark: Any, num_blocks: int) -> None:
    """A request of 64 blocks admitted, committed, released and closed: its time does not depend
    on the size of the pool."""
    manager = BlockManager(num_blocks, 16, enable_prefix_caching=True)
    tokens = [array("i", [number, *range(1023)]) for number in range(200)]
    turn = iter(range(10**9))

    def live() -> None:
        number = next(turn)
        manager.open(number, tokens[number % len(tokens)], "")
        assert manager.admit(number, manager.match(number, 1024), 1024)
        manager.commit(number, 1024)
        manager.release(number)
        manager.close(number)

    benchmark.pedantic(live, rounds=200, warmup_rounds=20)
    assert manager.num_free == num_blocks - 1


def test_hashing(benchmark: Any) -> None:
    """The keys of 8,192 tokens, 512 blocks."""
    tokens = array("i", range(8192))

    def hash_all() -> None:
        manager = BlockManager(2, 16, enable_prefix_caching=True)
        manager.open(0, tokens, "")

    benchmark.pedantic(hash_all, rounds=50, warmup_rounds=5)


@pytest.mark.parametrize("stops", [0, 4])
def test_detokenizer(benchmark: Any, tokenizer: Tokenizer, stops: int) -> None:
    """A thousand tokens one by one, without stop strings and with some."""
    token_ids = (tokenizer.encode("The sun is a star — ein Stern, 恒星, 🌞. ") * 100)[:1000]

    def push_all() -> None:
        detokenizer = Detokenizer(tokenizer, stop=[f"no such {i}" for i in range(stops)])
        for token_id in token_ids:
            detokenizer.push([token_id])
        detokenizer.finish()

    benchmark.pedantic(push_all, rounds=20, warmup_rounds=2)
