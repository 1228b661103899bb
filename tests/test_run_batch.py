from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_server import child
from serving import served

from minivllm.batch_files import run_batch
from minivllm.client import AppTransport
from minivllm.errors import MinivllmError, RequestError, ServerError
from minivllm.server import create_app


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    body = {"prompt": f"number {custom_id}", "max_tokens": 4} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(file: Path, requests: Sequence[Any]) -> Path:
    file.write_text("".join(json.dumps(one) + "\n" for one in requests))
    return file


def answers(file: Path) -> dict[str, Any]:
    """The answers by custom_id, of which each is there once."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    by_id = {line["custom_id"]: line["response"] for line in lines}
    assert len(by_id) == len(lines)
    assert all(line["error"] is None and line["id"].startswith("batch_req_") for line in lines)
    return by_id


async def ask(client: httpx.AsyncClient, requests: Path, output: Path) -> tuple[int, int, int]:
    counts = await run_batch(client, requests, output, max_concurrency=4, quiet=True)
    return counts.num_done_before, counts.num_done, counts.num_failed


async def test_a_file_is_answered(embedded_dir: Path, tmp_path: Path) -> None:
    """Each request gets its own answer, a refused one its refusal, over a socket and without."""
    requests = [request(f"r{number}") for number in range(20)]
    messages = [{"role": "user", "content": "Hi"}]
    chat = request("chat", "/v1/chat/completions", messages=messages)
    del chat["body"]["prompt"]
    requests += [chat, request("bad", temperature=9), request("lost", "/v1/nothing")]
    file = write(tmp_path / "in", requests)
    async with served(embedded_dir) as server:
        app = create_app(server.engine)
        transport = AppTransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as inside:
            found = []
            for number, client in enumerate((server.client, inside)):
                output = tmp_path / f"out{number}"
                assert await ask(client, file, output) == (0, 23, 2)
                found.append(answers(output))
        await server.until_idle()
    for by_id in found:
        statuses = {id: answer["status_code"] for id, answer in by_id.items()}
        assert {id: status for id, status in statuses.items() if status != 200} == {
            "bad": 400,
            "lost": 404,
        }
        assert by_id["chat"]["body"]["object"] == "chat.completion"
        assert by_id["bad"]["body"]["error"]["param"] == "temperature"
        assert by_id["r3"]["body"]["usage"]["completion_tokens"] == 4


async def test_a_run_goes_on_where_it_was(embedded_dir: Path, tmp_path: Path) -> None:
    """What has a whole answer is not asked again; half an answer is cut off and asked again."""
    file = write(tmp_path / "in", [request("a"), request("b"), request("c")])
    output = tmp_path / "out"
    async with served(embedded_dir) as server:
        assert await ask(server.client, file, output) == (0, 3, 0)
        lines = output.read_bytes().splitlines(keepends=True)
        output.write_bytes(lines[0] + lines[1][:-9])
        assert await ask(server.client, file, output) == (1, 2, 0)
        assert set(answers(output)) == {"a", "b", "c"}
        assert output.read_bytes().startswith(lines[0])
        assert await ask(server.client, file, output) == (3, 0, 0)


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        ('{"custom_id": "a"}\n', "line 1 of"),
        (json.dumps(request("a")) + "\nnonsense\n", "line 2 of"),
        (json.dumps(request("a")) + "\n\n" + json.dumps(request("a")), "a custom_id of its own"),
        (json.dumps(request("a", "completions")), "must have a url like"),
        (json.dumps(request("a") | {"method": "GET"}), "must be a request of a batch"),
        (json.dumps(request("a", stream=True)), "must not have stream"),
    ],
)
async def test_a_wrong_file_is_told_before_anything_is_asked(
    tmp_path: Path, lines: str, part: str
) -> None:
    """A line that is no request, or repeats an id, is named; no file of answers is made."""
    (tmp_path / "in").write_text(lines)
    async with httpx.AsyncClient(base_url="http://127.0.0.1:9") as client:
        with pytest.raises(RequestError, match=re.escape(part)):
            await ask(client, tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


async def test_a_file_of_answers_that_is_none_is_kept(tmp_path: Path) -> None:
    """A file with other lines than answers is named and not touched."""
    file = write(tmp_path / "in", [request("a")])
    output = tmp_path / "out"
    output.write_text("dear diary\n")
    async with httpx.AsyncClient(base_url="http://127.0.0.1:9") as client:
        with pytest.raises(RequestError, match=r"line 1 of .* must be an answer of a batch"):
            await ask(client, file, output)
    assert output.read_text() == "dear diary\n"


async def test_two_runs_do_not_share_a_file(tmp_path: Path) -> None:
    """While one run writes a file another that wants it ends with an error."""
    file = write(tmp_path / "in", [request("a")])
    errors: list[MinivllmError] = []

    async def answer(http_request: httpx.Request) -> httpx.Response:
        try:
            await ask(client, file, tmp_path / "out")
        except MinivllmError as error:
            errors.append(error)
        return httpx.Response(200, json={})

    async with httpx.AsyncClient(
        transport=httpx.MockTransport(answer), base_url="http://x"
    ) as client:
        assert await ask(client, file, tmp_path / "out") == (0, 1, 0)
    assert [str(error).partition(",")[0] for error in errors] == [
        "output_file must not be in use by another run"
    ]


async def test_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    """503 and 429 are no answers: the request is sent again when the server said it may."""
    file = write(tmp_path / "in", [request("a"), request("b")])
    replies = [httpx.Response(503, headers={"retry-after": "0"}), httpx.Response(429)]
    replies += [httpx.Response(200, json={"ok": True}) for _ in range(2)]

    def answer(http_request: httpx.Request) -> httpx.Response:
        return replies.pop(0)

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert await ask(client, file, tmp_path / "out") == (0, 2, 0)
    assert [one["status_code"] for one in answers(tmp_path / "out").values()] == [200, 200]
    assert not replies


async def test_a_server_that_goes_away(tmp_path: Path) -> None:
    """The run ends with an error, keeps the answers that it has, and marks nothing as answered."""
    file = write(tmp_path / "in", [request("a"), request("b")])

    def answer(http_request: httpx.Request) -> httpx.Response:
        if b"number b" in http_request.content:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={})

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        with pytest.raises(ServerError, match="http://x does not answer: refused"):
            await run_batch(client, file, tmp_path / "out", max_concurrency=1, quiet=True)
    assert set(answers(tmp_path / "out")) == {"a"}


async def test_killed_again_and_again(tmp_path: Path) -> None:
    """A run that is killed with SIGKILL, several times, has each answer once in the end, and no
    answer that was on the disk is lost."""
    file = write(tmp_path / "in", [request(f"r{number}", max_tokens=20) for number in range(400)])
    output = tmp_path / "out"
    output.touch()
    async with child(tmp_path / "socket", "fast") as server:
        command = [sys.executable, __file__, str(server.socket_file), str(file), str(output)]
        num_answers, num_kills, status = 0, 0, None
        while status != 0:
            process = await asyncio.create_subprocess_exec(*command)
            while process.returncode is None:
                grown = output.read_bytes().count(b"\n") - num_answers
                if num_kills < 3 and grown > 30:
                    process.kill()
                    num_kills += 1
                    await process.wait()
                await asyncio.sleep(0.002)
            status = process.returncode
            lines = output.read_bytes().count(b"\n")
            assert lines >= num_answers
            num_answers = lines
        assert num_kills
        by_id = answers(output)
        assert set(by_id) == {f"r{number}" for number in range(400)}
        assert all(one["body"]["usage"]["completion_tokens"] == 20 for one in by_id.values())
        await server.end()


async def main(socket_file: str, requests: str, output: str) -> None:
    transport = httpx.AsyncHTTPTransport(uds=socket_file)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60) as client:
        await run_batch(client, Path(requests), Path(output), max_concurrency=8, quiet=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
