"""What HTTP costs: tokens per second through streams, from workers that answer at once.

Clients and server are processes of their own; the server's CPU time is told per 1,000 tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from fake_server import Child, child

pytestmark = pytest.mark.benchmark

NUM_TOKENS = 200


async def read_stream(server: Child) -> None:
    """One stream, read as cheaply as can be: the server is what is measured."""
    body = json.dumps(
        {"prompt": [1, 2, 3], "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    ).encode()
    reader, writer = await asyncio.open_unix_connection(server.socket_file)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    received = await reader.read()
    writer.close()
    # the last two are [DONE] and nothing: merged deltas are fewer events, and no fewer tokens
    assert received.rstrip().endswith(b"0"), received[-200:]
    assert b"[DONE]" in received


@pytest.mark.parametrize("num_clients", [1, 64, 256])
def test_streams(benchmark, tmp_path: Path, num_clients: int) -> None:
    """Streams side by side, each of 200 tokens."""

    async def measure() -> None:
        async with child(tmp_path / "socket", "fast") as server:
            await read_stream(server)
            cpu_s, start_s = server.cpu_s, time.perf_counter()
            num_rounds = max(3, 512 // num_clients)
            for _ in range(num_rounds):
                await asyncio.gather(*(read_stream(server) for _ in range(num_clients)))
            num_tokens = num_rounds * num_clients * NUM_TOKENS
            figures = {
                "tokens_per_s": round(num_tokens / (time.perf_counter() - start_s)),
                "cpu_ms_per_1000_tokens": round((server.cpu_s - cpu_s) * 1e6 / num_tokens, 1),
            }
        benchmark.extra_info.update(figures)
        print(f"\n{num_clients} clients: {figures}")

    benchmark.pedantic(lambda: asyncio.run(measure()), rounds=1)
