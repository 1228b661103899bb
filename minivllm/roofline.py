"""How near a run came to what its machine can do: bytes and FLOPs of each step against the limits.

    recording ──> [Step, ...]       rows, tokens, keys that they attend over, seconds
    config.json ──> ModelCosts      bytes and FLOPs of such a step, from the model's shape
    measure() ──> Machine           bytes/s of a copy, FLOP/s of a matrix product, right here

A step cannot take less than max(bytes / bandwidth, FLOPs / GEMM rate). What is counted: every
weight is read once, each row's keys and values are read once and its new ones written, and a matrix
product of [T, n] by [n, m] is 2 T n m FLOPs. Activations are left out: they stay in caches.

Invariants: nothing is fitted, so a share above 1 means that the machine was slower when its limits
were measured. Source of the model: Williams et al., Roofline, CACM 2009.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minivllm.architectures import ModelConfig
from minivllm.batch import Start, StepPlan, StepResult, decode_record
from minivllm.channel import FrameReader

_COPY_BYTES = 256 << 20  # far beyond any cache
_GEMM_SIZE = 1536
_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Step:
    """One step as it was run."""

    step: int
    num_rows: int
    num_tokens: int
    num_sampled: int
    num_keys: int
    """Keys read: each row's context and its new tokens."""
    num_pairs: int
    """Pairs of a query and a key that it sees."""
    seconds: float

    @property
    def is_decode(self) -> bool:
        """Whether a token was sampled after each one computed: no part of a prompt is in it."""
        return self.num_tokens == self.num_sampled


def read_steps(file: Path) -> list[Step]:
    """The steps of a recording (`EngineConfig.record`) that have a result, in order."""
    steps: list[Step] = []
    planned: dict[int, Step] = {}
    ends: dict[int, int] = {}  # row -> tokens computed when its steps so far are done
    for payload in FrameReader().feed(file.read_bytes()):
        message = decode_record(payload)
        if isinstance(message, Start):
            planned, ends = {}, {}
        elif isinstance(message, StepPlan):
            planned[message.step] = _planned(message, ends)
        elif isinstance(message, StepResult):
            step = planned.pop(message.step)
            steps.append(_with_seconds(step, message.seconds))
    return steps


def _planned(plan: StepPlan, ends: dict[int, int]) -> Step:
    for new in plan.new_rows:
        ends[new.row] = new.num_computed
    num_keys = num_pairs = 0
    for row, query_len in zip(plan.rows, plan.query_lens, strict=True):
        context_len = ends[row]
        ends[row] = context_len + query_len
        num_keys += context_len + query_len
        num_pairs += query_len * context_len + query_len * (query_len + 1) // 2
    num_tokens, num_sampled = sum(plan.query_lens), sum(plan.samples)
    return Step(plan.step, len(plan.rows), num_tokens, num_sampled, num_keys, num_pairs, 0.0)


def _with_seconds(step: Step, seconds: float) -> Step:
    counts = (step.num_rows, step.num_tokens, step.num_sampled, step.num_keys, step.num_pairs)
    return Step(step.step, *counts, seconds)


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a step of one model reads and computes. Sliding windows are counted as full ones."""

    num_layer_weights: int
    """Of all matrices that every token goes through."""
    num_head_weights: int
    """Of the head, which sampled rows alone go through."""
    num_kv_values: int
    """Keys and values of one token, all layers."""
    num_attention_flops: int
    """Of one pair of a query and a key, all layers and heads."""
    weight_bytes: float
    """Of one weight, as it is stored."""
    kv_bytes: float

    @classmethod
    def of(cls, config: ModelConfig, *, weight_bytes: float, kv_bytes: float) -> ModelCosts:
        """The costs of a model with these dimensions."""
        E, D = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * D, config.num_kv_heads * D
        layer = E * (q_size + 2 * kv_size) + q_size * E + 3 * E * config.intermediate_size
        return cls(
            num_layer_weights=layer * config.num_layers,
            num_head_weights=E * config.vocab_size,
            num_kv_values=2 * kv_size * config.num_layers,
            num_attention_flops=4 * q_size * config.num_layers,  # q·k and p·v, 2 FLOPs each
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
        )

    def bytes_of(self, step: Step) -> float:
        """Bytes that the step must move."""
        num_weights = self.num_layer_weights + (self.num_head_weights if step.num_sampled else 0)
        num_values = (step.num_keys + step.num_tokens) * self.num_kv_values
        return num_weights * self.weight_bytes + num_values * self.kv_bytes

    def flops_of(self, step: Step) -> float:
        """Floating-point operations that the step must do."""
        return (
            2 * step.num_tokens * self.num_layer_weights
            + 2 * step.num_sampled * self.num_head_weights
            + step.num_pairs * self.num_attention_flops
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """What one machine can do, measured."""

    bytes_per_s: float
    flops_per_s: float

    def limit_s(self, costs: ModelCosts, step: Step) -> float:
        """Seconds that the step takes at least."""
        moving_s = costs.bytes_of(step) / self.bytes_per_s
        return max(moving_s, costs.flops_of(step) / self.flops_per_s)


def measure(device: torch.device, dtype: torch.dtype) -> Machine:
    """Time a copy, whose bytes are read and written, and a matrix product; the best of a few."""
    source = torch.ones(_COPY_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy_s = _best_s(device, lambda: target.copy_(source))
    a = torch.randn(_GEMM_SIZE, _GEMM_SIZE, device=device).to(dtype)
    gemm_s = _best_s(device, lambda: a @ a)
    return Machine(2 * _COPY_BYTES / copy_s, 2 * _GEMM_SIZE**3 / gemm_s)


def _best_s(device: torch.device, work: Any) -> float:
    times = []
    for _ in range(_ROUNDS):
        start_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start_s)
    return min(times[1:])  # the first touches the pages


def roofline(costs: ModelCosts, machine: Machine, steps: Sequence[Step]) -> dict[str, Any]:
    """Bytes, FLOPs, limits and the share of the limit reached, by kind of step."""
    kinds = {
        "decode": [step for step in steps if step.is_decode],
        "prefill": [step for step in steps if not step.is_decode],
    }
    report: dict[str, Any] = {
        "machine_bytes_per_s": machine.bytes_per_s,
        "machine_flops_per_s": machine.flops_per_s,
    }
    for kind, chosen in kinds.items():
        if chosen:
            report[kind] = _of_kind(costs, machine, chosen)
    return report


def _of_kind(costs: ModelCosts, machine: Machine, steps: Sequence[Step]) -> dict[str, float]:
    """Medians over the steps, each against its own limit."""
    moved = statistics.median(costs.bytes_of(step) for step in steps)
    flops = statistics.median(costs.flops_of(step) for step in steps)
    limits_s = [machine.limit_s(costs, step) for step in steps]
    shares = [limit_s / step.seconds for limit_s, step in zip(limits_s, steps, strict=True)]
    return {
        "num_steps": len(steps),
        "num_rows": statistics.median(step.num_rows for step in steps),
        "num_tokens": statistics.median(step.num_tokens for step in steps),
        "bytes_per_step": moved,
        "flops_per_step": flops,
        "step_ms": statistics.median(step.seconds for step in steps) * 1000,
        "limit_ms": statistics.median(limits_s) * 1000,
        "share_of_limit": statistics.median(shares),
    }


def show(report: Mapping[str, Any]) -> str:
    """The roofline in a few lines."""
    bandwidth, rate = report["machine_bytes_per_s"] / 1e9, report["machine_flops_per_s"] / 1e9
    lines = [f"Machine: copies {bandwidth:.1f} GB/s, multiplies {rate:.0f} GFLOP/s"]
    for kind in ("decode", "prefill"):
        if kind not in report:
            continue
        figures = report[kind]
        bound = (
            "memory"
            if figures["bytes_per_step"] / bandwidth / 1e9 > figures["flops_per_step"] / rate / 1e9
            else "compute"
        )
        lines.append(
            f"{kind}: {figures['num_steps']} steps of {figures['num_rows']:g} rows and"
            f" {figures['num_tokens']:g} tokens, {figures['bytes_per_step'] / 1e6:.0f} MB,"
            f" {figures['flops_per_step'] / 1e9:.1f} GFLOP; {figures['step_ms']:.1f} ms, at best"
            f" {figures['limit_ms']:.1f} ms ({bound}): {figures['share_of_limit']:.0%} of the limit"
        )
    return "\n".join(lines)
