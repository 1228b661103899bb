"""From logits to tokens: the logits pipeline, counter-based noise, log-probabilities.

    logits ─ adjust ─ temperature ─ min_p ─ top_k ─ top_p ─(+)─ argmax ─> token
             masks, biases, penalties                    Gumbel noise

Adding Gumbel noise to logits and taking the argmax draws from their softmax. The noise of one token
is a pure function of (seed, child, position, purpose, token id), the counter-based generator
Philox4x32-10, so there is no generator state to keep, move or restore: a draw is the same whatever
the batch, the preemptions, the rank or the replica. Greedy rows (temperature 0) take the argmax of
their logits and cost no noise.

A stage of the pipeline is a pure function (logits, batch) -> logits that touches only the rows
using it. Those that reshape the distribution are listed in STAGES. What binds greedy rows too is in
ADJUSTMENTS: functions of one row's logits, its parameters and its tokens so far, which hold no
state, so that a row adjusted here is adjusted alike after a preemption and beside any neighbour.

Invariants: a row's tokens and log-probabilities do not depend on its neighbours, bit for bit (no
sum may be split differently when the batch grows; softmax and cumsum run row by row); a row that
cannot be sampled fails alone. The CPU noise uses only operations that IEEE 754 rounds correctly,
so every CPU computes the same bits; the torch twin agrees to float32 rounding.

Shape letters: `attention`, and S rows that sample in this step.
Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
Gumbel-max: Maddison, Tarlow and Minka, "A* sampling", NeurIPS 2014, and the references there.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch  # before numba, which then shares torch's OpenMP runtime
from numba import njit, prange

from minivllm.batch import SampleInputs
from minivllm.device import upload

# Rows whose log-probabilities are held at once: 16 rows of 150,000 floats are 10 MB.
LOGPROB_ROWS = 16


class Purpose(IntEnum):
    """What noise is drawn for: draws of one row at one position share none between purposes."""

    TARGET = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """How each of S rows samples: host arrays, as which stages run is decided on the host."""

    temperature: np.ndarray  # [S] float32; 0: greedy
    top_k: np.ndarray  # [S] int64; 0: off
    top_p: np.ndarray  # [S] float32; 1: off
    min_p: np.ndarray  # [S] float32; 0: off
    seeds: np.ndarray  # [S] int64, the bits of an unsigned 64-bit number
    children: np.ndarray  # [S] int64; index among the samples of one request
    positions: np.ndarray  # [S] int64; index in its sequence of the token to sample
    num_logprobs: np.ndarray  # [S] int64; -1: none, k: the sampled token's and the k likeliest
    on_device: Mapping[str, torch.Tensor] | None = None  # the same, where they are there too

    def take(self, rows: np.ndarray) -> SamplingBatch:
        """The batch of these rows alone."""
        return SamplingBatch(**{name: x[rows] for name, x in self.arrays().items()})

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by their names."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "on_device"}

    def column(self, name: str, device: torch.device) -> torch.Tensor:
        """The array of that name on `device`.

        Shapes: out [S, 1]
        """
        if self.on_device is not None:
            return self.on_device[name].unsqueeze(-1)
        return upload(getattr(self, name), device).unsqueeze(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log-probabilities of N rows; what row n did not ask for is padding (token 0, -inf)."""

    rows: torch.Tensor  # [N] int64, rising; which rows of the batch these are
    token_ids: torch.Tensor  # [N, 1 + k] int64; the sampled token, then the likeliest, falling
    logprobs: torch.Tensor  # [N, 1 + k] float32
    ranks: torch.Tensor  # [N] int64; 1 + the number of tokens likelier than the sampled one

    @classmethod
    def padding(cls, rows: torch.Tensor, k: int) -> Logprobs:
        """Of `rows`, with nothing known yet but the room for k likeliest tokens."""
        shape = (len(rows), 1 + k)
        return cls(
            rows=rows,
            token_ids=rows.new_zeros(shape),
            logprobs=rows.new_full(shape, -torch.inf, dtype=torch.float32),
            ranks=torch.empty_like(rows),
        )

    def put(self, start: int, part: Logprobs) -> None:
        """Take those of other rows in from place `start` on."""
        places = slice(start, start + len(part.rows))
        for name in ("token_ids", "logprobs", "ranks"):
            getattr(self, name)[places] = getattr(part, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """The tokens of one step."""

    token_ids: torch.Tensor  # [S] int64; 0 where failed
    status: torch.Tensor  # [S] int8, an index into WHY; 0: sampled
    raised: dict[int, str]  # row -> what its logits processor raised
    logprobs: Logprobs | None  # None: no row asked

    @property
    def failed(self) -> dict[int, str]:
        """Row -> why it has no token. Waits for the device."""
        return failures(self.status) | self.raised


def failures(status: torch.Tensor) -> dict[int, str]:
    """Row -> why it has no token.

    Shapes: status [S] int8

    >>> failures(torch.tensor([0, 2]))
    {1: "the request's bans leave no token to sample"}
    """
    return {row: WHY[code] for row, code in enumerate(status.tolist()) if code}


class AdjustedRow(NamedTuple):
    """A row whose parameters change logits beyond temperature and truncation."""

    row: int
    inputs: SampleInputs
    token_ids: np.ndarray  # [position] int64; prompt, then output


class LogprobsMode(NamedTuple):
    """What is reported: of logits as the model gave them or as processed; normalised or not."""

    processed: bool
    normalized: bool


RAW_LOGPROBS = LogprobsMode(processed=False, normalized=True)


def sample(
    logits: torch.Tensor,
    batch: SamplingBatch,
    adjusted_rows: Sequence[AdjustedRow] = (),
    mode: LogprobsMode = RAW_LOGPROBS,
) -> SampleOutput:
    """Draw one token per row.

    A row fails, alone, if its logits contain NaN or +inf, if bans leave nothing to sample, or if a
    processor of its own raises.

    Shapes: logits [S, V] float32 contiguous
    """
    adjusted, raised = adjust(logits, adjusted_rows)
    processed = reshape(adjusted, batch)
    best, token_ids = add_noise(processed, batch).max(dim=-1)
    # No stage hides a NaN or +inf, and the maximum of a row is NaN if anything in it is.
    status = (~best.isfinite()).to(torch.int8) * WHY.index(NOT_FINITE)
    if adjusted_rows:
        is_banned = (best == -torch.inf) & logits.amax(-1).isfinite()
        status.masked_fill_(is_banned, WHY.index(NOTHING_LEFT))
    token_ids = token_ids.masked_fill(status > 0, 0)
    if raised:
        token_ids = token_ids.index_fill(0, upload(np.array(list(raised)), logits.device), 0)
    logprobs = None
    if batch.num_logprobs.max(initial=-1) >= 0:
        listed = {r.row: r.inputs.logprob_token_ids for r in adjusted_rows}
        logprobs = gather_logprobs(
            processed if mode.processed else logits,
            token_ids,
            batch.num_logprobs,
            listed=listed,
            normalized=mode.normalized,
        )
    return SampleOutput(token_ids=token_ids, status=status, raised=raised, logprobs=logprobs)


NOT_FINITE = "the model's numbers were not finite"
NOTHING_LEFT = "the request's bans leave no token to sample"
WHY = ("", NOT_FINITE, NOTHING_LEFT)


# ---------------------------------------------------------------------------------- adjustments


def adjust(
    logits: torch.Tensor, rows: Sequence[AdjustedRow]
) -> tuple[torch.Tensor, dict[int, str]]:
    """Logits as changed by each row's own parameters; and the rows that failed, with the reason.

    Shapes: logits [S, V] float32; out [S, V], a copy if anything changed
    """
    failed: dict[int, str] = {}
    if not rows:
        return logits, failed
    logits = logits.clone()
    for row, inputs, token_ids in rows:
        for adjust_row in ADJUSTMENTS:
            adjust_row(logits[row], inputs, token_ids)
        for processor in inputs.processors:
            try:
                logits[row] = processor(token_ids[inputs.prompt_len :].tolist(), logits[row])
            except Exception as error:  # noqa: BLE001 (the user's code: it fails its request)
                failed[row] = f"its logits processor raised {type(error).__name__}: {error}"
    return logits, failed


def allow(logits: torch.Tensor, inputs: SampleInputs, _token_ids: np.ndarray) -> None:
    """Nothing but `allowed_token_ids`."""
    if inputs.allowed_token_ids:
        _keep_only(logits, inputs.allowed_token_ids)


def ban_words(logits: torch.Tensor, inputs: SampleInputs, token_ids: np.ndarray) -> None:
    """No token that completes a bad word, whichever tokens spelled its beginning.

    A word is a graph over its bytes. The places in it that the output's last tokens can have
    reached are followed token by token; from each, an edge to the end is banned:

        "abc" with tokens a, ab, bc, c:   0 -a-> 1 -bc-> 3,  0 -ab-> 2 -c-> 3
        after "..ab" the places are {0, 2}: "c" is banned;  "a" and "ab" lead on, and stay
    """
    output = token_ids[inputs.prompt_len :]
    for edges in inputs.bad_words:
        end = max(stop for _, _, stop in edges)
        places = {0}
        for token_id in output[-end:].tolist():  # a token is a byte at least
            places = {0} | {b for a, t, b in edges if a in places and t == token_id}
        banned = [t for a, t, b in edges if b == end and a in places]
        if banned:
            logits[banned] = -torch.inf


def postpone_end(logits: torch.Tensor, inputs: SampleInputs, token_ids: np.ndarray) -> None:
    """No token that ends the output before `min_len`."""
    if len(token_ids) < inputs.min_len and inputs.end_ids:
        logits[inputs.end_ids] = -torch.inf


def bias(logits: torch.Tensor, inputs: SampleInputs, _token_ids: np.ndarray) -> None:
    """`logit_bias` added."""
    if inputs.logit_bias:
        ids, values = zip(*inputs.logit_bias, strict=True)
        logits[list(ids)] += torch.tensor(values, device=logits.device)


def penalize(logits: torch.Tensor, inputs: SampleInputs, token_ids: np.ndarray) -> None:
    """Repetition penalty on what is in prompt or output (Keskar et al., arXiv 1909.05858), then
    frequency and presence penalties on what is in the output."""
    if inputs.repetition_penalty != 1:
        seen = upload(np.unique(token_ids), logits.device)
        old, factor = logits[seen], inputs.repetition_penalty
        logits[seen] = torch.where(old > 0, old / factor, old * factor)
    if inputs.frequency_penalty or inputs.presence_penalty:
        ids, counts = np.unique(token_ids[inputs.prompt_len :], return_counts=True)
        penalty = inputs.frequency_penalty * counts + inputs.presence_penalty
        logits[upload(ids, logits.device)] -= upload(penalty.astype(np.float32), logits.device)


def close_thoughts(logits: torch.Tensor, inputs: SampleInputs, token_ids: np.ndarray) -> None:
    """After `budget` tokens of thought, the tokens that close it."""
    if inputs.thinking is None:
        return
    start_ids, end_ids = inputs.thinking.start_ids, inputs.thinking.end_ids
    start = _last_end_of(start_ids, token_ids)
    if start is None or _last_end_of(end_ids, token_ids[start:]) is not None:
        return
    num_over = len(token_ids) - start - inputs.thinking.budget
    if num_over >= 0:
        # As many of the closing tokens as stand there already, begun at the budget or before it.
        done = next(
            n
            for n in range(min(len(end_ids) - 1, len(token_ids) - start), -1, -1)
            if token_ids[len(token_ids) - n :].tolist() == end_ids[:n]
        )
        _keep_only(logits, [end_ids[done]])


def force(logits: torch.Tensor, inputs: SampleInputs, token_ids: np.ndarray) -> None:
    """The output's first tokens, as given."""
    num_output = len(token_ids) - inputs.prompt_len
    if num_output < len(inputs.forced_ids):
        forced = inputs.forced_ids[num_output]
        logits.fill_(-torch.inf)
        logits[forced] = 0.0


Adjustment = Callable[[torch.Tensor, SampleInputs, np.ndarray], None]
ADJUSTMENTS: tuple[Adjustment, ...] = (
    allow,
    ban_words,
    postpone_end,
    bias,
    penalize,
    close_thoughts,
    force,
)


def _keep_only(logits: torch.Tensor, token_ids: list[int]) -> None:
    kept = logits[token_ids]
    logits.fill_(-torch.inf)
    logits[token_ids] = kept


def _last_end_of(pattern: list[int], token_ids: np.ndarray) -> int | None:
    """Index behind the last place where `pattern` stands in `token_ids`.

    >>> _last_end_of([1, 2], np.array([1, 2, 3, 1, 2, 1]))
    5
    """
    if len(token_ids) < len(pattern):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(token_ids, len(pattern))
    found = np.flatnonzero((windows == pattern).all(axis=1))
    return int(found[-1]) + len(pattern) if len(found) else None


# ------------------------------------------------------------------------------------- pipeline

Stage = Callable[[torch.Tensor, SamplingBatch], torch.Tensor]


def _for_rows(uses: Callable[[SamplingBatch], np.ndarray]) -> Callable[[Stage], Stage]:
    """Restrict a stage to the rows that use it; with none, it costs nothing."""

    def restrict(stage: Stage) -> Stage:
        @functools.wraps(stage)
        def on_rows(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
            used = uses(batch)
            if not used.any():
                return logits
            if used.all():
                return stage(logits, batch)
            rows = np.flatnonzero(used)
            idx = upload(rows, logits.device)
            return logits.index_copy(0, idx, stage(logits[idx], batch.take(rows)))

        return on_rows

    return restrict


@_for_rows(lambda batch: batch.temperature > 0)
def reshape(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Logits of the distribution that is sampled; a greedy row as it is.

    Shapes: logits [S, V] float32 contiguous; out [S, V]
    """
    for stage in STAGES:
        logits = stage(logits, batch)
    return logits


@_for_rows(lambda batch: batch.temperature > 0)
def add_noise(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """What `sample` takes the argmax of; a greedy row as it is.

    Shapes: logits [S, V] float32 contiguous; out [S, V]
    """
    return add_gumbel(logits, batch, Purpose.TARGET)


@_for_rows(lambda batch: batch.temperature != 1)
def temperature(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Logits divided by the temperature, the largest moved to 0 so that none can overflow.

    Shapes: logits [S, V]; out [S, V]
    """
    return (logits - logits.amax(-1, keepdim=True)) / batch.column("temperature", logits.device)


@_for_rows(lambda batch: batch.min_p > 0)
def min_p(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Only tokens with at least `min_p` times the probability of the likeliest.

    Shapes: logits [S, V]; out [S, V]
    """
    # p >= min_p * p_max, by its logarithm: no softmax is needed.
    best = logits.amax(-1, keepdim=True)
    cut = best + batch.column("min_p", logits.device).log()
    return logits.masked_fill(logits < cut, -torch.inf)


@_for_rows(lambda batch: batch.top_k > 0)
def top_k(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Only the `top_k` largest logits, and all that equal the smallest of them.

    Shapes: logits [S, V]; out [S, V]
    """
    k = np.minimum(batch.top_k, logits.shape[-1])
    largest = logits.topk(int(k.max())).values
    cut = largest.gather(-1, upload(k, logits.device).unsqueeze(-1) - 1)
    return logits.masked_fill(logits < cut, -torch.inf)


@_for_rows(lambda batch: batch.top_p < 1)
def top_p(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Only the likeliest tokens that together reach `top_p`, and all as likely as the last of them.

    Shapes: logits [S, V]; out [S, V]
    """
    probs = logits.softmax(-1)
    falling = _sorted_falling(probs)
    # Of 0.5, 0.3, 0.2 the set for top_p 0.6 ends at index 1, the number of sums that stay below
    # it. Rounding can leave even the last sum below a top_p near 1: then every token stays.
    last = (falling.cumsum(-1) < batch.column("top_p", logits.device)).sum(-1, keepdim=True)
    cut = falling.gather(-1, last.clamp(max=logits.shape[-1] - 1))
    return logits.masked_fill(probs < cut, -torch.inf)


STAGES: tuple[Stage, ...] = (temperature, min_p, top_k, top_p)


def _sorted_falling(x: torch.Tensor) -> torch.Tensor:
    if x.device.type == "cpu":  # numpy sorts with vector instructions: 10 times as fast as torch
        return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)
    return x.sort(-1, descending=True).values


# ---------------------------------------------------------------------------- log-probabilities


def gather_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_logprobs: np.ndarray,
    *,
    listed: Mapping[int, Sequence[int]] = types.MappingProxyType({}),
    normalized: bool = True,
) -> Logprobs:
    """Log-softmax at each row's token and at the row's `num_logprobs` likeliest; -1 skips a row.

    `listed`: rows that report these tokens instead, as many as their `num_logprobs`; with
    `normalized` False the logits themselves are reported.

    Shapes: logits [S, V] float32; token_ids [S] int64; num_logprobs [S] int64, some not -1
    """
    rows = np.flatnonzero(num_logprobs >= 0)
    num_likeliest = np.minimum(num_logprobs[rows], logits.shape[-1])
    out = Logprobs.padding(upload(rows, logits.device), int(num_likeliest.max()))
    for k, members in _equal_groups(num_likeliest, LOGPROB_ROWS):
        n = upload(members, logits.device)
        logprobs = logits[out.rows[n]]
        if normalized:
            logprobs = logprobs.log_softmax(-1)
        chosen_ids = token_ids[out.rows[n]].unsqueeze(-1)
        chosen = logprobs.gather(-1, chosen_ids)
        values, indices = logprobs.topk(k)
        for i, row in enumerate(rows[members].tolist()):
            if listed.get(row):
                indices[i] = torch.tensor(listed[row], device=indices.device)
                values[i] = logprobs[i, indices[i]]
        out.token_ids[n, : 1 + k] = torch.cat((chosen_ids, indices), dim=-1)
        out.logprobs[n, : 1 + k] = torch.cat((chosen, values), dim=-1)
        out.ranks[n] = 1 + (logprobs > chosen).sum(-1)
    return out


def _equal_groups(values: np.ndarray, max_size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Each value with the indices that have it, in groups of at most `max_size`.

    Which of several equal logits topk returns depends on k, so taking as many for one row as a
    neighbour asks for could change the row's answer.
    """
    for value in np.unique(values):
        members = np.flatnonzero(values == value)
        for start in range(0, len(members), max_size):
            yield int(value), members[start : start + max_size]


# ---------------------------------------------------------------------------------------- noise

# Token v of a row has lane v % 4 of the block with counter (v // 4, position, child, purpose) and
# key (low, high half of the seed). A lane x gives u = (x + 0.5) / 2**32, in float64: in float32,
# u near 1 would round to 1, and the noise of a winner, which lies there, would be coarse.


def add_gumbel(logits: torch.Tensor, batch: SamplingBatch, purpose: Purpose) -> torch.Tensor:
    """Logits plus -log(-log(u)), u uniform in (0, 1) and a function of the row and the token id.

    Shapes: logits [S, V] float32 contiguous; out [S, V]
    """
    if logits.device.type != "cpu":
        return add_gumbel_torch(logits, batch, purpose)
    out = torch.empty_like(logits)
    _add_gumbel_parallel(
        logits.numpy(),
        batch.seeds,
        batch.children,
        batch.positions,
        int(purpose),
        out.numpy(),
        torch.get_num_threads(),
    )
    return out


def add_gumbel_torch(logits: torch.Tensor, batch: SamplingBatch, purpose: Purpose) -> torch.Tensor:
    """`add_gumbel`, written for reading."""
    u = philox_uniform_torch(batch, logits.shape[-1], purpose, logits.device)
    return logits - u.log().neg().log().to(logits.dtype)


def philox_uniform_torch(
    batch: SamplingBatch, vocab_size: int, purpose: Purpose, device: torch.device
) -> torch.Tensor:
    """A number in (0, 1) for each row and token.

    Shapes: out [S, V] float64
    """
    seeds = batch.column("seeds", device)
    positions = batch.column("positions", device)
    children = batch.column("children", device)
    block = torch.arange((vocab_size + 3) // 4, device=device)
    key = torch.stack((seeds & _MASK, seeds >> 32 & _MASK), dim=-1)  # [S, 1, 2]
    counter = torch.stack(
        torch.broadcast_tensors(
            block, positions, children, torch.full_like(positions, int(purpose))
        ),
        dim=-1,
    )
    words = philox_torch(counter, key).flatten(1)[:, :vocab_size]
    return (words.double() + 0.5) * 2.0**-32


def philox_torch(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10: four 32-bit words from a counter of four and a key of two.

    Shapes: counter [..., 4] int64; key [..., 2] int64; out [..., 4] int64; every word < 2**32

    >>> words = philox_torch(torch.zeros(4).long(), torch.zeros(2).long())
    >>> [f"{word:08x}" for word in words.tolist()]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(10):
        # A product fills 64 bits; int64 holds the right bits, and the mask drops the sign's copies.
        a = c0 * _PHILOX_M0
        b = c2 * _PHILOX_M1
        c0, c1 = (b >> 32 & _MASK) ^ c1 ^ k0, b & _MASK
        c2, c3 = (a >> 32 & _MASK) ^ c3 ^ k1, a & _MASK
        k0 = k0 + _PHILOX_W0 & _MASK
        k1 = k1 + _PHILOX_W1 & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


_MASK = 0xFFFFFFFF
# The paper's multipliers, and its steps of the key: the golden ratio and sqrt(3) - 1.
_PHILOX_M0 = 0xD2511F53
_PHILOX_M1 = 0xCD9E8D57
_PHILOX_W0 = 0x9E3779B9
_PHILOX_W1 = 0xBB67AE85

# Numbers of a numba kernel: unsigned where Python's ints would be signed.
_U32, _UMASK = np.uint64(32), np.uint64(_MASK)
_UM0, _UM1 = np.uint64(_PHILOX_M0), np.uint64(_PHILOX_M1)
_UW0, _UW1 = np.uint64(_PHILOX_W0), np.uint64(_PHILOX_W1)

# Tokens whose words are kept between the two loops that make and use them: 4 KB, in the L1 cache.
_CHUNK_LEN = 1024

# error_model "numpy": a check for division by zero would keep the loops from being vectorised.
# fastmath stays off: with it, the bits would depend on the CPU.
_njit = functools.partial(njit, nogil=True, cache=True, error_model="numpy")


@_njit(inline="always")
def philox(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> tuple[int, int, int, int]:
    """`philox_torch` for one counter, every argument and result a uint64 below 2**32."""
    for _ in range(10):
        a = c0 * _UM0
        b = c2 * _UM1
        c0, c1 = (b >> _U32) ^ c1 ^ k0, b & _UMASK
        c2, c3 = (a >> _U32) ^ c3 ^ k1, a & _UMASK
        k0 = (k0 + _UW0) & _UMASK
        k1 = (k1 + _UW1) & _UMASK
    return c0, c1, c2, c3


@_njit(inline="always")
def _log(x: float) -> float:
    """The natural logarithm of a positive normal number, to 1e-10 of its value.

    libm's is as good, but a call per number: the kernel would take five times as long.
    """
    # x = 2**e * m with m in [sqrt(1/2), sqrt(2)), by the exponent's bits; 0x3FE6... is sqrt(1/2).
    bits = np.float64(x).view(np.int64)
    e = (bits - np.int64(0x3FE6A09E667F3BCD)) >> np.int64(52)
    m = np.int64(bits - (e << np.int64(52))).view(np.float64)
    # log(m) = 2 atanh(s); s**2 is at most 0.0295, so the first term left out is under 5e-11.
    s = (m - 1.0) / (m + 1.0)
    q = s * s
    series = 1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11)))))
    return e * 0.6931471805599453 + 2.0 * s * series


@_njit()
def _add_gumbel_chunk(
    logits: np.ndarray,
    start: int,
    seed: int,
    child: int,
    position: int,
    purpose: int,
    words: np.ndarray,
    out: np.ndarray,
) -> None:
    """Tokens from `start` on of one row, as many as there are words (fewer at the end of V)."""
    key = np.uint64(seed)
    first_block = start // 4
    for i in range(len(words) // 4):
        x0, x1, x2, x3 = philox(
            np.uint64(first_block + i),
            np.uint64(position),
            np.uint64(child),
            np.uint64(purpose),
            key & _UMASK,
            key >> _U32,
        )
        words[4 * i] = x0
        words[4 * i + 1] = x1
        words[4 * i + 2] = x2
        words[4 * i + 3] = x3
    for i in range(min(len(words), len(logits) - start)):
        u = (words[i] + 0.5) * 2.0**-32
        out[start + i] = logits[start + i] - np.float32(_log(-_log(u)))


@_njit(parallel=True)
def _add_gumbel_parallel(
    logits: np.ndarray,
    seeds: np.ndarray,
    children: np.ndarray,
    positions: np.ndarray,
    purpose: int,
    out: np.ndarray,
    num_threads: int,
) -> None:
    S, V = logits.shape
    num_chunks = (V + _CHUNK_LEN - 1) // _CHUNK_LEN
    # Each thread takes a part of the vocabulary, so that a single row keeps all of them busy.
    for i in prange(num_threads):
        words = np.empty(_CHUNK_LEN, np.uint32)
        for s in range(S):
            for chunk in range(num_chunks * i // num_threads, num_chunks * (i + 1) // num_threads):
                _add_gumbel_chunk(
                    logits[s],
                    chunk * _CHUNK_LEN,
                    seeds[s],
                    children[s],
                    positions[s],
                    purpose,
                    words,
                    out[s],
                )
