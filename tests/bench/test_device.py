"""What a step is made of on this device: attention, sampling, and a whole step of the model."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_attention import Shape, make_step
from test_sampling import make_batch

from minivllm.attention import paged_attention
from minivllm.batch import NewRow, SampleInputs, StepPlan, StepResult
from minivllm.config import EngineConfig
from minivllm.model_runner import ModelRunner
from minivllm.sampling import sample

pytestmark = pytest.mark.benchmark

SMOL = Shape(K=3, G=3, D=64, P=16)  # the embedded model's heads
VOCAB = 49152


@pytest.mark.parametrize("context_len", [64, 1024, 4096])
@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_attention_of_decoding_rows(benchmark: Any, num_rows: int, context_len: int) -> None:
    """One layer's attention of rows with one query each."""
    step = make_step([(context_len, 1)] * num_rows, SMOL)
    out = benchmark.pedantic(
        paged_attention,
        args=(step.q, step.cache, step.batch),
        kwargs={"scale": 0.125},
        rounds=20,
        warmup_rounds=3,
    )
    assert out.isfinite().all()
    num_bytes = num_rows * (context_len + 1) * 2 * SMOL.K * SMOL.D * 4
    benchmark.extra_info["GB/s"] = num_bytes / benchmark.stats["median"] / 1e9


@pytest.mark.parametrize("context_len", [0, 1536])
def test_attention_of_a_chunk(benchmark: Any, context_len: int) -> None:
    """One layer's attention of 512 new tokens behind a context."""
    step = make_step([(context_len, 512)], SMOL)
    out = benchmark.pedantic(
        paged_attention,
        args=(step.q, step.cache, step.batch),
        kwargs={"scale": 0.125},
        rounds=10,
        warmup_rounds=2,
    )
    assert out.isfinite().all()


@pytest.mark.parametrize("kind", ["greedy", "temperature", "top_p"])
@pytest.mark.parametrize("num_rows", [1, 64])
def test_sampler(benchmark: Any, num_rows: int, kind: str) -> None:
    """A token for each row from logits of the embedded model's vocabulary."""
    values = {
        "greedy": {"temperature": 0},
        "temperature": {"temperature": 0.8},
        "top_p": {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    }[kind]
    logits = torch.randn(num_rows, VOCAB, generator=torch.manual_seed(0)) * 4
    batch = make_batch(num_rows, **values)
    out = benchmark.pedantic(sample, args=(logits, batch), rounds=20, warmup_rounds=3)
    assert len(out.token_ids) == num_rows


@pytest.fixture(scope="module")
def runner(embedded_dir: Path) -> ModelRunner:
    _, config = EngineConfig(
        max_model_len=2048, max_num_seqs=64, kv_cache_memory_bytes=1 << 30
    ).resolve(model_path=str(embedded_dir), model_max_len=8192)
    return ModelRunner(config)


@pytest.fixture(scope="module")
def step_numbers() -> Iterator[int]:
    """A worker refuses gaps."""
    return itertools.count()


@pytest.mark.parametrize(
    ("num_rows", "query_len"), [(1, 1), (8, 1), (64, 1), (1, 512)], ids=["1", "8", "64", "chunk"]
)
def test_one_step(
    benchmark: Any,
    runner: ModelRunner,
    step_numbers: Iterator[int],
    num_rows: int,
    query_len: int,
) -> None:
    """A step of the embedded model from its plan to its tokens, with 64 tokens of context."""
    context_len = 64
    length = context_len + query_len
    token_ids = array("i", range(100, 100 + length)).tobytes()
    inputs = SampleInputs(seed=0, prompt_len=length)
    rows = list(range(num_rows))
    new_rows = [NewRow(row, token_ids, context_len, length, inputs) for row in rows]
    num_blocks = -(-length // 16)
    tables = [(row, [1 + row * num_blocks + idx for idx in range(num_blocks)]) for row in rows]

    def step() -> StepResult:
        lens, samples = [query_len] * num_rows, [True] * num_rows
        plan = StepPlan(0, next(step_numbers), new_rows, rows, lens, samples, tables)
        return runner.launch(plan).result()

    result = benchmark.pedantic(step, rounds=15, warmup_rounds=3)
    assert len(result.tokens) == num_rows
    num_tokens = num_rows * query_len
    benchmark.extra_info["tokens_per_s"] = num_tokens / benchmark.stats["median"]
