"""Log-probabilities of the real model against transformers' log-softmax."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from minivllm.config import EngineConfig
from minivllm.engine import AsyncEngine
from minivllm.request import Logprob, RequestOutput, SamplingParams

TEXT = "The quick brown fox jumps over the lazy dog, and the dog, who was not that lazy, jumps back"
NUM_OUT = 8
COMMON: dict[str, Any] = {
    "distributed_executor_backend": "inline",
    "max_model_len": 64,
    "block_size": 8,
    "kv_cache_memory_bytes": 256 << 20,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 5},
    "preempted": {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 16},
    "process": {"distributed_executor_backend": "mp", "max_num_batched_tokens": 16},
}


@pytest.fixture(scope="module")
def model(embedded_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(embedded_dir, dtype=torch.float32)


def check_entry(entry: dict[int, Logprob] | None, expected: torch.Tensor, token_id: int) -> None:
    """An entry has the token, then the three likeliest, with the oracle's numbers and ranks."""
    assert entry is not None
    assert next(iter(entry)) == token_id
    assert 3 <= len(entry) <= 4
    for listed, found in entry.items():
        assert abs(found.logprob - expected[listed].item()) < 1e-3
        assert found.rank is not None
        # A near tie may swap neighbours in rank.
        higher = int((expected > expected[listed] + 1e-4).sum())
        at_least = int((expected > expected[listed] - 1e-4).sum())
        assert higher < found.rank <= at_least
    top = expected.topk(3).values.min() - 1e-4
    assert all(expected[listed] > top for listed in list(entry)[-3:])


def check(output: RequestOutput, model: Any) -> None:
    prompt = output.prompt_token_ids
    answer = output.outputs[0]
    with torch.inference_mode():
        ids = torch.tensor([prompt + answer.token_ids])
        expected = model(ids).logits[0].float().log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for i in range(1, len(prompt)):
        check_entry(output.prompt_logprobs[i], expected[i - 1], prompt[i])
    assert answer.logprobs is not None
    assert answer.cumulative_logprob is not None
    total = 0.0
    for i, token_id in enumerate(answer.token_ids):
        row = expected[len(prompt) + i - 1]
        check_entry(answer.logprobs[i], row, token_id)
        total += row[token_id].item()
    assert abs(answer.cumulative_logprob - total) < 1e-2


@pytest.mark.parametrize("variant", VARIANTS)
async def test_logprobs_equal_the_log_softmax_of_transformers(
    model: Any, embedded_dir: Path, variant: str
) -> None:
    """Of prompt and output, with the prefix cache cold and warm, whole, in chunks, preempted."""
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=NUM_OUT, ignore_eos=True, logprobs=3, prompt_logprobs=3
    )
    plain = SamplingParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True)
    config = EngineConfig(model=str(embedded_dir), **COMMON | VARIANTS[variant])
    async with AsyncEngine(config) as engine:
        stats = engine.core.scheduler.stats

        async def ask(text: str, params: SamplingParams) -> RequestOutput:
            async for output in engine.generate(text, params):
                last = output
            return last

        cold = await ask(TEXT, params)
        warm = await ask(TEXT, params)
        check(cold, model)
        check(warm, model)
        assert warm.num_cached_tokens == 0  # its logits had to be computed
        assert (await ask(TEXT, plain)).num_cached_tokens > 0  # the cache is warm all the same
        if variant == "preempted":
            others = [ask(f"{n} {TEXT}", params) for n in range(3)]
            for output in await asyncio.gather(*others):
                check(output, model)
            assert stats.num_preemptions > 0


PEAK = """
import sys
from minivllm import LLM, SamplingParams

def peak_mib():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024

llm = LLM(sys.argv[1], max_model_len=2048, kv_cache_memory_bytes=256 << 20)
prompt = [[(7 * i) % 40000 + 100 for i in range(2000)]]
for count in (None, 5):
    params = SamplingParams(max_tokens=1, prompt_logprobs=count, skip_reading_prefix_cache=True)
    output = llm.generate(prompt, params, use_tqdm=False)[0]
    assert count is None or len(output.prompt_logprobs) == 2000
    print(peak_mib())
"""


def test_prompt_logprobs_take_bounded_memory(embedded_dir: Path) -> None:
    """On 2,000 tokens they add less than 100 MiB to the peak; all logits at once are 375 MiB."""
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(embedded_dir)], capture_output=True, text=True, check=True
    )
    without, with_them = map(float, run.stdout.split())
    print(f"peak {without:.0f} MiB without, {with_them:.0f} MiB with prompt_logprobs")
    assert with_them - without < 100
