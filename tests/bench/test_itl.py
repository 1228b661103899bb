"""A long prompt that comes into running streams: what it does to the time between two tokens.

Without a target a step takes as much of the prompt as the token budget allows, and every stream
waits for it. With one, the prompt comes in chunks that share their steps with the streams' tokens:
the prompt takes longer, and each chunk pays a step's fixed cost.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import numpy as np
import pytest

from minivllm import AsyncEngine, EngineConfig, SamplingParams

NUM_STREAMS, NUM_OUT = 8, 64
NUM_PROMPTS, PROMPT_LEN, EVERY_S = 1, 2000, 1.0
TARGET_MS = 200.0
NUM_PAIRS = 3


async def stream(engine: AsyncEngine, first_token: int, gaps_s: list[float]) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True)
    last_s = None
    async for _ in engine.generate([first_token, *range(100, 132)], params):
        now_s = time.monotonic()
        if last_s is not None:
            gaps_s.append(now_s - last_s)
        last_s = now_s


async def prompt(engine: AsyncEngine, first_token: int, ttfts_s: list[float]) -> None:
    start_s = time.monotonic()
    ids = [first_token, *range(1000, 1000 + PROMPT_LEN - 1)]
    await anext(engine.generate(ids, SamplingParams(temperature=0, max_tokens=1)))
    ttfts_s.append(time.monotonic() - start_s)


async def measure(engine: AsyncEngine) -> dict[str, float]:
    gaps_s: list[float] = []
    ttfts_s: list[float] = []
    start_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(NUM_STREAMS):
            group.create_task(stream(engine, 10 + number, gaps_s))
        await asyncio.sleep(EVERY_S)
        for number in range(NUM_PROMPTS):
            group.create_task(prompt(engine, 50 + number, ttfts_s))
            await asyncio.sleep(EVERY_S)
    seconds = time.monotonic() - start_s
    num_tokens = NUM_STREAMS * (NUM_OUT + 33) + NUM_PROMPTS * (PROMPT_LEN + 1)
    return {
        "p50 ITL ms": float(np.percentile(gaps_s, 50)) * 1000,
        "p99 ITL ms": float(np.percentile(gaps_s, 99)) * 1000,
        "max ITL ms": max(gaps_s) * 1000,
        "TTFT s": statistics.mean(ttfts_s),
        "tokens/s": num_tokens / seconds,
    }


@pytest.mark.benchmark
def test_streams_keep_their_pace_beside_long_prompts(embedded_dir: Path) -> None:
    """p99 of the time between tokens and the throughput, without and with `itl_target_ms`."""

    async def pairs() -> list[tuple[dict[str, float], dict[str, float]]]:
        settings = {"model": str(embedded_dir), "enable_prefix_caching": False}
        async with (
            AsyncEngine(EngineConfig(**settings)) as free,
            AsyncEngine(EngineConfig(**settings, itl_target_ms=TARGET_MS)) as paced,
        ):
            for engine in (free, paced):
                await measure(engine)  # compiles kernels and lets the engine learn its steps
            return [(await measure(free), await measure(paced)) for _ in range(NUM_PAIRS)]

    measured = asyncio.run(pairs())
    for name in measured[0][0]:
        free = statistics.median(pair[0][name] for pair in measured)
        paced = statistics.median(pair[1][name] for pair in measured)
        print(f"{name}: {free:.1f} without, {paced:.1f} with a target of {TARGET_MS:.0f} ms")
    assert all(pair[1]["p99 ITL ms"] < pair[0]["p99 ITL ms"] for pair in measured)
