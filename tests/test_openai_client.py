"""The official client against the real model: what it sends is taken, what it gets it can read."""

from __future__ import annotations

import openai
import pytest
from fakes import FakeExecutor
from serving import listening, served

from minivllm.config import EngineConfig, ServerConfig
from minivllm.engine import AsyncEngine

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)


async def test_the_official_client() -> None:
    """Completions, chats and responses, whole and streamed, with log-probabilities, n, stop, seed
    and usage."""
    config = EngineConfig(max_model_len=512, kv_cache_memory_bytes=2**27)
    async with (
        AsyncEngine(config) as engine,
        listening(engine, ServerConfig(api_key=["key"])) as url,
        client_of(url) as client,
    ):
        (model,) = [model.id async for model in client.models.list()]
        await check_completions(client, model)
        await check_chats(client, model)
        await check_responses(client, model)


async def check_completions(client: openai.AsyncOpenAI, model: str) -> None:
    made = await client.completions.create(
        model=model, prompt="The capital of France is", max_tokens=4, temperature=0, logprobs=2
    )
    (choice,) = made.choices
    assert "Paris" in choice.text
    assert choice.finish_reason == "length"
    assert "".join(choice.logprobs.tokens) == choice.text
    assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs)
    assert made.usage.completion_tokens == 4
    seeded = {"prompt": ["One", "Two"], "n": 2, "seed": 7, "max_tokens": 5, "temperature": 1}
    first = await client.completions.create(model=model, **seeded)
    again = await client.completions.create(model=model, **seeded)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 4
    stream = await client.completions.create(model=model, stream=True, **seeded)
    streamed = ["", "", "", ""]
    async for chunk in stream:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


async def check_chats(client: openai.AsyncOpenAI, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12}
    made = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    (choice,) = made.choices
    assert "Paris" in choice.message.content
    tokens = choice.logprobs.content  # the one that ended the answer among them
    spelled = b"".join(bytes(token.bytes) for token in tokens).decode()
    assert spelled.removesuffix("<|im_end|>") == choice.message.content
    assert all(len(token.top_logprobs) == 2 for token in tokens)
    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content for chunk in chunks[:-1])
    assert text == choice.message.content
    assert chunks[-1].usage.completion_tokens == made.usage.completion_tokens
    stopped = await client.chat.completions.create(**asked, stop=["Paris"])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == text.partition("Paris")[0]


async def check_responses(client: openai.AsyncOpenAI, model: str) -> None:
    asked = {"model": model, "temperature": 0, "max_output_tokens": 12}
    made = await client.responses.create(input=MESSAGES, **asked)
    assert "Paris" in made.output_text
    assert made.usage.output_tokens <= 12
    more = await client.responses.create(input="Why?", previous_response_id=made.id, **asked)
    assert more.usage.input_tokens > made.usage.total_tokens
    assert (await client.responses.retrieve(made.id)).output_text == made.output_text
    text = ""
    async with client.responses.stream(input=MESSAGES, **asked) as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
        final = await stream.get_final_response()
    assert text == final.output_text == made.output_text


async def test_errors_are_the_clients_own(embedded_dir) -> None:
    """Each status becomes the exception that the client has for it."""
    config = ServerConfig(api_key=["key"])
    async with (
        served(embedded_dir, config, FakeExecutor(), max_num_queued_reqs=1) as server,
        client_of(server.url) as client,
    ):
        (model,) = [model.id async for model in client.models.list()]
        asked = {"model": model, "prompt": "x", "max_tokens": 5000}
        asked["extra_body"] = {"ignore_eos": True}
        with pytest.raises(openai.BadRequestError, match="temperature must be") as caught:
            await client.completions.create(**asked, temperature=5)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(**asked | {"model": "other"})
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="other").models.list()
        stream = await client.completions.create(**asked, stream=True)
        with pytest.raises(openai.InternalServerError, match="max_num_queued_reqs") as busy:
            await client.completions.create(**asked)
        assert busy.value.status_code == 503
        await stream.close()
        server.executor.model.fails = lambda tokens: True
        await server.until_idle()
        with pytest.raises(openai.InternalServerError) as failed:
            await client.completions.create(**asked)
        assert failed.value.status_code == 500
