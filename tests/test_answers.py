from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from serving import Served, served

from minivllm.config import ServerConfig


def random_body(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "max_tokens": rng.randrange(1, 30),
        "n": rng.choice([1, 1, 1, 2, 3]),
        "seed": rng.randrange(100),
        "ignore_eos": True,
        "stop": rng.choice([None, "e", ["th", "a", "."], [" "]]),
        "include_stop_str_in_output": rng.random() < 0.3,
        "skip_special_tokens": rng.random() < 0.5,
        "stop_token_ids": [rng.randrange(49152) for _ in range(rng.choice([0, 3000]))],
        "min_tokens": rng.choice([0, 0, 1]),
        "return_token_ids": rng.random() < 0.3,
        "stream_interval": rng.choice([None, 1, 3]),
    }
    if rng.random() < 0.4:
        body["logprobs"] = rng.randrange(3)
        body["return_tokens_as_token_ids"] = rng.random() < 0.3
    return body


def random_prompt(rng: random.Random) -> Any:
    words = ["the", "quick", "brown", "fox", "über", "日本語", "🦊", "jumps"]
    texts = [" ".join(rng.choices(words, k=rng.randrange(1, 9))) for _ in range(3)]
    ids = [rng.sample(range(1000, 40000), k=rng.randrange(1, 9)) for _ in range(2)]
    return rng.choice([texts[0], texts[1:], ids[0], ids])


def joined(events: list[Any]) -> dict[int, dict[str, Any]]:
    """The streamed choices by index, as one of the whole."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "logprobs": None})
    for data in events:
        for choice in data["choices"]:
            whole = choices[choice["index"]]
            assert whole.get("finish_reason") is None, "a piece after the end"
            whole["text"] += choice["text"] if "text" in choice else choice["delta"]["content"]
            for name in ("token_ids", "prompt_token_ids"):
                if name in choice:
                    whole[name] = whole.get(name, []) + choice[name]
            for name, values in (choice["logprobs"] or {}).items():
                whole["logprobs"] = whole["logprobs"] or {}
                old = whole["logprobs"].get(name)
                whole["logprobs"][name] = values if old is None else old + values
            whole["finish_reason"], whole["stop_reason"] = (
                choice["finish_reason"],
                choice["stop_reason"],
            )
    return choices


async def check_streamed(server: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    whole = (await server.post(path, **body)).json()
    events = await server.stream(path, **body, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    usage = events[-2]["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole["usage"][name]
    streamed = joined(events[:-1])
    assert len(streamed) == len(whole["choices"])
    for choice in whole["choices"]:
        expected = {k: v for k, v in choice.items() if k not in ("index", "message")}
        if "message" in choice:
            expected["text"] = choice["message"]["content"]
        assert streamed[choice["index"]] == expected
        pieces = [event["choices"][0] for event in events[:-2]]
        if "\ufffd" not in expected["text"]:
            mine = [piece for piece in pieces if piece["index"] == choice["index"]]
            assert all("\ufffd" not in piece.get("text", "") for piece in mine)
    return whole


async def test_streamed_completions_equal_whole_ones(embedded_dir: Path) -> None:
    """For 150 random prompts and parameter sets, joined pieces are the unstreamed answer: text,
    tokens, log-probabilities, ends and counts."""
    rng = random.Random(0)
    ends = set()
    async with served(embedded_dir) as server:
        for _ in range(150):
            body = random_body(rng) | {"prompt": random_prompt(rng), "echo": rng.random() < 0.2}
            whole = await check_streamed(server, "/v1/completions", body)
            ends |= {choice["finish_reason"] for choice in whole["choices"]}
        await server.until_idle()
    assert ends == {"stop", "length"}


async def test_streamed_chats_equal_whole_ones(embedded_dir: Path) -> None:
    """The same for 50 random chats; the first piece of each choice is its role, alone."""
    rng = random.Random(1)
    async with served(embedded_dir) as server:
        for _ in range(50):
            body = random_body(rng)
            if "logprobs" in body:
                body |= {"top_logprobs": body["logprobs"], "logprobs": True}
            body["messages"] = [{"role": "user", "content": f"Say {rng.random()}"}]
            await check_streamed(server, "/v1/chat/completions", body)
            seen = set()
            for data in await server.stream("/v1/chat/completions", **body):
                choice = data["choices"][0] if isinstance(data, dict) else None
                if choice is not None and choice["index"] not in seen:
                    assert choice["delta"] == {"role": "assistant", "content": ""}
                    seen.add(choice["index"])
            assert seen == set(range(body["n"]))


async def test_echo_and_scores(embedded_dir: Path) -> None:
    """`echo` puts the prompt before the text, with its log-probabilities; with max_tokens 0 it is
    all there is."""
    async with served(embedded_dir) as server:
        body = {"prompt": "Hello there", "echo": True, "logprobs": 1, "max_tokens": 0}
        scored = (await server.post("/v1/completions", **body)).json()
        (choice,) = scored["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Hello there", "length")
        assert choice["logprobs"]["tokens"] == ["Hello", " there"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert choice["logprobs"]["text_offset"] == [0, 5]
        assert scored["usage"]["completion_tokens"] == 0
        more = (await server.post("/v1/completions", **body | {"max_tokens": 2})).json()
        assert more["choices"][0]["text"].startswith("Hello there")
        assert len(more["choices"][0]["logprobs"]["tokens"]) == 4
        ids = body | {"prompt": scored["choices"][0]["logprobs"] and [19556, 665]}
        assert (await server.post("/v1/completions", **ids)).json()["choices"][0]["text"]


async def test_log_probabilities_of_a_chat(embedded_dir: Path) -> None:
    """Each token with its bytes and as many likely ones as asked; of the prompt, by id."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 3,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
        "prompt_logprobs": 0,
        "return_token_ids": True,
    }
    async with served(embedded_dir) as server:
        answer = (await server.post("/v1/chat/completions", **body)).json()
        tokenizer = server.engine.tokenizer
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 3
    for token_id, scored in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert bytes(scored["bytes"]) == tokenizer.token_bytes(token_id)
        assert scored["token"] == tokenizer.token_text(token_id)
        assert [top["logprob"] for top in scored["top_logprobs"]] == [-0.5, -1.5]
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    assert answer["prompt_logprobs"][0] is None
    (entry,) = answer["prompt_logprobs"][1].values()
    assert set(entry) == {"logprob", "rank", "decoded_token"}


async def test_what_the_server_adds(embedded_dir: Path) -> None:
    """Usage in every stream, cached tokens, latencies: as the config says."""
    config = ServerConfig(enable_force_include_usage=True, enable_per_request_metrics=True)
    body: dict[str, Any] = {"prompt": [7] * 100, "max_tokens": 4, "ignore_eos": True}
    async with served(embedded_dir, config) as server:
        first = (await server.post("/v1/completions", **body)).json()
        assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert first["metrics"]["time_to_first_token_ms"] > 0
        events = await server.stream("/v1/completions", **body)
        assert events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}
        counting = {"stream_options": {"continuous_usage_stats": True}}
        counts = [e["usage"]["completion_tokens"] for e in (
            await server.stream("/v1/completions", **body, **counting))[:-2]]
        assert counts == [1, 2, 3, 4]
    plain = ServerConfig(enable_prompt_tokens_details=False)
    async with served(embedded_dir, plain) as server:
        answer = (await server.post("/v1/completions", **body)).json()
        assert answer["usage"]["prompt_tokens_details"] is None
        assert "metrics" not in answer


async def test_a_request_that_fails_says_so(embedded_dir: Path) -> None:
    """When the model's numbers fail it alone: 500, or an error event in a stream that has begun."""
    async with served(embedded_dir) as server:
        server.executor.model.fails = lambda tokens: len(tokens) >= 5
        body = {"prompt": [1, 2, 3], "max_tokens": 9, "ignore_eos": True}
        response = await server.post("/v1/completions", **body)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "InternalServerError"
        events = await server.stream("/v1/completions", **body)
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == 500
        assert events[0]["choices"][0]["text"]


async def test_a_deadline_ends_an_answer(embedded_dir: Path) -> None:
    """`timeout_s` ends an answer with "abort", and what there is of it is sent."""
    async with served(embedded_dir) as server:
        body = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True, "timeout_s": 0.2}
        choice = (await server.post("/v1/completions", **body)).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "timeout")
        assert choice["text"]
        with pytest.raises(AssertionError, match="timeout_s must be a positive number"):
            await server.stream("/v1/completions", **body | {"timeout_s": -1})
