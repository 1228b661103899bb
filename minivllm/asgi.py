"""What stands between a socket and a route: the door, the errors, answers that end with the client.

    client ─> Door ─────────────────> route ─> Answer ─> client
              who may, how much       what     as it comes, until somebody leaves

All of it is plain ASGI: nothing here is paid per token but the call that sends it.

Invariants: every error leaves in OpenAI's form, and none tells what happened inside; keys are
compared in constant time; a client that leaves, while it waits or while it reads, cancels the work
for it at once; sending waits for a slow reader, and what it has not read yet is not built.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm.answers import DONE, encode, event
from minivllm.config import ServerConfig
from minivllm.errors import (
    ConfigError,
    EngineBusyError,
    EngineClosedError,
    EngineDead,
    ModelError,
    RequestError,
)

logger = logging.getLogger("minivllm")

PUBLIC_PATHS = frozenset({"/", "/health", "/ping", "/version", "/metrics"})
ADMIN_PATHS = frozenset(
    {
        "/reset_prefix_cache",
        "/pause",
        "/resume",
        "/is_paused",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/update_weights",
        "/abort_requests",
        "/start_profile",
        "/stop_profile",
    }
)
_RETRY_AFTER_S = 1
_ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    503: "ServiceUnavailableError",
}
_T = TypeVar("_T")


# ---- errors ----------------------------------------------------------------------------------


class HttpError(Exception):
    """An answer with that status."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


def describe(error: Exception, request_id: str) -> tuple[int, dict[str, Any]]:
    """The status and the body that tell a client of an error."""
    status, param = 500, None
    message = f"the server failed; its log has more under the request id {request_id}"
    if isinstance(error, RequestError | ConfigError):
        status, message, param = 400, str(error), error.field
    elif isinstance(error, ModelError):  # only a control route can meet one
        status, message = 400, str(error)
    elif isinstance(error, EngineBusyError | EngineClosedError):
        status, message = 503, str(error)
    elif isinstance(error, EngineDead):
        status, message = 503, "the engine is dead"
    elif isinstance(error, HttpError):
        status, message, param = error.status, str(error), error.param
    elif isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    kind = _ERROR_TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return status, {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(error: Exception, request_id: str) -> Response:
    """The HTTP response that tells a client of an error."""
    status, body = describe(error, request_id)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, EngineBusyError | EngineClosedError):
        headers["retry-after"] = str(_RETRY_AFTER_S)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(encode(body), status, headers, "application/json")


# ---- the door --------------------------------------------------------------------------------


class Door:
    """Middleware: request ids, keys, the size of bodies, and the last net for exceptions."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._keys = [_digest(key) for key in config.api_key]
        self._admin_keys = [_digest(config.admin_api_key)] if config.admin_api_key else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = safe_id(headers.get("x-request-id", "")) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        def note(message: Message) -> Awaitable[None]:  # not a coroutine: it is called per token
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._config.enable_request_id_headers:
                    MutableHeaders(scope=message)["x-request-id"] = request_id
            return send(message)

        try:
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            self._check(path or "/", headers)
            await self._app(scope, self._limited(receive), note)
        except HttpError as error:
            await error_response(error, request_id)(scope, receive, note)
        except Exception as error:
            logger.exception("request %s failed", request_id)
            if started:
                raise
            await error_response(error, request_id)(scope, receive, note)

    def _check(self, path: str, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._config.max_body_bytes:
            raise self._too_large()
        if path in PUBLIC_PATHS:
            return
        keys = self._admin_keys if path in ADMIN_PATHS else self._keys
        if not keys:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip())
        # every key is compared, so that the time tells nothing about them
        if sum([hmac.compare_digest(digest, known) for known in keys]) == 0 or (
            scheme.lower() != "bearer"
        ):
            raise HttpError(401, "a known key must be given as Authorization: Bearer <key>")

    def _limited(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._config.max_body_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> HttpError:
        return HttpError(413, f"a body can have {self._config.max_body_bytes} bytes")


def safe_id(text: str) -> str:
    """A client's id without what could forge or flood a line of a log.

    >>> safe_id("abc-1\\nERROR x")
    'abc-1_ERROR_x'
    """
    return re.sub(r"[^A-Za-z0-9._:-]", "_", text[:128])


def _digest(key: str) -> bytes:
    """Of equal length for all keys, which comparing in constant time needs."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


# ---- answers ---------------------------------------------------------------------------------


class Answer(Response):
    """The chunks of a generator, sent as they come; closes it when the client leaves.

    Nothing is sent before the first chunk is there, so what is wrong until then is a proper error.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], *, streamed: bool) -> None:
        """`chunks`: server-sent events, or (not `streamed`) one body of JSON."""
        super().__init__(media_type="text/event-stream" if streamed else "application/json")
        self._chunks = chunks
        self._streamed = streamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):  # nobody is left to be told
            async with while_connected(receive), contextlib.aclosing(self._chunks) as chunks:
                await self._send_all(send, chunks, scope["state"]["request_id"])

    async def _send_all(
        self, send: Send, chunks: AsyncGenerator[bytes, None], request_id: str
    ) -> None:
        chunk = await anext(chunks)
        del self.headers["content-length"]
        if self._streamed:
            self.headers["cache-control"] = "no-cache"
            self.headers["x-accel-buffering"] = "no"  # or nginx would gather the events
        else:
            self.headers["content-length"] = str(len(chunk))
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if self._streamed:
            await _send_chunk(send, chunk)
            await self._send_rest(send, chunks, request_id)
            chunk = b""
        await send({"type": "http.response.body", "body": chunk})

    async def _send_rest(
        self, send: Send, chunks: AsyncGenerator[bytes, None], request_id: str
    ) -> None:
        try:
            async for chunk in chunks:
                await _send_chunk(send, chunk)
        except Exception as error:
            status, body = describe(error, request_id)
            if status == 500:
                logger.exception("request %s failed", request_id)
            await _send_chunk(send, event(body) + DONE)


def _send_chunk(send: Send, chunk: bytes) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": chunk, "more_body": True})


@contextlib.asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancels what runs inside when the client leaves, as `asyncio.timeout` does at its time. The
    client's body must have been read.

    Raises: `ClientDisconnect`
    """
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()


async def merged(
    streams: Sequence[AsyncGenerator[_T, None]], silence_s: float | None = None
) -> AsyncGenerator[tuple[int, _T] | None, None]:
    """The items of all streams as they come, each with the index of its stream; None whenever
    nothing has come for `silence_s`. A stream is asked for more only after its item was taken."""
    if len(streams) == 1 and silence_s is None:  # without tasks: a third of the time per token
        async with contextlib.aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    waiting = {asyncio.ensure_future(anext(stream)): idx for idx, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(
                waiting, timeout=silence_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                yield None
            for task in sorted(done, key=waiting.__getitem__):
                idx = waiting.pop(task)
                with contextlib.suppress(StopAsyncIteration):
                    yield idx, task.result()
                    waiting[asyncio.ensure_future(anext(streams[idx]))] = idx
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
