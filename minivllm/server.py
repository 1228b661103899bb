"""The OpenAI server: `create_app` to mount in an app of one's own, `serve` to run by itself.

    serve:  bind ─> load the model ─> listen ── signal ──> drain ── second signal ──> end now
                                      └ uvicorn and the engine on one event loop

The address is taken before the model is loaded, so that one in use is told at once, and listened on
after, so that whoever gets through is served. After a signal no connection is taken, requests that
run have `shutdown_timeout_s` to end, and then end with "abort"; nothing is cut off in mid-event.

Invariants: the app needs no lifespan, because a mounted app has none; an idle server wakes for
nothing. What it serves: `routes`. What stands before them: `asgi`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minivllm.answers import ChatCompletion, Completion, encode
from minivllm.asgi import Door, HttpError, describe, error_response
from minivllm.config import EngineConfig, ServerConfig
from minivllm.engine import AsyncEngine
from minivllm.errors import ConfigError, MinivllmError
from minivllm.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ProfileRequest,
    TokenizeRequest,
    WeightsRequest,
)
from minivllm.responses import ResponsesRequest, ResponsesRoutes
from minivllm.routes import VERSION, AdminRoutes, OpenAIRoutes

__all__ = ["ServerConfig", "create_app", "serve"]

logger = logging.getLogger("minivllm")

_LAST_WRITES_S = 5.0  # for readers that do not read, after the engine has ended
_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # more than clients and proxies have, whose next request would meet our close
_BODIES = (
    CompletionRequest,
    ChatRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
    WeightsRequest,
    AbortRequest,
    ProfileRequest,
    Completion,
    ChatCompletion,
)


def create_app(engine: AsyncEngine, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI app over an engine that the caller starts and shuts down; may be mounted anywhere.

    Raises: `ConfigError`
    """
    config = config or ServerConfig()
    app = FastAPI(title="minivllm", version=VERSION)
    routes = OpenAIRoutes(engine, config)
    routes.add_to(app)
    ResponsesRoutes(routes, config).add_to(app)
    if config.enable_admin:
        AdminRoutes(engine).add_to(app)
    for kind in (HTTPException, HttpError, MinivllmError):
        app.add_exception_handler(kind, _handle)
    app.add_exception_handler(ClientDisconnect, _forget)
    _document(app)
    app.add_middleware(Door, config=config)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_credentials=config.allow_credentials,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app


async def _handle(request: Request, error: Exception) -> Response:
    request_id = request.scope["state"]["request_id"]
    response = error_response(error, request_id)
    if response.status_code == 500:
        logger.error("request %s failed", request_id, exc_info=error)
    return response


async def _forget(request: Request, error: Exception) -> Response:  # noqa: ARG001
    """There is nobody to answer; the status is for who counts them."""
    return Response(status_code=499)


def _document(app: FastAPI) -> None:
    """Have the document tell the bodies that the handlers take apart themselves."""
    _, schemas = msgspec.json.schema_components(_BODIES, ref_template="#/components/schemas/{name}")

    def openapi() -> dict[str, Any]:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents it


# ---- by itself -------------------------------------------------------------------------------


async def serve(engine_config: EngineConfig, server_config: ServerConfig | None = None) -> int:
    """Load a model and serve it until SIGTERM or SIGINT; returns the exit status: 0, or 1 when a
    second signal ended it.

    Raises: `ConfigError` for an address or a certificate that cannot be used; `ModelError`
    """
    return await serve_engine(AsyncEngine(engine_config), server_config or ServerConfig())


async def serve_engine(engine: AsyncEngine, config: ServerConfig) -> int:
    """`serve` for an engine that has not been started."""
    server = _Server(_uvicorn_config(create_app(engine, config), config))
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set() or not server.started:
            task.cancel()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        with _bound(config) as listener:
            async with engine, asyncio.TaskGroup() as group:
                serving = group.create_task(server.serve(sockets=[listener]))
                logger.info("serving on %s", _shown(listener, config))
                await stop.wait()
                server.exit.set()
                await engine.shutdown(drain_s=config.shutdown_timeout_s)
                await asyncio.wait([serving], timeout=_LAST_WRITES_S)
                serving.cancel()
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        task.uncancel()
        return 1
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    return 0


class _Server(uvicorn.Server):
    """uvicorn with our signals, and without its tick ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.exit = asyncio.Event()

    async def main_loop(self) -> None:
        await self.exit.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(HttpToolsProtocol):
    """uvicorn's, with a limit to a request's head, errors in our form, and ends for all.

    uvicorn tells only the last of pipelined requests that the client has left, and has a limit for
    heads that this parser does not look at.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes: int | None = 0  # None behind the head
        self._cycles: list[Any] = []

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            limit = self.config.h11_max_incomplete_event_size
            if limit and self._head_bytes > limit and not self.transport.is_closing():
                self.send_400_response(f"a head can have {limit} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._head_bytes = None
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()

    def send_400_response(self, msg: str) -> None:
        _, body = describe(HttpError(400, msg), "")
        content = encode(body)
        head = (
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head % len(content) + content)
        self.transport.close()


def _uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    made = uvicorn.Config(
        app,
        http=_Protocol,
        h11_max_incomplete_event_size=config.max_header_bytes,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=not config.disable_access_log,
        server_header=False,
        date_header=False,
        root_path=config.root_path.rstrip("/"),
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if config.ssl_ca_certs else ssl.CERT_NONE,
    )
    try:
        made.load()
    except OSError as error:  # SSLError is one
        rule = f"cannot be used ({error})"
        raise ConfigError("ssl_certfile", config.ssl_certfile, rule) from error
    return made


@contextlib.contextmanager
def _bound(config: ServerConfig) -> Iterator[socket.socket]:
    """The address, taken and not yet listened on."""
    if config.uds is not None:
        path = Path(config.uds)
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()  # of a server that was killed
        with socket.socket(socket.AF_UNIX) as listener:
            _bind(listener, config.uds, "uds", config.uds)
            try:
                yield listener
            finally:
                path.unlink(missing_ok=True)
        return
    host = config.host or "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only where the protocol is named
    with socket.socket(family, proto=socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(listener, (host, config.port), "host", f"{host}:{config.port}")
        yield listener


def _bind(listener: socket.socket, address: Any, name: str, value: str) -> None:
    try:
        listener.bind(address)
    except OSError as error:
        raise ConfigError(name, value, f"cannot be listened on ({error})") from error


def _shown(listener: socket.socket, config: ServerConfig) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
