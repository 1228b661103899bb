"""Speculative decoding: what proposes draft tokens, and the rule by which they stand.

    known tokens   [ The cat sat on the ]                     one row of a step
    proposed                             mat and then         k drafts, k = 3
    computed        ...             the  mat and then         query_len = 1 + k
    sampled                         mat  and it   -           one token per position
    accepted                        mat  and  |               drafts that equal what was sampled
    new tokens                      mat  and it               accepted + 1

Decoding reads all weights to compute one token; for a few more tokens the weights are read just
once too. So drafts that often hold make decoding faster by about as many tokens as stand per step.

The target draws its own token at each of the k + 1 positions, with its own noise and from the
distribution as processed for that position (the drafts before it count as history), and a draft
stands while it equals that token. So the output is token for token that of plain decoding, greedy
or sampled, whatever was proposed. For drafts that a distribution proposes with the same noise, the
chance to stand is at least (1 - TV) / (1 + TV), TV being the distance of the two distributions.

Invariants: a proposer sees known tokens alone, and only influences speed; a rejected draft leaves
nothing behind but KV in slots that are written again before anybody attends to them. Who says how
many drafts there may be: `scheduler`. Drawing: `sampling`. Rows and their lengths: `rows`.
Speculative decoding: Leviathan et al., ICML 2023. The rule: Daliri et al., "Coupling without
communication and drafter-invariant speculative decoding", ISIT 2025. Prompt lookup: Saxena, 2023.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from minivllm.config import SpeculativeConfig


class Proposer(Protocol):
    """Guesses how rows go on."""

    def start(self, row: int) -> None:
        """The row begins anew, with other tokens."""

    def propose(self, row: int, token_ids: np.ndarray, num_drafts: int) -> np.ndarray:
        """At most `num_drafts` tokens that may follow.

        Shapes: token_ids [known] int64; out [n] int64, n <= num_drafts
        """


def make_proposer(config: SpeculativeConfig, num_rows: int) -> Proposer:
    """The proposer that a config names."""
    fewest, most = config.prompt_lookup_lens
    return NgramProposer(num_rows, fewest, most)


class NgramProposer:
    """What followed when the last tokens stood there before: the longest match counts, and of
    several the latest. An index per row grows with its tokens, one entry per length and token.

    >>> proposer = NgramProposer(1, fewest=1, most=3)
    >>> proposer.propose(0, np.array([5, 6, 7, 8, 5, 6]), 3).tolist()
    [7, 8, 5]
    """

    def __init__(self, num_rows: int, fewest: int, most: int) -> None:
        """`fewest`, `most`: tokens that must match."""
        self._lens = range(most, fewest - 1, -1)
        # Per row: the last tokens before a place, as bytes -> the latest such place.
        self._places: list[dict[bytes, int]] = [{} for _ in range(num_rows)]
        self._num_indexed = [1] * num_rows  # places below this are in the index

    def start(self, row: int) -> None:
        """See `Proposer.start`."""
        self._places[row] = {}
        self._num_indexed[row] = 1

    def propose(self, row: int, token_ids: np.ndarray, num_drafts: int) -> np.ndarray:
        """See `Proposer.propose`."""
        places, end = self._places[row], len(token_ids)
        size = token_ids.itemsize
        first = self._num_indexed[row]
        base = max(0, first - self._lens[0])
        text = token_ids[base:].tobytes()
        for place in range(first, end):
            stop = (place - base) * size
            for n in self._lens:
                if n <= place:
                    places[text[stop - n * size : stop]] = place
        self._num_indexed[row] = max(first, end)
        for n in self._lens:
            if n < end and (place := places.get(text[-n * size :])) is not None:
                return token_ids[place : place + num_drafts]
        return token_ids[:0]


def num_standing(
    token_ids: np.ndarray, failed: np.ndarray, draft_ids: np.ndarray, num_drafts: np.ndarray
) -> np.ndarray:
    """New tokens per row: the drafts that stand, and the token sampled behind them. A position that
    could not be sampled ends the row's tokens before it, and fails when it is the first.

    Shapes: token_ids, failed, draft_ids [S + all drafts], row behind row, with no draft (-1) at
            the last position of each; num_drafts [S]; out [S], each at least 1

    >>> sampled, drafts = np.array([4, 5, 6, 9]), np.array([4, 7, -1, -1])
    >>> num_standing(sampled, np.zeros(4, bool), drafts, np.array([2, 0])).tolist()
    [2, 1]
    """
    stands = (token_ids == draft_ids) & ~np.append(failed[1:], False)
    starts = np.cumsum(num_drafts + 1) - (num_drafts + 1)
    places = np.arange(len(token_ids))
    first_fall = np.minimum.reduceat(np.where(stands, len(places), places), starts)
    return first_fall - starts + 1
