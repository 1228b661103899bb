from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from minivllm.batch import NewRow, SampleInputs, StepPlan
from minivllm.config import WorkerConfig
from minivllm.errors import ConfigError, WorkerError
from minivllm.graphs import Captured, Forwarded
from minivllm.model_runner import ModelRunner

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CONFIG = WorkerConfig(
    model_path="",
    dtype="auto",
    block_size=4,
    max_model_len=64,
    max_num_batched_tokens=64,
    max_num_seqs=6,
    kv_cache_memory_bytes=None,
    num_blocks=120,
    logprobs_mode="raw_logprobs",
    device="cpu",
    load_format="dummy",
    gpu_memory_utilization=0.92,
    kv_cache_dtype="auto",
    enforce_eager=False,
    cudagraph_capture_sizes=None,
    torch_compile=False,
)


class Recorder:
    """In place of CUDA graphs: a replay computes again into the tensors of the recording."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.sizes: list[int] = []
        """Rows of each replay."""

    def __call__(self, run: Callable[[], Forwarded]) -> Captured:
        self.num_recorded += 1
        outputs = Forwarded(*(tensor.clone() for tensor in run()))

        def replay() -> None:
            self.sizes.append(len(outputs.finite))
            for old, new in zip(outputs, run(), strict=True):
                old.copy_(new)

        return Captured(outputs, replay)


@pytest.fixture
def make(tmp_path: Path):
    """A runner of a random two-layer model."""
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))

    def make_runner(capture: Recorder | None = None, proposer=None, **changes) -> ModelRunner:
        config = replace(CONFIG, model_path=str(tmp_path), **changes)
        runner = ModelRunner(config, capture=capture, proposer=proposer)
        if capture is not None:
            capture.sizes.clear()
        return runner

    return make_runner


class Driver:
    """Plans steps as a host does: each row has its blocks from the start."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.step = 0
        self.tokens: dict[int, list[int]] = {}
        self.in_flight = []

    def launch(self, new: dict[int, tuple[list[int], SampleInputs]], decoding: list[int]) -> None:
        """Start the rows of `new` with their whole prompts; one token more for `decoding`."""
        rows = [*new, *decoding]
        new_rows, new_blocks = [], []
        for row, (prompt, inputs) in new.items():
            inputs = replace_inputs(inputs, prompt_len=len(prompt))
            token_ids = np.array(prompt, np.int32).tobytes()
            new_rows.append(NewRow(row, token_ids, 0, len(prompt), inputs))
            new_blocks.append((row, list(range(1 + 16 * row, 17 + 16 * row))))
            self.tokens[row] = []
        lens = [len(prompt) for prompt, _ in new.values()] + [1] * len(decoding)
        plan = StepPlan(0, self.step, new_rows, rows, lens, [True] * len(rows), new_blocks)
        self.step += 1
        self.in_flight.append((rows, self.runner.launch(plan)))

    def take(self):
        """The oldest result."""
        rows, pending = self.in_flight.pop(0)
        result = pending.result()
        for row, tokens in zip(rows, result.tokens, strict=True):
            self.tokens[row] += tokens
        return result

    def run(self, requests, num_steps: int, depth: int = 1) -> dict[int, list[int]]:
        """Start one row per step, so that steps mix prompts and decoding, then only decode."""
        for n in range(len(requests) + num_steps):
            new = {n: requests[n]} if n < len(requests) else {}
            self.launch(new, list(range(min(n, len(requests)))))
            if len(self.in_flight) == depth:
                self.take()
        while self.in_flight:
            self.take()
        return self.tokens


def replace_inputs(inputs: SampleInputs, **changes) -> SampleInputs:
    values = {name: getattr(inputs, name) for name in inputs.__struct_fields__}
    return SampleInputs(**values | changes)


def requests(num_rows: int, **inputs):
    """Prompts of different lengths; even rows are greedy."""
    rng = np.random.default_rng(0)
    return [
        (
            rng.integers(0, 101, 3 + 2 * row).tolist(),
            SampleInputs(seed=row, temperature=float(row % 2), **inputs),
        )
        for row in range(num_rows)
    ]


ADJUSTED = [
    {},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"top_p": 0.8, "top_k": 20, "min_p": 0.01},
    {"num_logprobs": 2},
]


@pytest.mark.parametrize("inputs", ADJUSTED, ids=["plain", "penalties", "truncated", "logprobs"])
def test_graphs_and_overlap_change_no_token(make, inputs) -> None:
    """Every combination of graphs and of steps launched ahead gives the same tokens."""
    expected = Driver(make()).run(requests(5, **inputs), 8)
    for recorder, depth in itertools.product((None, Recorder()), (1, 2)):
        found = Driver(make(recorder)).run(requests(5, **inputs), 8, depth)
        assert found == expected
        if recorder is not None:  # row 0 decodes alone in no step; 5 rows in 8, in a graph of 6
            assert recorder.sizes == [6] * 8


def test_a_token_that_the_host_does_not_know_comes_from_the_device(make) -> None:
    """A step launched before the result of the last was asked for continues with its tokens."""
    driver = Driver(make())
    driver.launch({0: requests(1)[0]}, [])
    driver.launch({}, [0])
    known = driver.runner._rows.token_ids[0]
    assert known[3] == known[4] == -1  # on their way
    driver.take()
    assert known[3] == driver.tokens[0][0]
    assert known[4] == -1


def test_a_row_that_starts_anew_waits_for_the_tokens_of_the_old_one(make) -> None:
    """Tokens that arrive late never land in the row's next request."""
    first, second = requests(2)
    alone = Driver(make())
    alone.launch({0: second}, [])
    expected = alone.take().tokens
    driver = Driver(make())
    driver.launch({0: first}, [])
    driver.launch({}, [0])
    driver.launch({0: second}, [])
    assert driver.in_flight[-1][1].result().tokens == expected
    prompt = driver.runner._rows.token_ids[0, : len(second[0])]
    assert prompt.tolist() == second[0]


def test_results_asked_for_out_of_order_are_the_same(make) -> None:
    """Asking for a later step's result settles the earlier ones first."""
    expected = Driver(make()).run(requests(3), 4)
    driver = Driver(make())
    for n in range(7):
        driver.launch({n: requests(3)[n]} if n < 3 else {}, list(range(min(n, 3))))
    driver.in_flight[-1][1].result()
    while driver.in_flight:
        driver.take()
    assert driver.tokens == expected


def test_graphs_are_recorded_at_first_use(make) -> None:
    """At the start only the smallest sizes are there; another is recorded once, when needed."""
    recorder = Recorder()
    runner = make(recorder, max_num_seqs=24, num_blocks=600, max_num_batched_tokens=128)
    assert recorder.num_recorded == 4  # 1, 2, 4, 8
    driver = Driver(runner)
    for row in range(20):
        driver.launch({row: requests(1)[0]}, [])
        driver.take()
    for _ in range(3):
        driver.launch({}, list(range(20)))
        driver.take()
    assert recorder.num_recorded == 5
    assert recorder.sizes == [24] * 3


def test_what_padding_left_behind_does_not_matter(make) -> None:
    """A step in a large graph leaves no trace in a smaller step in the same one."""
    found, reference = Driver(make(Recorder(), cudagraph_capture_sizes=(6,))), Driver(make())
    for driver in (found, reference):
        driver.run(requests(6), 2)
        for num_rows in (6, 2, 5, 1):
            driver.launch({}, list(range(num_rows)))
            driver.take()
    assert found.tokens == reference.tokens
    null = found.runner._block_tables[-1]
    assert not null.any()


@pytest.mark.parametrize(
    ("changes", "num_recorded"),
    [({"enforce_eager": True}, 0), ({"cudagraph_capture_sizes": (2, 4, 999)}, 2)],
)
def test_the_ladder_is_a_setting(make, changes, num_recorded) -> None:
    """No graph with enforce_eager; else those that were asked for and that fit."""
    recorder = Recorder()
    make(recorder, **changes)
    assert recorder.num_recorded == num_recorded


def test_a_prompt_is_scored_in_a_step_of_single_tokens(make) -> None:
    """Prompt log-probabilities of a prompt of two tokens are the same with a graph as without."""
    inputs = SampleInputs(seed=0, num_prompt_logprobs=1, num_logprobs=1)
    results = []
    for recorder in (None, Recorder()):
        driver = Driver(make(recorder))
        new = NewRow(0, np.array([5, 6], np.int32).tobytes(), 0, 1, inputs)
        new = replace_row(new, inputs=replace_inputs(inputs, prompt_len=2))
        first = StepPlan(0, 0, [new], [0], [1], [False], [(0, [1])])
        second = StepPlan(0, 1, [], [0], [1], [True], [])
        results.append([driver.runner.launch(plan).result() for plan in (first, second)])
    for one, other in zip(*results, strict=True):
        assert one.tokens == other.tokens
        assert one.prompt_logprobs == other.prompt_logprobs
        assert one.logprobs == other.logprobs
    assert results[0][0].prompt_logprobs


def replace_row(new: NewRow, **changes) -> NewRow:
    values = {name: getattr(new, name) for name in new.__struct_fields__}
    return NewRow(**values | changes)


def test_steps_come_in_order(make) -> None:
    """A gap in the step numbers is refused."""
    runner = make()
    with pytest.raises(WorkerError, match="step 1 came when 0"):
        runner.launch(StepPlan(0, 1, [], [], [], [], []))


def test_memory_that_holds_no_block_is_refused(make) -> None:
    """The error names the setting, and what a block needs."""
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes.*2 blocks of"):
        make(num_blocks=None, kv_cache_memory_bytes=100)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(make) -> None:
    """cuda without CUDA, and torch.compile on a CPU, are errors that name the setting."""
    with pytest.raises(ConfigError, match="device"):
        make(device="cuda")
    with pytest.raises(ConfigError, match="torch_compile"):
        make(torch_compile=True)


def test_more_new_blocks_than_a_copy_holds(make) -> None:
    """Rows whose long cached prefixes bring more block ids than fit get all of them."""
    runner = make(max_num_batched_tokens=1, max_num_seqs=1)
    prompt = np.arange(62, dtype=np.int32)
    new = NewRow(0, prompt.tobytes(), 61, 62, SampleInputs(seed=0))
    plan = StepPlan(0, 0, [new], [0], [1], [True], [(0, list(range(1, 17)))])
    runner.launch(plan).result()
    assert runner._block_tables[0, :16].tolist() == list(range(1, 17))


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("bfloat16", torch.bfloat16, 0.03),
        ("float16", torch.float16, 0.003),
        ("fp8", torch.float8_e4m3fn, 0.2),
    ],
)
def test_a_smaller_kv_cache_changes_little(make, name, dtype, tolerance) -> None:
    """Keys and values in fewer bits take that much less memory, and log-probabilities stay near."""
    found = []
    for kv_cache_dtype in ("auto", name):
        runner = make(kv_cache_dtype=kv_cache_dtype)
        driver = Driver(runner)
        driver.launch({0: requests(1, num_logprobs=20)[0]}, [])
        ((logprobs,),) = driver.take().logprobs
        found.append(dict(zip(logprobs.token_ids, logprobs.logprobs, strict=True)))
    assert runner._caches[0].k.dtype == dtype
    whole = 120 * 4 * 2 * 2 * 2 * 8  # blocks, block size, layers, k and v, heads, head dim
    assert runner.ready(0).memory_bytes["kv_cache"] == whole * dtype.itemsize
    shared = found[0].keys() & found[1].keys()
    differences = [abs(found[0][token] - found[1][token]) for token in shared]
    assert len(shared) >= 15
    assert 0 < max(differences) < tolerance
