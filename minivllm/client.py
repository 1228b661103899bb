"""What asks a server: one over HTTP, or the same app over an engine of our own, without a socket.

    connect(url=...)     ─> httpx ─> a server somewhere
    connect(config=...)  ─> httpx ─> AppTransport ─> create_app(engine)

Who asks cannot tell the two apart: a streamed answer comes as it is made (httpx's own
`ASGITransport` gathers it first), and closing it early tells the app that the client has left,
which ends the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import anyio
import httpx
from starlette.types import ASGIApp, Message

from minivllm.config import EngineConfig, ServerConfig
from minivllm.engine import AsyncEngine
from minivllm.errors import ServerError
from minivllm.server import create_app

_CONNECT_S = 10.0


@contextlib.asynccontextmanager
async def connect(
    *,
    url: str | None = None,
    api_key: str | None = None,
    config: EngineConfig | None = None,
    server_config: ServerConfig | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the server at `url` (with or without its /v1), or of an engine with `config`.

    Raises: `ConfigError`, `ModelError`
    """
    timeout = httpx.Timeout(None, connect=_CONNECT_S)  # an answer takes what it takes
    if url is not None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        base_url = url.rstrip("/").removesuffix("/v1")
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=base_url, headers=headers, timeout=timeout, limits=limits
        ) as client:
            yield client
        return
    async with AsyncEngine(config) as engine:
        transport = AppTransport(create_app(engine, server_config))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://engine", timeout=timeout
        ) as client:
            yield client


async def events(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any]
) -> AsyncGenerator[Any, None]:
    """The events of a streamed answer, as they come; closing it ends the request.

    Raises: `ServerError`
    """
    try:
        async with client.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                raise ServerError(refusal(response.status_code, await response.aread()))
            async for line in response.aiter_lines():
                name, _, data = line.partition(": ")
                if name == "data" and data != "[DONE]":
                    event = json.loads(data)
                    if "error" in event:
                        raise ServerError(event["error"]["message"])
                    yield event
    except httpx.HTTPError as error:
        raise ServerError(unreached(client, error)) from error


def refusal(status: int, content: bytes) -> str:
    """What the body of an error says, in a line."""
    try:
        return f"{json.loads(content)['error']['message']} (status {status})"
    except (ValueError, LookupError, TypeError):  # another server's form
        return f"status {status}: {content[:200].decode(errors='replace')}"


def unreached(client: httpx.AsyncClient, error: httpx.HTTPError) -> str:
    """That a server did not answer, and why, in a line."""
    return f"{client.base_url} does not answer: {str(error) or type(error).__name__}"


class AppTransport(httpx.AsyncBaseTransport):
    """Requests to an ASGI app in this process."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The app's answer, whose body is still to come."""
        exchange = _Exchange(self._app, _scope(request), await request.aread())
        try:
            head = await exchange.next_message()
        except BaseException:
            await exchange.aclose()
            raise
        return httpx.Response(head["status"], headers=head["headers"], stream=exchange)


class _Exchange(httpx.AsyncByteStream):
    """One request: the app on a task of its own, and its answer as a stream."""

    def __init__(self, app: ASGIApp, scope: dict[str, Any], content: bytes) -> None:
        self._content: bytes | None = content
        self._left = asyncio.Event()
        # Without room: the app waits for a slow reader.
        self._sent, self._received = anyio.create_memory_object_stream[Message](0)
        self._task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        with self._sent:
            await app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if self._content is not None:
            content, self._content = self._content, None
            return {"type": "http.request", "body": content}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        with contextlib.suppress(anyio.BrokenResourceError):  # `_receive` says that the client left
            await self._sent.send(message)

    async def next_message(self) -> Message:
        try:
            return await self._received.receive()
        except anyio.EndOfStream:
            raise httpx.ReadError("the app ended before its answer") from None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self.next_message()
            more = message.get("more_body", False)
            yield message.get("body", b"")

    async def aclose(self) -> None:
        self._left.set()
        self._received.close()
        await self._task


def _scope(request: httpx.Request) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.partition(b"?")[0],
        "query_string": request.url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "server": (request.url.host, request.url.port),
        "client": ("127.0.0.1", 0),
    }
