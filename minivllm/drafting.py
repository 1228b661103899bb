"""How many tokens to draft for a request: as many as are worth their cost.

With k drafts of which each stands with probability p if those before it did, a step yields

    1 + p + p^2 + ... + p^k tokens        and costs   a + (1 + k) * b seconds,

a: the row's share of what a step costs whatever is in it (reading the weights), b: what a token
costs. The best k has the most tokens per second. A lone row on a machine that waits for memory
drafts far; among many rows a is small, and drafts must be nearly sure to pay.

p is what was seen of the request's own drafts, newer ones counting more, on top of a guess that
lets a new request try. While a request drafts nothing, what was seen fades, so that it tries again.

Invariant: lengths change speed alone, never tokens. Step costs: `policy.StepTimes`. Who may draft
at all, and room for it: `scheduler`. The trade-off: Leviathan et al., ICML 2023, section 3.3.
"""

from __future__ import annotations

from minivllm.policy import StepTimes
from minivllm.request import FIRST_DRAFT_ODDS, Request

_KEPT = 0.9  # weight of what was seen, per step with drafts
_FADED = 0.03  # share of it that is forgotten, per step without
# Steps between two fits of the costs: a fit takes about as long as planning a step.
_STEPS_PER_FIT = 32


class DraftLengths:
    """Draft lengths from 0 to `most`."""

    def __init__(self, most: int, times: StepTimes) -> None:
        self._most = most
        self._times = times
        self._costs = (0.0, 0.0, 0.0)
        self._num_steps = 0

    def begin_step(self) -> None:
        """Look at what steps cost now and then."""
        n = self._num_steps
        if n % _STEPS_PER_FIT == 0 or n & (n - 1) == 0:  # often in the beginning: at 1, 2, 4, ...
            self._costs = self._times.costs
        self._num_steps += 1

    def choose(self, request: Request, num_rows: int) -> int:
        """Drafts for the request in a step of so many rows."""
        stood, fell = request.draft_odds
        fixed, per_token, per_pair = self._costs
        fixed /= num_rows
        per_token += per_pair * request.num_scheduled
        length = best_length(stood / (stood + fell), fixed, per_token, self._most)
        if length == 0:
            request.draft_odds = (
                stood + _FADED * (FIRST_DRAFT_ODDS[0] - stood),
                fell + _FADED * (FIRST_DRAFT_ODDS[1] - fell),
            )
        return length

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """So many drafts were verified, and the first so many of them stood."""
        stood, fell = request.draft_odds
        has_fallen = num_accepted < num_drafts
        request.draft_odds = _KEPT * stood + num_accepted, _KEPT * fell + has_fallen


def best_length(p: float, fixed: float, per_token: float, most: int) -> int:
    """The number of drafts with the most tokens per second; the fewest of equals.

    >>> best_length(0.8, fixed=50, per_token=3, most=8), best_length(0.05, 50, 3, 8)
    (7, 0)
    >>> best_length(0.5, fixed=2, per_token=3, most=8)
    0
    """
    best, best_rate, num_tokens = 0, 0.0, 0.0
    for k in range(most + 1):
        num_tokens += p**k
        rate = num_tokens / max(fixed + (1 + k) * per_token, 1e-9)
        if rate > best_rate * (1 + 1e-9):
            best, best_rate = k, rate
    return best
