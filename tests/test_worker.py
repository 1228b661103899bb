from __future__ import annotations

import asyncio
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from minivllm import errors
from minivllm.batch import Done, Profile, StepPlan, StepResult, Stop
from minivllm.channel import ProcessExecutor
from minivllm.config import EngineConfig
from minivllm.engine import AsyncEngine
from minivllm.pending import Pending
from minivllm.request import SamplingParams
from minivllm.worker import _serve, replay

SMALL = {"kv_cache_memory_bytes": 256 << 20, "max_model_len": 512}


def params(number: int, max_tokens: int) -> SamplingParams:
    """Even requests are greedy, odd ones sampled with a seed."""
    return SamplingParams(
        temperature=0.8 * (number % 2), seed=number, max_tokens=max_tokens, ignore_eos=True
    )


async def streams(
    engine: AsyncEngine,
    numbers: Iterable[int],
    num_out: int,
    prompt_len: int = 32,
    *,
    tell: Callable[[int], None] = lambda num_tokens: None,
) -> tuple[list[list[int]], float]:
    """The tokens of each stream, and the longest pause between two outputs of any of them. `tell`
    hears how many tokens all of them have, whenever they have more."""
    pauses = [0.0]
    lens: Counter[int] = Counter()

    async def one(number: int) -> list[int]:
        prompt = [100 + 7 * number + i for i in range(prompt_len)]
        last_s = last = None
        async for output in engine.generate(prompt, params(number, num_out)):
            now_s = time.monotonic()
            if last_s is not None:
                pauses.append(now_s - last_s)
            last_s, last = now_s, output.outputs[0]
            lens[number] = len(last.token_ids)
            tell(lens.total())
        assert last is not None
        assert last.finish_reason == "length"
        return last.token_ids

    return await asyncio.gather(*(one(n) for n in numbers)), max(pauses)


async def disturb(sent: int, count: int, num_out: int, times: int, **config: Any) -> None:
    """Streams with the worker sent a signal at random moments end as they do undisturbed."""
    rng = random.Random(sent)
    executor = ProcessExecutor(lease_s=config.pop("lease_s", 5.0), step_timeout_s=60.0)
    async with AsyncEngine(EngineConfig(**SMALL | config), executor=executor) as engine:
        expected, calm = await streams(engine, range(count), num_out)
        for _ in range(times):
            engine.reset_prefix_cache()
            generation = engine.core.scheduler.generation
            moment = rng.uniform(0.0, 0.9) * count * num_out
            victims = iter([executor.pid])

            def strike(num_tokens: int, moment=moment, victims=victims) -> None:
                if num_tokens >= moment:
                    for pid in victims:  # once
                        os.kill(pid, sent)

            tokens, pause = await streams(engine, range(count), num_out, tell=strike)
            print(f"signal {sent}: longest pause {pause:.2f} s, undisturbed {calm:.2f} s")
            assert engine.core.scheduler.generation == generation + 1
            assert tokens == expected


@pytest.mark.dist
async def test_kill_9_does_not_show_in_the_streams(embedded_dir: Path) -> None:
    """After kill -9 of the worker every stream goes on with the undisturbed run's tokens."""
    await disturb(signal.SIGKILL, count=8, num_out=16, times=1, model=str(embedded_dir))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
async def test_five_deaths_under_32_streams(embedded_dir: Path, sent: int) -> None:
    """Five deaths at random moments under 32 streams, by kill -9 and by SIGSTOP."""
    await disturb(sent, count=32, num_out=64, times=5, model=str(embedded_dir), lease_s=2.0)


@pytest.mark.dist
async def test_a_worker_that_dies_idle_is_replaced(embedded_dir: Path) -> None:
    """A worker killed while nothing runs is restarted, and the next request is served."""
    executor = ProcessExecutor(lease_s=5.0, step_timeout_s=60.0)
    settings = EngineConfig(model=str(embedded_dir), **SMALL)
    async with AsyncEngine(settings, executor=executor) as engine:
        assert executor.pid is not None
        os.kill(executor.pid, signal.SIGKILL)
        tokens, _ = await streams(engine, [0], 4)
        assert len(tokens[0]) == 4
        assert engine.core.scheduler.generation == 1


@pytest.mark.parametrize("backend", ["inline", "mp"])
async def test_weights_that_cannot_be_loaded_have_their_own_errors(
    embedded_dir: Path, tmp_path: Path, backend: str
) -> None:
    """Truncated weights and an unknown architecture are told as such, from either executor."""
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((embedded_dir / name).read_bytes())
    data = (embedded_dir / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    settings = EngineConfig(model=str(tmp_path), distributed_executor_backend=backend, **SMALL)
    with pytest.raises(errors.CorruptFileError, match=r"model\.safetensors"):
        await AsyncEngine(settings).start()
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("LlamaForCausalLM", "MambaForCausalLM"))
    with pytest.raises(errors.UnsupportedArchitectureError, match=r"Mamba.*LlamaForCausalLM"):
        await AsyncEngine(settings).start()


async def test_a_recording_replays_to_the_same_tokens(embedded_dir: Path, tmp_path: Path) -> None:
    """`record` writes every plan and result; running the plans again gives the same tokens."""
    file = tmp_path / "steps.bin"
    settings = EngineConfig(
        model=str(embedded_dir), distributed_executor_backend="inline", record=str(file), **SMALL
    )
    async with AsyncEngine(settings) as engine:
        await streams(engine, range(4), 8)
    num_steps, num_different = await asyncio.to_thread(replay, file)
    assert num_steps >= 8
    assert num_different == 0


async def test_a_seed_gives_the_same_tokens_anywhere(embedded_dir: Path) -> None:
    """A seeded request has the same tokens alone, in a batch of 32, preempted, in a process."""
    size = {"model": str(embedded_dir), "block_size": 2, "max_model_len": 16}
    results = []
    for backend in ("inline", "mp"):
        settings = EngineConfig(distributed_executor_backend=backend, **SMALL | size)
        async with AsyncEngine(settings) as engine:
            stats = engine.core.scheduler.stats
            results += (await streams(engine, [1], 8, prompt_len=8))[0]
            num_steps = stats.num_steps
            results.append((await streams(engine, range(32), 8, prompt_len=8))[0][1])
            assert stats.num_steps - num_steps < 2 * 8  # else they did not run as one batch
            assert stats.num_preemptions == 0
    # Blocks for both prompts and five tokens: the younger request, 1, has to give way.
    tight = {"num_gpu_blocks_override": 14, "enable_prefix_caching": False}
    settings = EngineConfig(distributed_executor_backend="inline", **SMALL | size | tight)
    async with AsyncEngine(settings) as engine:
        results.append((await streams(engine, [0, 1], 8, prompt_len=8))[0][1])
        assert engine.core.scheduler.stats.num_preemptions > 0
    assert results == [results[0]] * 5


PARENT = """
import os, signal, sys
from minivllm import LLM, SamplingParams

llm = LLM(sys.argv[1], distributed_executor_backend="mp", max_model_len=512)
print(llm.engine._executor.pid, flush=True)
if sys.argv[2] == "raise":
    raise RuntimeError("on purpose")
if sys.argv[2] == "return":
    sys.exit(0)
llm.generate([[5] * 32] * 8, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
"""


@pytest.mark.dist
@pytest.mark.parametrize(
    "end",
    [
        "SIGKILL",
        "SIGINT",
        pytest.param("SIGTERM", marks=pytest.mark.slow),
        pytest.param("raise", marks=pytest.mark.slow),
        pytest.param("return", marks=pytest.mark.slow),
    ],
)
def test_no_orphan(embedded_dir: Path, end: str) -> None:
    """However the parent ends, its worker is gone within seconds."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(embedded_dir), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if end.startswith("SIG"):
            time.sleep(0.5)
            parent.send_signal(getattr(signal, end))
        parent.wait(30)
    deadline_s = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline_s, f"worker {pid} outlived its parent"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


class Slow(Pending):
    """A step on a device that is done when the test says so."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.done = threading.Event()

    @property
    def must_wait(self) -> bool:
        return True

    def wait(self) -> None:
        assert self.done.wait(30)

    def result(self) -> StepResult:
        self.wait()
        return StepResult(0, self.step, [], [], [], {}, 0.0)


class SlowRunner:
    """Launches at once what ends later."""

    def __init__(self) -> None:
        self.launched: queue.Queue[Slow] = queue.Queue()
        self.orders: list[Any] = []

    def launch(self, plan: StepPlan) -> Slow:
        pending = Slow(plan.step)
        self.launched.put(pending)
        return pending

    def carry_out(self, order: Any) -> None:
        self.orders.append(order)


def test_a_plan_is_launched_while_the_step_before_it_runs() -> None:
    """The second plan does not wait for the first; answers come in order, an order's after those
    of the steps before it."""
    runner, inbox, answers = SlowRunner(), queue.SimpleQueue(), queue.Queue()
    thread = threading.Thread(target=_serve, args=(runner, inbox.get, inbox.put, answers.put))
    thread.start()
    try:
        for step in range(2):
            inbox.put(StepPlan(0, step, [], [], [], [], []))
        first, second = (runner.launched.get(timeout=30) for _ in range(2))
        assert answers.empty()
        second.done.set()
        first.done.set()
        assert [answers.get(timeout=30).step for _ in range(2)] == [0, 1]
        inbox.put(StepPlan(0, 2, [], [], [], [], []))
        third = runner.launched.get(timeout=30)
        inbox.put(Profile(None))
        third.done.set()
        assert answers.get(timeout=30).step == 2
        assert answers.get(timeout=30) == Done(None)
        assert runner.orders == [Profile(None)]
    finally:
        inbox.put(Stop())
        thread.join(30)
    assert not thread.is_alive()
    assert answers.empty()
