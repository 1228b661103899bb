"""A request and what is said about it: what is asked, where it stands, what is answered.

    SamplingParams ──┐
    prompt tokens ───┴─> Request ──(one step at a time)──> RequestOutput, one per look

`SamplingParams` and the outputs are immutable and public. `Request` is the one mutable record of a
request on the host: the scheduler owns its state and counters, the engine core its text and end.
A *request* lives on the host; its place in a batch is a *row*.

    tokens   [ prompt ............ | output ......... ]  + num_pending sampled, not yet seen
    KV       [ num_computed ........ | in flight ... ]
                                     ^ num_scheduled = computed + in flight

Invariants: num_computed <= num_scheduled <= known + pending; a request with `finish_reason` set
never changes again. Where blocks are freed: `scheduler`. How text is cut at a stop: `tokenizer`.
"""

from __future__ import annotations

import enum
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from minivllm.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and where they end.

    Raises `RequestError` naming the field and the value that breaks its rule.
    """

    temperature: float = 1.0
    """0 is greedy; at most 2. Between 0 and 0.01 it counts as 0.01."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability; (0, 1]."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 or -1 is off."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the likeliest one's probability; [0, 1]."""
    seed: int | None = None
    """Same seed, same tokens, in any batch; None (or -1) draws a fresh one."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: until the context is full."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text; they are not part of it."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the output; they are its last id, but not part of its text."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    logprobs: int | None = None
    """Log-probabilities per token: the sampled one's and those of this many likeliest."""

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0, 2, "must be between 0 and 2")
        _check_number("top_p", self.top_p, 0, 1, "must be in (0, 1]")
        if self.top_p == 0:
            raise RequestError("top_p", self.top_p, "must be in (0, 1]")
        _check_number("min_p", self.min_p, 0, 1, "must be between 0 and 1")
        _check_int("top_k", self.top_k, -1, "must be an integer, 0 or -1 to turn it off")
        if self.seed is not None:
            _check_int("seed", self.seed, -1, "must be an integer of at least 0")
            if self.seed >= 2**64:
                raise RequestError("seed", self.seed, "must be less than 2**64")
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, "must be an integer of at least 1")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, "must be an integer of at least 0")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError("ignore_eos", self.ignore_eos, "must be true or false")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise RequestError("stop", self.stop, "must be non-empty strings")
        for token_id in self.stop_token_ids or ():
            _check_int("stop_token_ids", token_id, 0, "must be token ids")

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


def _check_number(name: str, value: Any, low: float, high: float, rule: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(name, value, rule)
    if not low <= value <= high:  # NaN is not either
        raise RequestError(name, value, rule)


def _check_int(name: str, value: Any, low: int, rule: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise RequestError(name, value, rule)


class RequestState(enum.Enum):
    """Where a request stands; a preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Logprob(NamedTuple):
    """One token's log-probability at one position; rank 1 is the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class RequestStats:
    """Times on the monotonic clock in seconds, and counts, of one request."""

    arrival_s: float = field(default_factory=time.monotonic)
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer so far. `stop_reason`: the stop string or token id, None for the model's own end,
    the text of the error when `finish_reason` is "error"."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None

    def finished(self) -> bool:
        """Whether this answer has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What a caller sees of a request: everything so far, at each look."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStats
    num_cached_tokens: int


class Request:
    """The host's record of one request; see the picture in the module header."""

    __slots__ = (
        "cache_salt",
        "finish_reason",
        "id",
        "logprobs",
        "max_len",
        "num_computed",
        "num_pending",
        "num_scheduled",
        "num_seen",
        "number",
        "params",
        "prompt",
        "prompt_len",
        "row",
        "seed",
        "state",
        "stats",
        "stop_ids",
        "stop_reason",
        "suspect",
        "strikes",
        "text",
        "tokens",
    )

    def __init__(
        self,
        *,
        id: str,
        number: int,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        max_len: int,
        stop_ids: frozenset[int],
        cache_salt: str = "",
    ) -> None:
        """`max_len`: tokens of prompt and output at which the request ends with "length";
        `stop_ids`: every token id that ends it, the model's own included unless ignored."""
        self.id = id
        self.number = number  # order of arrival
        self.prompt = prompt
        self.prompt_len = len(prompt_token_ids)
        self.tokens = array("i", prompt_token_ids)
        self.params = params
        self.seed = seed
        self.max_len = max_len
        self.stop_ids = stop_ids
        self.cache_salt = cache_salt
        self.state = RequestState.WAITING
        self.row: int | None = None  # place in the worker's tables while running
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_pending = 0
        self.num_seen = 0  # tokens known at the last restart: more than this is progress
        self.suspect = False  # was in flight, without progress, when a worker died
        self.strikes = 0
        self.text = ""
        self.logprobs: list[dict[int, Logprob]] | None = (
            None if params.logprobs is None else []
        )
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.stats = RequestStats()

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and known to the host."""
        return len(self.tokens) - self.prompt_len

    @property
    def finished(self) -> bool:
        """Whether the request has had its one end."""
        return self.state is RequestState.FINISHED

    def output(self) -> RequestOutput:
        """Everything so far, as a value that later steps do not change."""
        output_ids = self.tokens[self.prompt_len :].tolist()
        cumulative = None
        if self.logprobs is not None:
            pairs = zip(self.logprobs, output_ids, strict=True)
            cumulative = sum(entry[token_id].logprob for entry, token_id in pairs)
        completion = CompletionOutput(
            index=0,
            text=self.text,
            token_ids=output_ids,
            cumulative_logprob=cumulative,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.tokens[: self.prompt_len].tolist(),
            outputs=[completion],
            finished=self.finished,
            metrics=replace(self.stats),
            num_cached_tokens=self.stats.num_cached_tokens,
        )
