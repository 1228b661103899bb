from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest

from minivllm.errors import RequestError
from minivllm.request import Logprob, Request, RequestState, SamplingParams

INF, NAN = math.inf, math.nan

BAD: dict[str, list[Any]] = {
    "temperature": [-0.1, -1, 2.01, INF, -INF, NAN, 10**400, "1", None, True],
    "top_p": [0, 0.0, -0.1, 1.01, INF, NAN, "0.9", None, True],
    "top_k": [-2, 1.5, 40.0, "40", None, True],
    "min_p": [-0.01, 1.01, INF, NAN, "0", None, False],
    "seed": [-2, 2**64, 1.0, "1", True],
    "max_tokens": [0, -1, 1.5, 16.0, "16", True],
    "stop": ["", [""], ["a", ""], [1], ["a", None], [["a"]], {1: 2}, [b"a"]],
    "ignore_eos": [None, 0, 1, "yes"],
    "logprobs": [-1, 1.0, "5", True],
}
BAD_STOP_TOKEN_IDS: list[Any] = [[-1], [1, -1], [1.0], ["1"], [None], [True], ["12"], "7"]

GOOD: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 1e-9, 1, 2, 2.0],
    "top_p": [1e-9, 0.5, 1, 1.0],
    "top_k": [-1, 0, 1, 10**6],
    "min_p": [0, 0.0, 1, 1.0],
    "seed": [None, -1, 0, 2**64 - 1],
    "max_tokens": [None, 1, 10**9],
    "stop": [None, [], (), "a", ["a"], ["a", "bc"], ("a", "\n")],
    "stop_token_ids": [None, [], (), [0], [1, 2], (0, 10**6)],
    "ignore_eos": [True, False],
    "logprobs": [None, 0, 1, 20],
}


def each(table: dict[str, list[Any]]) -> pytest.MarkDecorator:
    def label(value: Any) -> str:
        return repr(value) if len(repr(value)) < 30 else "huge"

    cases = [pytest.param(n, v, id=f"{n}={label(v)}") for n, vs in table.items() for v in vs]
    return pytest.mark.parametrize(("name", "value"), cases)


def shown(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 200 else repr(value)[:200] + "..."


@each(BAD)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    """A value out of range raises an error that carries and shows the field and the value."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name
    assert caught.value.value is value
    assert str(caught.value).startswith(f"{name} must be ")
    assert str(caught.value).endswith(f", got {shown(value)}")


@pytest.mark.parametrize("value", BAD_STOP_TOKEN_IDS, ids=repr)
def test_a_bad_stop_token_is_refused_by_name(value: Any) -> None:
    """A stop token that is no id, or a list that is none, is named with its field."""
    with pytest.raises(RequestError, match=r"^stop_token_ids must be .*, got ") as caught:
        SamplingParams(stop_token_ids=value)
    assert caught.value.field == "stop_token_ids"
    assert repr(caught.value.value) in repr(value)


@each(GOOD)
def test_an_edge_value_is_taken(name: str, value: Any) -> None:
    """The last values inside each range are kept as they were given."""
    assert getattr(SamplingParams(**{name: value}), name) is value


def test_every_parameter_is_in_the_tables() -> None:
    """A new sampling parameter has to be given its bad and good values here."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == BAD.keys() | {"stop_token_ids"} == GOOD.keys()


def test_params_cannot_be_changed() -> None:
    """Sampling parameters can be shared between requests: nothing writes to them."""
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(None, []), ([], []), ("ab", ["ab"]), (["a", "b"], ["a", "b"]), (("a",), ["a"])],
)
def test_stop_strings_is_always_a_list(stop: Any, expected: list[str]) -> None:
    """One string counts as a list of one, not as its characters."""
    assert SamplingParams(stop=stop).stop_strings == expected


def make_request(**changes: Any) -> Request:
    fields: dict[str, Any] = {
        "id": "r",
        "number": 0,
        "prompt": "abc",
        "prompt_token_ids": [1, 2, 3],
        "params": SamplingParams(),
        "seed": 0,
        "max_len": 19,
        "stop_ids": frozenset(),
    }
    return Request(**fields | changes)


def test_a_new_request_has_no_output() -> None:
    """Before the first step the output is empty and unfinished, and logprobs are not there."""
    output = make_request().output()
    answer = output.outputs[0]
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "abc", [1, 2, 3])
    assert not output.finished
    assert not answer.finished()
    assert (answer.index, answer.text, answer.token_ids) == (0, "", [])
    assert (answer.logprobs, answer.cumulative_logprob) == (None, None)
    assert (answer.finish_reason, answer.stop_reason) == (None, None)


def extend(request: Request, token_id: int, text: str, logprob: float) -> None:
    request.tokens.append(token_id)
    request.text += text
    request.stats.first_token_s = request.stats.first_token_s or 1.0
    request.stats.last_token_s = float(len(request.tokens))
    assert request.logprobs is not None
    likeliest = {9: Logprob(-0.1, 1, "z")}
    request.logprobs.append({token_id: Logprob(logprob, 2, text)} | likeliest)


def test_an_output_does_not_change_afterwards() -> None:
    """What a caller was given stays as it was, field by field, while the request goes on."""
    request = make_request(params=SamplingParams(logprobs=1))
    extend(request, 7, "x", -0.5)
    output = request.output()
    before = copy.deepcopy(output)
    extend(request, 8, "y", -0.25)
    request.stats.num_preemptions += 1
    request.stats.num_cached_tokens = 2
    request.stats.finished_s = 9.0
    request.finish_reason = "stop"
    request.stop_reason = "y"
    request.state = RequestState.FINISHED
    assert output == before


def test_a_caller_cannot_reach_the_request_through_its_output() -> None:
    """Writing into an output's lists changes neither the request nor the next output."""
    request = make_request(params=SamplingParams(logprobs=1))
    extend(request, 7, "x", -0.5)
    expected = copy.deepcopy(request.output())
    output = request.output()
    output.prompt_token_ids.clear()
    output.outputs[0].token_ids.clear()
    assert output.outputs[0].logprobs is not None
    output.outputs[0].logprobs.clear()
    output.metrics.num_preemptions = 5
    output.outputs.clear()
    assert request.output() == expected


def test_outputs_grow_and_end() -> None:
    """A finished request's output carries all tokens, text, the reasons and summed logprobs."""
    request = make_request(params=SamplingParams(logprobs=1))
    extend(request, 7, "x", -0.5)
    extend(request, 8, "y", -0.25)
    request.finish_reason, request.stop_reason = "stop", 8
    request.state = RequestState.FINISHED
    output = request.output()
    answer = output.outputs[0]
    assert output.finished
    assert answer.finished()
    assert (answer.token_ids, answer.text) == ([7, 8], "xy")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", 8)
    assert answer.cumulative_logprob == -0.75
    assert answer.logprobs is not None
    assert [sorted(entry) for entry in answer.logprobs] == [[7, 9], [8, 9]]


def test_logprobs_that_were_asked_for_are_a_list_from_the_start() -> None:
    """With `logprobs` set, an output without tokens has an empty list and the sum 0."""
    answer = make_request(params=SamplingParams(logprobs=0)).output().outputs[0]
    assert (answer.logprobs, answer.cumulative_logprob) == ([], 0)
