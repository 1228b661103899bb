from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeExecutor
from serving import _tokenizer_of_all

from minivllm import ablation, bench_cli
from minivllm.ablation import Table
from minivllm.batch import Ready
from minivllm.config import EngineConfig, WorkerConfig
from minivllm.engine import AsyncEngine
from minivllm.roofline import Machine


class TimedExecutor(FakeExecutor):
    """Whose steps say that they took a millisecond a token."""

    async def start(self, generation: int, config: WorkerConfig, deliver: Callable) -> Ready:
        def stamped(event: Any) -> None:
            seconds = sum(self.plans[event.step].query_lens) / 1000
            fields = {name: getattr(event, name) for name in event.__struct_fields__}
            deliver(type(event)(**fields | {"seconds": seconds}))

        return await super().start(generation, config, stamped)


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> list[TimedExecutor]:
    """The workers of every engine that an experiment starts."""
    made: list[TimedExecutor] = []

    def engine(config: EngineConfig) -> AsyncEngine:
        made.append(TimedExecutor())
        return AsyncEngine(config, executor=made[-1])

    monkeypatch.setattr(ablation, "AsyncEngine", engine)
    return made


@pytest.fixture
def config(embedded_dir: Path) -> EngineConfig:
    return EngineConfig(model=str(embedded_dir), enable_prefix_caching=False)


def drawn(table: Table, directory: Path) -> bool:
    return table.draw(directory / "a.png").stat().st_size > 0


async def test_batching(
    config: EngineConfig, executors: list[TimedExecutor], tmp_path: Path
) -> None:
    """Both ways make the same tokens; static batches leave seats empty that the other fills."""
    async with _tokenizer_of_all():
        table = await ablation.batching(config, num_requests=12, num_seats=3, shrink=20)
    made = [sum(sum(plan.samples) for plan in executor.plans) for executor in executors]
    assert made[0] == made[1]
    (static, *_, static_rows), (continuous, *_, continuous_rows) = table.rows
    assert (static, continuous) == ("static", "continuous")
    assert static_rows < continuous_rows <= 3
    assert drawn(table, tmp_path)


def test_memory(tmp_path: Path) -> None:
    """Blocks waste half a block a request; a reservation for the worst case wastes most of it."""
    table = ablation.memory(num_requests=3000)
    wasted = {str(name): float(share) for name, share, _ in table.rows}
    assert list(wasted) == ["whole context", "power of two", "exact length", "paged"]
    assert wasted["whole context"] > wasted["power of two"] > wasted["exact length"]
    assert 0 < wasted["paged"] < 5
    fits = [float(row[2]) for row in table.rows]
    assert fits == sorted(fits)
    assert fits[0] == pytest.approx(100_000 / 2048)
    assert drawn(table, tmp_path)


async def test_chunks(config: EngineConfig, executors: list[TimedExecutor], tmp_path: Path) -> None:
    """The long prompt comes in chunks of the given size beside running streams, or whole."""
    async with _tokenizer_of_all():
        table = await ablation.chunks(
            config, num_streams=2, output_len=900, prompt_len=300, sizes=(0, 64), wait_s=0.05
        )
    largest = [max(max(plan.query_lens) for plan in executor.plans) for executor in executors]
    assert largest == [300, 64]
    assert [row[0] for row in table.rows] == ["whole", "64 tokens"]
    assert all(0 < row[1] <= row[2] <= row[3] for row in table.rows)
    assert drawn(table, tmp_path)


async def test_prefix(config: EngineConfig, executors: list[TimedExecutor], tmp_path: Path) -> None:
    """The first of a pair computes the prefix, the second finds it; no other pair does."""
    async with _tokenizer_of_all():
        table = await ablation.prefix(config, lens=(32, 64), num_rounds=2)
    lens = [sum(plan.query_lens) for plan in executors[0].plans if plan.new_rows]
    computed = [size for size in lens if size < 256]  # not the warm-up's
    assert computed == [48, 16] * 3 + [80, 16] * 3
    assert [row[0] for row in table.rows] == [32, 64]
    assert drawn(table, tmp_path)


async def test_batch(config: EngineConfig, executors: list[TimedExecutor], tmp_path: Path) -> None:
    """A row of the table for each size, by the worker's own times, beside the limit."""
    async with _tokenizer_of_all():
        machine = Machine(1e12, 1e10)
        table = await ablation.batch(config, machine, sizes=(1, 4), output_len=5)
    (one, one_ms, one_limit, one_rate, _), (four, four_ms, four_limit, four_rate, _) = table.rows
    assert (one, one_ms, one_rate) == (1, 1.0, 1000.0)
    assert (four, four_ms, four_rate) == (4, 4.0, 1000.0)
    # bound by FLOPs, 2 for each of 134.5 million weights, and attention
    assert four_limit == pytest.approx(4 * one_limit, rel=0.01)
    assert one_limit == pytest.approx(2 * 134.5e6 / 1e10 * 1000, rel=0.02)
    assert drawn(table, tmp_path)


async def test_every_experiment_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name of the command is an experiment; limits are measured where they are needed."""
    measured: list[EngineConfig] = []

    async def found(config: EngineConfig, *args: Any) -> Any:
        return dataclasses.astuple(args[0]) if args else "found"

    def measure(config: EngineConfig) -> Machine:
        measured.append(config)
        return Machine(1.0, 2.0)

    monkeypatch.setattr(ablation, "memory", lambda: "found")
    for name in bench_cli.EXPERIMENTS:
        if name != "memory":
            monkeypatch.setattr(ablation, name, found)
    config = EngineConfig()
    results = {name: await ablation.run(name, config, measure) for name in bench_cli.EXPERIMENTS}
    assert results.pop("batch") == (1.0, 2.0)
    assert set(results.values()) == {"found"}
    assert measured == [config]
