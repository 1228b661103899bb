"""A server on a loopback socket, in the test's own event loop, over fake workers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import socket
import unittest.mock
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from fakes import FakeExecutor

from minivllm.config import EngineConfig, ServerConfig
from minivllm.engine import AsyncEngine
from minivllm.server import _bound, _Server, _uvicorn_config, create_app
from minivllm.tokenizer import Tokenizer


@contextlib.asynccontextmanager
async def listening(engine: AsyncEngine, config: ServerConfig | None = None) -> AsyncIterator[str]:
    """The address of a server over an engine that runs."""
    config = dataclasses.replace(config or ServerConfig(), host="127.0.0.1", port=0)
    with _bound(config) as listener:
        # What a slow reader leaves unread is felt after kilobytes, not megabytes.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
        server = _Server(_uvicorn_config(create_app(engine, config), config))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(0)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.exit.set()
        await asyncio.wait_for(task, 10)


@dataclasses.dataclass
class Served:
    engine: AsyncEngine
    executor: FakeExecutor
    url: str
    client: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def stream(self, path: str, **body: Any) -> list[Any]:
        """The data of all events; the last is the string [DONE]."""
        async with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            return [read_event(line) async for line in response.aiter_lines() if line]

    async def until_idle(self) -> None:
        """Return when the engine has no request and all blocks are free."""
        async with asyncio.timeout(5):
            while self.engine.request_ids or self.engine.core.scheduler.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        scheduler = self.engine.core.scheduler
        assert scheduler.num_running == scheduler.num_waiting == 0
        scheduler.blocks.check_integrity()
        assert scheduler.blocks.num_free == self.executor.num_blocks - 1


def read_event(line: str) -> Any:
    assert line.startswith("data: "), line
    data = line.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)


_read_once = functools.cache(Tokenizer.from_dir)


@contextlib.asynccontextmanager
async def _tokenizer_of_all() -> AsyncIterator[None]:
    """A tokenizer does not change once built, and to build one takes most of a start."""
    with unittest.mock.patch.object(Tokenizer, "from_dir", _read_once):
        yield


@contextlib.asynccontextmanager
async def served(
    model_dir: Path,
    config: ServerConfig | None = None,
    executor: FakeExecutor | None = None,
    **engine_config: Any,
) -> AsyncIterator[Served]:
    executor = executor or FakeExecutor()
    settings = EngineConfig(model=str(model_dir), **engine_config)
    async with (
        _tokenizer_of_all(),
        AsyncEngine(settings, executor=executor) as engine,
        listening(engine, config) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        yield Served(engine, executor, url, client)
