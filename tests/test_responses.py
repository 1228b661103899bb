from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeExecutor
from serving import Served, served

from minivllm.config import ServerConfig

SHORT: dict[str, Any] = {"input": "Hello", "max_output_tokens": 6, "ignore_eos": True, "seed": 1}
PATH = "/v1/responses"


async def read_events(server: Served, **body: Any) -> list[dict[str, Any]]:
    async with server.client.stream("POST", PATH, json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        text = (await response.aread()).decode()
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def until_ended(server: Served, id: str) -> dict[str, Any]:
    async with asyncio.timeout(5):
        while True:
            body = (await server.client.get(f"{PATH}/{id}")).json()
            if body["status"] not in ("queued", "in_progress"):
                return body
            await asyncio.sleep(0.01)


async def test_a_response(embedded_dir: Path) -> None:
    """Text comes as one message with usage; what ends at the limit is incomplete."""
    async with served(embedded_dir) as server:
        body = (await server.post(PATH, **SHORT)).json()
        chat = (
            await server.post(
                "/v1/chat/completions",
                messages=[{"role": "user", "content": "Hello"}],
                max_tokens=6,
                ignore_eos=True,
            )
        ).json()
    assert body["object"] == "response"
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = body["output"]
    assert (item["type"], item["role"]) == ("message", "assistant")
    assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert body["usage"]["output_tokens"] == 6
    assert body["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


async def test_streamed_events_tell_the_whole(embedded_dir: Path) -> None:
    """The events come in OpenAI's order, are numbered, and their deltas are the text."""
    body = SHORT | {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    async with served(embedded_dir) as server:
        whole = (await server.post(PATH, **body)).json()
        events = await read_events(server, **body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    deltas = events[4:-4]
    assert {event["type"] for event in deltas} == {"response.output_text.delta"}
    part = whole["output"][0]["content"][0]
    assert "".join(event["delta"] for event in deltas) == part["text"] == events[-4]["text"]
    assert [one for event in deltas for one in event["logprobs"]] == part["logprobs"]
    assert len(part["logprobs"]) == 6
    assert len(part["logprobs"][0]["top_logprobs"]) == 1
    assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]


async def test_a_response_goes_on_with_an_earlier_one(embedded_dir: Path) -> None:
    """`previous_response_id` puts the earlier messages, without their instructions, before the
    input; what is not stored, or was held too long ago, is unknown."""
    async with served(embedded_dir, ServerConfig(max_num_responses=2)) as server:
        first = (await server.post(PATH, **SHORT, instructions="Be brief")).json()
        assert (await server.client.get(f"{PATH}/{first['id']}")).json() == first
        more = {"previous_response_id": first["id"], "input": [{"role": "user", "content": "Go"}]}
        second = (await server.post(PATH, **SHORT | more)).json()
        chat = {
            "messages": [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": first["output"][0]["content"][0]["text"]},
                {"role": "user", "content": [{"type": "text", "text": "Go"}]},
            ],
            "max_tokens": 1,
        }
        answer = (await server.post("/v1/chat/completions", **chat)).json()
        assert second["usage"]["input_tokens"] == answer["usage"]["prompt_tokens"]
        unkept = (await server.post(PATH, **SHORT, store=False)).json()
        await server.post(PATH, **SHORT)
        for id in (first["id"], unkept["id"], "x"):
            response = await server.client.get(f"{PATH}/{id}")
            assert response.status_code == 404
            response = await server.post(PATH, **SHORT, previous_response_id=id)
            assert response.status_code == 404
            assert response.json()["error"]["param"] == "previous_response_id"


async def test_responses_in_the_background(embedded_dir: Path) -> None:
    """One in the background is answered at once, can be retrieved while it goes on, and ends or is
    cancelled."""
    async with served(embedded_dir, executor=FakeExecutor(delay_s=0.002)) as server:
        short = (await server.post(PATH, **SHORT, background=True)).json()
        assert short["status"] == "queued"
        body = await until_ended(server, short["id"])
        assert body["output"][0]["content"][0]["text"]
        endless = SHORT | {"max_output_tokens": 5000, "background": True}
        long = (await server.post(PATH, **endless)).json()
        more = await server.post(PATH, **SHORT, previous_response_id=long["id"])
        assert more.status_code == 400
        cancelled = (await server.client.post(f"{PATH}/{long['id']}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        await server.until_idle()
        response = await server.client.post(f"{PATH}/{short['id']}/cancel")
        assert response.json()["status"] == "incomplete", "it had ended"
        foreground = (await server.post(PATH, **SHORT)).json()
        response = await server.client.post(f"{PATH}/{foreground['id']}/cancel")
        assert response.status_code == 400


async def test_a_response_that_fails(embedded_dir: Path) -> None:
    """A failure is a 500, a response.failed in a stream, and a status in the background."""
    async with served(embedded_dir) as server:
        server.executor.model.fails = lambda tokens: len(tokens) >= 34
        long = SHORT | {"max_output_tokens": 30}
        assert (await server.post(PATH, **long)).status_code == 500
        events = await read_events(server, **long)
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == "server_error"
        started = (await server.post(PATH, **long, background=True)).json()
        body = await until_ended(server, started["id"])
        assert body["status"] == "failed"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", [{"type": "function_call_output", "output": "x"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}]),
        ("tools", [{"type": "web_search"}]),
        ("text.format", {"type": "json_object"}),
        ("include", ["reasoning.encrypted_content"]),
        ("truncation", "some"),
        ("background", True),
        ("conversation", "x"),
        ("metadata", {str(number): "x" for number in range(17)}),
        ("max_output_tokens", 0),
    ],
)
async def test_what_is_wrong_is_named(embedded_dir: Path, field: str, value: Any) -> None:
    """A refusal names the field."""
    body = SHORT | ({"text": {"format": value}} if field == "text.format" else {field: value})
    if field == "background":
        body["stream"] = True
    async with served(embedded_dir) as server:
        response = await server.post(PATH, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
