"""OpenAI bodies to requests: completions, chats, tokens.

    JSON ─decode─> CompletionRequest | ChatRequest ─sampling_params─> SamplingParams

The fields are OpenAI's and vLLM's. A field that is known has its effect; those typed `Any` are
taken because clients always send them, and do nothing; every other one is refused by name, as are
values that ask for what is not there (tools, structured output). Null counts as absent.

Invariant: what is wrong with a body is a `RequestError` that names the field and the value. What a
parameter may be: `request.SamplingParams`. What comes back: `answers`. Routes, errors and sockets:
`server`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from minivllm.errors import RequestError
from minivllm.request import RepetitionDetection, RequestOutputKind, SamplingParams

_MAX_JSON_DEPTH = 64
_MAX_CHOICES = 1024  # prompts times n
_MAX_WORDS = 256  # stop strings, stop patterns, bad words, of each


# ---- what clients ask ------------------------------------------------------------------------


class StreamOptions(Struct, forbid_unknown_fields=True):
    """What a stream tells besides the answer."""

    include_usage: bool | None = None
    """A last chunk with the token counts and no choices."""
    continuous_usage_stats: bool | None = None
    """Token counts so far in every chunk."""


class GenerationRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chats share; None stands for the model's default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    repetition_detection: RepetitionDetection | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    thinking_token_budget: int | None = None
    stream_interval: int | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    timeout_s: float | None = None
    ttft_target_s: float | None = None
    response_format: dict[str, Any] | None = None
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None

    def check(self) -> None:
        """Refuse what no one field can tell.

        Raises: `RequestError`
        """
        if self.stream_options is not None and not self.stream:
            rule = "can only be set where stream is true"
            raise RequestError("stream_options", msgspec.to_builtins(self.stream_options), rule)
        if self.stream and self.prompt_logprobs is not None:
            rule = "cannot be streamed"
            raise RequestError("prompt_logprobs", self.prompt_logprobs, rule)
        kind = (self.response_format or {"type": "text"}).get("type")
        if kind != "text":
            rule = "must have the type text: structured output is not supported"
            raise RequestError("response_format", self.response_format, rule)
        for name in ("stop", "stop_regex", "bad_words"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) > _MAX_WORDS:
                rule = f"must have at most {_MAX_WORDS} strings"
                raise RequestError(name, len(value), rule)

    def num_choices(self, num_prompts: int) -> int:
        """Answers that the request asks for.

        Raises: `RequestError` for more than one request may have
        """
        count = num_prompts * max(1, self.n or 1)
        if count > _MAX_CHOICES:
            rule = f"times the number of prompts must be at most {_MAX_CHOICES}"
            raise RequestError("n", self.n or 1, rule)
        return count


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    """Text, token ids, or a list of either."""
    logprobs: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or token ids.

        Raises: `RequestError`
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(item) for item in self.prompt}
        if len(kinds) != 1:
            rule = "must be text, token ids, or a list of either, not empty and not mixed"
            raise RequestError("prompt", self.prompt, rule)
        prompts: list[Any] = [self.prompt] if kinds == {int} else self.prompt
        self.num_choices(len(prompts))
        return prompts


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise RequestError("messages", self.messages, "must have at least one message")
        refuse_tools(self.tools, self.tool_choice)
        self.num_choices(1)
        if self.top_logprobs is not None and not self.logprobs:
            rule = "can only be set where logprobs is true"
            raise RequestError("top_logprobs", self.top_logprobs, rule)
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            rule = "must equal max_completion_tokens, or be left out"
            raise RequestError("max_tokens", self.max_tokens, rule)


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """None: yes for a prompt, no for messages, whose template writes them."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class WeightsRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /update_weights."""

    path: str
    """A directory of safetensors on the server."""


class AbortRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /abort_requests."""

    request_ids: list[str] | None = None
    """The ids of answers, which begin with cmpl- and the like; None: all."""


class ProfileRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /start_profile."""

    directory: str
    """Where the trace goes, on the server."""


def refuse_tools(tools: Sequence[Any] | None, tool_choice: Any) -> None:
    """Raises: `RequestError` for anything that needs tool calls"""
    if tools:
        raise RequestError("tools", tools, "must be left out: tool calls are not supported")
    if tool_choice not in (None, "none", "auto"):
        rule = "must be none or auto: tool calls are not supported"
        raise RequestError("tool_choice", tool_choice, rule)


# ---- JSON ------------------------------------------------------------------------------------

_Body = TypeVar("_Body", bound=Struct)


def decode(body: bytes, kind: type[_Body]) -> _Body:
    """A body as a `kind`.

    Raises: `RequestError`

    >>> decode(b'{"tokens": [1, "2"]}', DetokenizeRequest)
    Traceback (most recent call last):
    minivllm.errors.RequestError: tokens[1] must be `int`, not `str`, got '2'
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError("body", body[:200], f"must be JSON ({error})") from error
    # Only a body with many brackets can be deep, and only such a one is looked through.
    if body.count(b"[") + body.count(b"{") > _MAX_JSON_DEPTH and _deeper(value, _MAX_JSON_DEPTH):
        raise RequestError("body", body[:200], f"must be at most {_MAX_JSON_DEPTH} levels deep")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _located(str(error), value) from error


def _deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_deeper(item, depth - 1) for item in items)


def _located(text: str, value: Any) -> RequestError:
    """msgspec's message as an error about the field that it speaks of."""
    rule, _, path = text.partition(" - at `$")
    field = ""
    for name, idx in re.findall(r"\.([^.\[\]`]+)|\[(\d+)\]", path):
        if isinstance(value, dict) and name in value:
            value, field = value[name], f"{field}.{name}".lstrip(".")
        elif isinstance(value, list) and idx:
            value, field = value[int(idx)], f"{field}[{idx}]"
    unknown = re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", rule)
    if unknown and isinstance(value, dict):
        name = f"{field}.{unknown[2]}".lstrip(".")
        if unknown[1] == "missing required":
            return RequestError(name, None, "must be given")
        return RequestError(name, value.get(unknown[2]), "is not a field, or not supported")
    rule = rule.replace("Expected", "must be", 1).replace(", got", ", not", 1)
    return RequestError(field or "body", value, rule)


# ---- to the engine ---------------------------------------------------------------------------

_SAMPLING_FIELDS = tuple(
    {field.name for field in dataclasses.fields(SamplingParams)}
    & set(GenerationRequest.__struct_fields__)
    - {"logit_bias"}
)


def sampling_params(
    request: CompletionRequest | ChatRequest, default: SamplingParams, stream_interval: int
) -> SamplingParams:
    """`default` with what the request says.

    Raises: `RequestError`
    """
    request.check()
    given: dict[str, Any] = {name: getattr(request, name) for name in _SAMPLING_FIELDS}
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(request, ChatRequest):
        given["max_tokens"] = request.max_completion_tokens or request.max_tokens
        if 0 in (request.max_completion_tokens, request.max_tokens):
            raise RequestError("max_completion_tokens", 0, "must be an integer of at least 1")
        if request.logprobs:
            given["logprobs"] = request.top_logprobs or 0
    else:
        given |= _completion_params(request)
    if request.logprob_token_ids is not None and "logprobs" in given:
        del given["logprobs"]  # their number, or the parameters would refuse it
    if request.logit_bias is not None:
        given["logit_bias"] = _logit_bias(request.logit_bias)
    given.setdefault("stream_interval", stream_interval)
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return dataclasses.replace(default, **given, output_kind=kind)


def _completion_params(request: CompletionRequest) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if request.logprobs is not None:
        given["logprobs"] = request.logprobs
        if request.echo and request.prompt_logprobs is None:
            given["prompt_logprobs"] = request.logprobs
    if request.max_tokens == 0 and request.echo:  # only the prompt is wanted
        given["max_tokens"] = 1
    return given


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    for name in bias:
        if not (name.isascii() and name.isdecimal()):
            raise RequestError("logit_bias", name, "must have token ids as keys")
    # vLLM's bounds: beyond them, a bias decides alone
    return {int(name): max(-100.0, min(100.0, value)) for name, value in bias.items()}


def chat_options(request: ChatRequest | TokenizeRequest, trust_template: bool) -> dict[str, Any]:
    """What `Tokenizer.apply_chat_template` takes beside the messages.

    Raises: `RequestError`
    """
    if request.chat_template is not None and not trust_template:
        rule = "must be left out: the server does not run templates of requests"
        raise RequestError("chat_template", request.chat_template, rule)
    continues = bool(request.continue_final_message)
    opens = request.add_generation_prompt
    options: dict[str, Any] = {
        "add_generation_prompt": not continues if opens is None else opens,
        "continue_final_message": continues,
        "chat_template": request.chat_template,
    }
    variables = request.chat_template_kwargs or {}
    taken = {*options, "tools", "messages"} & set(variables)
    if taken:
        raise RequestError("chat_template_kwargs", sorted(taken), "must not set these")
    if isinstance(request, ChatRequest):
        if request.documents is not None:
            variables = variables | {"documents": request.documents}
        if request.reasoning_effort is not None:
            variables = variables | {"reasoning_effort": request.reasoning_effort}
    return options | variables
