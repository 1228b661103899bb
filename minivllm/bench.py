"""Benchmarks without a server: latency of one batch, throughput of many prompts, time of a start.

    latency      the same batch, again and again             ─┐  each with a recording of its steps,
    throughput   a data set, as fast as the engine takes it  ─┴─> set against the machine's limits
    startup      a process from nothing to its first token, with compiled kernels and without

Results have the keys of vLLM's `bench`; `roofline` and `phase_s` are ours. A recording costs
microseconds a step. Invariants: what is timed is warm; prompts are token ids, so their length is
exact. Over HTTP: `bench_serve`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from minivllm.architectures import model_config
from minivllm.checkpoint import Checkpoint, find_checkpoint
from minivllm.config import EngineConfig
from minivllm.device import pick_device, pick_dtype, pick_kv_dtype
from minivllm.engine import AsyncEngine
from minivllm.errors import ConfigError, WorkerError
from minivllm.llm import LLM
from minivllm.request import RequestOutputKind, SamplingParams
from minivllm.roofline import Machine, ModelCosts, Step, measure, read_steps, roofline
from minivllm.workloads import Work

_PERCENTILES = (10, 25, 50, 75, 90, 99)


def latency(
    config: EngineConfig,
    *,
    input_len: int = 32,
    output_len: int = 128,
    batch_size: int = 8,
    n: int = 1,
    num_iters_warmup: int = 10,
    num_iters: int = 30,
    seed: int = 0,
    profile: str | None = None,
    quiet: bool = True,
) -> tuple[dict[str, Any], list[Step]]:
    """Seconds that one batch takes, again and again; and the steps that were run.

    Raises: `ConfigError`, `ModelError`
    """
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("num_iters", num_iters, 1),
        ("num_iters_warmup", num_iters_warmup, 0),
        ("n", n, 1),
    ):
        if value < least:
            raise ConfigError(name, value, f"must be at least {least}")
    params = SamplingParams(n=n, temperature=float(n > 1), max_tokens=output_len, ignore_eos=True)
    latencies = []
    with _recorded(config) as (recorded, file):
        with LLM(**_fields(recorded)) as llm:
            vocab_size = llm.tokenizer.vocab_size
            rng = np.random.default_rng(seed)
            prompts = rng.integers(0, vocab_size, (batch_size, input_len)).tolist()
            rounds = range(-num_iters_warmup, num_iters)
            for number in tqdm(rounds, desc="Iterations", disable=quiet):
                if number == 0 and profile is not None:
                    llm.start_profile(profile)
                start_s = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                if number >= 0:
                    latencies.append(time.perf_counter() - start_s)
            if profile is not None:
                llm.stop_profile()
        steps = _tail(read_steps(file), num_iters / (num_iters + num_iters_warmup))
    median_s = float(np.median(latencies))
    result = {
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": _percentiles(latencies),
        "output_tokens_per_second": batch_size * n * output_len / median_s,
        "roofline": limits(config, steps),
    }
    return result, steps


def throughput(
    config: EngineConfig, works: Sequence[Work], *, n: int = 1, use_async: bool, quiet: bool = True
) -> tuple[dict[str, Any], list[Step]]:
    """Requests and tokens per second of all the work at once; and the steps that were run.

    Raises: `ConfigError`, `ModelError`
    """
    params = [
        SamplingParams(n=n, temperature=float(n > 1), max_tokens=work.output_len, ignore_eos=True)
        for work in works
    ]
    prompts = [work.prompt for work in works]
    with _recorded(config) as (recorded, file):
        if use_async:
            elapsed_s = asyncio.run(_run_async(recorded, prompts, params, quiet))
        else:
            with LLM(**_fields(recorded)) as llm:
                start_s = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=not quiet)
                elapsed_s = time.perf_counter() - start_s
        steps = read_steps(file)
    num_output = n * sum(work.output_len for work in works)
    num_tokens = num_output + sum(work.prompt_len for work in works)
    result = {
        "elapsed_time": elapsed_s,
        "num_requests": len(works),
        "total_num_tokens": num_tokens,
        "requests_per_second": len(works) / elapsed_s,
        "tokens_per_second": num_tokens / elapsed_s,
        "output_tokens_per_second": num_output / elapsed_s,
        "roofline": limits(config, steps),
    }
    return result, steps


async def _run_async(
    config: EngineConfig,
    prompts: Sequence[str | list[int]],
    params: Sequence[SamplingParams],
    quiet: bool,
) -> float:
    async with AsyncEngine(config) as engine:
        bar = tqdm(total=len(prompts), desc="Prompts", disable=quiet)

        async def one(prompt: str | list[int], chosen: SamplingParams) -> None:
            final = dataclasses.replace(chosen, output_kind=RequestOutputKind.FINAL_ONLY)
            async for _ in engine.generate(prompt, final):
                pass
            bar.update()

        start_s = time.perf_counter()
        with bar:
            async with asyncio.TaskGroup() as group:
                for prompt, chosen in zip(prompts, params, strict=True):
                    group.create_task(one(prompt, chosen))
        return time.perf_counter() - start_s


def limits(config: EngineConfig, steps: Sequence[Step]) -> dict[str, Any]:
    """The steps against the limits of the machine, measured now: `roofline.roofline`."""
    return roofline(model_costs(config), machine_of(config), steps)


def model_costs(config: EngineConfig) -> ModelCosts:
    """What a step of the config's model costs in the config's dtypes."""
    dtype = _dtype(config)
    return ModelCosts.of(
        model_config(_checkpoint(config).hf_config),
        weight_bytes=dtype.itemsize,
        kv_bytes=pick_kv_dtype(config.kv_cache_dtype, dtype).itemsize,
    )


def machine_of(config: EngineConfig) -> Machine:
    """The limits of the config's device, measured now."""
    return measure(pick_device(config.device), _dtype(config))


def _dtype(config: EngineConfig) -> Any:
    hf_config = _checkpoint(config).hf_config
    return pick_dtype(config.dtype, pick_device(config.device), hf_config)


def _checkpoint(config: EngineConfig) -> Checkpoint:
    return find_checkpoint(
        config.model, revision=config.revision, needs_weights=config.load_format != "dummy"
    )


def _fields(config: EngineConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


@contextmanager
def _recorded(config: EngineConfig) -> Iterator[tuple[EngineConfig, Path]]:
    """The config with a recording, in the user's file or in one for the while."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(config.record or Path(directory, "record"))
        yield dataclasses.replace(config, record=str(file)), file


def _tail(steps: list[Step], share: float) -> list[Step]:
    """The steps after the warm-up, which is alike."""
    return steps[len(steps) - round(len(steps) * share) :]


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {str(p): float(np.percentile(values, p)) for p in _PERCENTILES}


# ---- start-up --------------------------------------------------------------------------------

# From the call of the interpreter, whose imports count, to the first token.
_CHILD = "from minivllm.bench import first_token; first_token()"


def first_token() -> None:
    """In a process of its own: the settings on stdin, to one token; a line of JSON on stdout."""
    loaded_s = time.time()
    settings = json.load(sys.stdin)
    with LLM(**settings) as llm:
        ready_s = time.time()
        llm.generate([1], SamplingParams(max_tokens=1), use_tqdm=False)
    end_s = time.time()
    sys.stdout.write(json.dumps({"loaded": loaded_s, "ready": ready_s, "end": end_s}))


def startup(
    settings: dict[str, Any],
    *,
    num_iters_cold: int = 3,
    num_iters_warmup: int = 1,
    num_iters_warm: int = 3,
    quiet: bool = True,
) -> dict[str, Any]:
    """Seconds from nothing to the first token: cold, with no kernel compiled, and warm.

    Raises: `ConfigError`; `WorkerError` when a start fails
    """
    for name, value in (("num_iters_cold", num_iters_cold), ("num_iters_warm", num_iters_warm)):
        if value < 1:
            raise ConfigError(name, value, "must be at least 1")
    EngineConfig(**settings)  # what is wrong is told once
    num_starts = num_iters_cold + num_iters_warmup + num_iters_warm
    with (
        tempfile.TemporaryDirectory() as directory,
        tqdm(total=num_starts, desc="Starts", disable=quiet) as bar,
    ):

        def start(cache: str) -> dict[str, float]:
            phases = _start_once(settings, Path(directory, cache))
            bar.update()
            return phases

        cold = [start(f"cold{number}") for number in range(num_iters_cold)]
        for _ in range(num_iters_warmup):
            start("warm")
        warm = [start("warm") for _ in range(num_iters_warm)]
    result: dict[str, Any] = {}
    for name, runs in (("cold", cold), ("warm", warm)):
        times = [sum(phases.values()) for phases in runs]
        result[f"avg_{name}_startup_time"] = float(np.mean(times))
        result[f"{name}_startup_times"] = times
        result[f"{name}_startup_percentiles"] = _percentiles(times)
        result[f"{name}_phase_s"] = {
            phase: float(np.median([phases[phase] for phases in runs])) for phase in runs[0]
        }
    return result


def _start_once(settings: dict[str, Any], cache: Path) -> dict[str, float]:
    """Seconds of each phase of a start whose compiled kernels are kept in `cache`."""
    caches = {"NUMBA_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    start_s = time.time()
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=json.dumps(settings),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | caches,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise WorkerError(f"a start failed: {last}")
    times = json.loads(done.stdout)
    return {
        "imports": times["loaded"] - start_s,
        "engine": times["ready"] - times["loaded"],
        "first_token": times["end"] - times["ready"],
    }
