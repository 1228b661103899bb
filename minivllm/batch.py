"""What crosses the process wall: small immutable messages, encoded by msgspec as MessagePack.

    host ── Start ───────────────────────────> worker
    host <─ Ready | Failed ─────────────────── worker
    host ── StepPlan, StepPlan, ... ─────────> worker     one per step, in order
    host <─ StepResult, Failed, Beat, ... ──── worker

The worker keeps a table of rows (tokens, block ids, sampling parameters), so a plan names a row in
full only when it starts or restarts (`NewRow`); from then on only as differences: how many tokens
to compute and which blocks were added. The worker appends what it samples to its own table, which
is why the host may plan step n+1 before it has seen the tokens of step n.

Invariants: `step` rises by one within a `generation`, a worker refuses gaps; a result answers
exactly one plan, its `tokens` in the order of the plan's sampling rows. No pickle, ever.
Framing and sockets: `channel`.
"""

from __future__ import annotations

import msgspec

from minivllm.config import WorkerConfig


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A row in full: its request has just started, resumed or restarted."""

    row: int
    token_ids: bytes
    """int32, all known tokens: prompt and, after a resume, output."""
    num_computed: int
    """Leading tokens whose KV is in the cache already."""
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    num_logprobs: int
    """-1: none; otherwise that many beside the sampled token's own."""


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


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The sampled token first, then the likeliest in falling order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the sampled token, from 1."""


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """What a step produced."""

    generation: int
    step: int
    tokens: list[list[int]]
    """New tokens per sampling row of the plan, in its order."""
    logprobs: list[RowLogprobs | None]
    """Like `tokens`; empty when no row asked."""
    failed: list[int]
    """Indices into the plan's `rows` whose numbers were not finite: those requests fail alone."""
    seconds: float
    """Time the worker spent in the step."""


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
    """Please exit."""


HostMessage = Start | StepPlan | Stop
WorkerMessage = Ready | StepResult | Failed | Beat

encode = msgspec.msgpack.Encoder().encode
decode_host_message = msgspec.msgpack.Decoder(HostMessage).decode
decode_worker_message = msgspec.msgpack.Decoder(WorkerMessage).decode
decode_record = msgspec.msgpack.Decoder(Start | StepPlan | StepResult).decode
