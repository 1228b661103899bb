from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from minivllm.batch import SampleInputs, Thinking
from minivllm.sampling import (
    NOT_FINITE,
    NOTHING_LEFT,
    AdjustedRow,
    LogprobsMode,
    SamplingBatch,
    adjust,
    gather_logprobs,
    sample,
)

V = 50


def make_batch(num_rows: int, **values: Any) -> SamplingBatch:
    plain = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0}
    ints = {"top_k": 0, "seeds": 1, "children": 0, "positions": 9, "num_logprobs": -1}
    return SamplingBatch(
        **{k: np.full(num_rows, values.get(k, v), np.float32) for k, v in plain.items()},
        **{k: np.full(num_rows, values.get(k, v), np.int64) for k, v in ints.items()},
    )


def adjusted(logits: torch.Tensor, tokens: list[int], **inputs: Any) -> torch.Tensor:
    """The logits of one row that has these tokens, adjusted."""
    row = AdjustedRow(0, SampleInputs(seed=0, **inputs), np.array(tokens, np.int64))
    before = logits.clone()
    out, failed = adjust(logits[None], [row])
    assert not failed
    assert torch.equal(logits, before), "the logits given were changed"
    return out[0]


def kept(logits: torch.Tensor) -> list[int]:
    return list(torch.nonzero(logits > -torch.inf).flatten().tolist())


def test_repetition_penalty_equals_transformers() -> None:
    """Prompt and output count alike, each token once."""
    torch.manual_seed(0)
    logits = torch.randn(V) * 3
    tokens = [3, 4, 4, 9, 3, 20]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens]), logits[None].clone())
    out = adjusted(logits, tokens, prompt_len=2, repetition_penalty=1.7)
    torch.testing.assert_close(out, expected[0])


def test_frequency_and_presence_count_the_output_only() -> None:
    """A token that is c times in the output loses c * frequency + presence; the prompt is free."""
    logits = torch.zeros(V)
    out = adjusted(
        logits, [3, 3, 8, 5, 5, 5], prompt_len=3, frequency_penalty=0.5, presence_penalty=-0.25
    )
    assert out[5] == -(3 * 0.5 - 0.25)
    out[5] = 0
    assert torch.equal(out, logits)


def test_bias_is_added_and_a_ban_is_not_undone_by_it() -> None:
    """`logit_bias` moves its tokens; one that is not allowed stays out whatever its bias."""
    out = adjusted(torch.ones(V), [1], logit_bias=[(4, 2.5), (7, -1.0), (9, 1e9)])
    assert (out[4], out[7], out[9]) == (3.5, 0.0, 1e9 + 1)
    out = adjusted(torch.ones(V), [1], logit_bias=[(9, 1e9)], allowed_token_ids=[4, 7])
    assert kept(out) == [4, 7]


def test_end_tokens_wait_for_min_len() -> None:
    """Below `min_len` known tokens the ends are masked, from it on they are not."""
    for num_tokens in (4, 5, 6):
        out = adjusted(torch.zeros(V), [1] * num_tokens, min_len=6, end_ids=[2, 30])
        assert (2 in kept(out)) == (30 in kept(out)) == (num_tokens >= 6)


def spelled(tokens: list[bytes], word: bytes, output: list[int]) -> list[int]:
    """The tokens that would complete `word`: brute force over every start of the output."""
    banned = set()
    for token_id, token in enumerate(tokens):
        for start in range(len(output) + 1):
            if b"".join(tokens[t] for t in output[start:]) + token == word:
                banned.add(token_id)
    return sorted(banned)


def test_bad_words_are_banned_however_they_are_spelled() -> None:
    """For random outputs over a tiny vocabulary, exactly the completing tokens are banned."""
    tokens = [b"a", b"b", b"ab", b"ba", b"aa", b"aba", b"c"]
    rng = np.random.default_rng(0)
    for word in (b"a", b"ab", b"aba", b"aaa", b"abab", b"abaab"):
        graph = [
            (i, t, i + len(token))
            for i in range(len(word))
            for t, token in enumerate(tokens)
            if word[i:].startswith(token)
        ]
        for _ in range(60):
            output = rng.integers(0, len(tokens), rng.integers(0, 8)).tolist()
            out = adjusted(torch.zeros(7), [9, *output], prompt_len=1, bad_words=[graph])
            expected = [t for t in range(7) if t not in spelled(tokens, word, output)]
            assert kept(out) == expected


def test_forced_tokens_come_first_and_then_the_model_decides() -> None:
    """Output i is forced_ids[i], even a banned one; behind the last nothing is forced."""
    inputs: dict[str, Any] = {"prompt_len": 2, "forced_ids": [7, 8], "allowed_token_ids": [4, 5]}
    assert kept(adjusted(torch.zeros(V), [1, 1], **inputs)) == [7]
    assert kept(adjusted(torch.zeros(V), [1, 1, 7], **inputs)) == [8]
    assert kept(adjusted(torch.zeros(V), [1, 1, 7, 8], **inputs)) == [4, 5]


def test_thoughts_are_closed_when_their_budget_is_used() -> None:
    """After `budget` tokens of thought the closing tokens come, one by one; then it is over."""
    thinking = Thinking(2, start_ids=[40, 41], end_ids=[42, 43])
    free = list(range(V))
    for tokens, expected in (
        ([1, 40, 41, 5], free),
        ([1, 40, 41, 5, 6], [42]),
        ([1, 40, 41, 5, 6, 42], [43]),
        ([1, 40, 41, 5, 42], [43]),  # begun by the model, at the budget
        ([1, 40, 41, 5, 6, 42, 43], free),
        ([1, 40, 41, 5, 6, 42, 43, 7, 8, 9], free),
        ([1, 2, 3, 4, 5, 6], free),  # no thoughts
        ([40, 41, 5, 42, 43, 40, 41, 1, 1], [42]),  # thoughts opened again
    ):
        assert kept(adjusted(torch.zeros(V), tokens, prompt_len=1, thinking=thinking)) == expected
    none = Thinking(0, start_ids=[40], end_ids=[42])
    assert kept(adjusted(torch.zeros(V), [1, 40], prompt_len=2, thinking=none)) == [42]


def test_a_processor_sees_the_output_and_its_error_fails_its_row() -> None:
    """Callables get (output ids, logits) and give logits; one that raises fails its row alone."""
    seen = []

    def only_seven(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(token_ids)
        out = torch.full_like(logits, -torch.inf)
        out[7] = logits[7]
        return out

    def broken(_token_ids: list[int], _logits: torch.Tensor) -> torch.Tensor:
        raise ValueError("on purpose")

    rows = [
        AdjustedRow(r, SampleInputs(seed=0, prompt_len=1, processors=(p,)), np.array([1, 5, 6]))
        for r, p in ((0, only_seven), (2, broken))
    ]
    torch.manual_seed(0)
    logits = torch.randn(3, V)
    out = sample(logits, make_batch(3), rows)
    assert seen == [[5, 6]]
    assert out.failed.keys() == {2}
    assert "ValueError: on purpose" in out.failed[2]
    assert out.token_ids.tolist() == [7, int(logits[1].argmax()), 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_that_leave_nothing_have_their_own_error(temperature: float) -> None:
    """A row whose every token is banned fails as such, one with NaN as not finite."""
    row = SampleInputs(seed=0, allowed_token_ids=[4], logit_bias=[(4, -torch.inf)])
    logits = torch.zeros(3, V)
    logits[1, 3] = torch.nan
    rows = [AdjustedRow(r, row, np.array([1])) for r in (0, 1)]
    out = sample(logits, make_batch(3, temperature=temperature), rows)
    assert out.failed == {0: NOTHING_LEFT, 1: NOT_FINITE}


def test_rows_that_adjust_nothing_keep_their_bits() -> None:
    """A neighbour's penalties and bans do not touch a row's tokens or log-probabilities."""
    torch.manual_seed(0)
    logits = torch.randn(4, V)
    batch = make_batch(4, temperature=0.7, num_logprobs=3)
    alone = sample(logits, batch)
    inputs = SampleInputs(seed=0, repetition_penalty=2.0, allowed_token_ids=[1], num_logprobs=3)
    beside = sample(logits, batch, [AdjustedRow(1, inputs, np.arange(9))])
    others = [0, 2, 3]
    assert torch.equal(alone.token_ids[others], beside.token_ids[others])
    assert alone.logprobs is not None
    assert beside.logprobs is not None
    assert torch.equal(alone.logprobs.logprobs[others], beside.logprobs.logprobs[others])
    # Raw log-probabilities: the adjusted row's own do not show what was done to it either.
    assert torch.equal(alone.logprobs.token_ids[1, 1:], beside.logprobs.token_ids[1, 1:])


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
def test_logprobs_modes(processed: bool, normalized: bool) -> None:
    """Raw or processed, logits or their log-softmax: each is what it says."""
    torch.manual_seed(0)
    logits = torch.randn(1, V)
    inputs = SampleInputs(seed=0, logit_bias=[(3, 5.0)])
    batch = make_batch(1, temperature=0.5, num_logprobs=V)
    mode = LogprobsMode(processed=processed, normalized=normalized)
    found = sample(logits, batch, [AdjustedRow(0, inputs, np.array([1]))], mode).logprobs
    assert found is not None
    expected = logits[0].clone()
    if processed:
        expected[3] += 5
        expected = (expected - expected.max()) / 0.5
    if normalized:
        expected = expected.log_softmax(-1)
    torch.testing.assert_close(found.logprobs[0, 1:], expected[found.token_ids[0, 1:]])


def test_listed_tokens_are_reported_in_their_order() -> None:
    """A row with `listed` tokens reports those; its neighbour reports the likeliest."""
    torch.manual_seed(0)
    logits = torch.randn(2, V)
    found = gather_logprobs(
        logits, torch.tensor([5, 6]), np.array([3, 3]), listed={0: [30, 2, 11]}
    )
    assert found.token_ids[0].tolist() == [5, 30, 2, 11]
    assert found.token_ids[1].tolist() == [6, *logits[1].topk(3).indices.tolist()]
    torch.testing.assert_close(found.logprobs[0], logits[0].log_softmax(-1)[[5, 30, 2, 11]])
