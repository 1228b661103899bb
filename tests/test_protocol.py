from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from minivllm.errors import RequestError
from minivllm.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    chat_options,
    decode,
    sampling_params,
)
from minivllm.request import RequestOutputKind, SamplingParams

MODEL = SamplingParams(temperature=0.6, top_p=0.9, max_tokens=33)


def completion(**fields: Any) -> CompletionRequest:
    return decode(json.dumps({"prompt": "x"} | fields).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "x"}]
    return decode(json.dumps({"messages": messages} | fields).encode(), ChatRequest)


def params(request: CompletionRequest | ChatRequest) -> SamplingParams:
    return sampling_params(request, MODEL, 1)


SHARED: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "presence_penalty": 1.5,
    "frequency_penalty": -1.5,
    "repetition_penalty": 1.25,
    "allowed_token_ids": [1, 2],
    "bad_words": ["a"],
    "seed": 5,
    "max_tokens": 9,
    "min_tokens": 3,
    "stop": ["b"],
    "stop_regex": "c+",
    "stop_token_ids": [4],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "prompt_logprobs": 2,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 6,
    "thinking_token_budget": 8,
    "stream_interval": 2,
}


@pytest.mark.parametrize("make", [completion, chat])
def test_every_sampling_field_arrives(make: Any) -> None:
    """Each field of a body is the parameter of the same name; null is absent."""
    made = params(make(**SHARED))
    assert {name: getattr(made, name) for name in SHARED} == SHARED
    nothing = params(make(**dict.fromkeys(SHARED)))
    assert nothing == params(make())


def test_what_a_body_leaves_out_is_the_models() -> None:
    """Without fields, the model's defaults; a chat may fill the context."""
    final = dataclasses.replace(
        MODEL, output_kind=RequestOutputKind.FINAL_ONLY, stream_interval=1
    )
    assert params(completion()) == final
    assert params(chat()) == dataclasses.replace(final, max_tokens=None)
    assert params(completion(stream=True)).output_kind is RequestOutputKind.DELTA


def test_fields_that_mean_something_else_here() -> None:
    """logit_bias has its keys as text and is bounded; logprobs, echo and max_tokens have OpenAI's
    meanings."""
    bias = {"5": 1.5, "6": -1e9, "7": 1e9}
    assert params(completion(logit_bias=bias)).logit_bias == {5: 1.5, 6: -100, 7: 100}
    assert params(completion(logprobs=3)).logprobs == 3
    assert params(completion(logprobs=3, echo=True)).prompt_logprobs == 3
    assert params(completion(max_tokens=0, echo=True)).max_tokens == 1
    assert params(chat(logprobs=True)).logprobs == 0
    assert params(chat(logprobs=True, top_logprobs=4)).logprobs == 4
    assert params(chat(max_completion_tokens=4)).max_tokens == 4
    assert params(completion(logprob_token_ids=[1, 2], logprobs=0)).logprobs is None
    detection = params(completion(repetition_detection={"max_pattern_size": 4}))
    assert detection.repetition_detection is not None
    assert detection.repetition_detection.max_pattern_size == 4


def test_prompts_in_all_their_forms() -> None:
    """Text, token ids, and lists of either."""
    for prompt, prompts in (
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ):
        assert completion(prompt=prompt).prompts() == prompts


def test_inert_fields_are_taken() -> None:
    """What clients always send, and means nothing here, is no error."""
    inert = {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}
    assert params(completion(**inert, safety_identifier="x")) == params(completion())
    nothing = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    plain = {"response_format": {"type": "text"}}
    assert params(chat(**inert, **nothing, **plain)) == params(chat())


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (completion, {"prompt": None}, "prompt must be"),
        (completion, {"prompt": []}, "prompt must be text"),
        (completion, {"prompt": ["a", 1]}, "not mixed"),
        (completion, {"prompt": ["a"] * 600, "n": 2}, "n times the number of prompts"),
        (completion, {"max_tokens": "5"}, r"max_tokens must be `int \| null`.*got '5'"),
        (completion, {"max_tokens": 0}, "max_tokens must be an integer of at least 1"),
        (completion, {"stop": ["a"] * 257}, "stop must have at most 256"),
        (completion, {"stop": ["a", 5]}, r"stop\[1\] must be `str`"),
        (completion, {"best_of": 2}, "best_of is not a field, or not supported, got 2"),
        (completion, {"guided_json": {}}, "guided_json is not a field"),
        (completion, {"structured_outputs": {}}, "structured_outputs is not a field"),
        (completion, {"response_format": {"type": "json_object"}}, "response_format must"),
        (completion, {"stream_options": {}}, "stream_options can only be set where stream"),
        (completion, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs cannot be streamed"),
        (completion, {"logit_bias": {"a": 1}}, "logit_bias must have token ids as keys, got 'a'"),
        (completion, {"request_id": "a\nb"}, "request_id must be"),
        (completion, {"cache_salt": ""}, "cache_salt must be"),
        (completion, {"temperature": 2.5}, "temperature must be between 0 and 2, got 2.5"),
        (completion, {"repetition_detection": {"max_pattern_size": 0}}, "max_pattern_size must"),
        (chat, {"messages": "a"}, "messages must be `array`"),
        (chat, {"messages": [5]}, r"messages\[0\] must be `object`"),
        (chat, {"tools": [{"type": "function"}]}, "tools must be left out"),
        (chat, {"tool_choice": "required"}, "tool_choice must be none or auto"),
        (chat, {"top_logprobs": 2}, "top_logprobs can only be set where logprobs is true"),
        (chat, {"messages": []}, "messages must have at least one message"),
        (chat, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens must equal"),
        (chat, {"max_completion_tokens": 0}, "max_completion_tokens must be"),
        (chat, {"n": 2000}, "n times the number of prompts"),
    ],
)
def test_what_is_wrong_is_named(make: Any, fields: dict[str, Any], message: str) -> None:
    """A refusal names the field and the value."""

    def use() -> None:
        request = make(**fields)
        if isinstance(request, CompletionRequest):
            request.prompts()
        params(request)

    with pytest.raises(RequestError, match=message):
        use()


def test_a_missing_field_is_named() -> None:
    """A body without what it must have says so."""
    with pytest.raises(RequestError, match="tokens must be given"):
        decode(b"{}", DetokenizeRequest)
    with pytest.raises(RequestError, match="body must be `object`"):
        decode(b"[]", DetokenizeRequest)


def test_templates_of_requests_run_only_where_trusted() -> None:
    """A request cannot bring a program, not even among the template's variables."""
    assert chat_options(chat(chat_template="{{ 1 }}"), True)["chat_template"] == "{{ 1 }}"
    with pytest.raises(RequestError, match="chat_template must be left out"):
        chat_options(chat(chat_template="{{ 1 }}"), False)
    with pytest.raises(RequestError, match="chat_template_kwargs must not set these"):
        chat_options(chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}), False)
    kwargs = {"enable_thinking": False}
    options = chat_options(chat(chat_template_kwargs=kwargs, reasoning_effort="low"), False)
    assert (options["enable_thinking"], options["reasoning_effort"]) == (False, "low")
    request = TokenizeRequest(messages=[], continue_final_message=True)
    assert chat_options(request, False)["add_generation_prompt"] is False
