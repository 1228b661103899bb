from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_server import ADMIN_KEY, Child, child
from fakes import FakeExecutor, expected_output
from serving import Served, listening, read_event, served

from minivllm.config import EngineConfig, ServerConfig
from minivllm.engine import AsyncEngine
from minivllm.errors import ConfigError
from minivllm.server import _bound, serve_engine

CERTIFICATE = Path(__file__).parent / "tls.pem"
LONG: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 5000, "ignore_eos": True}


# ---- life ------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(
    embedded_dir: Path, socket_file: Path, **config: Any
) -> AsyncIterator[tuple[asyncio.Task[int], httpx.AsyncClient]]:
    """`serve` as it is, on a Unix socket; the test ends it."""
    executor = FakeExecutor(delay_s=0.002)
    engine = AsyncEngine(EngineConfig(model=str(embedded_dir)), executor=executor)
    settings = ServerConfig(uds=str(socket_file), **config)
    task = asyncio.create_task(serve_engine(engine, settings))
    transport = httpx.AsyncHTTPTransport(uds=str(socket_file), retries=0)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=30) as client:
        async with asyncio.timeout(10):
            while True:
                try:
                    await client.get("/health")
                    break
                except httpx.ConnectError:  # it loads
                    await asyncio.sleep(0.01)
        yield task, client


async def read_events(response: httpx.Response) -> list[Any]:
    return [read_event(line) async for line in response.aiter_lines() if line]


async def test_a_signal_lets_requests_end(embedded_dir: Path, tmp_path: Path) -> None:
    """After SIGTERM a stream goes on to its end, new requests are turned away, and the server
    leaves nothing behind."""
    socket_file = tmp_path / "socket"
    body = LONG | {"max_tokens": 300, "stream": True}
    async with (
        serving(embedded_dir, socket_file) as (task, client),
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
        events = await read_events(response)
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert await asyncio.wait_for(task, 10) == 0
    assert not socket_file.exists()


async def test_requests_end_when_the_time_to_drain_is_over(
    embedded_dir: Path, tmp_path: Path
) -> None:
    """What runs longer than `shutdown_timeout_s` ends with "abort" and a proper end of stream."""
    async with (
        serving(embedded_dir, tmp_path / "socket", shutdown_timeout_s=0.1) as (task, client),
        client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response,
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        events = await read_events(response)
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "abort"
        assert await asyncio.wait_for(task, 10) == 0


async def test_a_second_signal_ends_at_once(embedded_dir: Path, tmp_path: Path) -> None:
    """Whoever asks twice does not wait for anybody."""
    async with (
        serving(embedded_dir, tmp_path / "socket") as (task, client),
        client.stream("POST", "/v1/completions", json=LONG | {"stream": True}),
    ):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.02)
        assert await asyncio.wait_for(task, 5) == 1


async def test_a_server_that_cannot_listen_says_so_before_it_loads(
    embedded_dir: Path, tmp_path: Path
) -> None:
    """An address in use, and certificates that are none, are errors that name them."""
    executor = FakeExecutor()
    engine = AsyncEngine(EngineConfig(model=str(embedded_dir)), executor=executor)
    with _bound(ServerConfig(host="127.0.0.1", port=0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"host cannot be listened on.*127.0.0.1:{port}"):
            await serve_engine(engine, ServerConfig(host="127.0.0.1", port=port))
    with pytest.raises(ConfigError, match="ssl_certfile cannot be used"):
        await serve_engine(engine, ServerConfig(ssl_certfile=str(tmp_path / "none.pem")))
    assert executor.generations == []


async def test_tls(embedded_dir: Path) -> None:
    """With a certificate the server speaks TLS, and asks clients for one where it shall."""
    config = ServerConfig(ssl_certfile=str(CERTIFICATE))
    both = ServerConfig(ssl_certfile=str(CERTIFICATE), ssl_ca_certs=str(CERTIFICATE))
    engine = AsyncEngine(EngineConfig(model=str(embedded_dir)), executor=FakeExecutor())
    trusting = ssl.create_default_context(cafile=str(CERTIFICATE))
    shown = ssl.create_default_context(cafile=str(CERTIFICATE))
    shown.load_cert_chain(CERTIFICATE)
    async with engine:
        for settings, context in ((config, trusting), (both, shown)):
            async with (
                listening(engine, settings) as url,
                httpx.AsyncClient(verify=context) as client,
            ):
                address = url.replace("http:", "https:") + "/health"
                assert (await client.get(address)).json() == {"status": "ok"}
        async with listening(engine, both) as url, httpx.AsyncClient(verify=trusting) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(url.replace("http:", "https:") + "/health")


# ---- sockets that misbehave ------------------------------------------------------------------


async def exchange(server: Served, data: bytes, *, waits_s: float = 0.5) -> bytes:
    """Send `data` as it is; what comes back until the server closes or is silent."""
    port = int(server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        for start in range(0, len(data), 2**16):
            writer.write(data[start : start + 2**16])
            await writer.drain()
        async with asyncio.timeout(waits_s):
            while chunk := await reader.read(2**16):
                received += chunk
    except (TimeoutError, ConnectionError):
        pass
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return received


def post(body: bytes, path: str = "/v1/completions", extra: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{extra}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def test_a_head_has_a_limit(embedded_dir: Path) -> None:
    """A head of 10 MB is refused after the first kilobytes, in the form of all errors."""
    async with served(embedded_dir) as server:
        lines = b"x-%d: %s\r\n"
        many = b"".join(lines % (number, b"a" * 1000) for number in range(10_000))
        for flood in (b"GET / HTTP/1.1\r\nx: " + b"a" * 10**7, b"GET / HTTP/1.1\r\n" + many):
            received = await exchange(server, flood)
            if received:  # else the connection was reset while we wrote
                assert received.startswith(b"HTTP/1.1 400 ")
                error = json.loads(received.partition(b"\r\n\r\n")[2])["error"]
                assert error["type"] == "BadRequestError"
        assert (await server.client.get("/health")).status_code == 200


async def test_pipelined_requests_are_answered_in_order(embedded_dir: Path) -> None:
    """Requests sent without waiting get their answers in turn; with their client they all end."""
    async with served(embedded_dir, executor=FakeExecutor(delay_s=0.002)) as server:
        bodies = [json.dumps({"prompt": "x", "request_id": f"r{n}"}).encode() for n in range(5)]
        received = await exchange(server, b"".join(map(post, bodies)), waits_s=2)
        ids = [received.index(f'"cmpl-r{n}"'.encode()) for n in range(5)]
        assert ids == sorted(ids)
        endless = json.dumps(LONG | {"stream": True}).encode()
        await exchange(server, post(endless) * 3, waits_s=0.1)
        await server.until_idle()


async def test_random_bytes_harm_nobody(embedded_dir: Path) -> None:
    """300 broken requests (cut, mutated, never ended, sent byte by byte) beside a stream that stays
    exact; the next good request is answered."""
    rng = random.Random(0)
    good = post(json.dumps({"prompt": "Hello", "max_tokens": 3}).encode())
    num_tokens = 500

    async def one(server: Served) -> None:
        data = bytearray(good)
        kind = rng.randrange(4)
        if kind == 0:
            data = data[: rng.randrange(len(data))]
        elif kind == 1:
            for _ in range(rng.randrange(1, 20)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind == 2:
            data = bytearray(rng.randbytes(rng.randrange(1, 300)))
        else:
            position = rng.randrange(len(data))
            data[position:position] = rng.choice([b"\r\n", b"\0", b"\xff" * 9, good])
        received = await exchange(server, bytes(data), waits_s=0.15)
        assert not received.startswith(b"HTTP/1.1 5"), received

    async with served(embedded_dir, executor=FakeExecutor(delay_s=0.001)) as server:
        body = LONG | {"max_tokens": num_tokens, "return_token_ids": True}
        async with asyncio.TaskGroup() as group:
            stream = group.create_task(server.stream("/v1/completions", **body))
            for _ in range(10):
                await asyncio.gather(*(one(server) for _ in range(30)))
        ids = [i for event in stream.result()[:-1] for i in event["choices"][0]["token_ids"]]
        assert ids == expected_output([1, 2, 3], num_tokens, 49152)
        assert (await server.post("/v1/completions", prompt="x")).status_code == 200
        await server.until_idle()


# ---- many at once ----------------------------------------------------------------------------


async def soak(server: Child, num_clients: int, duration_s: float) -> dict[str, int]:
    """Clients that read, leave, are aborted or ask nonsense, until the time is over."""
    rng = random.Random(0)
    ends: dict[str, int] = {}
    stop_s = time.monotonic() + duration_s

    async def one(id: str) -> None:
        fate = rng.choice(["read", "read", "leave", "leave", "leave", "abort", "bad"])
        ends[fate] = ends.get(fate, 0) + 1
        prompt = [rng.randrange(49152) for _ in range(rng.randrange(1, 40))]
        num_tokens = rng.randrange(1, 60)
        body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        body |= {"return_token_ids": True, "request_id": id}
        if fate == "bad":
            bad = await server.client.post("/v1/completions", json=body | {"temperature": -1})
            assert bad.status_code == 400
            return
        ids: list[int] = []
        done = False
        async with server.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line:
                    ids += read_event(line)["choices"][0]["token_ids"]
                if fate == "leave" and rng.random() < 0.1:
                    break
                if fate == "abort" and rng.random() < 0.1:
                    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
                    ended = {"request_ids": [f"cmpl-{id}"]}
                    await server.client.post("/abort_requests", json=ended, headers=headers)
        expected = expected_output(prompt, num_tokens, 49152)
        assert ids == expected[: len(ids)]
        if fate == "read":
            assert done
            assert ids == expected

    async def client(number: int) -> None:
        while time.monotonic() < stop_s:
            await one(f"{number}-{rng.getrandbits(60)}")

    async with asyncio.TaskGroup() as group:
        for number in range(num_clients):
            group.create_task(client(number))
    async with asyncio.timeout(5):
        while (await server.client.get("/load")).json()["server_load"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return ends


async def run_soak(socket_file: Path, duration_s: float) -> None:
    async with child(socket_file, "checked") as server:
        await soak(server, 256, duration_s / 5)
        before = server.resident_bytes
        ends = await soak(server, 256, duration_s * 4 / 5)
        grown = (server.resident_bytes - before) / 2**20
        await server.client.aclose()
        figures = await server.end()
    print(f"\n{ends} {figures}, resident {before / 2**20:.0f} MiB and {grown:.1f} MiB more")
    assert figures["status"] == figures["num_lost_blocks"] == 0


async def test_many_clients_that_come_and_go(tmp_path: Path) -> None:
    """256 clients at once that read, leave, are aborted or ask nonsense: each that stays gets its
    own tokens, whole, and nothing is left of any."""
    await run_soak(tmp_path / "socket", 2)


@pytest.mark.slow
async def test_many_clients_that_come_and_go_for_minutes(tmp_path: Path) -> None:
    """The same for five minutes; prints the lag of the loop and how much memory grew."""
    await run_soak(tmp_path / "socket", 300)
