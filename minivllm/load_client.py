"""The load of a serving benchmark: many streams to any OpenAI server, each piece timed as it comes.

    arrivals ─┐
    works ────┴─> a task per request ─> httpx ─> server
                        └── bytes ─> events ─> Answer: TTFT, ITLs, latency, tokens

The cost per piece is kept low, as the client shares the machine with what it measures: no decoding
of transfer encodings, no dict of an event, one clock reading per arrival of bytes (events that come
in one read came at one time). Tokens are counted by the server's usage.

Invariants: every request has one `Answer`, whatever became of it; a stream without its [DONE] has
failed. What is made of the answers: `measures`; of where the clients come from: `client`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx
import msgspec
from tqdm import tqdm

from minivllm.client import refusal, unreached
from minivllm.errors import ServerError
from minivllm.measures import Answer
from minivllm.workloads import Work


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None

    @property
    def is_piece(self) -> bool:
        """Whether it brings output: a chat's first event may bring its role alone."""
        for choice in self.choices:
            delta = choice.delta
            if delta is None or delta.content or delta.reasoning:
                return True
            if delta.reasoning_content or delta.tool_calls:
                return True
        return False


_decode = msgspec.json.Decoder(_Event).decode


async def served_model(client: httpx.AsyncClient) -> str:
    """The name of the server's first model.

    Raises: `ServerError` when it does not answer, or names none
    """
    try:
        response = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ServerError(unreached(client, error)) from error
    if response.status_code != 200:
        raise ServerError(refusal(response.status_code, response.content))
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ServerError(f"{client.base_url} names no model: {response.text[:200]}") from error


def body_of(
    work: Work, *, model: str, is_chat: bool, decode: Callable[[list[int]], str], **options: Any
) -> dict[str, Any]:
    """The body of a request. A chat takes text, so made-up tokens are `decode`d for it."""
    body = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    if not is_chat:
        return body | {"prompt": work.prompt, "max_tokens": work.output_len}
    text = work.prompt if isinstance(work.prompt, str) else decode(work.prompt)
    messages = [{"role": "user", "content": text}]
    return body | {"messages": messages, "max_completion_tokens": work.output_len}


async def ask(
    client: httpx.AsyncClient,
    path: str,
    body: Mapping[str, Any],
    prompt_len: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """Send one request, and time its stream."""
    content = msgspec.json.encode(body)
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    answer = Answer(prompt_len, clock())
    try:
        async with client.stream("POST", path, content=content, headers=headers) as response:
            if response.status_code != 200:
                answer.error = refusal(response.status_code, await response.aread())
                return answer
            await _read(response, answer, clock)
    except httpx.HTTPError as error:
        answer.error = str(error) or type(error).__name__
    except msgspec.MsgspecError as error:
        answer.error = f"an event cannot be read: {error}"
    return answer


async def _read(response: httpx.Response, answer: Answer, clock: Callable[[], float]) -> None:
    rest = b""
    last_s, num_pieces, is_done = answer.start_s, 0, False
    async for data in response.aiter_raw():
        now_s = clock()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                is_done = True
                continue
            event = _decode(payload)
            if event.error is not None:
                answer.error = f"the stream failed: {event.error}"
            if event.usage is not None:
                answer.output_len = event.usage.completion_tokens
                answer.prompt_len = event.usage.prompt_tokens or answer.prompt_len
            if event.is_piece:
                if num_pieces:
                    answer.itl_s.append(now_s - last_s)
                else:
                    answer.ttft_s = now_s - answer.start_s
                num_pieces += 1
                last_s = now_s
    answer.latency_s = last_s - answer.start_s
    answer.output_len = answer.output_len or num_pieces  # a server that tells no usage
    if not is_done and not answer.error:
        answer.error = "the stream ended before its [DONE]"
    if not num_pieces and not answer.error:
        answer.error = "the stream brought no token"


async def run_load(
    client: httpx.AsyncClient,
    path: str,
    requests: Sequence[tuple[Mapping[str, Any], int]],
    arrivals_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    quiet: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[Answer], float]:
    """Send requests (body, prompt length) at their times, at most `max_concurrency` at once.

    Returns the answers in the order of the requests, and the seconds from the first to the last.
    A request that waits for its turn is timed from its turn on, as vLLM does.
    """
    room = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    bar = tqdm(total=len(requests), desc="Requests", disable=quiet)
    start_s = clock()

    async def one(body: Mapping[str, Any], prompt_len: int) -> Answer:
        async with AsyncExitStack() as turn:
            if room is not None:
                await turn.enter_async_context(room)
            answer = await ask(client, path, body, prompt_len, clock=clock)
        bar.update()
        return answer

    with bar:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for (body, prompt_len), arrival_s in zip(requests, arrivals_s, strict=True):
                wait_s = start_s + arrival_s - clock()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                tasks.append(group.create_task(one(body, prompt_len)))
    return [task.result() for task in tasks], clock() - start_s
