"""The Responses API: a chat whose messages the server remembers.

    input, instructions, earlier messages ─> ChatRequest ─> the routes' own way to the engine
    outputs ─> response.output_text.delta ... ─> the response ─> held, for whoever continues it

Invariants: a response is held once it has ended (one in the background from the start), the oldest
goes when there are too many, and its messages are those that the model saw, without `instructions`,
which hold for one response alone. Every stream ends with response.completed, .incomplete or
.failed. Fields that are chats' too: `protocol`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from minivllm.answers import ChatWriter, encode, event
from minivllm.asgi import Answer, HttpError, describe
from minivllm.config import ServerConfig
from minivllm.errors import MinivllmError, RequestError
from minivllm.protocol import ChatRequest, refuse_tools
from minivllm.request import CompletionOutput, RequestOutput, SamplingParams
from minivllm.routes import OpenAIRoutes, described, parameter, read, reply

logger = logging.getLogger("minivllm")

_LOGPROBS = "message.output_text.logprobs"
_Key = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]
_TEXT_PARTS = ("text", "input_text", "output_text")


class ResponsesRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    """The user's message, or messages, after those of `previous_response_id`."""
    instructions: str | None = None
    """A system message for this response alone."""
    previous_response_id: str | None = None
    store: bool | None = None
    """Hold the response when it has ended; None: yes."""
    background: bool | None = None
    """Answer at once with what is to be retrieved later."""
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    request_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    timeout_s: float | None = None
    ttft_target_s: float | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    metadata: Annotated[dict[_Key, _Value], Meta(max_length=16)] | None = None
    """Comes back with the response, as does `user`."""
    service_tier: Any = None
    safety_identifier: Any = None

    def check(self) -> None:
        """Refuse what is not there.

        Raises: `RequestError`
        """
        refuse_tools(self.tools, self.tool_choice)
        settings = (self.text or {}).get("format") or {"type": "text"}
        if not isinstance(settings, dict) or settings.get("type") != "text":
            rule = "must be of the type text: structured output is not supported"
            raise RequestError("text.format", settings, rule)
        for name in self.include or ():
            if name != _LOGPROBS:
                raise RequestError("include", name, f"can only have {_LOGPROBS}")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            rule = "must be an integer of at least 1"
            raise RequestError("max_output_tokens", self.max_output_tokens, rule)
        if self.truncation not in (None, "auto", "disabled"):
            raise RequestError("truncation", self.truncation, "must be auto or disabled")
        if self.background and (self.stream or self.store is False):
            rule = "needs store, and cannot be streamed"
            raise RequestError("background", True, rule)
        unknown = set(self.reasoning or ()) - {"effort"}
        if unknown:
            raise RequestError("reasoning", sorted(unknown), "can only have an effort")
        effort = (self.reasoning or {}).get("effort")
        if not isinstance(effort, str | None):
            raise RequestError("reasoning.effort", effort, "must be a string")

    def messages(self) -> list[dict[str, Any]]:
        """The input as messages of a chat.

        Raises: `RequestError`
        """
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return [_message(item) for item in self.input]

    def chat(self, messages: Sequence[dict[str, Any]]) -> ChatRequest:
        """The same as a chat with these messages."""
        system = {"role": "system", "content": self.instructions}
        shared = set(ChatRequest.__struct_fields__) & set(self.__struct_fields__)
        fields = {name: getattr(self, name) for name in shared}
        return ChatRequest(
            **fields,
            logprobs=_LOGPROBS in (self.include or ()) or self.top_logprobs is not None,
            messages=[*([system] if self.instructions else []), *messages],
            max_completion_tokens=self.max_output_tokens,
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            reasoning_effort=(self.reasoning or {}).get("effort"),
        )


def _message(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type", "message") != "message":
        raise RequestError("input", item, "can only have messages")
    content = item.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
                raise RequestError("input", part, "must have content of text alone")
        content = [{"type": "text", "text": part.get("text")} for part in content]
    return {"role": item.get("role"), "content": content}


@dataclass(slots=True)
class _Held:
    """A response, and what continues it."""

    body: dict[str, Any]
    messages: list[dict[str, Any]]
    task: asyncio.Task[None] | None = None


class ResponsesRoutes:
    """/v1/responses, beside the routes that it goes through."""

    def __init__(self, routes: OpenAIRoutes, config: ServerConfig) -> None:
        self._routes = routes
        self._config = config
        self._held: OrderedDict[str, _Held] = OrderedDict()

    def add_to(self, app: FastAPI) -> None:
        """Register the routes."""
        one = {"parameters": [parameter("response_id", "path")]}
        path = "/v1/responses"
        make = described(ResponsesRequest)
        app.add_api_route(path, self.create, methods=["POST"], openapi_extra=make)
        app.add_api_route(path + "/{response_id}", self.retrieve, openapi_extra=one)
        app.add_api_route(
            path + "/{response_id}/cancel", self.cancel, methods=["POST"], openapi_extra=one
        )

    async def create(self, request: Request) -> Response:
        """Answer an input."""
        body = await read(request, ResponsesRequest)
        body.check()
        self._routes.check_model(body.model)
        messages = body.messages()
        if body.previous_response_id is not None:
            earlier = self._find(body.previous_response_id, "previous_response_id")
            if earlier.body["status"] not in ("completed", "incomplete"):
                rule = "must be the id of a response that has ended well"
                raise RequestError("previous_response_id", body.previous_response_id, rule)
            messages = earlier.messages + messages
        chat = body.chat(messages)
        text, token_ids = await self._routes.render(chat)
        run = _Run(body, self._routes, chat, messages)
        prompt = {"prompt": text, "prompt_token_ids": token_ids, "cache_salt": body.cache_salt}
        streams = self._routes.streams(request, chat, run.params, [prompt], run.id)
        if body.background:
            self._hold(run.held)
            run.held.task = asyncio.create_task(self._finish(run, streams[0]))
            return reply(run.held.body)
        if body.stream:
            return Answer(self._events(run, streams[0]), streamed=True)
        return Answer(self._whole(run, streams[0]), streamed=False)

    async def retrieve(self, request: Request) -> Response:
        """A response that is held."""
        return reply(self._find(request.path_params["response_id"], "response_id").body)

    async def cancel(self, request: Request) -> Response:
        """End a response in the background."""
        held = self._find(request.path_params["response_id"], "response_id")
        if held.task is None:
            rule = "must be the id of a response in the background"
            raise RequestError("response_id", held.body["id"], rule)
        held.task.cancel()
        await asyncio.wait([held.task])
        return reply(held.body)

    def _find(self, response_id: str, field: str) -> _Held:
        held = self._held.get(response_id)
        if held is None:
            raise HttpError(404, f"There is no response {response_id[:200]!r}.", field)
        return held

    def _hold(self, held: _Held) -> None:
        self._held[held.body["id"]] = held
        while len(self._held) > self._config.max_num_responses:
            _, oldest = self._held.popitem(last=False)
            if oldest.task is not None:
                oldest.task.cancel()

    async def _finish(self, run: _Run, stream: AsyncGenerator[RequestOutput, None]) -> None:
        """A response in the background, to its end."""
        try:
            run.held.body["status"] = "in_progress"
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    run.take(output)
            run.end()
        except asyncio.CancelledError:
            run.held.body["status"] = "cancelled"
        except Exception as error:
            run.fail(error)
            if not isinstance(error, MinivllmError):
                logger.exception("response %s failed", run.id)

    async def _whole(
        self, run: _Run, stream: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                run.take(output)
        run.end()
        if run.stored:
            self._hold(run.held)
        yield encode(run.held.body)

    async def _events(
        self, run: _Run, stream: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[bytes, None]:
        opened = False
        try:
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    events = [] if opened else run.opening()
                    opened = True
                    yield b"".join([*events, *run.take(output)])
            events = run.end()
        except MinivllmError as error:
            if not opened:
                raise
            events = run.fail(error)
        if run.stored:
            self._hold(run.held)
        yield b"".join(events)


class _Run:
    """One response while it is made: its body, and the events that tell of it."""

    def __init__(
        self,
        request: ResponsesRequest,
        routes: OpenAIRoutes,
        chat: ChatRequest,
        messages: list[dict[str, Any]],
    ) -> None:
        self.id = f"resp_{request.request_id or uuid.uuid4().hex}"
        self.stored = request.store is not False
        self.params: SamplingParams = routes.params(chat)
        self._writer: ChatWriter = routes.writer(chat, self.id)
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._sequence_number = 0
        self._text = ""
        self._logprobs: list[Any] = []
        self._end: CompletionOutput | None = None
        self.held = _Held(self._new_body(request, routes), messages)

    def _new_body(self, request: ResponsesRequest, routes: OpenAIRoutes) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "queued" if request.background else "in_progress",
            "background": bool(request.background),
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": request.model or routes.names[0],
            "output": [],
            "parallel_tool_calls": False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": (request.reasoning or {}).get("effort"), "summary": None},
            "store": self.stored,
            "temperature": self.params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": self.params.top_p,
            "truncation": request.truncation or "disabled",
            "usage": None,
            "user": request.user,
            "metadata": request.metadata or {},
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part()]
        item = {"id": self._item_id, "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": content}

    def _part(self) -> dict[str, Any]:
        part = {"type": "output_text", "text": self._text, "annotations": []}
        return {**part, "logprobs": self._logprobs}

    def opening(self) -> list[bytes]:
        """The events before the first text."""
        return [
            self._event("response.created", response=self.held.body),
            self._event("response.in_progress", response=self.held.body),
            self._event(
                "response.output_item.added", output_index=0, item=self._item("in_progress")
            ),
            self._part_event("response.content_part.added", part=self._part()),
        ]

    def take(self, output: RequestOutput) -> list[bytes]:
        """Take in what is new; the events that tell of it.

        Raises: `RequestFailed`
        """
        self._writer.count(0, output)
        (answer,) = output.outputs
        if answer.finished():
            self._end = answer
        scored = self._writer.logprobs(answer)
        logprobs = [] if scored is None else msgspec.to_builtins(scored.content)
        self._text += answer.text
        self._logprobs += logprobs
        if not answer.text and not logprobs:
            return []
        kind = "response.output_text.delta"
        return [self._part_event(kind, delta=answer.text, logprobs=logprobs)]

    def end(self) -> list[bytes]:
        """Complete the body; the events that tell of it."""
        assert self._end is not None, "a request ends with an output"
        body = self.held.body
        status = "completed"
        if self._end.finish_reason in ("length", "abort"):
            status = "incomplete"
            is_length = self._end.finish_reason == "length"
            reason = "max_output_tokens" if is_length else self._end.stop_reason or "abort"
            body["incomplete_details"] = {"reason": reason}
        body["status"] = status
        body["output"] = [self._item(status)]
        body["usage"] = self._usage()
        self.held.messages = [*self.held.messages, {"role": "assistant", "content": self._text}]
        return [
            self._part_event(
                "response.output_text.done", text=self._text, logprobs=self._logprobs
            ),
            self._part_event("response.content_part.done", part=self._part()),
            self._event("response.output_item.done", output_index=0, item=self._item(status)),
            self._event(f"response.{status}", response=body),
        ]

    def fail(self, error: Exception) -> list[bytes]:
        """Say in the body that it failed; the event that tells of it."""
        _, described_error = describe(error, self.id)
        message = described_error["error"]["message"]
        self.held.messages = []
        self.held.body["status"] = "failed"
        self.held.body["error"] = {"code": "server_error", "message": message}
        return [self._event("response.failed", response=self.held.body)]

    def _usage(self) -> dict[str, Any]:
        usage = self._writer.usage()
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        }
