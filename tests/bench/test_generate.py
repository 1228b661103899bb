"""Whole runs beside transformers: the same model, float32, the same prompts and lengths.

The floor of a decode step at batch 1 is the bytes of the weights over the memory bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from minivllm import LLM, SamplingParams

NUM_IN, NUM_OUT = 32, 64


@pytest.fixture(scope="module")
def theirs(embedded_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(embedded_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def ours(embedded_dir: Path) -> Iterator[LLM]:
    with LLM(
        str(embedded_dir), enable_prefix_caching=False, kv_cache_memory_bytes=1 << 30
    ) as llm:
        yield llm


@pytest.mark.benchmark
@pytest.mark.parametrize("batch_size", [1, 8, 32])
def test_generate_beside_transformers(
    benchmark: Any, ours: LLM, theirs: Any, batch_size: int
) -> None:
    """Pairs in turn: transformers' generate, then ours; the ratio of each pair. Both
    generate the same number of tokens."""
    prompts = torch.randint(100, 40_000, (batch_size, NUM_IN), generator=torch.manual_seed(0))
    params = SamplingParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True)
    times: dict[str, list[float]] = {"theirs": [], "ours": []}
    num_out: dict[str, list[int]] = {}

    def run_theirs() -> None:
        start_s = time.perf_counter()
        output = theirs.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=NUM_OUT,
            min_new_tokens=NUM_OUT,
            do_sample=False,
            pad_token_id=0,
        )
        times["theirs"].append(time.perf_counter() - start_s)
        num_out["theirs"] = [len(row) - NUM_IN for row in output]

    def run_ours() -> None:
        start_s = time.perf_counter()
        outputs = ours.generate(prompts.tolist(), params, use_tqdm=False)
        times["ours"].append(time.perf_counter() - start_s)
        num_out["ours"] = [len(output.outputs[0].token_ids) for output in outputs]

    benchmark.pedantic(run_ours, setup=run_theirs, rounds=5, warmup_rounds=1)
    assert num_out["ours"] == num_out["theirs"] == [NUM_OUT] * batch_size
    del times["theirs"][0], times["ours"][0]  # the warm-up
    ratios = [a / b for a, b in zip(times["theirs"], times["ours"], strict=True)]
    tokens_per_s = batch_size * NUM_OUT / statistics.median(times["ours"])
    benchmark.extra_info |= {"tokens_per_s": tokens_per_s, "ratio": statistics.median(ratios)}
    print(
        f"\nbatch {batch_size}: ours {tokens_per_s:.1f} tok/s, transformers"
        f" {batch_size * NUM_OUT / statistics.median(times['theirs']):.1f} tok/s,"
        f" median ratio {statistics.median(ratios):.2f}x of {[round(r, 2) for r in ratios]}"
    )
