from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeExecutor
from fastapi import FastAPI
from serving import served

from minivllm import AsyncEngine, EngineConfig
from minivllm.config import ServerConfig
from minivllm.errors import ConfigError
from minivllm.server import create_app

LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 5000, "ignore_eos": True}
ADMIN = {"authorization": "Bearer key"}
WITH_ADMIN = ServerConfig(enable_admin=True, admin_api_key="key")


async def test_models_under_their_names(embedded_dir: Path) -> None:
    """Each served name is a model; the first one signs answers that ask for none."""
    names = ["small", "org/tiny"]
    async with served(embedded_dir, ServerConfig(served_model_name=names)) as server:
        cards = (await server.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == names
        assert cards[0]["max_model_len"] == 8192
        assert (await server.client.get("/v1/models/org/tiny")).json() == cards[1]
        assert (await server.client.get("/v1/models/other")).status_code == 404
        for asked, answered in ((None, "small"), ("", "small"), ("org/tiny", "org/tiny")):
            response = await server.post("/v1/completions", prompt="x", model=asked)
            assert response.json()["model"] == answered
        response = await server.post("/v1/completions", prompt="x", model="other")
        assert response.status_code == 404
        assert response.json()["error"]["param"] == "model"


async def test_a_proxys_path_is_taken_off(embedded_dir: Path) -> None:
    """Behind a proxy that shows the server under a path, routes and keys are the same."""
    config = ServerConfig(root_path="/api/", api_key=["key"])
    async with served(embedded_dir, config) as server:
        assert (await server.client.get("/health")).status_code == 200
        assert (await server.client.get("/v1/models")).status_code == 401
        headers = {"authorization": "Bearer key"}
        assert (await server.client.get("/v1/models", headers=headers)).status_code == 200


async def test_tokens_and_back(embedded_dir: Path) -> None:
    """/tokenize counts a prompt or a chat as the model sees it; /detokenize is its inverse."""
    messages = [{"role": "user", "content": "Hi"}]
    async with served(embedded_dir) as server:
        made = (await server.post("/tokenize", prompt="Hi there", return_token_strs=True)).json()
        assert made["count"] == len(made["tokens"]) == 2
        assert "".join(made["token_strs"]) == "Hi there"
        assert (await server.post("/detokenize", tokens=made["tokens"])).json() == {
            "prompt": "Hi there"
        }
        chat = (await server.post("/tokenize", messages=messages)).json()
        body = {"messages": messages, "max_tokens": 1}
        answer = (await server.post("/v1/chat/completions", **body)).json()
        assert chat["count"] == answer["usage"]["prompt_tokens"]
        for bad in ({}, {"prompt": "x", "messages": messages}):
            assert (await server.post("/tokenize", **bad)).status_code == 400
        response = await server.post("/detokenize", tokens=[10**9])
        assert response.json()["error"]["param"] == "token_ids"


async def test_chats_take_templates_from_the_operator(embedded_dir: Path, tmp_path: Path) -> None:
    """The server's template replaces the model's, from text or a file; a request's is refused
    unless it is trusted."""
    text = "{{ prefix }}{% for m in messages %}{{ m.content }}{% endfor %}"
    file = tmp_path / "template.jinja"
    file.write_text(text)
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
        "return_token_ids": True,
    }

    async def prompt(config: ServerConfig, **more: Any) -> str:
        async with served(embedded_dir, config) as server:
            answer = await server.post("/v1/chat/completions", **body | more)
            assert answer.status_code == 200, answer.text
            return server.engine.tokenizer.decode(answer.json()["prompt_token_ids"])

    for template in (text, str(file)):
        config = ServerConfig(
            chat_template=template, default_chat_template_kwargs={"prefix": "A: "}
        )
        assert await prompt(config) == "A: Hi"
        assert await prompt(config, chat_template_kwargs={"prefix": "B: "}) == "B: Hi"
    trusting = ServerConfig(trust_request_chat_template=True)
    assert await prompt(trusting, chat_template="{{ 1 + 1 }}") == "2"
    async with served(embedded_dir) as server:
        response = await server.post("/v1/chat/completions", **body, chat_template="{{ 1 }}")
        assert response.json()["error"]["param"] == "chat_template"
    with pytest.raises(ConfigError, match="chat_template must be a template or a file"):
        create_app(AsyncEngine(), ServerConfig(chat_template="/nowhere"))


async def test_a_chat_goes_on_with_its_last_message(embedded_dir: Path) -> None:
    """`continue_final_message` ends the prompt in the message; `echo` puts it before the answer."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    body: dict[str, Any] = {"messages": messages, "continue_final_message": True, "echo": True}
    async with served(embedded_dir) as server:
        body |= {"max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
        answer = (await server.post("/v1/chat/completions", **body)).json()
        prompt = server.engine.tokenizer.decode(answer["prompt_token_ids"])
        events = await server.stream("/v1/chat/completions", **body)
    assert prompt.endswith("Well,")
    text = answer["choices"][0]["message"]["content"]
    assert text.startswith("Well,")
    deltas = [event["choices"][0]["delta"]["content"] for event in events[:-1]]
    assert "".join(deltas) == text
    bad: dict[str, Any] = {"messages": [{"role": "user", "content": "x", "tool_calls": 5}]}
    async with served(embedded_dir) as server:
        response = await server.post("/v1/chat/completions", **bad)
        assert response.json()["error"]["param"] == "messages"


async def test_priority_comes_in_the_body_or_a_header(embedded_dir: Path) -> None:
    """Either is the engine's priority; the body's goes before the header's."""
    async with served(embedded_dir, scheduling_policy="priority") as server:

        async def ask(header: str | None, **body: Any) -> httpx.Response:
            headers = {} if header is None else {"x-vllm-priority": header}
            body |= {"prompt": "x", "max_tokens": 1}
            return await server.client.post("/v1/completions", json=body, headers=headers)

        seen = []
        add = server.engine.core.scheduler.add
        server.engine.core.scheduler.add = lambda request: (  # type: ignore[method-assign]
            seen.append(request.priority),
            add(request),
        )[1]
        for header, body in (("-3", {}), ("-3", {"priority": 2}), (None, {"priority": 5})):
            assert (await ask(header, **body)).status_code == 200
        assert seen == [-3, 2, 5]
        response = await ask("high")
        assert response.json()["error"]["param"] == "X-Vllm-Priority"


async def test_ids_are_the_callers_or_fresh(embedded_dir: Path) -> None:
    """`request_id` names the answer; one that is in use is refused, and no other is."""
    async with served(embedded_dir, executor=FakeExecutor(delay_s=0.001)) as server:
        body = LONG | {"request_id": "mine", "stream": True}
        async with server.client.stream("POST", "/v1/completions", json=body) as response:
            assert server.engine.request_ids == ["cmpl-mine"]
            again = await server.post("/v1/completions", prompt="x", request_id="mine")
            assert again.status_code == 400
            assert again.json()["error"]["param"] == "request_id"
            assert response.status_code == 200
        await server.until_idle()
        again = await server.post("/v1/completions", prompt="x", request_id="mine")
        assert again.json()["id"] == "cmpl-mine"


async def test_health_tells_the_engines_state(embedded_dir: Path) -> None:
    """ok; degraded while requests wait; closed and dead are no success. /load counts prompts."""
    executor = FakeExecutor(delay_s=0.001)
    async with served(embedded_dir, executor=executor) as server:

        async def health() -> tuple[int, str]:
            response = await server.client.get("/health")
            return response.status_code, response.json()["status"]

        assert await health() == (200, "ok")
        await server.engine.pause()
        assert await health() == (200, "degraded")
        await server.engine.resume()
        async with server.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}):
            assert (await server.client.get("/load")).json() == {"server_load": 1}
        executor.start = None  # type: ignore[assignment]  # nothing can be restarted
        executor.kills = lambda plan, model: True
        response = await server.post("/v1/completions", prompt="x")
        assert (response.status_code, response.json()["error"]["message"]) == (
            503,
            "the engine is dead",
        )
        assert await health() == (503, "dead")
        assert (await server.post("/v1/completions", prompt="x")).status_code == 503
    async with served(embedded_dir) as server:
        await server.engine.shutdown()
        response = await server.client.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "closed")
        response = await server.post("/v1/completions", prompt="x")
        assert response.status_code == 503
        assert response.headers["retry-after"]


async def test_metrics_are_those_of_the_model(embedded_dir: Path) -> None:
    """/metrics has vLLM's names, under the model's first name."""
    async with served(embedded_dir, ServerConfig(served_model_name=["tiny"])) as server:
        await server.post("/v1/completions", prompt="Hello there", max_tokens=3, ignore_eos=True)
        response = await server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    sample = 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 3.0'
    assert sample in response.text.splitlines()


async def test_what_an_operator_can_do(embedded_dir: Path) -> None:
    """Pause, resume, sleep, wake, forget the cache, load weights, profile: each reaches the
    engine, and what is wrong is told."""
    async with served(embedded_dir, WITH_ADMIN) as server:

        async def order(path: str, /, **body: Any) -> httpx.Response:
            return await server.client.post(path, json=body, headers=ADMIN)

        async def look(path: str) -> Any:
            return (await server.client.get(path, headers=ADMIN)).json()

        assert (await order("/pause?mode=wait&clear_cache=false")).status_code == 200
        assert await look("/is_paused") == {"is_paused": True}
        waiting = asyncio.create_task(server.post("/v1/completions", prompt="x", max_tokens=1))
        await order("/resume")
        assert (await waiting).status_code == 200
        assert (await order("/sleep?level=2")).status_code == 200
        assert await look("/is_sleeping") == {"is_sleeping": True}
        await order("/wake_up")
        assert await look("/is_sleeping") == {"is_sleeping": False}
        assert (await order("/reset_prefix_cache")).json() == {"success": True}
        assert (await order("/update_weights", path="/new")).json() == {"weight_epoch": 1}
        assert (await order("/start_profile", directory="/tmp")).status_code == 200
        assert (await order("/stop_profile")).status_code == 200
        for path, body in (
            ("/pause?mode=now", {}),
            ("/pause?clear_cache=maybe", {}),
            ("/sleep?level=3", {}),
            ("/sleep?level=x", {}),
            ("/update_weights", {"path": "/missing"}),
            ("/update_weights", {}),
            ("/start_profile", {"directory": "/dev/null/x"}),
            ("/start_profile", {"directory": "\0"}),
        ):
            response = await order(path, **body)
            assert response.status_code == 400, path
            assert response.json()["error"]["message"]


async def test_an_operator_ends_requests(embedded_dir: Path) -> None:
    """/abort_requests ends those that it names, with all their prompts, or all there are."""
    async with served(embedded_dir, WITH_ADMIN, FakeExecutor(delay_s=0.001)) as server:
        for named in ({"request_ids": ["cmpl-a"]}, {}):
            body = LONG | {"prompt": ["x", "y"], "request_id": "a"}
            task = asyncio.create_task(server.post("/v1/completions", **body))
            while len(server.engine.request_ids) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            other = {"request_ids": ["cmpl-b"]}
            await server.client.post("/abort_requests", json=other, headers=ADMIN)
            assert len(server.engine.request_ids) == 2
            response = await server.client.post("/abort_requests", json=named, headers=ADMIN)
            assert sorted(response.json()["request_ids"]) == ["cmpl-a-0", "cmpl-a-1"]
            choices = (await task).json()["choices"]
            assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]


async def test_silence_is_filled_where_asked(embedded_dir: Path) -> None:
    """With a keep-alive interval, a stream without tokens gets comments."""
    config = ServerConfig(sse_keep_alive_interval_s=0.05)
    async with served(embedded_dir, config) as server:
        await server.engine.pause()
        body = LONG | {"stream": True, "max_tokens": 2}
        async with server.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            await server.engine.resume()
            rest = [line async for line in lines if line.startswith("data")]
    assert rest[-1] == "data: [DONE]"
    assert len(rest) == 3


async def test_prompts_are_logged_only_where_asked(
    embedded_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A request's line has its id and parameters, and of its prompt what `max_log_len` allows."""
    for config, shown, hidden in (
        (ServerConfig(), "", "max_tokens"),
        (ServerConfig(enable_log_requests=True), "{'max_tokens': 3", "secret"),
        (ServerConfig(enable_log_requests=True, max_log_len=30), "secret", "word"),
    ):
        caplog.clear()
        async with served(embedded_dir, config) as server:
            with caplog.at_level(logging.INFO, logger="minivllm"):
                await server.post("/v1/completions", prompt="secret " * 9 + "word", max_tokens=3)
        text = caplog.text
        assert shown in text
        assert hidden not in text


async def test_an_app_of_ones_own(embedded_dir: Path) -> None:
    """The server is mounted under a path of another app, which needs no lifespan for it; its
    errors and its open routes are the same there."""
    config = EngineConfig(model=str(embedded_dir))
    async with AsyncEngine(config, executor=FakeExecutor()) as engine:
        app = FastAPI()
        app.mount("/llm", create_app(engine, ServerConfig(api_key=["key"])))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x/llm") as client:
            assert (await client.get("/health")).json() == {"status": "ok"}
            body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
            response = await client.post("/v1/completions", json=body)
            assert response.json()["error"]["type"] == "AuthenticationError"
            headers = {"authorization": "Bearer key"}
            response = await client.post("/v1/completions", json=body, headers=headers)
            assert response.json()["usage"]["completion_tokens"] == 3
            response = await client.post(
                "/v1/completions", json=body | {"stream": True}, headers=headers
            )
            assert response.text.endswith("data: [DONE]\n\n")
            assert (await client.get("/nope", headers=headers)).json()["error"]["code"] == 404
