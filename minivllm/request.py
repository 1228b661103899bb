"""A request and what is said about it: what is asked, where it stands, what is answered.

    SamplingParams ──┐
    prompt tokens ───┴─> Request ──(one step at a time)──> RequestOutput, one per look

`SamplingParams` and the outputs are immutable and public. `Request` is the one mutable record of a
request on the host: the scheduler owns its tokens, state, counters and end, the engine core its
text, log-probabilities and latencies.
A *request* lives on the host; its place in a batch is a *row*.

    tokens   [ prompt ............ | output ......... ]  + num_pending sampled, not yet seen
    KV       [ num_computed ........ | in flight ... ]
                                     ^ num_scheduled = computed + in flight

Invariants: num_computed <= num_scheduled <= known + pending; what a caller sees of a request never
changes once `finish_reason` is set. Who sets it: `scheduler`. How text is cut at a stop:
`detokenizer`.
"""

from __future__ import annotations

import enum
import math
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, overload

from minivllm.batch import SampleInputs
from minivllm.errors import RequestError


class RequestOutputKind(enum.Enum):
    """What each look at a request shows."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """What came since the last look."""
    FINAL_ONLY = 2
    """Everything, once, at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """End a request (finish reason "repetition") whose output ends in one pattern, over and over.

    Raises `RequestError` naming the field and the value that breaks its rule.
    """

    max_pattern_size: int
    """Tokens in the longest pattern looked for."""
    min_pattern_size: int = 1
    min_count: int = 3
    """Times in a row that the pattern must stand there."""

    def __post_init__(self) -> None:
        for name, least in (("min_pattern_size", 1), ("max_pattern_size", 1), ("min_count", 2)):
            _check_int(name, getattr(self, name), least)
        if self.min_pattern_size > self.max_pattern_size:
            rule = f"must be at most max_pattern_size ({self.max_pattern_size})"
            raise RequestError("min_pattern_size", self.min_pattern_size, rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, where they end, and what is shown of them.

    Raises `RequestError` naming the field and the value that breaks its rule.
    """

    n: int = 1
    """Independent answers to the prompt, which is computed once."""
    temperature: float = 1.0
    """0 is greedy; at most 2. Between 0 and 0.01 it counts as 0.01."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability; (0, 1]."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 or -1 is off."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the likeliest one's probability; [0, 1]."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that is in the output; [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it is in the output; [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides a positive logit, multiplies a negative one, of tokens in prompt or output; > 0."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens."""
    allowed_token_ids: Sequence[int] | None = None
    """Sample nothing else."""
    bad_words: Sequence[str] | None = None
    """Never sample the token that would complete one of these, in any way to spell it, with a space
    before it or without."""
    seed: int | None = None
    """Same seed, same tokens, in any batch; None (or -1) draws a fresh one."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: until the context is full."""
    min_tokens: int = 0
    """Tokens before which nothing but `max_tokens` ends the output."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text; they are not part of it."""
    stop_regex: str | Sequence[str] | None = None
    """Regular expressions whose first match ends the text; it is not part of it."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the output; they are its last id, but not part of its text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, the match or the stop token in the text."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    repetition_detection: RepetitionDetection | None = None
    """End an output that repeats itself."""
    logprobs: int | None = None
    """Log-probabilities per token: the sampled one's and those of this many likeliest; -1: all."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, from the second on."""
    logprob_token_ids: Sequence[int] | None = None
    """Report these tokens' log-probabilities in place of the likeliest; at most 128."""
    flat_logprobs: bool = False
    """Return log-probabilities as one `FlatLogprobs`, which is kinder to the garbage collector."""
    detokenize: bool = True
    """Make text of the output."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Accepted, as vLLM has it, and without effect: see `detokenizer`."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens at the end of the prompt; -1: as many as the context allows."""
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt; None: only for `prompt_logprobs`, which need it."""
    thinking_token_budget: int | None = None
    """Tokens after which a model's thoughts are closed; -1: no limit."""
    trace_decode_token_ids: Sequence[int] | None = None
    """The output's first tokens, whatever the model would choose."""
    logits_processors: Sequence[Callable[..., Any]] | None = None
    """Callables (output token ids, logits [V]) -> logits [V]; only where the model runs inline."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each look shows."""
    stream_interval: int | None = None
    """Tokens to come before another look is offered; the first and the end are at once."""

    def __post_init__(self) -> None:
        rule = f"must be an integer from 1 to {_MAX_N}"
        _check_int("n", self.n, 1, rule)
        if self.n > _MAX_N:
            raise RequestError("n", self.n, rule)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -2, 2, "must be between -2 and 2")
        _check_number("temperature", self.temperature, 0, 2, "must be between 0 and 2")
        if self.temperature == 0 and self.n > 1:
            raise RequestError("n", self.n, "must be 1 where temperature is 0: all would be equal")
        least, most = math.ulp(0.0), sys.float_info.max
        _check_number("top_p", self.top_p, least, 1, "must be in (0, 1]")
        rule = "must be a number greater than 0"
        _check_number("repetition_penalty", self.repetition_penalty, least, most, rule)
        _check_number("min_p", self.min_p, 0, 1, "must be between 0 and 1")
        _check_int("top_k", self.top_k, -1, "must be an integer, 0 or -1 to turn it off")
        self._check_optional_ints()
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, getattr(self, name), "must be true or false")
        if self.skip_reading_prefix_cache not in (None, True, False):
            value = self.skip_reading_prefix_cache
            raise RequestError("skip_reading_prefix_cache", value, "must be true or false")
        self._check_lists()
        self._check_objects()

    def _check_optional_ints(self) -> None:
        for name, least, rule in (
            ("seed", -1, "must be an integer of at least 0"),
            ("max_tokens", 1, "must be an integer of at least 1"),
            ("logprobs", -1, "must be an integer of at least 0, or -1 for the whole vocabulary"),
            ("prompt_logprobs", -1, "must be an integer of at least 0, or -1 for all"),
            ("truncate_prompt_tokens", -1, "must be an integer of at least 1, or -1"),
            ("thinking_token_budget", -1, "must be an integer of at least 0, or -1"),
            ("stream_interval", 1, "must be an integer of at least 1"),
        ):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), least, rule)
        if self.truncate_prompt_tokens == 0:
            rule = "must be an integer of at least 1, or -1"
            raise RequestError("truncate_prompt_tokens", 0, rule)
        if self.seed is not None and self.seed >= 2**64:
            raise RequestError("seed", self.seed, "must be less than 2**64")
        _check_int("min_tokens", self.min_tokens, 0, "must be an integer of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            rule = f"must be at most max_tokens ({self.max_tokens})"
            raise RequestError("min_tokens", self.min_tokens, rule)

    def _check_lists(self) -> None:
        for name in (
            "stop_token_ids",
            "allowed_token_ids",
            "logprob_token_ids",
            "trace_decode_token_ids",
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, Sequence) or isinstance(value, str):
                raise RequestError(name, value, "must be a list of token ids")
            for token_id in value:
                _check_int(name, token_id, 0, "must be token ids")
        for name in ("stop", "stop_regex", "bad_words"):
            value = getattr(self, name)
            if isinstance(value, str) and name != "bad_words":
                value = [value]
            if value is None:
                continue
            if not isinstance(value, Sequence) or isinstance(value, str):
                raise RequestError(name, value, "must be strings")
            for text in value:
                if not isinstance(text, str) or not text:
                    raise RequestError(name, getattr(self, name), "must be non-empty strings")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids", self.allowed_token_ids, "must not be empty")
        listed = self.logprob_token_ids
        if listed is not None and not 1 <= len(listed) <= _MAX_LOGPROB_TOKEN_IDS:
            rule = f"must have 1 to {_MAX_LOGPROB_TOKEN_IDS} ids"
            raise RequestError("logprob_token_ids", listed, rule)
        if listed is not None and self.logprobs not in (None, len(listed)):
            rule = f"must be the number of logprob_token_ids ({len(listed)}), or not set"
            raise RequestError("logprobs", self.logprobs, rule)
        if not self.detokenize and (self.stop or self.stop_regex):
            raise RequestError("detokenize", False, "must be true where stop or stop_regex is set")

    def _check_objects(self) -> None:
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError("logit_bias", self.logit_bias, "must map token ids to numbers")
            for token_id, bias in self.logit_bias.items():
                _check_int("logit_bias", token_id, 0, "must have token ids as keys")
                low, high = -sys.float_info.max, sys.float_info.max
                _check_number("logit_bias", bias, low, high, "must have finite numbers as values")
        if not isinstance(self.repetition_detection, RepetitionDetection | None):
            rule = "must be a RepetitionDetection"
            raise RequestError("repetition_detection", self.repetition_detection, rule)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError("output_kind", self.output_kind, "must be a RequestOutputKind")
        processors = self.logits_processors
        if processors is not None and (
            not isinstance(processors, Sequence) or not all(map(callable, processors))
        ):
            raise RequestError("logits_processors", processors, "must be callables")

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return _as_list(self.stop)

    @property
    def stop_patterns(self) -> list[str]:
        """`stop_regex` as a list."""
        return _as_list(self.stop_regex)


_MAX_N = 16384
# Drafts that stood and that fell, before a request has seen any.
FIRST_DRAFT_ODDS = (2.0, 1.0)
_MAX_LOGPROB_TOKEN_IDS = 128
_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def _as_list(value: str | Sequence[str] | None) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _check_number(name: str, value: Any, low: float, high: float, rule: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(name, value, rule)
    if not low <= value <= high:  # NaN is not either
        raise RequestError(name, value, rule)


def _check_int(name: str, value: Any, low: int, rule: str | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise RequestError(name, value, rule or f"must be an integer of at least {low}")


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


class FlatLogprobs(Sequence[dict[int, Logprob] | None]):
    """Log-probabilities of many positions in five lists, read like a list of dicts.

    A dict of named tuples per position is thousands of objects for the garbage collector to visit.
    """

    __slots__ = ("decoded_tokens", "ends", "logprobs", "ranks", "token_ids")

    def __init__(self, entries: Iterable[dict[int, Logprob] | None] = ()) -> None:
        self.ends: list[int] = []
        """Where each position's entries end in the other lists."""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str] = []
        for entry in entries:
            self.append(entry)

    def append(self, entry: dict[int, Logprob] | None) -> None:
        """Add one position; None, as for a prompt's first token, comes back as None."""
        for token_id, (logprob, rank, decoded_token) in (entry or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            self.ranks.append(rank)
            self.decoded_tokens.append(decoded_token)
        self.ends.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, idx: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, idx: slice) -> FlatLogprobs: ...
    def __getitem__(self, idx: int | slice) -> dict[int, Logprob] | FlatLogprobs | None:
        if isinstance(idx, slice):
            return FlatLogprobs(self[i] for i in range(*idx.indices(len(self))))
        idx = range(len(self))[idx]
        start, end = (self.ends[idx - 1] if idx else 0), self.ends[idx]
        rows = zip(
            self.logprobs[start:end],
            self.ranks[start:end],
            self.decoded_tokens[start:end],
            strict=True,
        )
        entries = dict(zip(self.token_ids[start:end], map(Logprob._make, rows), strict=True))
        return entries or None


Logprobs = list[dict[int, Logprob] | None] | FlatLogprobs


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
    num_drafts: int = 0
    """Steps that verified drafts for it."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Of the draft tokens, those that stood."""
    demoted: bool = False
    """Served after all others, because it could not have its first token in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer so far.

    `finish_reason`: "stop", "length", "repetition", "abort" or "error"; None while it goes on.
    `stop_reason`: of a "stop" the string, pattern or token id, None for the model's own end; of an
    "abort" "timeout" or "ttft", None for the caller's; of an "error" its text.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    weight_versions: list[tuple[int, int]]
    """(weight epoch, tokens computed with it), in order: one pair, unless weights were updated."""

    def finished(self) -> bool:
        """Whether this answer has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What a caller sees of a request at one look: everything so far, or what is new (`DELTA`)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Logprobs | None
    """Per prompt token; None for the first, which nothing predicts."""
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStats
    num_cached_tokens: int


class Request:
    """The host's record of one request; see the picture in the module header."""

    __slots__ = (
        "cache_salt",
        "cumulative_logprob",
        "draft_odds",
        "due",
        "finish_reason",
        "group_id",
        "id",
        "inputs",
        "logprobs",
        "max_len",
        "num_computed",
        "num_drafted",
        "num_pending",
        "num_scheduled",
        "num_seen",
        "num_started",
        "number",
        "params",
        "priority",
        "prompt",
        "prompt_len",
        "prompt_logprobs",
        "row",
        "slack",
        "state",
        "stats",
        "stop_ids",
        "stop_reason",
        "suspect",
        "strikes",
        "text",
        "timeout_s",
        "tokens",
        "ttft_target_s",
        "weight_versions",
    )

    def __init__(
        self,
        *,
        id: str,
        group_id: str,
        number: int,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        inputs: SampleInputs,
        max_len: int,
        stop_ids: frozenset[int],
        cache_salt: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        ttft_target_s: float | None = None,
    ) -> None:
        """`max_len`: tokens of prompt and output at which the request ends with "length";
        `stop_ids`: every token id that ends it, the model's own included unless ignored;
        `priority`: the lower, the earlier; `timeout_s`, `ttft_target_s`: seconds after arrival at
        which it ends, and at which it should have its first token."""
        self.id = id
        self.group_id = group_id  # what the caller named; shared by the samples of one prompt
        self.number = number  # order of arrival
        self.prompt = prompt
        self.prompt_len = len(prompt_token_ids)
        self.tokens = array("i", prompt_token_ids)
        self.params = params
        self.inputs = inputs
        self.max_len = max_len
        self.stop_ids = stop_ids
        self.cache_salt = cache_salt
        self.priority = priority
        self.timeout_s = timeout_s
        self.ttft_target_s = ttft_target_s
        self.due = 0  # in ns, for `policy.Aging`, while it waits
        self.slack = 0  # in ns, for `policy.Aging`, while it runs
        self.state = RequestState.WAITING
        self.row: int | None = None  # place in the worker's tables while running
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_pending = 0
        self.num_drafted = 0  # drafts in flight: so many tokens more may be known by now
        self.draft_odds = FIRST_DRAFT_ODDS  # drafts that stood and that fell, for `drafting`
        self.num_seen = 0  # tokens known at the last restart: more than this is progress
        self.num_started = 0  # tokens known when it last began to run
        self.suspect = False  # was in flight, without progress, when a worker died
        self.strikes = 0  # workers that died while it alone was in flight
        self.text = ""
        make = FlatLogprobs if params.flat_logprobs else list
        self.logprobs: Logprobs | None = make() if inputs.num_logprobs >= 0 else None
        self.weight_versions: list[tuple[int, int]] = []  # (epoch, output tokens), in order
        self.cumulative_logprob = 0.0
        self.prompt_logprobs: Logprobs | None = None
        if inputs.num_prompt_logprobs >= 0:
            self.prompt_logprobs = make()
            self.prompt_logprobs.append(None)
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.stats = RequestStats()

    def count_tokens(self, weight_epoch: int, num_tokens: int) -> None:
        """Note with which weights the next output tokens were computed."""
        spans = self.weight_versions
        if spans and spans[-1][0] == weight_epoch:
            num_tokens += spans.pop()[1]
        spans.append((weight_epoch, num_tokens))

    @property
    def num_scored(self) -> int:
        """Leading prompt tokens whose log-probabilities are known, or need not be."""
        return self.prompt_len if self.prompt_logprobs is None else len(self.prompt_logprobs)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and known to the host."""
        return len(self.tokens) - self.prompt_len

    @property
    def finished(self) -> bool:
        """Whether the request has had its one end."""
        return self.state is RequestState.FINISHED

    def completion(self, *, text_start: int = 0, token_start: int = 0) -> CompletionOutput:
        """The answer from these characters and tokens on, as a value that later steps do not
        change."""
        return CompletionOutput(
            index=self.inputs.child,
            text=self.text[text_start:],
            token_ids=self.tokens[self.prompt_len + token_start :].tolist(),
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[token_start:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            weight_versions=list(self.weight_versions),
        )


class OutputStream:
    """The answers to one prompt, as their caller looks at them."""

    def __init__(self, request_id: str, requests: Sequence[Request]) -> None:
        first, params = requests[0], requests[0].params
        self._request_id = request_id
        self._requests = requests
        self._kind = params.output_kind
        self._interval = params.stream_interval or 1
        self._num_shown = [(0, 0)] * len(requests)  # characters and tokens, of each
        # Made once: a look per token must not cost a prompt's length.
        self._prompt_token_ids = first.tokens[: first.prompt_len].tolist()
        self._prompt_logprobs: Logprobs | None = None
        self._num_looks = 0
        self._open = set(range(len(requests)))  # whose end has not been shown

    def look(self) -> RequestOutput | None:
        """What there is to show; None when that is nothing yet."""
        changed = [idx for idx in sorted(self._open) if self._has_news(idx)]
        finished = all(request.finished for request in self._requests)
        if not changed or (self._kind is RequestOutputKind.FINAL_ONLY and not finished):
            return None
        first = self._requests[0]
        is_delta = self._kind is RequestOutputKind.DELTA
        outputs = []
        for idx in changed if is_delta else range(len(self._requests)):
            request = self._requests[idx]
            num_chars, num_tokens = self._num_shown[idx] if is_delta else (0, 0)
            outputs.append(request.completion(text_start=num_chars, token_start=num_tokens))
            self._num_shown[idx] = (len(request.text), request.num_output_tokens)
            if request.finished:
                self._open.discard(idx)
        self._num_looks += 1
        known = first.prompt_logprobs
        if known is not None and len(self._prompt_logprobs or ()) < len(known):
            self._prompt_logprobs = known[:]
        return RequestOutput(
            request_id=self._request_id,
            prompt=first.prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=None if is_delta and self._num_looks > 1 else self._prompt_logprobs,
            outputs=outputs,
            finished=finished,
            metrics=replace(first.stats),
            num_cached_tokens=first.stats.num_cached_tokens,
        )

    def _has_news(self, idx: int) -> bool:
        request = self._requests[idx]
        num_new = request.num_output_tokens - self._num_shown[idx][1]
        is_first = self._num_shown[idx][1] == 0
        return request.finished or num_new >= (1 if is_first else self._interval)
