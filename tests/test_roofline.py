from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch

from minivllm.architectures import LayerConfig, ModelConfig
from minivllm.batch import NewRow, SampleInputs, Start, StepPlan, StepResult
from minivllm.channel import frame
from minivllm.config import EngineConfig
from minivllm.roofline import Machine, ModelCosts, Step, measure, read_steps, roofline, show

MODEL = ModelConfig(
    hidden_size=8,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=100,
    max_position_embeddings=64,
    layers=(LayerConfig(0, None),) * 3,
    dtype="float32",
    tie_word_embeddings=True,
    activation="silu",
    rms_norm_eps=1e-5,
    attention_scale=0.5,
)
COSTS = ModelCosts.of(MODEL, weight_bytes=4, kv_bytes=2)


def step(num_rows: int, num_tokens: int, seconds: float = 1.0) -> Step:
    return Step(0, num_rows, num_tokens, num_rows, 10 * num_rows, 10 * num_tokens, seconds)


def test_costs_are_of_the_shape() -> None:
    """Weights, keys and values, and attention, counted by hand for a small model."""
    # q: 8x8, k and v: 8x4 each, o: 8x8, gate, up and down: 8x16 each
    assert COSTS.num_layer_weights == 3 * (64 + 64 + 64 + 3 * 128)
    assert COSTS.num_head_weights == 800
    assert COSTS.num_kv_values == 3 * 2 * 4
    assert COSTS.num_attention_flops == 3 * 2 * (2 * 4 + 2 * 4)
    one = Step(0, num_rows=2, num_tokens=5, num_sampled=1, num_keys=9, num_pairs=20, seconds=1.0)
    assert COSTS.bytes_of(one) == (1728 + 800) * 4 + (9 + 5) * 24 * 2
    assert COSTS.flops_of(one) == 2 * 5 * 1728 + 2 * 1 * 800 + 20 * 96


def test_the_head_is_read_where_it_is_used() -> None:
    """A step that samples nothing neither reads nor multiplies the head."""
    one = Step(0, num_rows=1, num_tokens=1, num_sampled=0, num_keys=0, num_pairs=0, seconds=1.0)
    assert COSTS.bytes_of(one) == 1728 * 4 + 24 * 2
    assert COSTS.flops_of(one) == 2 * 1728


def test_the_larger_limit_holds() -> None:
    """A step takes what its bytes take, or its FLOPs, whichever is more."""
    one = step(1, 1)
    moved, flops = COSTS.bytes_of(one), COSTS.flops_of(one)
    assert Machine(moved, 2 * flops).limit_s(COSTS, one) == 1.0
    assert Machine(moved * 4, flops / 3).limit_s(COSTS, one) == 3.0


def test_shares() -> None:
    """Decoding steps and others are told apart, each against its own limit."""
    machine = Machine(COSTS.bytes_of(step(2, 2)), 1e12)
    steps = [step(2, 2, 2.0), step(2, 2, 4.0), step(2, 2, 4.0), step(2, 9, 3.0)]
    report = roofline(COSTS, machine, steps)
    assert report["decode"]["share_of_limit"] == pytest.approx(0.25)
    assert report["decode"]["num_steps"] == 3
    assert report["decode"]["limit_ms"] == pytest.approx(1000)
    assert report["prefill"]["num_tokens"] == 9
    assert "decode: 3 steps of 2 rows and 2 tokens" in show(report)
    assert "(memory): 25% of the limit" in show(report)
    assert "prefill" not in roofline(COSTS, machine, steps[:1])


def test_steps_of_a_recording(tmp_path: Path) -> None:
    """Contexts follow from the plans: a chunk, the rest, a decode, and a row that resumes."""
    _, config = EngineConfig(max_model_len=64).resolve(model_path="x", model_max_len=64)
    inputs = SampleInputs(seed=0, prompt_len=6)

    def new(row: int, num_computed: int) -> NewRow:
        return NewRow(row, array("i", range(6)).tobytes(), num_computed, 1, inputs)

    plans = [
        ([new(0, 0)], [0], [4], [False]),
        ([new(1, 3)], [0, 1], [2, 3], [True, True]),
        ([], [0, 1], [1, 1], [True, True]),
        ([new(0, 5)], [0], [2], [True]),
    ]
    data = frame(Start(0, config, 0.0))
    for number, (new_rows, rows, lens, samples) in enumerate(plans):
        data += frame(StepPlan(0, number, new_rows, rows, lens, samples, []))
        if number:  # results come a step later
            data += frame(StepResult(0, number - 1, [], [], [], {}, number / 10))
    file = tmp_path / "record"
    file.write_bytes(data)
    assert read_steps(file) == [  # the last has no result
        Step(0, 1, 4, 0, num_keys=4, num_pairs=1 + 2 + 3 + 4, seconds=0.1),
        Step(1, 2, 5, 2, num_keys=6 + 6, num_pairs=5 + 6 + 4 + 5 + 6, seconds=0.2),
        Step(2, 2, 2, 2, num_keys=7 + 7, num_pairs=7 + 7, seconds=0.3),
    ]


def test_a_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are the sizes over the best time of a few."""
    monkeypatch.setattr("minivllm.roofline._COPY_BYTES", 4000)
    monkeypatch.setattr("minivllm.roofline._GEMM_SIZE", 10)
    monkeypatch.setattr("minivllm.roofline._best_s", lambda device, work: (work(), 0.5)[1])
    machine = measure(torch.device("cpu"), torch.float32)
    assert machine == Machine(16_000.0, 4000.0)
