"""Outputs of the engine to OpenAI bodies: completions and chats, whole or in pieces.

    RequestOutput ─CompletionWriter─> Completion       RequestOutput ─ChatWriter─> ChatCompletion
                   └──────────────> pieces of it                      └─────────> ChatChunk ...

A writer belongs to one HTTP request, which may hold several prompts, each with several answers.
Pieces are typed structs, encoded in C: a token costs microseconds here.

Invariants: a writer is given each output once, so that joined pieces are the whole; the first piece
of an answer tells its role (chat) or the prompt (echo), the last its reason to end. What is asked:
`protocol`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from minivllm.errors import MinivllmError
from minivllm.protocol import ChatRequest, CompletionRequest
from minivllm.request import CompletionOutput, Logprob, Logprobs, RequestOutput
from minivllm.tokenizer import Tokenizer

_MIN_LOGPROB = -9999.0  # JSON has no infinity

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def event(data: Struct | Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event.

    >>> event({"a": 1})
    b'data: {"a":1}\\n\\n'
    """
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (head, encode(data))


# ---- bodies ----------------------------------------------------------------------------------


class PromptTokensDetails(Struct):
    """Where a prompt's KV came from."""

    cached_tokens: int


class Usage(Struct):
    """Token counts of all prompts and all their answers."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class CompletionLogprobs(Struct):
    """Per token; `text_offset` counts characters from the start of the answer."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


_PromptLogprobs = list[dict[str, dict[str, Any]] | None]


class CompletionChoice(Struct):
    """One answer of a completion, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: _PromptLogprobs | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A completion, or a chunk of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    metrics: dict[str, float | None] | UnsetType = UNSET


class TopLogprob(Struct):
    """A token that could have stood there."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """A token of the answer, and what could have stood there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Per token of the answer."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(Struct):
    """The model's message."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(Struct):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    """An answered chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    service_tier: None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: _PromptLogprobs | UnsetType = UNSET
    metrics: dict[str, float | None] | UnsetType = UNSET


class ChatDelta(Struct):
    """A piece of the model's message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """A piece of one answer of a chat."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """A piece of an answered chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


# ---- writers ---------------------------------------------------------------------------------


class RequestFailed(MinivllmError):
    """The engine ended a request with "error"; the text is its stop reason."""


class _Writer:
    """What both writers know of one HTTP request."""

    def __init__(
        self,
        request: CompletionRequest | ChatRequest,
        *,
        id: str,
        model: str,
        tokenizer: Tokenizer,
        options: WriterOptions,
    ) -> None:
        self.id = id
        self._model = model
        self._created = int(time.time())
        self._request = request
        self._tokenizer = tokenizer
        self._options = options
        self._num_prompt = 0
        self._num_cached = 0
        self._num_output = 0
        self._known_prompts: set[int] = set()
        self._known_answers: set[int] = set()
        asked = request.stream_options
        self._streams_usage = options.force_usage or bool(asked and asked.include_usage)
        self._counts_always = bool(asked and asked.continuous_usage_stats)
        # A piece without text is nothing to a reader, unless its tokens are.
        self._shows_tokens = bool(
            request.return_token_ids
            or request.logprobs is not None
            or request.logprob_token_ids is not None
            or self._counts_always
        )

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._options.fingerprint,
        }

    def _index(self, prompt_idx: int, answer: CompletionOutput) -> int:
        return prompt_idx * (self._request.n or 1) + answer.index

    def count(self, prompt_idx: int, output: RequestOutput) -> None:
        """Take in an output; one that failed ends the whole request."""
        if prompt_idx not in self._known_prompts:
            self._known_prompts.add(prompt_idx)
            self._num_prompt += len(output.prompt_token_ids)
            self._num_cached += output.num_cached_tokens
        for answer in output.outputs:
            self._num_output += self._num_shown(answer)
            if answer.finish_reason == "error":
                raise RequestFailed(str(answer.stop_reason))

    def _num_shown(self, answer: CompletionOutput) -> int:
        return len(answer.token_ids)

    def usage(self) -> Usage:
        """The counts so far."""
        details = None
        if self._options.prompt_details:
            details = PromptTokensDetails(self._num_cached)
        total = self._num_prompt + self._num_output
        return Usage(self._num_prompt, total, self._num_output, details)

    def _metrics(self, outputs: Sequence[RequestOutput]) -> dict[str, float | None] | UnsetType:
        if not self._options.metrics:
            return UNSET
        stats = outputs[0].metrics
        first, last = stats.first_token_s, stats.last_token_s
        num_output = sum(len(answer.token_ids) for answer in outputs[0].outputs)
        decode_s = None if first is None or last is None else last - first
        return {
            "time_to_first_token_ms": _ms(stats.arrival_s, first),
            "queue_time_ms": _ms(stats.arrival_s, stats.scheduled_s),
            "generation_time_ms": _ms(first, last),
            "mean_itl_ms": decode_s and decode_s * 1000 / max(1, num_output - 1),
            "tokens_per_second": num_output / decode_s if decode_s else None,
        }

    def _token(self, token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if self._request.return_tokens_as_token_ids else text

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None and self._request.truncate_prompt_tokens is None:
            return output.prompt
        hides = self._request.skip_special_tokens is not False
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=hides)


class WriterOptions(Struct, frozen=True):
    """What the server adds to every answer."""

    fingerprint: str
    force_usage: bool = False
    prompt_details: bool = True
    metrics: bool = False


class CompletionWriter(_Writer):
    """Answers of /v1/completions; answer c of prompt p has the index p * n + c."""

    _request: CompletionRequest

    def __init__(self, request: CompletionRequest, **common: Any) -> None:
        super().__init__(request, **common)
        self._text_lens: dict[int, int] = {}  # per answer, characters whose offset has been told

    def whole(self, outputs: Sequence[RequestOutput]) -> Completion:
        """The final outputs, one per prompt, as a body.

        Raises: `RequestFailed`
        """
        choices = []
        for prompt_idx, output in enumerate(outputs):
            self.count(prompt_idx, output)
            choices += [self._choice(prompt_idx, output, answer) for answer in output.outputs]
        metrics = self._metrics(outputs)
        return Completion(**self._head(), choices=choices, usage=self.usage(), metrics=metrics)

    def pieces(self, prompt_idx: int, output: RequestOutput) -> Iterator[Completion]:
        """What is new of one prompt, in chunks of one choice.

        Raises: `RequestFailed`
        """
        self.count(prompt_idx, output)
        for answer in output.outputs:
            is_first = self._index(prompt_idx, answer) not in self._known_answers
            choice = self._choice(prompt_idx, output, answer)
            shows = choice.text or answer.finished() or (is_first and self._request.echo)
            if shows or (self._shows_tokens and answer.token_ids):
                usage = self.usage() if self._counts_always else None
                yield Completion(**self._head(), choices=[choice], usage=usage)

    def last_piece(self) -> Completion | None:
        """The token counts, if they were asked for."""
        if not self._streams_usage:
            return None
        return Completion(**self._head(), choices=[], usage=self.usage())

    @property
    def _only_scores(self) -> bool:
        return self._request.max_tokens == 0

    def _num_shown(self, answer: CompletionOutput) -> int:
        return 0 if self._only_scores else len(answer.token_ids)

    def _choice(
        self, prompt_idx: int, output: RequestOutput, answer: CompletionOutput
    ) -> CompletionChoice:
        request, index = self._request, self._index(prompt_idx, answer)
        text, token_ids, entries = answer.text, answer.token_ids, list(answer.logprobs or ())
        if self._only_scores:
            text, token_ids, entries = "", [], []
        is_first = index not in self._known_answers
        self._known_answers.add(index)
        shown_ids = token_ids
        if request.echo and is_first:
            text = self._prompt_text(output) + text
            shown_ids = output.prompt_token_ids + token_ids
            entries = [*(output.prompt_logprobs or ()), *entries]
        choice = CompletionChoice(
            index=index,
            text=text,
            finish_reason="length" if self._only_scores else answer.finish_reason,
            stop_reason=None if self._only_scores else answer.stop_reason,
        )
        if request.logprobs is not None or request.logprob_token_ids is not None:
            choice.logprobs = self._logprobs(index, shown_ids, entries)
        if request.return_token_ids:
            choice.token_ids = token_ids
            if is_first:
                choice.prompt_token_ids = output.prompt_token_ids
        if request.prompt_logprobs is not None:
            choice.prompt_logprobs = _prompt_logprobs(output.prompt_logprobs)
        return choice

    def _logprobs(
        self, index: int, token_ids: Sequence[int], entries: Sequence[dict[int, Logprob] | None]
    ) -> CompletionLogprobs:
        shown = CompletionLogprobs([], [], [], [])
        offset = self._text_lens.get(index, 0)
        for token_id, entry in zip(token_ids, entries, strict=True):
            shown.text_offset.append(offset)
            if entry is None:  # nothing predicts the first token
                text = self._tokenizer.token_text(token_id)
                shown.tokens.append(self._token(token_id, text))
                shown.token_logprobs.append(None)
                shown.top_logprobs.append(None)
            else:
                text = entry[token_id].decoded_token
                shown.tokens.append(self._token(token_id, text))
                shown.token_logprobs.append(_finite(entry[token_id].logprob))
                shown.top_logprobs.append(
                    {
                        self._token(id, one.decoded_token): _finite(one.logprob)
                        for id, one in entry.items()
                    }
                )
            offset += len(text)
        self._text_lens[index] = offset
        return shown


class ChatWriter(_Writer):
    """Answers of /v1/chat/completions."""

    _request: ChatRequest

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        """The final output, one in a list, as a body.

        Raises: `RequestFailed`
        """
        (output,) = outputs
        self.count(0, output)
        choices = [
            ChatChoice(
                index=answer.index,
                message=ChatMessage("assistant", self._opening() + answer.text),
                logprobs=self.logprobs(answer),
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
                token_ids=answer.token_ids if self._request.return_token_ids else UNSET,
            )
            for answer in output.outputs
        ]
        body = ChatCompletion(**self._head(), choices=choices, usage=self.usage())
        body.metrics = self._metrics(outputs)
        if self._request.return_token_ids:
            body.prompt_token_ids = output.prompt_token_ids
        if self._request.prompt_logprobs is not None:
            body.prompt_logprobs = _prompt_logprobs(output.prompt_logprobs)
        return body

    def pieces(self, prompt_idx: int, output: RequestOutput) -> Iterator[ChatChunk]:
        """What is new, in chunks of one choice; the first of each choice is its role.

        Raises: `RequestFailed`
        """
        self.count(prompt_idx, output)
        for answer in output.outputs:
            if answer.index not in self._known_answers:
                self._known_answers.add(answer.index)
                delta = ChatDelta(role="assistant", content="")
                opening = self._chunk(ChatChunkChoice(answer.index, delta))
                if self._request.return_token_ids:
                    opening.prompt_token_ids = output.prompt_token_ids
                yield opening
                if self._opening():
                    delta = ChatDelta(content=self._opening())
                    yield self._chunk(ChatChunkChoice(answer.index, delta))
            if answer.text or answer.finished() or (self._shows_tokens and answer.token_ids):
                yield self._chunk(
                    ChatChunkChoice(
                        index=answer.index,
                        delta=ChatDelta(content=answer.text),
                        logprobs=self.logprobs(answer),
                        finish_reason=answer.finish_reason,
                        stop_reason=answer.stop_reason,
                        token_ids=answer.token_ids if self._request.return_token_ids else UNSET,
                    )
                )

    def last_piece(self) -> ChatChunk | None:
        """The token counts, if they were asked for."""
        if not self._streams_usage:
            return None
        return ChatChunk(**self._head(), choices=[], usage=self.usage())

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        usage = self.usage() if self._counts_always else None
        return ChatChunk(**self._head(), choices=[choice], usage=usage)

    def _opening(self) -> str:
        """With `echo`, the message that the answer goes on with."""
        last = self._request.messages[-1] if self._request.messages else {}
        content = last.get("content")
        if self._request.echo and last.get("role") == "assistant" and isinstance(content, str):
            return content
        return ""

    def logprobs(self, answer: CompletionOutput) -> ChatLogprobs | None:
        """Those of an answer, or of a piece of one; None if nobody asked."""
        if answer.logprobs is None:
            return None
        pairs = zip(answer.token_ids, answer.logprobs, strict=True)
        return ChatLogprobs([self._scored(id, entry) for id, entry in pairs if entry])

    def _scored(self, token_id: int, entry: Mapping[int, Logprob]) -> TokenLogprob:
        best = sorted(entry.items(), key=lambda item: -item[1].logprob)
        if self._request.logprob_token_ids is None:
            best = best[: self._request.top_logprobs or 0]
        top = [TopLogprob(*self._parts(*item)) for item in best]
        return TokenLogprob(*self._parts(token_id, entry[token_id]), top)

    def _parts(self, token_id: int, one: Logprob) -> tuple[str, float, list[int]]:
        data = self._tokenizer.token_bytes(token_id)
        return self._token(token_id, one.decoded_token), _finite(one.logprob), list(data)


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


def _prompt_logprobs(logprobs: Logprobs | None) -> _PromptLogprobs:
    return [
        None
        if entry is None
        else {
            str(token_id): {**one._asdict(), "logprob": _finite(one.logprob)}
            for token_id, one in entry.items()
        }
        for entry in logprobs or ()
    ]


def _ms(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else (end_s - start_s) * 1000
