"""`minivllm run-batch`: a file of requests to a file of answers, in OpenAI's batch format.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
      ─> {"id": "...", "custom_id": "a", "response": {"status_code": 200, ...}, "error": null}

Answers are appended as they come, in any order. A run that was stopped, or killed, is started again
with the same files and goes on with the requests that have no answer yet.

Invariants: the file of answers has each custom_id at most once, whenever and however often a run
was killed: an answer counts when its line is whole and on the disk, half a line is cut off; one run
at a time writes a file. A request that the server refuses has its refusal for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import httpx
import msgspec
from tqdm import tqdm

from minivllm.client import unreached
from minivllm.errors import RequestError, ServerError

_BUSY = (429, 503)
_MAX_BUSY_TRIES = 100
_MAX_BUSY_S = 30.0


class BatchRequest(msgspec.Struct):
    """A line of the file of requests."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Counts:
    """How a run went."""

    num_done_before: int
    num_done: int
    num_failed: int
    """Of those done, with another status than 200."""


async def run_batch(
    client: httpx.AsyncClient, requests: Path, answers: Path, *, max_concurrency: int, quiet: bool
) -> Counts:
    """Ask what has no answer yet; returns when every request has one.

    Raises: `RequestError` naming the line for a file of requests that is wrong, before anything is
            asked; `ServerError` for a server that cannot be reached, or stays too busy
    """
    ids = await asyncio.to_thread(_check, requests)
    with _Answers(answers) as file:
        known = file.known & ids
        num_failed = 0
        room = asyncio.Semaphore(max_concurrency)
        bar = tqdm(total=len(ids), initial=len(known), desc="Requests", disable=quiet)

        async def ask(request: BatchRequest) -> None:
            nonlocal num_failed
            try:
                answer = await _ask(client, request)
                num_failed += answer["response"]["status_code"] != 200
                await file.write(answer)
                bar.update()
            finally:
                room.release()

        try:
            with bar:
                async with asyncio.TaskGroup() as group:
                    for _, line in _lines(requests):
                        request = msgspec.json.decode(line, type=BatchRequest)
                        if request.custom_id not in known:
                            await room.acquire()
                            group.create_task(ask(request))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
    return Counts(len(known), len(ids) - len(known), num_failed)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line


def _check(file: Path) -> set[str]:
    """The ids of a file of requests that are whole and have an id of their own each."""
    ids: set[str] = set()
    for number, line in _lines(file):
        place = f"line {number} of {file}"
        try:
            request = msgspec.json.decode(line, type=BatchRequest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            shown = line.decode(errors="replace").strip()
            raise RequestError(place, shown, f"must be a request of a batch ({error})") from error
        if request.custom_id in ids:
            raise RequestError(place, request.custom_id, "must have a custom_id of its own")
        if not request.url.startswith("/"):
            raise RequestError(place, request.url, "must have a url like /v1/chat/completions")
        if request.body.get("stream"):
            raise RequestError(place, True, "must not have stream in its body")
        ids.add(request.custom_id)
    return ids


async def _ask(client: httpx.AsyncClient, request: BatchRequest) -> dict[str, Any]:
    for _ in range(_MAX_BUSY_TRIES):
        try:
            response = await client.post(request.url, json=request.body)
        except httpx.HTTPError as error:
            raise ServerError(unreached(client, error)) from error
        if response.status_code not in _BUSY:
            break
        wait_s = response.headers.get("retry-after", "")
        await asyncio.sleep(min(int(wait_s) if wait_s.isdecimal() else 1, _MAX_BUSY_S))
    else:
        raise ServerError(f"{client.base_url} stays too busy (status {response.status_code})")
    try:
        body: Any = response.json()
    except ValueError:
        body = response.text
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": request.custom_id,
        "response": {
            "status_code": response.status_code,
            "request_id": response.headers.get("x-request-id") or uuid.uuid4().hex,
            "body": body,
        },
        "error": None,
    }


class _Answers:
    """The file of answers: what is in it, and what is added."""

    def __init__(self, file: Path) -> None:
        self._path = file
        self._disk = asyncio.Lock()
        self._waiting: list[bytes] = []
        self.known: frozenset[str] = frozenset()

    def __enter__(self) -> _Answers:
        with contextlib.ExitStack() as stack:
            self._file: IO[bytes] = stack.enter_context(self._path.open("a+b", buffering=0))
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                rule = "must not be in use by another run"
                raise RequestError("output_file", str(self._path), rule) from error
            self.known = self._recover()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _recover(self) -> frozenset[str]:
        """The ids of whole answers; cuts off the half line at which a run was killed."""
        known = set()
        end = 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                known.add(str(json.loads(line)["custom_id"]))
            except (ValueError, LookupError, TypeError) as error:
                place = f"line {number} of {self._path}"
                shown = line.decode(errors="replace").strip()
                raise RequestError(place, shown, "must be an answer of a batch") from error
            end += len(line)
        self._file.truncate(end)
        return frozenset(known)

    async def write(self, answer: dict[str, Any]) -> None:
        """Return when the answer is on the disk; those that come meanwhile go there together."""
        line = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
        self._waiting.append(line)
        async with self._disk:
            lines, self._waiting = self._waiting, []
            if lines:
                await asyncio.to_thread(self._append, b"".join(lines))

    def _append(self, lines: bytes) -> None:
        while lines:
            lines = lines[self._file.write(lines) :]
        os.fsync(self._file.fileno())
