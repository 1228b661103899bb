from __future__ import annotations

import asyncio
import io
import os
import pty
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeExecutor
from serving import Served, served

from minivllm import cli
from minivllm.config import ServerConfig

SHORT = ["--max-tokens", "6"]


async def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *argv: str
) -> tuple[int, str, str]:
    """The status and the output of a command with `text` for stdin, beside the test's loop."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    capsys.readouterr()
    status = await asyncio.to_thread(cli.main, list(argv))
    return status, *capsys.readouterr()


async def answer(server: Served, messages: list[dict[str, str]], **fields: Any) -> str:
    body = {"messages": messages, "max_tokens": 6} | fields
    response = await server.post("/v1/chat/completions", **body)
    return response.json()["choices"][0]["message"]["content"]


def said(*texts: str) -> list[dict[str, str]]:
    """A conversation whose first speaker is the user."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


async def test_a_conversation(
    embedded_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line is answered with those before it in mind, until /reset, behind the system prompt;
    nothing but the replies is printed where stdin is no terminal."""
    async with served(embedded_dir) as server:
        system = [{"role": "system", "content": "Be brief"}]
        first = await answer(server, system + said("Hi"))
        second = await answer(server, [*system, *said("Hi", first, "And?")])
        argv = ["chat", "--url", server.url + "/v1", "--system-prompt", "Be brief", *SHORT]
        found = await run(monkeypatch, capsys, "Hi\n\nAnd?\n/reset\nHi\n", *argv)
        assert found == (0, f"{first}\n{second}\n{first}\n", "")


async def test_completions(
    embedded_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`complete` goes on from each line by itself, or from the one of --quick, with the flags'
    parameters."""
    async with served(embedded_dir) as server:
        body = {"max_tokens": 6, "logit_bias": {"5": 1.5}, "stop": ["zzz"]}
        texts = []
        for prompt in ("one", "two"):
            response = await server.post("/v1/completions", prompt=prompt, **body)
            texts.append(response.json()["choices"][0]["text"])
        flags = [*SHORT, "--logit-bias", '{"5": 1.5}', "--stop", "zzz", "--url", server.url]
        argv = ["complete", *flags]
        found = await run(monkeypatch, capsys, "one\ntwo\n", *argv)
        assert found == (0, f"{texts[0]}\n{texts[1]}\n", "")
        found = await run(monkeypatch, capsys, "", *argv, "--quick", "two")
        assert found == (0, f"{texts[1]}\n", "")


async def test_keys_and_refusals(
    embedded_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the server's key, or with another model's name, the command ends with what the server
    says; OPENAI_API_KEY is the key where no flag gives one."""
    async with served(embedded_dir, ServerConfig(api_key=["k"])) as server:
        argv = ["chat", "--url", server.url, *SHORT, "-q", "Hi"]
        for more, part in (
            ([], "a known key must be given"),
            (["--api-key", "k", "--model-name", "other"], "'other' does not exist"),
        ):
            status, out, err = await run(monkeypatch, capsys, "", *argv, *more)
            assert (status, out, len(err.splitlines())) == (1, "", 1)
            assert part in err
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        status, out, err = await run(monkeypatch, capsys, "", *argv)
        assert (status, err) == (0, "")
        assert out


def test_an_embedded_model(
    embedded_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --url the model is loaded and answers; --config holds for these commands too."""
    flags = ["--model", str(embedded_dir), "--distributed-executor-backend", "inline"]
    flags += ["--kv-cache-memory-bytes", "32m", "--max-model-len", "256", "--temperature", "0"]
    status = cli.main(["complete", *flags, *SHORT, "-q", "The capital of France is"])
    assert (status, *capsys.readouterr()) == (0, " Paris.\n\nThe answer\n", "")


class Terminal:
    """A command on a terminal, typed at and read from."""

    def __init__(self, *argv: str) -> None:
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "dumb"
            os.execv(sys.executable, [sys.executable, "-m", "minivllm", *argv])
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    async def until(self, text: str) -> None:
        """Read on until `text` is shown; forgets what came up to it."""
        async with asyncio.timeout(30):
            while text not in self.shown:
                self.shown += (await asyncio.to_thread(os.read, self._file, 4096)).decode()
        self.shown = self.shown.partition(text)[2]

    async def end(self) -> int:
        """The exit status; the terminal must have been left."""
        _, status = await asyncio.to_thread(os.waitpid, self.pid, 0)
        os.close(self._file)
        return os.waitstatus_to_exitcode(status)


async def test_at_a_terminal(embedded_dir: Path) -> None:
    """Ctrl-C ends a reply and its request, and gives up a half-typed line; an error does not end
    the program; Ctrl-D does."""
    executor = FakeExecutor(delay_s=0.02)
    async with served(embedded_dir, executor=executor, max_model_len=400) as server:
        terminal = Terminal("chat", "--url", server.url, "--ignore-eos")
        await terminal.until("Ctrl-D the program.")
        await terminal.until("> ")
        terminal.type("Hi\n")
        while not server.engine.request_ids:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await terminal.until("Hi")
        await asyncio.sleep(0.2)  # some of the reply
        terminal.type("\x03")
        await server.until_idle()
        await terminal.until("> ")
        terminal.type("half a line\x03")
        await terminal.until("> ")
        terminal.type("word " * 500 + "\n")
        await terminal.until("minivllm: ")
        await terminal.until("> ")
        terminal.type("\x04")
        assert await terminal.end() == 0
