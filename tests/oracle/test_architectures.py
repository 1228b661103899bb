"""Each architecture through the whole engine, against transformers in float32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from oracle.test_oracle import ask_oracle, check_equal, run
from test_models import AXES, DRAWS, VOCAB_SIZE, draw, make_oracle

NUM_OUT = 20
# Tokens of the longest request, in blocks, and a few more: most requests have to wait or give way.
SMALL = {
    "max_model_len": 96,
    "block_size": 4,
    "num_gpu_blocks_override": 28,
    "max_num_batched_tokens": 17,
    "long_prefill_token_threshold": 8,
}


def save_with_tokenizer(oracle: Any, directory: Path) -> None:
    """A model that the engine can start from; the words of its vocabulary are numbers."""
    oracle.save_pretrained(directory)
    words = {str(i): i for i in range(VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


async def check_engine(architecture: str, number: int, directory: Path, **config: Any) -> None:
    """Prompts of 1 to 75 tokens, half of which begin alike, get the oracle's greedy tokens."""
    changes = {"max_position_embeddings": 128} | draw(architecture, number)
    oracle = make_oracle(architecture, **changes)
    save_with_tokenizer(oracle, directory)
    rng = random.Random(number)
    start = [rng.randrange(VOCAB_SIZE) for _ in range(24)]
    cases = []
    for i, length in enumerate([1, 3, 4, 5, 16, 17, 30, 33, 48, 75]):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
        if i % 2:
            prompt[:24] = start[:length]
        cases.append(ask_oracle(oracle, prompt, NUM_OUT))
    (outputs,), (stats,) = await run(cases, model=str(directory), **SMALL | config)
    check_equal(cases, outputs)
    assert stats.num_preemptions > 0
    assert sum(output.num_cached_tokens for output in outputs) > 0


@pytest.mark.parametrize("architecture", AXES)
async def test_tokens_equal_transformers(architecture: str, tmp_path: Path) -> None:
    """Chunked, cached and preempted, every architecture gives transformers' greedy tokens."""
    await check_engine(architecture, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", DRAWS)
@pytest.mark.parametrize("architecture", AXES)
async def test_tokens_equal_transformers_with_overlap(
    architecture: str, number: int, tmp_path: Path
) -> None:
    """The same with other settings of the model, and with steps planned ahead."""
    await check_engine(architecture, number, tmp_path, async_scheduling=True)
