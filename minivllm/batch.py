"""What crosses the process wall: small immutable messages, encoded by msgspec as MessagePack.

    host ── Start ───────────────────────────> worker
    host <─ Ready | Failed ─────────────────── worker
    host ── StepPlan, StepPlan, ... ─────────> worker     one per step, in order
    host <─ StepResult, Failed, Beat, ... ──── worker
    host ── LoadWeights | Sleep | ... ───────> worker     orders, each answered by Done

The worker keeps a table of rows (tokens, block ids, sampling parameters), so a plan names a row in
full only when it starts or restarts (`NewRow`); from then on only as differences: how many tokens
to compute and which blocks were added. The worker appends what it samples to its own table, which
is why the host may plan step n+1 before it has seen the tokens of step n. Drafts never cross: the
worker makes them, verifies them in the same step, and answers with the tokens that stand.

Invariants: `step` rises by one within a `generation`, a worker refuses gaps; a result answers
exactly one plan, its `tokens` in the order of the plan's sampling rows; plans and orders are
carried out, and answered, in the order in which they were sent. No pickle, ever.
Framing and sockets: `channel`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from minivllm.config import WorkerConfig


class Thinking(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens a model may think for, and what opens and closes its thoughts."""

    budget: int
    start_ids: list[int]
    end_ids: list[int]


class SampleInputs(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How a row samples. Every id is inside the vocabulary; the defaults leave logits as they are.

    What may be empty is checked once per row, so what a request does not use costs it nothing.
    """

    seed: int
    child: int = 0
    """Which of the samples of one request this is."""
    prompt_len: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: list[tuple[int, float]] = []
    allowed_token_ids: list[int] = []
    """Nothing else is sampled; empty: no such limit."""
    bad_words: list[list[tuple[int, int, int]]] = []
    """A graph per word: (from byte, token id, to byte) for every token on a way to spell it."""
    max_len: int = 0
    """Tokens, prompt included, at which the output ends: no draft is worth making beyond."""
    min_len: int = 0
    """Tokens, prompt included, below which none of `end_ids` is sampled."""
    end_ids: list[int] = []
    forced_ids: list[int] = []
    """The output's first tokens."""
    thinking: Thinking | None = None
    num_logprobs: int = -1
    """-1: none; otherwise that many beside the sampled token's own."""
    logprob_token_ids: list[int] = []
    """Report these in place of the likeliest."""
    num_prompt_logprobs: int = -1
    processors: Any = ()
    """Callables (output ids, logits [V]) -> logits [V]. They cannot leave their process."""

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed beyond what temperature and truncation do."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.min_len
            or self.forced_ids
            or self.thinking
            or self.processors
        )


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A row in full: its request has just started, resumed or restarted."""

    row: int
    token_ids: bytes
    """int32, all known tokens: prompt and, after a resume, output."""
    num_computed: int
    """Leading tokens whose KV is in the cache already."""
    num_scored: int
    """Leading prompt tokens whose log-probabilities the host has, or that have none (the first)."""
    inputs: SampleInputs


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """One step: which rows compute how many tokens. Row i of the step is `rows[i]`."""

    generation: int
    step: int
    new_rows: list[NewRow]
    rows: list[int]
    query_lens: list[int]
    """Tokens to compute, per row of the step."""
    samples: list[bool]
    """Whether the row catches up with its known tokens and so samples the next."""
    new_blocks: list[tuple[int, list[int]]]
    """(row, block ids to append to its table); for a new row the whole table."""
    num_drafts: list[int] = []
    """Most drafts to verify per row of the step, beside its `query_lens`; empty: none."""


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One token's position: that token first, then the likeliest in falling order, or those that
    the request named."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the first, from 1."""


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """What a step produced."""

    generation: int
    step: int
    tokens: list[list[int]]
    """New tokens per sampling row of the plan, in its order."""
    logprobs: list[list[RowLogprobs]]
    """Like `tokens`, with nothing for a row that did not ask; empty when no row asked."""
    prompt_logprobs: list[tuple[int, list[RowLogprobs]]]
    """(index into the plan's `rows`, the next prompt tokens' log-probabilities, in order)."""
    failed: dict[int, str]
    """Index into the plan's `rows` -> why it could not go on; those requests fail alone."""
    seconds: float
    """Time the worker spent in the step."""
    num_drafts: list[int] = []
    """Drafts that were verified, per sampling row; empty: none."""


class Start(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The first message to a worker."""

    generation: int
    config: WorkerConfig
    beat_s: float
    """Send a sign of life at least this often."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The worker has loaded the model and can take plans."""

    generation: int
    num_blocks: int
    vocab_size: int
    phase_s: dict[str, float]
    """Seconds per phase of the start."""
    memory_bytes: dict[str, int]
    """The memory plan: weights, KV cache, ..."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The worker cannot go on: an error by name and text (`errors.to_wire`)."""

    name: str
    text: str


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A sign of life."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Please exit. For the inline worker alone: a worker process is killed, not asked."""


class LoadWeights(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Go on with other weights of the same shapes; if they cannot be loaded, with the old ones."""

    path: str | None
    """A directory of safetensors."""
    tensors: Any = None
    """Or tensors by their names in such files: Python objects, which stay in one process."""


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Give memory back: 1, the KV cache, with the weights moved to the host's memory; 2, the
    weights too."""

    level: int


class WakeUp(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Take it again: an empty KV cache, and, after level 2, the weights of the start."""


class Profile(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Begin to trace steps; without a directory, end and write the trace."""

    directory: str | None


class Done(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """An order was carried out, or was not: an error by name and text (`errors.to_wire`)."""

    error: tuple[str, str] | None


Order = LoadWeights | Sleep | WakeUp | Profile
HostMessage = Start | StepPlan | Stop | Order
WorkerMessage = Ready | StepResult | Failed | Beat | Done

encode = msgspec.msgpack.Encoder().encode
decode_host_message = msgspec.msgpack.Decoder(HostMessage).decode
decode_worker_message = msgspec.msgpack.Decoder(WorkerMessage).decode
decode_record = msgspec.msgpack.Decoder(Start | StepPlan | StepResult | LoadWeights).decode
