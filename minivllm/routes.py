"""The routes: what a client, or an operator, may ask of an engine over HTTP.

    body ─protocol─> prompts, SamplingParams ─engine─> outputs ─answers─> body | events

A request is one coroutine from its socket to its tokens: the engine's outputs are merged, written
and sent in it, so whoever leaves cancels it, and whoever reads slowly is waited for.

Invariants: a handler takes its own body apart, so that FastAPI only routes and documents; nothing
is sent before the first output, so a refusal has its proper status. Keys, errors, disconnects:
`asgi`. Fields and bodies: `protocol`, `answers`. Stored answers: `responses`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from minivllm.answers import DONE, ChatWriter, CompletionWriter, WriterOptions, encode, event
from minivllm.asgi import Answer, HttpError, merged, safe_id
from minivllm.config import ServerConfig
from minivllm.engine import PAUSE_MODES, AsyncEngine, Prompt
from minivllm.errors import ConfigError, EngineClosedError, EngineDead, RequestError
from minivllm.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    ProfileRequest,
    TokenizeRequest,
    WeightsRequest,
    chat_options,
    decode,
    sampling_params,
)
from minivllm.request import RequestOutput, SamplingParams

logger = logging.getLogger("minivllm")

VERSION = version("minivllm")

_Body = TypeVar("_Body", bound=msgspec.Struct)


async def read(request: Request, kind: type[_Body]) -> _Body:
    """The request's body as a `kind`.

    Raises: `HttpError`; `RequestError`
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(415, f"the content-type must be application/json, got {media_type!r}")
    return decode(await request.body(), kind)


def reply(body: Any) -> Response:
    """A body in JSON."""
    return Response(encode(body), media_type="application/json")


class OpenAIRoutes:
    """What everybody may ask."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config
        self._template = _read_template(config.chat_template)
        self._page = Path(__file__).with_name("page.html").read_bytes()
        self._created = int(time.time())
        self._writer_options = WriterOptions(
            fingerprint=f"minivllm-{VERSION}",
            force_usage=config.enable_force_include_usage,
            prompt_details=config.enable_prompt_tokens_details,
            metrics=config.enable_per_request_metrics,
        )

    def add_to(self, app: FastAPI) -> None:
        """Register the routes."""
        posts: dict[str, tuple[Any, type[msgspec.Struct]]] = {
            "/v1/completions": (self.completions, CompletionRequest),
            "/v1/chat/completions": (self.chat_completions, ChatRequest),
            "/tokenize": (self.tokenize, TokenizeRequest),
            "/detokenize": (self.detokenize, DetokenizeRequest),
        }
        for path, (handler, kind) in posts.items():
            app.add_api_route(path, handler, methods=["POST"], openapi_extra=described(kind))
        for path, get in (
            ("/v1/models", self.models),
            ("/health", self.health),
            ("/ping", self.health),
            ("/version", self.version),
            ("/load", self.load),
            ("/metrics", self.metrics),
        ):
            app.add_api_route(path, get, methods=["GET"])
        app.add_api_route("/ping", self.health, methods=["POST"])
        named = {"parameters": [parameter("model", "path")]}
        app.add_api_route("/v1/models/{model:path}", self.model, openapi_extra=named)
        app.add_api_route("/", self.page, methods=["GET"], include_in_schema=False)

    # ---- generation ----

    async def completions(self, request: Request) -> Response:
        """Complete prompts."""
        body = await read(request, CompletionRequest)
        self.check_model(body.model)
        prompts: list[Prompt] = []
        for prompt in body.prompts():
            entry: dict[str, Any] = {"cache_salt": body.cache_salt}
            if not isinstance(prompt, str):
                entry["prompt_token_ids"] = prompt
            else:
                entry["prompt"] = prompt
                if body.add_special_tokens is False:
                    entry["prompt_token_ids"] = await asyncio.to_thread(
                        self._engine.tokenizer.encode, prompt, add_special_tokens=False
                    )
            prompts.append(entry)
        return self._answer(request, body, prompts)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a chat."""
        body = await read(request, ChatRequest)
        self.check_model(body.model)
        text, token_ids = await self.render(body)
        salt = body.cache_salt
        prompt = {"prompt": text, "prompt_token_ids": token_ids, "cache_salt": salt}
        return self._answer(request, body, [prompt])

    async def render(self, body: ChatRequest | TokenizeRequest) -> tuple[str, list[int]]:
        """The prompt of a chat, as text and tokens.

        Raises: `RequestError`
        """
        options = chat_options(body, self._config.trust_request_chat_template)
        options = {**(self._config.default_chat_template_kwargs or {}), **options}
        if options["chat_template"] is None:
            options["chat_template"] = self._template
        tokenizer = self._engine.tokenizer

        def run() -> tuple[str, list[int]]:
            text = tokenizer.apply_chat_template(body.messages or [], **options)
            return text, tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))

        return await asyncio.to_thread(run)

    def _answer(
        self, request: Request, body: CompletionRequest | ChatRequest, prompts: Sequence[Prompt]
    ) -> Answer:
        params = self.params(body)
        prefix = "chatcmpl" if isinstance(body, ChatRequest) else "cmpl"
        writer = self.writer(body, f"{prefix}-{_base_id(request, body)}")
        streams = self.streams(request, body, params, prompts, writer.id)
        silence_s = self._config.sse_keep_alive_interval_s or None
        if body.stream:
            return Answer(_events(streams, writer, silence_s), streamed=True)
        return Answer(_whole(streams, writer), streamed=False)

    def params(self, body: CompletionRequest | ChatRequest) -> SamplingParams:
        """The model's parameters with those of a body.

        Raises: `RequestError`
        """
        default = self._engine.core.default_params
        return sampling_params(body, default, self._config.stream_interval)

    @overload
    def writer(self, body: ChatRequest, id: str) -> ChatWriter: ...
    @overload
    def writer(self, body: CompletionRequest, id: str) -> CompletionWriter: ...
    def writer(
        self, body: ChatRequest | CompletionRequest, id: str
    ) -> ChatWriter | CompletionWriter:
        """Writes the answers to a body."""
        common: dict[str, Any] = {
            "id": id,
            "model": body.model or self.names[0],
            "tokenizer": self._engine.tokenizer,
            "options": self._writer_options,
        }
        if isinstance(body, ChatRequest):
            return ChatWriter(body, **common)
        return CompletionWriter(body, **common)

    def streams(
        self,
        request: Request,
        body: GenerationRequest,
        params: SamplingParams,
        prompts: Sequence[Prompt],
        id: str,
    ) -> list[AsyncGenerator[RequestOutput, None]]:
        """The engine's answers to each prompt, begun when they are first looked at.

        Raises: `RequestError`
        """
        priority = body.priority
        header = request.headers.get("x-vllm-priority")
        if priority is None and header is not None:
            try:
                priority = int(header)
            except ValueError:
                raise RequestError("X-Vllm-Priority", header, "must be an integer") from None
        ids = [id] if len(prompts) == 1 else [f"{id}-{idx}" for idx in range(len(prompts))]
        if self._config.enable_log_requests:
            self._log_request(id, params, prompts)
        return [
            self._engine.generate(
                prompt,
                params,
                request_id,
                priority=priority or 0,
                timeout_s=body.timeout_s,
                ttft_target_s=body.ttft_target_s,
            )
            for request_id, prompt in zip(ids, prompts, strict=True)
        ]

    def _log_request(self, id: str, params: SamplingParams, prompts: Sequence[Any]) -> None:
        plain = SamplingParams()
        chosen = {
            field.name: getattr(params, field.name)
            for field in dataclasses.fields(params)
            if getattr(params, field.name) != getattr(plain, field.name)
        }
        cut = self._config.max_log_len
        texts = [str(one.get("prompt") or one["prompt_token_ids"])[:cut] for one in prompts]
        shown: Any = texts if cut else len(prompts)
        logger.info("request %s: prompts %r, parameters %r", id, shown, chosen)

    # ---- the rest ----

    @property
    def names(self) -> Sequence[str]:
        """What requests may call the model."""
        return self._config.served_model_name or [self._engine.core.model_name]

    def check_model(self, model: str | None) -> None:
        """Raises: `HttpError` for another model than the one here"""
        if model and model not in self.names:
            raise HttpError(404, f"The model {model[:200]!r} does not exist.", "model")

    async def tokenize(self, request: Request) -> Response:
        """Tokens of a prompt or of a chat."""
        body = await read(request, TokenizeRequest)
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("prompt", body.prompt, "or messages must be given, and not both")
        tokenizer = self._engine.tokenizer
        if body.prompt is None:
            _, token_ids = await self.render(body)
        else:
            special = body.add_special_tokens is not False
            token_ids = await asyncio.to_thread(
                tokenizer.encode, body.prompt, add_special_tokens=special
            )
        shows = body.return_token_strs
        return reply(
            {
                "count": len(token_ids),
                "max_model_len": self._engine.core.max_model_len,
                "tokens": token_ids,
                "token_strs": [tokenizer.token_text(id) for id in token_ids] if shows else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """Text of tokens."""
        body = await read(request, DetokenizeRequest)
        self.check_model(body.model)
        decode_ids = self._engine.tokenizer.decode
        text = await asyncio.to_thread(decode_ids, body.tokens, skip_special_tokens=False)
        return reply({"prompt": text})

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "minivllm",
            "root": self._engine.core.model_name,
            "parent": None,
            "max_model_len": self._engine.core.max_model_len,
            "permission": [],
        }

    async def models(self) -> Response:
        """The model, under each of its names."""
        return reply({"object": "list", "data": [self._card(name) for name in self.names]})

    async def model(self, request: Request) -> Response:
        """The model under one of its names."""
        name = request.path_params["model"]
        self.check_model(name)
        return reply(self._card(name))

    async def health(self) -> Response:
        """Whether requests are served: ok, degraded, closed or dead."""
        try:
            status, state = 200, await self._engine.health()
        except EngineClosedError:
            status, state = 503, "closed"
        except EngineDead:
            status, state = 503, "dead"
        return Response(encode({"status": state}), status, media_type="application/json")

    async def version(self) -> Response:
        """The version of the server."""
        return reply({"version": VERSION})

    async def load(self) -> Response:
        """How many prompts are in the engine."""
        return reply({"server_load": len(self._engine.request_ids)})

    async def metrics(self) -> Response:
        """Gauges, counters and histograms for Prometheus."""
        text = self._engine.prometheus(model_name=self.names[0], engine="0")
        return Response(text, media_type="text/plain; version=0.0.4")

    async def page(self) -> Response:
        """A page for people."""
        return Response(self._page, media_type="text/html")


class AdminRoutes:
    """What an operator may ask; see `AsyncEngine` for what it does."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def add_to(self, app: FastAPI) -> None:
        """Register the routes."""
        mode = parameter("mode", "query", enum=list(PAUSE_MODES))
        clear_cache = parameter("clear_cache", "query", type="boolean")
        level = parameter("level", "query", type="integer", enum=[1, 2])
        posts: dict[str, tuple[Any, dict[str, Any]]] = {
            "/reset_prefix_cache": (self.reset_prefix_cache, {}),
            "/pause": (self.pause, {"parameters": [mode, clear_cache]}),
            "/resume": (self.resume, {}),
            "/sleep": (self.sleep, {"parameters": [level, mode]}),
            "/wake_up": (self.wake_up, {}),
            "/update_weights": (self.update_weights, described(WeightsRequest)),
            "/abort_requests": (self.abort_requests, described(AbortRequest)),
            "/start_profile": (self.start_profile, described(ProfileRequest)),
            "/stop_profile": (self.stop_profile, {}),
        }
        for path, (handler, extra) in posts.items():
            app.add_api_route(path, handler, methods=["POST"], openapi_extra=extra)
        app.add_api_route("/is_paused", self.is_paused, methods=["GET"])
        app.add_api_route("/is_sleeping", self.is_sleeping, methods=["GET"])

    async def reset_prefix_cache(self) -> Response:
        """Forget all cached prefixes."""
        self._engine.reset_prefix_cache()
        return reply({"success": True})

    async def pause(self, request: Request) -> Response:
        """Come to rest; new requests wait."""
        query = request.query_params
        flags = {"true": True, "1": True, "false": False, "0": False}
        clear_cache = query.get("clear_cache", "true").lower()
        if clear_cache not in flags:
            raise RequestError("clear_cache", clear_cache, "must be true or false")
        await self._engine.pause(query.get("mode", "abort"), clear_cache=flags[clear_cache])
        return reply({"status": "paused"})

    async def resume(self) -> Response:
        """Go on after a pause."""
        await self._engine.resume()
        return reply({"status": "resumed"})

    async def is_paused(self) -> Response:
        """Whether new requests wait."""
        return reply({"is_paused": self._engine.is_paused})

    async def sleep(self, request: Request) -> Response:
        """Pause, and give memory back."""
        query = request.query_params
        level = query.get("level", "1")
        if not level.isascii() or not level.isdecimal():
            raise RequestError("level", level, "must be 1 or 2")
        await self._engine.sleep(int(level[:9]), query.get("mode", "abort"))
        return reply({"status": "asleep"})

    async def wake_up(self) -> Response:
        """Take the memory again, and resume."""
        await self._engine.wake_up()
        return reply({"status": "awake"})

    async def is_sleeping(self) -> Response:
        """Whether the memory was given back."""
        return reply({"is_sleeping": self._engine.is_sleeping})

    async def update_weights(self, request: Request) -> Response:
        """Other weights, from a directory on the server."""
        body = await read(request, WeightsRequest)
        return reply({"weight_epoch": await self._engine.update_weights(body.path)})

    async def abort_requests(self, request: Request) -> Response:
        """End the requests with these ids, or all."""
        ids = (await read(request, AbortRequest)).request_ids
        ended = [
            request_id
            for request_id in self._engine.request_ids
            # the prompts of one HTTP request are numbered
            if ids is None or request_id in ids or request_id.rpartition("-")[0] in ids
        ]
        for request_id in ended:
            self._engine.abort(request_id)
        return reply({"request_ids": ended})

    async def start_profile(self, request: Request) -> Response:
        """Trace the workers' steps from here on, into a directory on the server."""
        body = await read(request, ProfileRequest)
        try:
            await self._engine.start_profile(body.directory)
        except (OSError, ValueError) as error:
            rule = f"must be a directory that can be made ({error})"
            raise RequestError("directory", body.directory, rule) from error
        return reply({"status": "profiling"})

    async def stop_profile(self) -> Response:
        """Write the trace."""
        await self._engine.stop_profile()
        return reply({"status": "written"})


async def _whole(
    streams: Sequence[AsyncGenerator[RequestOutput, None]], writer: CompletionWriter | ChatWriter
) -> AsyncGenerator[bytes, None]:
    finals: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(merged(streams)) as items:
        async for item in items:
            assert item is not None, "without a limit to silence there is none"
            finals[item[0]] = item[1]
    yield encode(writer.whole([finals[idx] for idx in range(len(streams))]))


async def _events(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
    writer: CompletionWriter | ChatWriter,
    silence_s: float | None,
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(merged(streams, silence_s)) as items:
        async for item in items:
            if item is None:
                yield b": keep-alive\n\n"
                continue
            events = b"".join([event(piece) for piece in writer.pieces(*item)])
            if events:
                yield events
    last = writer.last_piece()
    yield DONE if last is None else event(last) + DONE


def _base_id(request: Request, body: GenerationRequest) -> str:
    """The body's id as it is; a header's, which proxies repeat, with an ending of its own."""
    fresh = uuid.uuid4().hex
    header = safe_id(request.headers.get("x-request-id", ""))
    return body.request_id or (f"{header}-{fresh[:8]}" if header else fresh)


def _read_template(template: str | None) -> str | None:
    if template is None or "{" in template:  # a text, which no file is named like
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"must be a template or a file ({error})"
        raise ConfigError("chat_template", template, rule) from error


def described(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A body for the OpenAPI document, which FastAPI does not see; see `document`."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def parameter(name: str, place: str, **schema: Any) -> dict[str, Any]:
    """A parameter for the OpenAPI document."""
    schema = {"type": "string"} | schema
    return {"name": name, "in": place, "required": place == "path", "schema": schema}
