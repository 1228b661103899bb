from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeExecutor
from serving import Served, read_event, served

from minivllm.asgi import merged
from minivllm.config import ServerConfig

LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 5000, "ignore_eos": True}


def check_error(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == (kind, status)
    return error


async def test_routes_and_methods_that_do_not_exist(embedded_dir: Path) -> None:
    """Unknown routes, wrong methods and wrong media types have OpenAI's error body."""
    async with served(embedded_dir) as server:
        check_error(await server.client.get("/nope"), 404, "NotFoundError")
        response = await server.client.get("/v1/completions")
        check_error(response, 405, "MethodNotAllowedError")
        response = await server.client.post("/v1/completions", data={"prompt": "x"})
        check_error(response, 415, "UnsupportedMediaTypeError")


async def test_bodies_that_are_not_requests(embedded_dir: Path) -> None:
    """What is no JSON, too deep or too large is refused before anything is made of it."""
    async with served(embedded_dir, ServerConfig(max_body_bytes=100_000)) as server:
        json_type = {"content-type": "application/json"}
        deep = b'{"prompt": "x", "metadata": ' + b"[" * 70 + b"]" * 70 + b"}"
        for body in (b"", b"{", b"\xff", b"nul", b"[" * 90_000, deep, b'{"prompt": "\\ud800"}'):
            response = await server.client.post("/v1/completions", content=body, headers=json_type)
            check_error(response, 400, "BadRequestError")

        async def chunks() -> AsyncGenerator[bytes, None]:  # without a content-length
            for _ in range(200):
                yield b" " * 1000

        for content in (b" " * 200_000, chunks()):
            response = await server.client.post(
                "/v1/completions", content=content, headers=json_type
            )
            error = check_error(response, 413, "RequestEntityTooLargeError")
            assert "100000 bytes" in error["message"]
        assert (await server.post("/v1/completions", prompt="x")).status_code == 200


async def test_keys_guard_all_but_what_is_public(embedded_dir: Path) -> None:
    """Each key opens the API and none of the control routes, whose key opens these alone."""
    config = ServerConfig(api_key=["one", "two"], enable_admin=True, admin_api_key="three")
    async with served(embedded_dir, config) as server:

        async def ask(method: str, path: str, authorization: str | None) -> int:
            headers = {} if authorization is None else {"authorization": authorization}
            response = await server.client.request(method, path, headers=headers)
            if response.status_code == 401:
                check_error(response, 401, "AuthenticationError")
                assert response.headers["www-authenticate"] == "Bearer"
            return response.status_code

        for path in ("/", "/health", "/ping", "/version"):
            assert await ask("GET", path, None) == 200
        for path in ("/v1/models", "/load", "/openapi.json", "/nope"):
            for wrong in (None, "Bearer", "Bearer on", "Bearer three", "Basic one", "one"):
                assert await ask("GET", path, wrong) == 401
        for right in ("Bearer one", "Bearer two", "bearer one"):
            assert await ask("GET", "/v1/models", right) == 200
            assert await ask("POST", "/pause", right) == 401
        assert await ask("POST", "/reset_prefix_cache", "Bearer three") == 200


async def test_control_routes_exist_only_where_asked_for(embedded_dir: Path) -> None:
    """Without `enable_admin` there is no such route."""
    async with served(embedded_dir) as server:
        check_error(await server.client.post("/pause"), 404, "NotFoundError")


async def test_request_ids_are_made_safe_and_sent_back(embedded_dir: Path) -> None:
    """A header's id is part of the answer's, without what could forge a line of a log."""
    async with served(embedded_dir, ServerConfig(enable_request_id_headers=True)) as server:
        response = await server.client.post(
            "/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "a b\tc" + "d" * 300}
        )
        assert response.headers["x-request-id"] == "a_b_c" + "d" * 123
        assert response.json()["id"].startswith("cmpl-a_b_cddd")
        assert (await server.client.get("/health")).headers["x-request-id"]


async def test_what_nobody_foresaw_tells_nothing(
    embedded_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unforeseen exception is a 500 with the id under which the log has the rest."""
    async with served(embedded_dir) as server:

        def fail(*args: Any) -> None:
            raise ZeroDivisionError("secret")

        monkeypatch.setattr(server.engine, "generate", fail)
        response = await server.post("/v1/completions", prompt="x")
        error = check_error(response, 500, "InternalServerError")
    assert "secret" not in response.text
    request_id = error["message"].split()[-1]
    assert any(request_id in r.getMessage() and r.exc_info for r in caplog.records)


async def test_a_full_queue_says_when_to_come_again(embedded_dir: Path) -> None:
    """Refused at the door: 503 with Retry-After, before any event of a stream."""
    async with (
        served(embedded_dir, max_num_queued_reqs=1) as server,
        server.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}),
    ):
        for stream in (False, True):
            response = await server.post("/v1/completions", **LONG, stream=stream)
            check_error(response, 503, "ServiceUnavailableError")
            assert response.headers["retry-after"] == "1"


async def test_cors_is_off_unless_origins_are_allowed(embedded_dir: Path) -> None:
    """A page of another origin may ask only when its origin is listed."""
    headers = {"origin": "http://a.example", "access-control-request-method": "POST"}
    for origins, allowed in (([], None), (["http://a.example"], "http://a.example")):
        async with served(embedded_dir, ServerConfig(allowed_origins=origins)) as server:
            response = await server.client.options("/v1/completions", headers=headers)
            assert response.headers.get("access-control-allow-origin") == allowed


# ---- clients that leave ----


async def until_running(server: Served, num_requests: int) -> None:
    async with asyncio.timeout(5):
        while server.engine.core.scheduler.num_running < num_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_client_that_leaves_ends_its_request(
    embedded_dir: Path, stream: bool, path: str
) -> None:
    """A client that closes its connection takes all its answers with it, within two steps."""
    executor = FakeExecutor(delay_s=0.01)
    async with served(embedded_dir, executor=executor) as server:
        body = LONG | {"n": 3, "stream": stream, "temperature": 1}
        if path.startswith("/v1/chat"):
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        task = asyncio.create_task(server.client.post(path, json=body))
        await until_running(server, 3)
        task.cancel()
        await asyncio.wait([task])
        num_plans = len(executor.plans)
        await server.until_idle()
        assert len(executor.plans) <= num_plans + 4


async def test_a_client_that_leaves_while_it_waits(embedded_dir: Path) -> None:
    """Requests that wait for a seat, or for `resume`, end with their clients too."""
    async with served(embedded_dir, executor=FakeExecutor(delay_s=0.005), max_num_seqs=1) as server:
        first = asyncio.create_task(server.post("/v1/completions", **LONG | {"max_tokens": 200}))
        await until_running(server, 1)
        second = asyncio.create_task(server.post("/v1/completions", **LONG, stream=True))
        async with asyncio.timeout(5):
            while not server.engine.core.scheduler.num_waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        second.cancel()
        async with asyncio.timeout(5):
            while server.engine.core.scheduler.num_waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert (await first).json()["usage"]["completion_tokens"] == 200
        await server.engine.pause()
        third = asyncio.create_task(server.post("/v1/completions", **LONG))
        await asyncio.sleep(0.05)
        third.cancel()
        await asyncio.sleep(0.05)
        await server.engine.resume()
        await server.until_idle()


async def test_a_slow_reader_finds_merged_deltas(embedded_dir: Path) -> None:
    """While a client does not read, its deltas gather in the engine, not in the socket's buffer:
    what it finds later is whole, in fewer events than tokens."""
    large = LONG | {"n": 4, "temperature": 1, "max_tokens": 500, "logprobs": 20}
    async with served(embedded_dir) as server:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        client.setblocking(False)  # before it connects, so that the loop may wait for it
        address = "127.0.0.1", int(server.url.rpartition(":")[2])
        await asyncio.get_running_loop().sock_connect(client, address)
        reader, writer = await asyncio.open_connection(sock=client, limit=2**12)
        body = json.dumps(large | {"stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await until_running(server, 4)
        async with asyncio.timeout(60):
            while server.engine.core.scheduler.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            received = b""
            while b"[DONE]" not in received[-100:]:
                received += await reader.read(2**16)
        writer.close()
        await writer.wait_closed()
        whole = (await server.post("/v1/completions", **large)).json()
    lines = received.decode().splitlines()
    choices = [read_event(line)["choices"][0] for line in lines if line.startswith("data: {")]
    for choice in whole["choices"]:
        mine = [c for c in choices if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        tokens = [token for c in mine for token in c["logprobs"]["tokens"]]
        assert tokens == choice["logprobs"]["tokens"]
    assert len(choices) < 4 * 500 / 2


# ---- merged streams ----


async def numbers(start: int, stop: int, delay_s: float) -> AsyncGenerator[int, None]:
    for number in range(start, stop):
        await asyncio.sleep(delay_s)
        yield number


async def test_merged_streams_keep_their_order_and_tell_silence() -> None:
    """Each stream's items come in order; silence shows as None; the end is everybody's."""
    items = [item async for item in merged([numbers(0, 3, 0.001), numbers(10, 12, 0.05)], 0.02)]
    assert [item[1] for item in items if item and item[0] == 0] == [0, 1, 2]
    assert [item[1] for item in items if item and item[0] == 1] == [10, 11]
    assert None in items


async def test_merged_streams_close_together() -> None:
    """An error of one stream, or an early end of reading, closes all of them."""
    closed = []

    async def endless(name: str, fails: bool = False) -> AsyncGenerator[int, None]:
        try:
            while True:
                await asyncio.sleep(0)
                if fails:
                    raise ValueError(name)
                yield 1
        finally:
            closed.append(name)

    with pytest.raises(ValueError, match="b"):
        async for _ in merged([endless("a"), endless("b", fails=True)]):
            pass
    stream = merged([endless("c"), endless("d")])
    await anext(stream)
    await stream.aclose()
    assert sorted(closed) == ["a", "b", "c", "d"]
