from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import served

from minivllm.errors import ServerError
from minivllm.load_client import ask, body_of, run_load, served_model
from minivllm.measures import Answer
from minivllm.workloads import Work

Script = list[tuple[float, bytes | Exception]]


class Clock:
    """Time that a script moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Scripted(httpx.AsyncByteStream):
    """The bytes of a stream, each after so many seconds."""

    def __init__(self, clock: Clock, script: Script) -> None:
        self._clock, self._script = clock, script

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for seconds, data in self._script:
            self._clock.now_s += seconds
            if isinstance(data, Exception):
                raise data
            yield data


def client_of(handler: Callable[[httpx.Request], httpx.Response]) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://x")


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(text: str = "a") -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": None}])


def delta(**fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields}])


USAGE = event(choices=[], usage={"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16})
DONE = b"data: [DONE]\n\n"


async def timed(script: Script, status: int = 200) -> Answer:
    clock = Clock()
    async with client_of(
        lambda request: httpx.Response(status, stream=Scripted(clock, script))
    ) as client:
        return await ask(client, "/v1/completions", {}, 10, clock=clock)


async def test_times_are_of_the_pieces() -> None:
    """TTFT to the first, ITL between two, latency to the last; tokens are the server's count."""
    script = [(0.5, piece()), (0.25, piece() + piece("")), (0.125, piece()), (4.0, USAGE + DONE)]
    answer = await timed(script)
    assert answer == Answer(
        11, 100.0, ttft_s=0.5, itl_s=[0.25, 0.0, 0.125], latency_s=0.875, output_len=5
    )
    assert answer.tpot_s == 0.375 / 4


async def test_an_event_in_two_reads_comes_with_its_end() -> None:
    """Bytes may be cut anywhere; a piece's time is that of its line's end."""
    data = piece("é") + DONE
    script: Script = [(0.25, data[idx : idx + 1]) for idx in range(len(data))]
    answer = await timed(script)
    assert answer.error == ""
    assert answer.ttft_s == 0.25 * (len(piece("é")) - 1), "the second of its two line ends is none"
    assert answer.output_len == 1, "without usage, pieces are counted"


async def test_a_role_is_no_piece() -> None:
    """A chat's first token is its first content, reasoning or tool call."""
    first = delta(role="assistant", content="")
    for fields in (
        {"content": "a"},
        {"reasoning": "a"},
        {"reasoning_content": "a"},
        {"tool_calls": [{}]},
    ):
        answer = await timed([(1.0, first), (1.0, delta(**fields)), (1.0, delta()), (1.0, DONE)])
        assert (answer.ttft_s, answer.latency_s, answer.itl_s) == (2.0, 2.0, [])


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([(1.0, piece()), (1.0, httpx.ReadError("reset"))], "reset"),
        ([(1.0, piece())], "the stream ended before its [DONE]"),
        ([(1.0, DONE)], "the stream brought no token"),
        ([(1.0, piece()), (1.0, event(error={"message": "sick"}) + DONE)], "the stream failed"),
        ([(1.0, b"data: {not json}\n\n")], "an event cannot be read"),
    ],
)
async def test_a_stream_that_fails(script: Script, error: str) -> None:
    """What goes wrong on the way is the answer's error."""
    assert error in (await timed(script)).error


async def test_a_refusal() -> None:
    """A status of 400 or above is an error, with the server's words."""
    body = json.dumps({"error": {"message": "max_tokens must be at least 1"}}).encode()
    answer = await timed([(1.0, body)], status=400)
    assert answer.error == "max_tokens must be at least 1 (status 400)"


async def test_a_server_that_is_down() -> None:
    """Asking nobody is an answer with an error; asking for the model's name raises."""

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    async with client_of(refuse) as client:
        assert (await ask(client, "/", {}, 1)).error == "connection refused"
        with pytest.raises(ServerError, match="http://x does not answer: connection refused"):
            await served_model(client)


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (httpx.Response(401, json={"error": {"message": "no key"}}), "no key .status 401"),
        (httpx.Response(200, json={"data": []}), "names no model"),
        (httpx.Response(200, text="hello"), "names no model"),
    ],
)
async def test_a_server_without_a_model(response: httpx.Response, error: str) -> None:
    """A server that names no model is told so."""
    async with client_of(lambda request: response) as client:
        with pytest.raises(ServerError, match=error):
            await served_model(client)


async def test_concurrency_is_bounded() -> None:
    """At most so many requests are open at once, and each is timed from its turn on."""
    num_open = most = 0

    class Slow(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            nonlocal num_open, most
            num_open += 1
            most = max(most, num_open)
            yield piece()
            await asyncio.sleep(0)
            num_open -= 1
            yield DONE

    async with client_of(lambda request: httpx.Response(200, stream=Slow())) as client:
        requests: list[Any] = [({}, number) for number in range(20)]
        answers, _ = await run_load(client, "/", requests, [0.0] * 20, max_concurrency=3)
    assert most == 3
    assert [answer.prompt_len for answer in answers] == list(range(20)), "in their order"
    assert not any(answer.error for answer in answers)


async def test_requests_wait_for_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is sent at its arrival, or at once when that is past."""
    clock = Clock()
    yield_once = asyncio.sleep

    async def sleep(seconds: float) -> None:
        await yield_once(0)  # who has been sent reads the clock
        clock.now_s += seconds

    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Scripted(clock, [(0.0, piece() + DONE)]))

    monkeypatch.setattr("minivllm.load_client.asyncio.sleep", sleep)
    async with client_of(handle) as client:
        requests: list[Any] = [({}, 1)] * 4
        times_s = [0.0, 2.0, 2.5, 2.25]
        answers, duration_s = await run_load(client, "/", requests, times_s, clock=clock)
    assert [answer.start_s for answer in answers] == [100.0, 102.0, 102.5, 102.5]
    assert duration_s == 2.5


def test_bodies() -> None:
    """A completion takes token ids as they are, a chat their text."""
    work = Work([1, 2], 2, 9)
    options = {"model": "m", "decode": lambda ids: f"{len(ids)} tokens", "temperature": 0.5}
    body = body_of(work, is_chat=False, **options)
    assert body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "prompt": [1, 2],
        "max_tokens": 9,
    }
    chat = body_of(work, is_chat=True, **options)
    assert chat["messages"] == [{"role": "user", "content": "2 tokens"}]
    assert chat["max_completion_tokens"] == 9
    told = body_of(Work("Hi", 1, 9), is_chat=True, **options)
    assert told["messages"][0]["content"] == "Hi"


async def test_both_endpoints_of_a_real_server(embedded_dir: Path) -> None:
    """Each request's tokens are counted by the server, over a socket, whole and in pieces."""
    async with served(embedded_dir) as server:
        model = await served_model(server.client)
        works = [Work([100 + number, 7, 8], 3, 5 + number) for number in range(6)]
        for path in ("/v1/completions", "/v1/chat/completions"):
            requests = [
                (
                    body_of(
                        work,
                        model=model,
                        is_chat="chat" in path,
                        decode=lambda ids: "Hi",
                        ignore_eos=True,
                    ),
                    work.prompt_len,
                )
                for work in works
            ]
            answers, duration_s = await run_load(server.client, path, requests, [0.0] * 6)
            assert [answer.error for answer in answers] == [""] * 6
            assert [answer.output_len for answer in answers] == [work.output_len for work in works]
            assert all(0 < a.ttft_s <= a.latency_s <= duration_s for a in answers)
            assert all(sum(a.itl_s) == pytest.approx(a.latency_s - a.ttft_s) for a in answers)
