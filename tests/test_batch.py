from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm import batch
from minivllm.batch import (
    Beat,
    Done,
    Failed,
    LoadWeights,
    NewRow,
    Profile,
    Ready,
    RowLogprobs,
    SampleInputs,
    Sleep,
    Start,
    StepPlan,
    StepResult,
    Stop,
    Thinking,
    WakeUp,
    decode_host_message,
    decode_record,
    decode_worker_message,
    encode,
)
from minivllm.config import WorkerConfig

CONFIG = WorkerConfig(
    model_path="/models/ä",
    dtype="auto",
    block_size=16,
    max_model_len=2048,
    max_num_batched_tokens=512,
    max_num_seqs=8,
    kv_cache_memory_bytes=None,
    num_blocks=100,
    logprobs_mode="raw_logprobs",
    device="cpu",
    load_format="auto",
    gpu_memory_utilization=0.92,
    kv_cache_dtype="auto",
    enforce_eager=False,
    cudagraph_capture_sizes=(1, 2),
    torch_compile=False,
)
INPUTS = SampleInputs(
    seed=2**64 - 1,
    child=3,
    logit_bias=[(5, -1.5)],
    bad_words=[[(0, 7, 2), (2, 8, 3)]],
    thinking=Thinking(9, [1], [2, 3]),
    processors=[],
)
ROW = NewRow(3, b"\x01\0\0\0\xff\xff\0\0", 16, 2, INPUTS)
PLAN = StepPlan(2, 7, [ROW], [3, 0], [2, 1], [True, False], [(3, [9, 10]), (0, [])], [3, 0])
RESULT = StepResult(
    2,
    7,
    [[5], [6, 7]],
    [[RowLogprobs([5, 1], [-0.5, -1e9], 2)], []],
    [(1, [RowLogprobs([9], [-2.0], 1)])],
    {1: "not finite"},
    0.25,
    [0, 3],
)
HOST: list[Any] = [
    Start(1, CONFIG, 0.5),
    PLAN,
    LoadWeights("/models/ä"),
    Sleep(2),
    WakeUp(),
    Profile(None),
    Stop(),
]
WORKER: list[Any] = [
    Ready(1, 100, 49152, {"load": 0.5, "total": 1.25}, {"weights": 2**40}),
    RESULT,
    Failed("ModelError", "a tensor is missing: ü\n"),
    Beat(),
    Done(("WeightsError", "lacks a tensor")),
]


def name(message: Any) -> str:
    return type(message).__name__


@pytest.mark.parametrize("message", HOST, ids=name)
def test_a_host_message_comes_back_equal(message: Any) -> None:
    """What the host sends is what the worker reads, of the same type and with the same values."""
    again = decode_host_message(encode(message))
    assert type(again) is type(message)
    assert again == message


@pytest.mark.parametrize("message", WORKER, ids=name)
def test_a_worker_message_comes_back_equal(message: Any) -> None:
    """What the worker sends is what the host reads, of the same type and with the same values."""
    again = decode_worker_message(encode(message))
    assert type(again) is type(message)
    assert again == message


def test_every_message_is_tried() -> None:
    """A new message of the module has to be added to the lists above."""
    structs = {
        value
        for value in vars(batch).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    }
    nested = {NewRow, RowLogprobs, SampleInputs, Thinking}
    assert structs == {type(message) for message in HOST + WORKER} | nested


INTS = st.integers(0, 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
ROWS = st.builds(
    NewRow,
    row=INTS,
    token_ids=st.binary(),
    num_computed=INTS,
    num_scored=INTS,
    inputs=st.builds(
        SampleInputs,
        seed=st.integers(0, 2**64 - 1),
        temperature=FLOATS,
        top_k=st.integers(-1, 2**31),
        logit_bias=st.lists(st.tuples(INTS, FLOATS), max_size=3),
        end_ids=st.lists(INTS, max_size=3),
        processors=st.just([]),
    ),
)
PLANS = st.builds(
    StepPlan,
    generation=INTS,
    step=INTS,
    new_rows=st.lists(ROWS, max_size=3),
    rows=st.lists(INTS),
    query_lens=st.lists(INTS),
    samples=st.lists(st.booleans()),
    new_blocks=st.lists(st.tuples(INTS, st.lists(INTS)), max_size=3),
    num_drafts=st.lists(INTS),
)
LOGPROBS = st.builds(RowLogprobs, st.lists(INTS), st.lists(FLOATS), INTS)
RESULTS = st.builds(
    StepResult,
    generation=INTS,
    step=INTS,
    tokens=st.lists(st.lists(INTS), max_size=3),
    logprobs=st.lists(st.lists(LOGPROBS, max_size=2), max_size=3),
    prompt_logprobs=st.lists(st.tuples(INTS, st.lists(LOGPROBS, max_size=2)), max_size=2),
    failed=st.dictionaries(INTS, st.text(), max_size=2),
    seconds=FLOATS,
    num_drafts=st.lists(INTS),
)


@given(PLANS)
def test_any_plan_comes_back_equal(plan: StepPlan) -> None:
    """Plans of every shape survive the wire and a recording."""
    assert decode_host_message(encode(plan)) == decode_record(encode(plan)) == plan


@given(RESULTS)
def test_any_result_comes_back_equal(result: StepResult) -> None:
    """Results of every shape survive the wire and a recording."""
    assert decode_worker_message(encode(result)) == decode_record(encode(result)) == result


@pytest.mark.parametrize("message", HOST, ids=name)
def test_a_worker_never_sends_what_a_host_does(message: Any) -> None:
    """A host message is refused where a worker's is expected."""
    with pytest.raises(msgspec.ValidationError):
        decode_worker_message(encode(message))


@pytest.mark.parametrize("message", WORKER, ids=name)
def test_a_host_never_sends_what_a_worker_does(message: Any) -> None:
    """A worker message is refused where a host's is expected."""
    with pytest.raises(msgspec.ValidationError):
        decode_host_message(encode(message))


@pytest.mark.parametrize("message", [Ready(1, 2, 3, {}, {}), Beat(), Stop()], ids=name)
def test_a_recording_holds_only_what_replay_needs(message: Any) -> None:
    """Messages that a recording never has are refused when one is read."""
    with pytest.raises(msgspec.ValidationError):
        decode_record(encode(message))


@pytest.mark.parametrize("message", HOST + WORKER, ids=name)
def test_a_message_cut_short_is_refused(message: Any) -> None:
    """No beginning of a message is taken for a message."""
    data = encode(message)
    decode = decode_host_message if message in HOST else decode_worker_message
    for length in range(len(data)):
        with pytest.raises(msgspec.MsgspecError):
            decode(data[:length])


PLAN_PARTS: list[Any] = [1, 2, 7, [], [3], [2], [True], [[3, [9]]]]


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, 99),
        (0, "1"),
        (1, "2"),
        (2, 1.5),
        (3, [[1, 2]]),
        (4, [None]),
        (5, ["2"]),
        (6, [1]),
        (7, [[3]]),
        (7, [[3, 9]]),
    ],
)
def test_a_plan_with_a_part_of_the_wrong_type_is_refused(position: int, value: Any) -> None:
    """Types are checked where a message is read, before anything uses it."""
    parts = PLAN_PARTS.copy()
    assert decode_host_message(msgspec.msgpack.encode(parts)).step == 7
    parts[position] = value
    with pytest.raises(msgspec.ValidationError):
        decode_host_message(msgspec.msgpack.encode(parts))


@given(st.binary())
def test_garbage_is_refused_or_is_a_message(data: bytes) -> None:
    """Random bytes give a message of the right kind or a MsgspecError, nothing else."""
    for decode, kinds in (
        (decode_host_message, (Start, StepPlan, Stop)),
        (decode_worker_message, (Ready, StepResult, Failed, Beat)),
    ):
        try:
            message = decode(data)
        except msgspec.MsgspecError:
            continue
        assert isinstance(message, kinds)


class _Foreign:
    """Something that pickle would take and the wire must not."""


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused(protocol: int) -> None:
    """A pickled message is garbage like any other."""
    data = pickle.dumps({"generation": 1}, protocol)
    for decode in (decode_host_message, decode_worker_message, decode_record):
        with pytest.raises(msgspec.MsgspecError):
            decode(data)


def test_foreign_objects_are_not_encoded() -> None:
    """An object of a class that is no message cannot be sent, not even inside of one."""
    for message in (_Foreign(), Failed("x", _Foreign()), print):  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            encode(message)


@pytest.mark.parametrize("message", HOST + WORKER, ids=name)
def test_messages_are_plain_messagepack(message: Any) -> None:
    """Any MessagePack reader can read a message: lists, maps, numbers, text and bytes only."""
    plain = msgspec.msgpack.decode(encode(message))
    stack = [plain]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            stack += value
        else:
            assert value is None or isinstance(value, int | float | str | bytes)
    assert isinstance(plain[0], int), "the tag comes first"
