from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest

from minivllm.batch import SampleInputs
from minivllm.errors import RequestError
from minivllm.request import (
    FlatLogprobs,
    Logprob,
    OutputStream,
    RepetitionDetection,
    Request,
    RequestOutput,
    RequestOutputKind,
    RequestState,
    SamplingParams,
)

INF, NAN = math.inf, math.nan
DELTA = RequestOutputKind.DELTA

IDS_BAD: list[Any] = [[-1], [1, -1], [1.0], ["1"], [None], [True], ["12"], "7", 7]

BAD: dict[str, list[Any]] = {
    "n": [0, -1, 1.0, "1", None, True, 16385],
    "temperature": [-0.1, -1, 2.01, INF, -INF, NAN, 10**400, "1", None, True],
    "top_p": [0, 0.0, -0.1, 1.01, INF, NAN, "0.9", None, True],
    "top_k": [-2, 1.5, 40.0, "40", None, True],
    "min_p": [-0.01, 1.01, INF, NAN, "0", None, False],
    "presence_penalty": [-2.01, 2.01, NAN, INF, "1", None, True],
    "frequency_penalty": [-2.01, 2.01, NAN, INF, "1", None, True],
    "repetition_penalty": [0, 0.0, -1, NAN, INF, "1", None, True],
    "logit_bias": [[1], "1", {"1": 1.0}, {-1: 1.0}, {1.0: 1.0}, {1: NAN}, {1: INF}, {1: "1"}],
    "allowed_token_ids": [[], *IDS_BAD],
    "bad_words": ["a", [""], ["a", ""], [1], [None], 5],
    "seed": [-2, 2**64, 1.0, "1", True],
    "max_tokens": [0, -1, 1.5, 16.0, "16", True],
    "min_tokens": [-1, 17, 1.0, "1", None, True],
    "stop": ["", [""], ["a", ""], [1], ["a", None], [["a"]], {1: 2}, [b"a"], 5],
    "stop_regex": ["", [""], [1], 5],
    "stop_token_ids": IDS_BAD,
    "include_stop_str_in_output": [None, 0, 1, "yes"],
    "ignore_eos": [None, 0, 1, "yes"],
    "repetition_detection": [True, 5, {"max_pattern_size": 3}],
    "logprobs": [-2, 1.0, "5", True],
    "prompt_logprobs": [-2, 1.0, "5", True],
    "logprob_token_ids": [[], list(range(129)), *IDS_BAD],
    "flat_logprobs": [None, 0, 1, "yes"],
    "detokenize": [None, 0, 1, "yes"],
    "skip_special_tokens": [None, 0, 1, "yes"],
    "spaces_between_special_tokens": [None, 0, 1, "yes"],
    "truncate_prompt_tokens": [0, -2, 1.0, "1", True],
    "skip_reading_prefix_cache": ["yes", 2],
    "thinking_token_budget": [-2, 1.0, "1", True],
    "trace_decode_token_ids": IDS_BAD,
    "logits_processors": [5, [5], [None], "f"],
    "output_kind": [0, "DELTA", True, None],
    "stream_interval": [0, -1, 1.5, "1", True],
}


def identity(_token_ids: Any, logits: Any) -> Any:
    return logits


GOOD: dict[str, list[Any]] = {
    "n": [1, 2, 16384],
    "temperature": [0, 0.0, 1e-9, 1, 2, 2.0],
    "top_p": [1e-9, 0.5, 1, 1.0],
    "top_k": [-1, 0, 1, 10**6],
    "min_p": [0, 0.0, 1, 1.0],
    "presence_penalty": [-2, 0, 2],
    "frequency_penalty": [-2, 0, 2],
    "repetition_penalty": [1e-9, 1, 100],
    "logit_bias": [None, {}, {0: -100.0, 5: 1}],
    "allowed_token_ids": [None, [0], (0, 1)],
    "bad_words": [None, [], ["a"], (" a", "b")],
    "seed": [None, -1, 0, 2**64 - 1],
    "max_tokens": [None, 1, 10**9],
    "min_tokens": [0, 16],
    "stop": [None, [], (), "a", ["a"], ["a", "bc"], ("a", "\n")],
    "stop_regex": [None, [], "a+", ["a", "b$"]],
    "stop_token_ids": [None, [], (), [0], [1, 2], (0, 10**6)],
    "include_stop_str_in_output": [True, False],
    "ignore_eos": [True, False],
    "repetition_detection": [None, RepetitionDetection(max_pattern_size=3)],
    "logprobs": [None, -1, 0, 1, 20],
    "prompt_logprobs": [None, -1, 0, 1, 20],
    "logprob_token_ids": [None, [0], list(range(128))],
    "flat_logprobs": [True, False],
    "detokenize": [True, False],
    "skip_special_tokens": [True, False],
    "spaces_between_special_tokens": [True, False],
    "truncate_prompt_tokens": [None, -1, 1, 10**6],
    "skip_reading_prefix_cache": [None, True, False],
    "thinking_token_budget": [None, -1, 0, 100],
    "trace_decode_token_ids": [None, [], [1, 2]],
    "logits_processors": [None, [], [identity]],
    "output_kind": list(RequestOutputKind),
    "stream_interval": [None, 1, 100],
}


def each(table: dict[str, list[Any]]) -> pytest.MarkDecorator:
    def label(value: Any) -> str:
        return repr(value)[:28]

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
    shown_value = caught.value.value  # of a list, the part that is wrong
    assert shown_value is value or repr(shown_value) in repr(value)
    assert str(caught.value).startswith(f"{name} must ")
    assert str(caught.value).endswith(f", got {shown(shown_value)}")


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"n": 2, "temperature": 0}, "n"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logprob_token_ids": [1, 2], "logprobs": 1}, "logprobs"),
        ({"detokenize": False, "stop": "a"}, "detokenize"),
        ({"detokenize": False, "stop_regex": "a"}, "detokenize"),
    ],
)
def test_values_that_contradict_each_other_are_refused(values: dict[str, Any], field: str) -> None:
    """Two values that are fine alone name the field that has to give way."""
    with pytest.raises(RequestError, match=rf"^{field} must be "):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_pattern_size": 0}, "max_pattern_size"),
        ({"max_pattern_size": 2, "min_pattern_size": 3}, "min_pattern_size"),
        ({"max_pattern_size": 2, "min_pattern_size": 0}, "min_pattern_size"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count"),
    ],
)
def test_a_bad_repetition_rule_is_refused(values: dict[str, int], field: str) -> None:
    """Sizes and counts that could not describe a repetition are refused by name."""
    with pytest.raises(RequestError, match=rf"^{field} must be "):
        RepetitionDetection(**values)


@each(GOOD)
def test_an_edge_value_is_taken(name: str, value: Any) -> None:
    """The last values inside each range are kept as they were given."""
    assert getattr(SamplingParams(**{name: value}), name) is value


def test_every_parameter_is_in_the_tables() -> None:
    """A new sampling parameter has to be given its bad and good values here."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == BAD.keys() == GOOD.keys()


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
        "group_id": "r",
        "number": 0,
        "prompt": "abc",
        "prompt_token_ids": [1, 2, 3],
        "params": SamplingParams(),
        "inputs": SampleInputs(seed=0),
        "max_len": 19,
        "stop_ids": frozenset(),
    }
    return Request(**fields | changes)


LOGPROBS = SampleInputs(seed=0, num_logprobs=1)


def look(request: Request) -> RequestOutput:
    """What somebody sees who looks at it for the first time."""
    output = OutputStream(request.id, [request]).look()
    assert output is not None
    return output


def test_a_new_request_has_no_output() -> None:
    """Before the first step the output is empty and unfinished, and logprobs are not there."""
    request = make_request()
    assert OutputStream("r", [request]).look() is None
    answer = request.completion()
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
    request.cumulative_logprob += logprob


def test_an_output_does_not_change_afterwards() -> None:
    """What a caller was given stays as it was, field by field, while the request goes on."""
    request = make_request(inputs=LOGPROBS)
    extend(request, 7, "x", -0.5)
    output = look(request)
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
    request = make_request(inputs=LOGPROBS)
    extend(request, 7, "x", -0.5)
    expected = copy.deepcopy(look(request))
    output = look(request)
    output.prompt_token_ids.clear()
    output.outputs[0].token_ids.clear()
    assert isinstance(output.outputs[0].logprobs, list)
    output.outputs[0].logprobs.clear()
    output.metrics.num_preemptions = 5
    output.outputs.clear()
    assert look(request) == expected


def test_outputs_grow_and_end() -> None:
    """A finished request's output carries all tokens, text, the reasons and summed logprobs."""
    request = make_request(inputs=LOGPROBS)
    extend(request, 7, "x", -0.5)
    extend(request, 8, "y", -0.25)
    request.finish_reason, request.stop_reason = "stop", 8
    request.state = RequestState.FINISHED
    output = look(request)
    answer = output.outputs[0]
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "abc", [1, 2, 3])
    assert output.finished
    assert answer.finished()
    assert (answer.token_ids, answer.text) == ([7, 8], "xy")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", 8)
    assert answer.cumulative_logprob == -0.75
    assert answer.logprobs is not None
    assert [sorted(entry or {}) for entry in answer.logprobs] == [[7, 9], [8, 9]]


def test_logprobs_that_were_asked_for_are_a_list_from_the_start() -> None:
    """With `logprobs` set, an output without tokens has an empty list and the sum 0."""
    answer = make_request(inputs=SampleInputs(seed=0, num_logprobs=0)).completion()
    assert (answer.logprobs, answer.cumulative_logprob) == ([], 0)


# ---- streams of outputs ----


def finish(request: Request) -> None:
    request.finish_reason = "length"
    request.state = RequestState.FINISHED


def test_a_delta_shows_what_is_new_and_the_joined_deltas_are_everything() -> None:
    """Each look at a DELTA stream has the text, tokens and logprobs since the last, once."""
    request = make_request(inputs=LOGPROBS, params=SamplingParams(output_kind=DELTA))
    stream = OutputStream("r", [request])
    texts, tokens, logprobs = "", [], []
    for number in range(6):
        extend(request, number, f"<{number}>", -0.5)
        if number % 2:
            continue  # a slow reader misses every second moment, and nothing of what came
        if number == 4:
            finish(request)
        output = stream.look()
        assert output is not None
        assert stream.look() is None
        texts += output.outputs[0].text
        tokens += output.outputs[0].token_ids
        logprobs += output.outputs[0].logprobs or []
        if number == 4:
            break
    assert output.finished
    assert (texts, tokens) == ("<0><1><2><3><4>", [0, 1, 2, 3, 4])
    assert logprobs == request.logprobs


def test_a_final_only_stream_shows_the_end_and_nothing_else() -> None:
    """FINAL_ONLY has one look, when every answer has ended."""
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    first, second = make_request(params=params), make_request(params=params)
    stream = OutputStream("r", [first, second])
    extend_plain(first, 7)
    assert stream.look() is None
    finish(first)
    assert stream.look() is None
    finish(second)
    output = stream.look()
    assert output is not None
    assert output.finished
    assert len(output.outputs) == 2
    assert stream.look() is None


def test_stream_interval_waits_for_tokens_but_not_for_the_first_or_the_end() -> None:
    """Looks come at the first token, then every `stream_interval` tokens, and at the end."""
    request = make_request(params=SamplingParams(stream_interval=3))
    stream = OutputStream("r", [request])
    seen = []
    for number in range(6):
        extend_plain(request, number)
        if number == 5:
            finish(request)
        if stream.look() is not None:
            seen.append(number + 1)
    assert seen == [1, 4, 6]


def test_samples_of_one_prompt_are_shown_together() -> None:
    """Cumulative looks hold all answers, deltas those that changed; finished when all are."""
    for kind, expected in ((RequestOutputKind.CUMULATIVE, [0, 1]), (DELTA, [1])):
        requests = [
            make_request(
                params=SamplingParams(output_kind=kind), inputs=SampleInputs(seed=0, child=child)
            )
            for child in range(2)
        ]
        stream = OutputStream("r", requests)
        finish(requests[0])
        assert stream.look() is not None
        extend_plain(requests[1], 5)
        output = stream.look()
        assert output is not None
        assert [answer.index for answer in output.outputs] == expected
        assert not output.finished
        finish(requests[1])
        last = stream.look()
        assert last is not None
        assert last.finished


def extend_plain(request: Request, token_id: int) -> None:
    request.tokens.append(token_id)


def test_flat_logprobs_read_like_a_list_of_dicts() -> None:
    """Indices, slices, length and iteration give the dicts that were appended."""
    entries = [
        None,
        {7: Logprob(-0.5, 1, "a"), 9: Logprob(-1.0, None, "b")},
        {8: Logprob(-0.25, 3, "c")},
    ]
    flat = FlatLogprobs(entries)
    assert list(flat) == entries
    assert [flat[i] for i in (-1, 0, 1)] == [entries[2], None, entries[1]]
    assert list(flat[1:]) == entries[1:]
    assert len(flat) == 3
    with pytest.raises(IndexError):
        flat[3]
