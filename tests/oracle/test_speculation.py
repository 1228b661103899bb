"""Drafts on the real model: token for token what plain decoding says, with everything else on or
off. Run with -s to see how many drafts stood."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from minivllm.channel import ProcessExecutor
from minivllm.config import EngineConfig
from minivllm.engine import AsyncEngine
from minivllm.request import RequestOutput, SamplingParams

PROMPTS = [
    "Repeat this: The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who every",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n",
]
NUM_TOKENS = 32
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "seed": 7}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "three": SAMPLED | {"n": 3},
    "penalties": GREEDY | {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "sampled_penalties": SAMPLED | {"presence_penalty": 0.5, "top_p": 0.9, "min_p": 0.02},
    "stops": GREEDY | {"stop": ["jumps", "8", "return"], "min_tokens": 6, "logprobs": 2},
}
# A pool of 12 blocks does not hold four requests to their ends: some are preempted.
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_cache": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 17},
    "preempted": {"num_gpu_blocks_override": 12, "max_model_len": 128},
    "overlap": {"async_scheduling": True},
    "mp": {"distributed_executor_backend": "mp"},
    "restarted": {"distributed_executor_backend": "mp"},
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
}

# Each pair of what is asked and k, and of engine and k, twice or more.
DAILY = [("three", "preempted", 3), ("stops", "no_cache", 8)]
ALL = [
    (asked, engine, (1, 3, 8)[(i + j) % 3])
    for i, asked in enumerate(ASKED)
    for j, engine in enumerate(ENGINES)
    if (i + 2 * j) % 2 == 0 or engine in ("overlap", "restarted")
]


async def answers(
    engine: AsyncEngine, asked: dict[str, Any], executor: ProcessExecutor | None = None
) -> list[RequestOutput]:
    """What is said to the prompts; a worker of `executor` is killed in the middle of it."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **asked)

    async def one(prompt: str) -> RequestOutput:
        kills = executor is not None and prompt == PROMPTS[2]
        async for output in engine.generate(prompt, params):
            last = output
            if kills and len(output.outputs[0].token_ids) >= 9:
                assert executor.pid is not None
                os.kill(executor.pid, signal.SIGKILL)
                kills = False
        return last

    outputs = await asyncio.gather(*(one(prompt) for prompt in PROMPTS))
    engine.core.scheduler.blocks.check_integrity()
    return outputs


def facts(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (a.token_ids, a.text, a.finish_reason, a.stop_reason, a.logprobs and len(a.logprobs))
        for output in outputs
        for a in output.outputs
    ]


def run(asked: dict[str, Any], *, kill: bool = False, **config: Any) -> list[RequestOutput]:
    settings = {"kv_cache_memory_bytes": 1 << 28, "distributed_executor_backend": "inline"}

    async def main() -> list[RequestOutput]:
        executor = ProcessExecutor(lease_s=5.0, step_timeout_s=60.0) if kill else None
        async with AsyncEngine(EngineConfig(**settings | config), executor=executor) as engine:
            outputs = await answers(engine, asked, executor)
            if "num_gpu_blocks_override" in config:
                assert engine.core.scheduler.stats.num_preemptions > 0
            return outputs

    return asyncio.run(main())


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Any]]:
    """What plain decoding says to everything that is asked."""

    async def main() -> dict[str, list[Any]]:
        config = EngineConfig(kv_cache_memory_bytes=1 << 28, distributed_executor_backend="inline")
        async with AsyncEngine(config) as engine:
            return {name: facts(await answers(engine, asked)) for name, asked in ASKED.items()}

    return asyncio.run(main())


def check(plain: dict[str, list[Any]], drafter: str, asked: str, engine: str, k: int) -> None:
    config = DRAFTERS[drafter] | {"num_speculative_tokens": k}
    kill = engine == "restarted"
    outputs = run(ASKED[asked], kill=kill, speculative_config=config, **ENGINES[engine])
    stats = [output.metrics for output in outputs]
    num_accepted = sum(s.num_accepted_tokens for s in stats)
    print(drafter, asked, engine, k, f"{num_accepted} of {sum(s.num_draft_tokens for s in stats)}")
    if kill:
        assert max(s.num_restarts for s in stats) == 1
    assert facts(outputs) == plain[asked]
    assert sum(s.num_draft_tokens for s in stats) > 0


@pytest.mark.parametrize(("asked", "engine", "k"), DAILY)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_output_is_that_of_plain_decoding(plain, drafter, asked, engine, k) -> None:
    """Whatever proposes, and however the engine runs."""
    check(plain, drafter, asked, engine, k)


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "engine", "k"), ALL)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_pair_of_features_leaves_the_output(plain, drafter, asked, engine, k) -> None:
    """What is asked, how the engine runs and how many are drafted, in pairs."""
    check(plain, drafter, asked, engine, k)
