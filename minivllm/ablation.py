"""Each mechanism with and without: what batching, paging, chunks and the cache are worth.

    batching   requests join and leave at every step, or all wait for the longest of a batch
    memory     KV in blocks, or one piece of memory per request, as long as it may become
    chunks     a long prompt into running streams, whole or in chunks: their gaps, its own wait
    prefix     the first token of a prompt whose beginning is known, or is not
    batch      time of a step and tokens per second by rows, beside the machine's limit

Every experiment gives a `Table`; the command prints it and draws it. Sizes suit a CPU and a small
model: a run takes minutes. Invariants: what is compared gets the same prompts and makes the same
tokens; an engine is warm when its time is taken. Times of steps are the worker's own (`roofline`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minivllm import plots
from minivllm.bench import model_costs
from minivllm.blocks import BlockManager
from minivllm.config import EngineConfig
from minivllm.engine import AsyncEngine
from minivllm.request import SamplingParams
from minivllm.roofline import Machine, read_steps
from minivllm.workloads import Dataset, Work

_VOCABULARY = range(100, 20_000)  # ids that any model has
Row = Sequence[str | float]


@dataclass(frozen=True, slots=True)
class Table:
    """What one experiment found."""

    name: str
    question: str
    columns: Sequence[str]
    rows: Sequence[Row]
    draw: Callable[[Path], Path]
    """Write its picture to a file."""

    def show(self) -> str:
        """The table as text.

        >>> print(Table("a", "Is it?", ("rows", "ms"), [(1, 2.5)], lambda file: file).show())
        Is it?
          rows      ms
             1     2.5
        """
        cells = [list(self.columns)] + [[_cell(value) for value in row] for row in self.rows]
        widths = [max(6, *(len(row[i]) for row in cells)) for i in range(len(self.columns))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in cells
        ]
        return "\n".join([self.question, *lines])


def _cell(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}"


async def _ask(
    engine: AsyncEngine, work: Work, times_s: list[float] | None = None, salt: str = ""
) -> float:
    """Seconds that a request took from now; `times_s` gets the moment of each token."""
    params = SamplingParams(temperature=0, max_tokens=work.output_len, ignore_eos=True)
    prompt = {"prompt_token_ids": work.prompt, "cache_salt": salt}
    start_s = time.perf_counter()
    async for _ in engine.generate(prompt, params):
        if times_s is not None:
            times_s.append(time.perf_counter())
    return time.perf_counter() - start_s


async def _warm_up(engine: AsyncEngine) -> None:
    works = Dataset(num_prompts=4, input_len=64, output_len=4).read(_VOCABULARY, str.split, seed=99)
    await asyncio.gather(*(_ask(engine, work, salt="warm-up") for work in works))


# ---- batching --------------------------------------------------------------------------------


async def batching(
    config: EngineConfig, *, num_requests: int = 32, num_seats: int = 8, shrink: int = 4
) -> Table:
    """ShareGPT's lengths, divided by `shrink`, on a few seats, filled at every step or in turns."""
    dataset = Dataset(dataset_name="sharegpt_synthetic", num_prompts=num_requests)
    works = [
        Work(work.prompt[: work.prompt_len // shrink + 1], 0, work.output_len // shrink + 1)
        for work in dataset.read(_VOCABULARY, str.split)
    ]
    num_tokens = sum(work.output_len for work in works)
    rows: list[Row] = []
    for name, num_together in (("static", num_seats), ("continuous", num_requests)):
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, "record")
            chosen = dataclasses.replace(config, max_num_seqs=num_seats, record=str(file))
            async with AsyncEngine(chosen) as engine:
                await _warm_up(engine)
                start_s, ends_s = time.perf_counter(), []
                for turn in range(0, num_requests, num_together):
                    begun_s = time.perf_counter() - start_s
                    asked = [_ask(engine, one) for one in works[turn : turn + num_together]]
                    ends_s += [begun_s + took_s for took_s in await asyncio.gather(*asked)]
                seconds = time.perf_counter() - start_s
            mean_rows = statistics.mean(step.num_rows for step in read_steps(file))
        rows.append((name, num_tokens / seconds, statistics.mean(ends_s), mean_rows))

    def draw(file: Path) -> Path:
        return plots.bars(
            file,
            [
                (title, unit, {str(row[0]): float(row[idx]) for row in rows})
                for idx, title, unit in (
                    (1, "Throughput", "output tokens per second"),
                    (2, "Mean time to a whole answer", "seconds"),
                    (3, f"Seats in use, of {num_seats}", "rows per step"),
                )
            ],
        )

    return Table(
        "batching",
        f"What is it worth that a free seat is filled at once? {num_requests} requests of mixed"
        f" lengths on {num_seats} seats:",
        ("batching", "tokens/s", "mean latency s", "rows/step"),
        rows,
        draw,
    )


# ---- memory ----------------------------------------------------------------------------------


def memory(*, num_requests: int = 2000, max_model_len: int = 2048, seed: int = 0) -> Table:
    """KV memory that holds no token, for requests of ShareGPT's lengths at a moment of their lives;
    no model is run."""
    dataset = Dataset(dataset_name="sharegpt_synthetic", num_prompts=num_requests)
    works = dataset.read(_VOCABULARY, str.split, seed)
    lived = np.random.default_rng(seed).random(num_requests)
    blocks = BlockManager(2, 16, enable_prefix_caching=False)
    final = np.array([work.prompt_len + work.output_len for work in works])
    prompts = np.array([work.prompt_len for work in works])
    now = prompts + np.ceil(lived * (final - prompts)).astype(int)
    held = {
        "whole context": np.full(num_requests, max_model_len),
        "power of two": 2 ** np.ceil(np.log2(final)).astype(int),
        "exact length": final,  # which nobody knows before the end
        "paged": np.array([blocks.num_blocks_for(int(size)) for size in now]) * blocks.block_size,
    }
    rows: list[Row] = [
        (name, 100 * (1 - now.sum() / sizes.sum()), 100_000 / sizes.mean())
        for name, sizes in held.items()
    ]

    def draw(file: Path) -> Path:
        return plots.bars(
            file,
            [
                ("KV memory without a token in it", "%", {str(r[0]): float(r[1]) for r in rows}),
                (
                    "Requests in 100,000 tokens of KV",
                    "requests",
                    {str(r[0]): float(r[2]) for r in rows},
                ),
            ],
        )

    return Table(
        "memory",
        f"How much KV memory is wasted? Contiguous pieces, reserved at the start for a context of"
        f" {max_model_len}, for the next power of two or for the length to come; or blocks of 16:",
        ("reserved", "wasted %", "requests that fit"),
        rows,
        draw,
    )


# ---- chunks ----------------------------------------------------------------------------------


async def chunks(
    config: EngineConfig,
    *,
    num_streams: int = 8,
    output_len: int = 64,
    prompt_len: int = 1500,
    sizes: Sequence[int] = (0, 512, 256, 64),
    wait_s: float = 0.5,
) -> Table:
    """Running streams, and a long prompt that comes into them."""
    streams = Dataset(num_prompts=num_streams, input_len=32, output_len=output_len)
    works = streams.read(_VOCABULARY, str.split)
    (long,) = Dataset(num_prompts=1, input_len=prompt_len, output_len=1).read(
        _VOCABULARY, str.split, seed=1
    )
    rows: list[Row] = []
    for size in sizes:
        async with AsyncEngine(
            dataclasses.replace(config, long_prefill_token_threshold=size)
        ) as engine:
            await _warm_up(engine)
            times_s: list[list[float]] = [[] for _ in works]
            async with asyncio.TaskGroup() as group:
                for work, own in zip(works, times_s, strict=True):
                    group.create_task(_ask(engine, work, own))
                await asyncio.sleep(wait_s)  # so that all of them decode
                ttft = group.create_task(_ask(engine, long))
        gaps_ms = np.concatenate([np.diff(own) for own in times_s]) * 1000
        name = f"{size} tokens" if size else "whole"
        rows.append((name, *np.percentile(gaps_ms, [50, 99]), gaps_ms.max(), ttft.result()))

    def draw(file: Path) -> Path:
        return plots.bars(
            file,
            [
                (title, unit, {str(row[0]): float(row[idx]) for row in rows})
                for idx, title, unit in (
                    (3, "Longest gap of a running stream", "ms"),
                    (4, f"First token of {prompt_len} tokens", "seconds"),
                )
            ],
        )

    return Table(
        "chunks",
        f"What does a prompt of {prompt_len} tokens do to {num_streams} running streams?",
        ("chunks", "p50 ITL ms", "p99 ITL ms", "max ITL ms", "its TTFT s"),
        rows,
        draw,
    )


# ---- prefix ----------------------------------------------------------------------------------


async def prefix(
    config: EngineConfig, *, lens: Sequence[int] = (64, 256, 512, 1024), num_rounds: int = 3
) -> Table:
    """The first token of a prompt of two parts, when the first part is in the cache or not."""
    rows: list[Row] = []
    async with AsyncEngine(dataclasses.replace(config, enable_prefix_caching=True)) as engine:
        await _warm_up(engine)
        for length in lens:
            times_s: list[tuple[float, float]] = []
            for number in range(num_rounds + 1):
                pair = Dataset(
                    num_prompts=2, input_len=16, output_len=1, random_prefix_len=length
                ).read(_VOCABULARY, str.split, seed=number)
                salt = f"{length} {number}"
                cold_s, warm_s = [await _ask(engine, work, salt=salt) for work in pair]
                times_s.append((cold_s, warm_s))
            cold_s, warm_s = (statistics.median(side) for side in zip(*times_s[1:], strict=True))
            rows.append((length, cold_s * 1000, warm_s * 1000, cold_s / warm_s))

    def draw(file: Path) -> Path:
        named = {
            "computed": [float(row[1]) for row in rows],
            "in the cache": [float(row[2]) for row in rows],
        }
        return plots.lines(
            file, [("Time to first token", "ms", named)], lens, "tokens of the prefix", xlog=True
        )

    return Table(
        "prefix",
        "What is a prefix in the cache worth? Time to first token, with 16 tokens behind it:",
        ("prefix", "computed ms", "cached ms", "ratio"),
        rows,
        draw,
    )


# ---- batch -----------------------------------------------------------------------------------


async def batch(
    config: EngineConfig,
    machine: Machine,
    *,
    sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    input_len: int = 32,
    output_len: int = 24,
) -> Table:
    """Decoding steps by their rows, beside what the machine allows."""
    costs = model_costs(config)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "record")
        async with AsyncEngine(dataclasses.replace(config, record=str(file))) as engine:
            await _warm_up(engine)
            for size in sizes:
                works = Dataset(num_prompts=size, input_len=input_len, output_len=output_len)
                asked = works.read(_VOCABULARY, str.split, seed=size)
                await asyncio.gather(*(_ask(engine, work) for work in asked))
        steps = [step for step in read_steps(file) if step.is_decode]
    rows: list[Row] = []
    for size in sizes:
        own = [step for step in steps if step.num_rows == size]
        step_s = statistics.median(step.seconds for step in own)
        limit_s = statistics.median(machine.limit_s(costs, step) for step in own)
        rows.append((size, step_s * 1000, limit_s * 1000, size / step_s, size / limit_s))

    def draw(file: Path) -> Path:
        def column(idx: int) -> list[float]:
            return [float(row[idx]) for row in rows]

        return plots.lines(
            file,
            [
                ("Inter-token latency", "ms", {"measured": column(1), "limit": column(2)}),
                (
                    "Throughput",
                    "output tokens per second",
                    {"measured": column(3), "limit": column(4)},
                ),
            ],
            sizes,
            "rows of the batch",
            xlog=True,
        )

    return Table(
        "batch",
        f"What does a larger batch cost, and bring? The machine copies"
        f" {machine.bytes_per_s / 1e9:.1f} GB/s and multiplies {machine.flops_per_s / 1e9:.0f}"
        " GFLOP/s:",
        ("rows", "step ms", "limit ms", "tokens/s", "limit tokens/s"),
        rows,
        draw,
    )


async def run(name: str, config: EngineConfig, measure: Callable[[EngineConfig], Machine]) -> Table:
    """One experiment by its name; `measure` is called where the machine's limits are needed."""
    if name == "memory":
        return memory()
    if name == "batch":
        return await batch(config, await asyncio.to_thread(measure, config))
    experiments: dict[str, Callable[[EngineConfig], Awaitable[Table]]] = {
        "batching": batching,
        "chunks": chunks,
        "prefix": prefix,
    }
    return await experiments[name](config)
