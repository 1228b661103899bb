"""What the real model samples follows the distribution that transformers computes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.tokenizer import Tokenizer

NUM_SAMPLES = 2000
TEXT = "My favorite animal is the"
# The prompt is 5 tokens, 4 of which every sample finds in the prefix cache.
CONFIG: dict[str, Any] = {
    "block_size": 4,
    "max_model_len": 16,
    "kv_cache_memory_bytes": 256 << 20,
}


@pytest.fixture(scope="module")
def expected(embedded_dir: Path) -> torch.Tensor:
    """The logits of the token after TEXT, in float64."""
    model = AutoModelForCausalLM.from_pretrained(embedded_dir, dtype=torch.float32)
    ids = torch.tensor([Tokenizer.from_dir(embedded_dir).encode(TEXT)])
    with torch.inference_mode():
        logits: torch.Tensor = model(ids, logits_to_keep=1).logits[0, -1].double()
    return logits


def p_value(counts: Counter[int], probs: torch.Tensor) -> float:
    """Chi-square over the tokens that are expected at least five times; the others are one bin."""
    common = torch.nonzero(probs * NUM_SAMPLES >= 5).flatten().tolist()
    observed = [counts[token_id] for token_id in common]
    shares = probs[common].tolist()
    observed.append(NUM_SAMPLES - sum(observed))
    shares.append(1 - sum(shares))
    kept = [i for i, share in enumerate(shares) if share > 1e-9]
    assert len(kept) > 2
    if any(observed[i] for i in range(len(shares)) if i not in kept):
        return 0.0  # what cannot come has come
    found = stats.chisquare(
        [observed[i] for i in kept], np.array([shares[i] for i in kept]) * NUM_SAMPLES
    )
    return float(found.pvalue)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, id="plain"),
        pytest.param(
            {"temperature": 0.7, "top_k": 40, "top_p": 0.9}, id="truncated", marks=pytest.mark.slow
        ),
    ],
)
def test_sampled_tokens_follow_the_model(
    embedded_dir: Path, expected: torch.Tensor, shape: dict[str, Any]
) -> None:
    """2,000 samples of one token pass a chi-square test; with a bias of the likeliest they fail."""
    logits = expected / shape.get("temperature", 1.0)
    if "top_k" in shape:
        logits = logits.masked_fill(logits < logits.topk(40).values[-1], -torch.inf)
        falling, order = logits.softmax(-1).sort(descending=True)
        last = int((falling.cumsum(-1) < 0.9).sum())
        kept = torch.full_like(logits, -torch.inf)
        kept[order[: last + 1]] = logits[order[: last + 1]]
        logits = kept
    probs = logits.softmax(-1)
    with LLM(str(embedded_dir), **CONFIG) as llm:
        assert len(llm.tokenizer.encode(TEXT)) == 5

        def sample(**changes: Any) -> Counter[int]:
            params = SamplingParams(n=NUM_SAMPLES, seed=11, max_tokens=1, **shape | changes)
            output = llm.generate(TEXT, params, use_tqdm=False)[0]
            return Counter(answer.token_ids[0] for answer in output.outputs)

        fair = p_value(sample(), probs)
        biased = p_value(sample(logit_bias={int(probs.argmax()): 0.7}), probs)
    print(f"p = {fair:.3f}, with the bias {biased:.1e}")
    assert fair > 1e-3
    assert biased < 1e-6
