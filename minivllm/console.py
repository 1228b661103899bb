"""`minivllm chat` and `minivllm complete`: a person at a terminal, and a server or an engine.

The event loop runs on a thread of its own, because reading a line blocks this one: the engine's
workers have to hear from it meanwhile. Ctrl-C ends the reply and not the program, the half reply
stays in the history; Ctrl-D ends the program. When stdin is no terminal its lines are the inputs,
nothing but replies is printed, and the first error ends the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal

from minivllm.client import events, refusal, unreached
from minivllm.errors import MinivllmError, ServerError

_HELP = "Ctrl-C ends the reply, Ctrl-D the program."
_CHAT_HELP = f"/reset forgets the conversation. {_HELP}"

_T = TypeVar("_T")
Connection = contextlib.AbstractAsyncContextManager[httpx.AsyncClient]


def chat(
    connection: Connection, fields: Mapping[str, Any], *, system: str | None, quick: str | None
) -> int:
    """Talk: each line is a message, answered with those before it in mind; returns the exit status.

    `fields`: what a body has besides the messages. `quick`: the only message.
    """
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)

    def answer(console: _Console, line: str) -> None:
        if line == "/reset":
            messages[:] = opening
            return
        messages.append({"role": "user", "content": line})
        try:
            reply = console.show("/v1/chat/completions", {"messages": messages, **fields})
        except MinivllmError:
            messages.pop()
            raise
        messages.append({"role": "assistant", "content": reply})

    return _converse(connection, answer, quick, _CHAT_HELP)


def complete(connection: Connection, fields: Mapping[str, Any], *, quick: str | None) -> int:
    """Complete each line by itself; returns the exit status."""

    def answer(console: _Console, line: str) -> None:
        console.show("/v1/completions", {"prompt": line, **fields})

    return _converse(connection, answer, quick, _HELP)


def _converse(
    connection: Connection,
    answer: Callable[[_Console, str], None],
    quick: str | None,
    help_text: str,
) -> int:
    with (
        start_blocking_portal(backend_options={"use_uvloop": True}) as portal,
        portal.wrap_async_context_manager(connection) as client,
    ):
        console = _Console(portal, client)
        if quick is not None:
            answer(console, quick)
            return 0
        interactive = sys.stdin.isatty()
        if interactive:
            print(f"{console.model}. {help_text}", file=sys.stderr)
        for line in _typed() if interactive else map(str.strip, sys.stdin):
            if not line:
                continue
            try:
                answer(console, line)
            except ServerError as error:
                if not interactive:
                    raise
                print(f"minivllm: {error}", file=sys.stderr)
    return 0


def _typed() -> Iterator[str]:
    """Lines as they are typed, with editing and history."""
    import readline  # noqa: F401  for `input`

    while True:
        try:
            yield input("> ").strip()
        except KeyboardInterrupt:
            print()  # what was typed is given up
        except EOFError:
            print()
            return


class _Console:
    """Shows replies while they come."""

    def __init__(self, portal: BlockingPortal, client: httpx.AsyncClient) -> None:
        self._portal = portal
        self._client = client
        self.model = self._call(self._first_model)

    def _call(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """The result of `work` on the loop's thread; Ctrl-C cancels it."""
        future: Future[_T] = self._portal.start_task_soon(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    async def _first_model(self) -> str:
        try:
            response = await self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise ServerError(unreached(self._client, error)) from error
        if response.status_code != 200:
            raise ServerError(refusal(response.status_code, response.content))
        return str(response.json()["data"][0]["id"])

    def show(self, path: str, body: Mapping[str, Any]) -> str:
        """Print a reply as it comes; returns what there was of it before its end or Ctrl-C.

        Raises: `ServerError`
        """
        pieces: list[str] = []

        async def run() -> None:
            async with contextlib.aclosing(self._pieces(path, body)) as stream:
                async for piece in stream:
                    pieces.append(piece)
                    await asyncio.to_thread(print, piece, end="", flush=True)

        try:
            self._call(run)
        except (KeyboardInterrupt, CancelledError):
            if not sys.stdin.isatty():
                raise
        print()
        return "".join(pieces)

    async def _pieces(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        body = {"model": self.model, **body}
        async with contextlib.aclosing(events(self._client, path, body)) as stream:
            async for event in stream:
                for choice in event["choices"]:
                    text = choice["delta"].get("content") if "delta" in choice else choice["text"]
                    if text:
                        yield text
