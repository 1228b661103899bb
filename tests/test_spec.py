from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_model_runner import CONFIG, Driver, make, replace_inputs, requests  # noqa: F401

from minivllm.batch import NewRow, StepPlan
from minivllm.spec import NgramProposer, num_standing

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def last_match(tokens: list[int], fewest: int, most: int, num_drafts: int) -> list[int]:
    """Prompt lookup as one says it."""
    for n in range(most, fewest - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + num_drafts]
    return []


@given(TOKENS, TOKENS, st.integers(1, 3), st.integers(0, 3), st.integers(1, 5))
def test_ngram_finds_the_latest_longest_match(first, more, fewest, extra, num_drafts) -> None:
    """Tokens that come bit by bit are drafted from as a search over all of them would, and a row
    that starts anew remembers nothing."""
    proposer = NgramProposer(2, fewest, fewest + extra)
    for tokens in (first, more):
        proposer.start(1)
        for end in range(1, len(tokens) + 1, 2):
            known = np.array(tokens[:end])
            expected = last_match(tokens[:end], fewest, fewest + extra, num_drafts)
            assert proposer.propose(1, known, num_drafts).tolist() == expected


ROWS = st.lists(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 1), st.booleans()), min_size=1, max_size=4
    ),
    min_size=1,
    max_size=4,
)


@given(ROWS)
def test_drafts_stand_while_they_equal_the_sampled(rows) -> None:
    """Per row: the leading drafts that equal what was sampled, and one token more, but nothing from
    a position that failed, unless it is the first."""
    expected = []
    for row in rows:
        count = 1
        for (token, draft, _), (_, _, failed) in itertools.pairwise(row):
            if token != draft or failed:
                break
            count += 1
        expected.append(count)
    flat = [position for row in rows for position in row]
    drafts = [d if i < len(row) - 1 else -1 for row in rows for i, (_, d, _) in enumerate(row)]
    got = num_standing(
        np.array([token for token, _, _ in flat]),
        np.array([failed for _, _, failed in flat]),
        np.array(drafts),
        np.array([len(row) - 1 for row in rows]),
    )
    assert got.tolist() == expected


class Guesser:
    """Knows how each row goes on, but for tokens whose place is a multiple of `errs_at`."""

    def __init__(self, texts: dict[int, list[int]], errs_at: int) -> None:
        self.texts, self.errs_at = texts, errs_at

    def start(self, row: int) -> None:
        """Nothing to forget."""

    def propose(self, row: int, token_ids: np.ndarray, num_drafts: int) -> np.ndarray:
        places = range(len(token_ids), min(len(token_ids) + num_drafts, len(self.texts[row])))
        return np.array([self.texts[row][p] if p % self.errs_at else 0 for p in places], np.int64)


def run_drafted(runner, asked, num_drafts: int, num_tokens: int) -> tuple[dict, int]:
    """Every row's output with so many drafts per step, and the steps that it took."""
    outputs: dict[int, list[int]] = {}
    for step in range(2 * num_tokens):
        new_rows, blocks = [], []
        for row, (prompt, inputs) in enumerate(asked if step == 0 else []):
            inputs = replace_inputs(inputs, prompt_len=len(prompt), max_len=64)
            token_ids = np.array(prompt, np.int32).tobytes()
            new_rows.append(NewRow(row, token_ids, 0, len(prompt), inputs))
            blocks.append((row, list(range(1 + 16 * row, 17 + 16 * row))))
            outputs[row] = []
        rows = [row for row, output in outputs.items() if len(output) < num_tokens]
        if not rows:
            return {row: output[:num_tokens] for row, output in outputs.items()}, step
        lens = [len(prompt) for prompt, _ in asked] if step == 0 else [1] * len(rows)
        plan = StepPlan(
            0, step, new_rows, rows, lens, [True] * len(rows), blocks, [num_drafts] * len(rows)
        )
        result = runner.launch(plan).result()
        assert not result.failed
        for row, tokens in zip(rows, result.tokens, strict=True):
            outputs[row] += tokens
    raise AssertionError("the rows do not end")


CASES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"top_p": 0.8, "top_k": 20, "min_p": 0.01, "logit_bias": [(5, 2.0)]},
    {"bad_words": [[(0, 7, 1), (1, 9, 2)]], "min_len": 20, "end_ids": [3]},
]


@pytest.mark.parametrize("inputs", CASES, ids=["plain", "penalties", "truncated", "bans"])
@pytest.mark.parametrize("num_drafts", [1, 3, 8])
def test_drafts_change_no_token(make, inputs, num_drafts) -> None:  # noqa: F811
    """Greedy or sampled, adjusted or not, rows give the tokens of plain decoding, in fewer steps
    when most drafts are right."""
    asked = requests(4, **inputs)
    plain = Driver(make())
    plain.run(asked, num_steps=24)
    texts = {row: prompt + plain.tokens[row] for row, (prompt, _) in enumerate(asked)}
    runner = make(proposer=Guesser(texts, errs_at=5))
    outputs, num_steps = run_drafted(runner, asked, num_drafts, 20)
    assert outputs == {row: tokens[:20] for row, tokens in plain.tokens.items()}
    assert num_steps < 20
