from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeExecutor
from serving import served

from minivllm.client import AppTransport, connect, events
from minivllm.config import ServerConfig
from minivllm.errors import ServerError
from minivllm.server import create_app

BODY = {"prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": True}


def inside(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=AppTransport(app), base_url="http://app")


async def test_what_comes_inside_is_what_comes_over_a_socket(embedded_dir: Path) -> None:
    """Bodies, statuses, headers, queries and streams are the same without a socket as with one."""
    config = ServerConfig(api_key=["k"], enable_admin=True, admin_api_key="k")
    async with served(embedded_dir, config) as server:
        seen = []
        client = inside(create_app(server.engine, config))
        async with client, connect(url=f"{server.url}/v1/", api_key="k") as outside:
            client.headers["authorization"] = "Bearer k"
            for one in (client, outside):
                body = BODY | {"max_tokens": 8}
                answer = await one.post("/v1/completions", json=body)
                refused = await one.post("/v1/completions", json=BODY | {"n": 0})
                paused = await one.post("/pause?mode=odd")
                found = [event async for event in events(one, "/v1/completions", body)]
                statuses = [answer.status_code, refused.status_code, paused.status_code]
                texts = [event["choices"][0]["text"] for event in found]
                whole = answer.json()["choices"][0]["text"]
                assert "".join(texts) == whole
                types = [one.headers["content-type"] for one in (answer, refused)]
                seen.append((statuses, whole, refused.json(), paused.json(), types))
        assert seen[0] == seen[1]
        assert seen[0][0] == [200, 400, 400]


async def test_a_stream_inside_comes_as_it_is_made(embedded_dir: Path) -> None:
    """An event is there before the answer has ended; closing the stream early ends the request."""
    async with (
        served(embedded_dir, executor=FakeExecutor(delay_s=0.01)) as server,
        inside(create_app(server.engine)) as client,
    ):
        async with contextlib.aclosing(events(client, "/v1/completions", BODY)) as stream:
            await anext(stream)
            await anext(stream)
            assert server.engine.request_ids
        async with asyncio.timeout(2):  # of the five seconds that the whole answer takes
            await server.until_idle()


async def test_a_caller_that_is_cancelled_ends_its_request(embedded_dir: Path) -> None:
    """Cancelling who waits for a whole answer, inside, ends the request too."""
    async with (
        served(embedded_dir, executor=FakeExecutor(delay_s=0.01)) as server,
        inside(create_app(server.engine)) as client,
    ):
        asked = asyncio.create_task(client.post("/v1/completions", json=BODY))
        while not server.engine.request_ids:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        async with asyncio.timeout(2):
            await server.until_idle()


async def test_an_app_waits_for_its_reader() -> None:
    """What the reader has not taken is not made."""
    made = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(100):
            made.append(number)
            await send({"type": "http.response.body", "body": b"x", "more_body": number < 99})

    async with inside(app) as client, client.stream("GET", "/") as response:
        chunks = response.aiter_raw()
        await anext(chunks)
        await asyncio.sleep(0.01)
        assert len(made) <= 3
        assert 1 + len([chunk async for chunk in chunks]) == len(made) == 100


async def test_an_app_that_ends_early_is_an_error() -> None:
    """An app without an answer, or that fails in one, is an error of its caller and no hang."""

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        pass

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("on purpose")

    async with asyncio.timeout(5):
        async with inside(silent) as client:
            with pytest.raises(httpx.ReadError, match="ended before its answer"):
                await client.get("/")
        async with inside(failing) as client:
            with pytest.raises(ValueError, match="on purpose"):
                await client.get("/")


@pytest.mark.parametrize(
    ("status", "content", "part"),
    [
        (400, json.dumps({"error": {"message": "n is wrong"}}), "n is wrong (status 400)"),
        (502, "<html>Bad gateway", "status 502: <html>Bad gateway"),
        (401, json.dumps({"error": "Unauthorized"}), 'status 401: {"error": "Unauthorized"}'),
        (200, 'data: {"error": {"message": "the engine is dead"}}\n\n', "the engine is dead"),
    ],
)
async def test_errors_of_a_server(status: int, content: str, part: str) -> None:
    """A refusal, another server's page and an error in a stream are told in a line."""
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=content))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        with pytest.raises(ServerError) as caught:
            [event async for event in events(client, "/v1/completions", BODY)]
    assert str(caught.value) == part
