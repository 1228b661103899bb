from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeExecutor, expected_output
from safetensors.torch import load_file, save_file

from minivllm import errors
from minivllm.batch import LoadWeights, Sleep, WakeUp
from minivllm.config import EngineConfig
from minivllm.engine import AsyncEngine
from minivllm.request import CompletionOutput, RequestOutput, SamplingParams

VOCAB = 49152
PROMPT = list(range(1, 41))


@contextlib.asynccontextmanager
async def fake_engine(
    model_dir: Path, executor: FakeExecutor, **config: Any
) -> AsyncIterator[AsyncEngine]:
    settings = EngineConfig(model=str(model_dir), **config)
    async with AsyncEngine(settings, executor=executor) as engine:
        yield engine


async def answer(stream: AsyncIterator[RequestOutput]) -> CompletionOutput:
    outputs = [output async for output in stream]
    return outputs[-1].outputs[0]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


class Streams:
    """Some streams of an engine; `reached(n)` waits until each has n tokens."""

    def __init__(self, engine: AsyncEngine, prompts: list[list[int]], max_tokens: int) -> None:
        self.prompts, self.max_tokens = prompts, max_tokens
        self.lens = [0] * len(prompts)
        self.moved = asyncio.Event()
        self.tasks = [
            asyncio.create_task(self.follow(engine, idx)) for idx in range(len(prompts))
        ]

    async def follow(self, engine: AsyncEngine, idx: int) -> CompletionOutput:
        async for output in engine.generate(self.prompts[idx], greedy(self.max_tokens)):
            self.lens[idx] = len(output.outputs[0].token_ids)
            self.moved.set()
            last = output.outputs[0]
        return last

    async def reached(self, num_tokens: int) -> None:
        while min(self.lens) < num_tokens:
            self.moved.clear()
            await self.moved.wait()

    async def answers(self) -> list[CompletionOutput]:
        return list(await asyncio.gather(*self.tasks))

    def check(self, answers: list[CompletionOutput]) -> None:
        """Every stream ended by its length, with the model's tokens."""
        for prompt, found in zip(self.prompts, answers, strict=True):
            assert found.finish_reason == "length"
            assert found.token_ids == expected_output(prompt, self.max_tokens, VOCAB)


def prompts(count: int) -> list[list[int]]:
    return [[*PROMPT, number] for number in range(count)]


# ---- weights ----


async def test_an_update_under_16_streams_drops_nothing_and_hits_nothing_stale(
    embedded_dir: Path,
) -> None:
    """Streams go on over three updates; spans tell which tokens came from which weights; requests
    that begin like older ones find nothing of the old weights (the fake worker checks)."""
    executor = FakeExecutor()
    # A pool that also preempts: rows that are recomputed are keyed anew.
    async with fake_engine(
        embedded_dir, executor, num_gpu_blocks_override=60, max_model_len=200
    ) as engine:
        executor.num_blocks = 60
        streams = Streams(engine, prompts(16), 60)
        later = []
        for epoch in (1, 2, 3):
            await streams.reached(10 * epoch)
            assert await engine.update_weights(f"/weights/{epoch}") == epoch
            later.append(asyncio.create_task(answer(engine.generate(PROMPT, greedy(5)))))
        found = await streams.answers()
        streams.check(found)
        for one in found:
            epochs = [epoch for epoch, _ in one.weight_versions]
            assert epochs == sorted(set(epochs))
            assert epochs[0] == 0
            assert sum(count for _, count in one.weight_versions) == 60
        assert any(len(one.weight_versions) == 4 for one in found)
        for task in later:
            one = await task
            assert one.token_ids == expected_output(PROMPT, 5, VOCAB)
        stats = engine.core.scheduler.stats
        assert stats.prefix_hits > 0, "new requests do share what the new weights computed"
        engine.core.scheduler.blocks.check_integrity()
    assert [order.path for order in executor.orders if isinstance(order, LoadWeights)] == [
        "/weights/1",
        "/weights/2",
        "/weights/3",
    ]


async def test_an_update_that_fails_changes_nothing(embedded_dir: Path) -> None:
    """Weights that cannot be loaded raise their own error; the streams and the epoch stay."""
    executor = FakeExecutor()
    async with fake_engine(embedded_dir, executor) as engine:
        streams = Streams(engine, prompts(4), 30)
        await streams.reached(3)
        with pytest.raises(errors.WeightsError, match="/missing"):
            await engine.update_weights("/missing")
        with pytest.raises(errors.ConfigError, match="path"):
            await engine.update_weights()
        with pytest.raises(errors.ConfigError, match="tensors"):
            await engine.update_weights(tensors={})
        found = await streams.answers()
        streams.check(found)
        assert [one.weight_versions for one in found] == [[(0, 30)]] * 4


async def test_updated_weights_survive_the_worker(embedded_dir: Path) -> None:
    """A worker that starts after an update is given the updated weights before any plan."""
    executor = FakeExecutor()
    async with fake_engine(embedded_dir, executor) as engine:
        await engine.update_weights("/weights/1")
        streams = Streams(engine, prompts(4), 30)
        await streams.reached(3)
        executor.kills = lambda plan, model: plan.generation == 0
        streams.check(await streams.answers())
        assert engine.core.scheduler.generation == 1
        assert executor.model.epoch == 1


def save_changed(model_dir: Path, to: Path) -> dict[str, torch.Tensor]:
    """The embedded model with its last norm's weights negated, in a directory of its own."""
    to.mkdir()
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.norm.weight"] = -tensors["model.norm.weight"]
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (to / name).write_bytes((model_dir / name).read_bytes())
    return tensors


async def test_real_weights_change_what_comes(embedded_dir: Path, tmp_path: Path) -> None:
    """From a path and from tensors: after the update the engine answers as one started with those
    weights, and after another back as before."""
    tensors = save_changed(embedded_dir, tmp_path / "changed")
    size: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_bytes": 64 << 20}
    inline = size | {"distributed_executor_backend": "inline"}

    async def ask(engine: AsyncEngine) -> list[int]:
        return (await answer(engine.generate(PROMPT, greedy(6)))).token_ids

    async with AsyncEngine(EngineConfig(model=str(tmp_path / "changed"), **inline)) as engine:
        changed = await ask(engine)
    async with AsyncEngine(EngineConfig(model=str(embedded_dir), **inline)) as engine:
        plain = await ask(engine)
        assert plain != changed
        await engine.update_weights(tensors=tensors)
        assert await ask(engine) == changed
        await engine.update_weights(str(embedded_dir))
        assert await ask(engine) == plain
        with pytest.raises(errors.WeightsError, match="lacks"):
            await engine.update_weights(tensors={})
        with pytest.raises(errors.WeightsError, match="neither"):
            await engine.update_weights(str(tmp_path))
        assert await ask(engine) == plain
        for level in (1, 2):
            await engine.update_weights(tensors=tensors)
            await engine.sleep(level)
            await engine.wake_up()
            assert await ask(engine) == changed
    async with AsyncEngine(EngineConfig(model=str(embedded_dir), **size)) as engine:
        assert await ask(engine) == plain
        await engine.update_weights(str(tmp_path / "changed"))
        assert await ask(engine) == changed
        await engine.sleep(2)
        await engine.wake_up()
        assert await ask(engine) == changed


async def test_an_update_under_16_real_streams(embedded_dir: Path) -> None:
    """The same weights loaded again in the middle change no token, whatever was in flight."""
    config = EngineConfig(
        model=str(embedded_dir), max_model_len=128, kv_cache_memory_bytes=128 << 20
    )
    async with AsyncEngine(config) as engine:
        calm = await Streams(engine, prompts(16), 24).answers()
        engine.reset_prefix_cache()
        streams = Streams(engine, prompts(16), 24)
        await streams.reached(8)
        assert await engine.update_weights(str(embedded_dir)) == 1
        found = await streams.answers()
    assert [one.token_ids for one in found] == [one.token_ids for one in calm]
    for one in found:
        (old, num_old), (new, num_new) = one.weight_versions
        assert (old, new) == (0, 1)
        assert 8 <= num_old < 24
        assert num_old + num_new == 24


# ---- pause, sleep ----


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_pause_modes(embedded_dir: Path, mode: str) -> None:
    """Running requests are aborted, finished or kept; new ones wait for `resume`; no step runs
    while the engine is paused."""
    executor = FakeExecutor()
    async with fake_engine(embedded_dir, executor) as engine:
        streams = Streams(engine, prompts(4), 40)
        await streams.reached(5)
        await engine.pause(mode)
        assert engine.is_paused
        assert not engine.core.scheduler.in_flight
        num_plans = len(executor.plans)
        new = asyncio.create_task(answer(engine.generate([7], greedy(3))))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(executor.plans) == num_plans
        await engine.resume()
        assert (await new).token_ids == expected_output([7], 3, VOCAB)
        found = await streams.answers()
        if mode == "abort":
            assert [one.finish_reason for one in found] == ["abort"] * 4
        else:
            streams.check(found)
        assert not engine.is_paused


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_gives_memory_back_and_kept_requests_go_on(
    embedded_dir: Path, level: int
) -> None:
    """Kept requests lose their KV and are computed again after `wake_up`; nothing runs between."""
    executor = FakeExecutor()
    async with fake_engine(embedded_dir, executor) as engine:
        streams = Streams(engine, prompts(4), 40)
        await streams.reached(5)
        await engine.sleep(level, mode="keep")
        assert engine.is_sleeping
        assert executor.model.asleep
        with pytest.raises(errors.EngineClosedError, match="sleeps"):
            await engine.resume()
        new = asyncio.create_task(answer(engine.generate(PROMPT, greedy(3))))
        await asyncio.sleep(0.01)
        await engine.wake_up()
        assert not engine.is_sleeping
        assert (await new).token_ids == expected_output(PROMPT, 3, VOCAB)
        streams.check(await streams.answers())
        assert engine.metrics()["num_preemptions"] == 0, "no memory was short"
        assert isinstance(executor.orders[0], Sleep)
        assert isinstance(executor.orders[1], WakeUp)
        engine.core.scheduler.blocks.check_integrity()


async def test_bad_orders_are_refused(embedded_dir: Path) -> None:
    """A mode or a level that does not exist is named."""
    async with fake_engine(embedded_dir, FakeExecutor()) as engine:
        with pytest.raises(errors.ConfigError, match=r"mode .*'later'"):
            await engine.pause("later")
        with pytest.raises(errors.ConfigError, match=r"level .*3"):
            await engine.sleep(3)
        assert not engine.is_paused


async def test_shutdown_of_a_paused_engine(embedded_dir: Path) -> None:
    """Whoever waits for `resume` is told that the engine is closed."""
    executor = FakeExecutor()
    async with fake_engine(embedded_dir, executor) as engine:
        await engine.pause()
        new = asyncio.create_task(answer(engine.generate([7], greedy(3))))
        await asyncio.sleep(0.01)
    assert (await new).finish_reason == "abort"


async def test_requests_to_a_paused_engine_are_requests(embedded_dir: Path) -> None:
    """What waits for `resume` is checked, counted, aborted and timed out like any other, and
    neither holds up nor is ended by a pause that comes later."""
    executor = FakeExecutor()
    async with fake_engine(embedded_dir, executor, max_num_queued_reqs=4) as engine:
        await engine.pause()
        kept, aborted, closed = (
            asyncio.create_task(answer(engine.generate([7], greedy(3), request_id=name)))
            for name in ("kept", "aborted", "closed")
        )
        late = asyncio.create_task(answer(engine.generate([7], greedy(3), timeout_s=0.05)))
        await asyncio.sleep(0.01)
        assert engine.metrics()["num_requests_waiting"] == 4
        with pytest.raises(errors.EngineBusyError):
            await answer(engine.generate([7], greedy(3)))
        end = await asyncio.wait_for(late, 5)
        assert (end.finish_reason, end.stop_reason) == ("abort", "timeout")
        with pytest.raises(errors.TokenIdError):
            await answer(engine.generate([VOCAB], greedy(3)))
        with pytest.raises(errors.DuplicateRequestError):
            await answer(engine.generate([7], greedy(3), request_id="kept"))
        engine.abort("aborted")
        end = await asyncio.wait_for(aborted, 5)
        assert (end.finish_reason, end.token_ids) == ("abort", [])
        closed.cancel()
        await asyncio.wait([closed])
        await asyncio.wait_for(engine.pause("wait"), 5)
        await asyncio.wait_for(engine.pause("abort"), 5)
        assert engine.metrics()["num_requests_waiting"] == 1
        assert not executor.plans
        executor.kills = lambda plan, model: True
        await engine.resume()
        executor.kills = lambda plan, model: len(executor.generations) == 1
        assert (await kept).token_ids == expected_output([7], 3, VOCAB)


async def test_a_death_while_paused_lets_nobody_in(embedded_dir: Path) -> None:
    """New workers change nothing about who waits."""
    executor = FakeExecutor(delay_s=0.01)
    async with fake_engine(embedded_dir, executor) as engine:
        running = asyncio.create_task(answer(engine.generate(PROMPT, greedy(20))))
        await asyncio.sleep(0.03)
        executor.kills = lambda plan, model: len(executor.generations) == 1
        waiting = asyncio.create_task(engine.pause("wait"))
        await asyncio.sleep(0)
        new = asyncio.create_task(answer(engine.generate([7], greedy(3))))
        await asyncio.wait_for(waiting, 5)
        assert executor.generations == [0, 1]
        assert (await running).token_ids == expected_output(PROMPT, 20, VOCAB)
        assert not new.done()
        assert engine.core.scheduler.num_running == 0
        await engine.resume()
        assert (await new).token_ids == expected_output([7], 3, VOCAB)


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_drain_of_a_paused_engine(embedded_dir: Path, mode: str) -> None:
    """Requests that were kept, or came meanwhile, are let go on; a sleeping engine has nothing to
    wait for."""
    for sleeps in (False, True):
        async with fake_engine(embedded_dir, FakeExecutor()) as engine:
            await (engine.sleep(1, mode) if sleeps else engine.pause(mode))
            new = asyncio.create_task(answer(engine.generate([7], greedy(3))))
            await asyncio.sleep(0.01)
            await asyncio.wait_for(engine.shutdown(drain_s=60.0), 5)
        assert (await new).finish_reason == ("abort" if sleeps else "length")


async def test_drain_lets_requests_end(embedded_dir: Path) -> None:
    """`shutdown(drain_s)` waits for running requests, and aborts them when time is up."""
    for drain_s, reason in ((30.0, "length"), (0.0, "abort")):
        executor = FakeExecutor()
        async with fake_engine(embedded_dir, executor) as engine:
            streams = Streams(engine, prompts(4), 40)
            await streams.reached(5)
            await engine.shutdown(drain_s)
            assert [one.finish_reason for one in await streams.answers()] == [reason] * 4


# ---- what can be asked ----


async def test_metrics_and_health(embedded_dir: Path) -> None:
    """Counts of what ran; health returns while the engine lives, and says when it is closed."""
    executor = FakeExecutor()
    async with fake_engine(embedded_dir, executor) as engine:
        await engine.health()
        for _ in range(2):
            await answer(engine.generate(PROMPT, greedy(6)))
        found = engine.metrics()
        assert found["prompt_tokens"] == 80
        assert found["generation_tokens"] == 12
        assert found["request_success_length"] == 2
        assert found["prefix_hits"] == 32
        assert found["num_requests_running"] == found["num_requests_waiting"] == 0
        assert found["kv_cache_usage"] == 0
    with pytest.raises(errors.EngineClosedError):
        await engine.health()


async def test_a_profile_is_written(embedded_dir: Path, tmp_path: Path) -> None:
    """Between start and stop the worker traces its steps into the directory."""
    config = EngineConfig(
        model=str(embedded_dir),
        distributed_executor_backend="inline",
        max_model_len=64,
        kv_cache_memory_bytes=64 << 20,
    )
    async with AsyncEngine(config) as engine:
        await engine.start_profile(str(tmp_path / "traces"))
        await answer(engine.generate(PROMPT, greedy(2)))
        await engine.stop_profile()
    (trace,) = (tmp_path / "traces").iterdir()
    events = json.loads(trace.read_text())["traceEvents"]
    assert any("linear" in event.get("name", "") for event in events)


async def test_prometheus_counts_what_happened(embedded_dir: Path) -> None:
    """Two engines in one process count each for itself; a refused request is counted too."""
    async with (
        fake_engine(embedded_dir, FakeExecutor(), max_num_queued_reqs=1) as engine,
        fake_engine(embedded_dir, FakeExecutor()) as other,
    ):
        for _ in range(2):
            await answer(engine.generate(PROMPT, greedy(5)))
        with pytest.raises(errors.EngineBusyError):
            await answer(engine.generate([1], SamplingParams(n=2)))
        text = engine.prometheus(model_name="tiny").decode()
        idle = other.prometheus(model_name="tiny").decode()
    for line in (
        'vllm:prompt_tokens_total{model_name="tiny"} 80.0',
        'vllm:prompt_tokens_cached_total{model_name="tiny"} 32.0',
        'vllm:generation_tokens_total{model_name="tiny"} 10.0',
        'vllm:request_success_total{finished_reason="length",model_name="tiny"} 2.0',
        'vllm:admission_rejections_total{model_name="tiny",reason="max_num_queued_reqs"} 1.0',
        'vllm:time_to_first_token_seconds_count{model_name="tiny"} 2.0',
        'vllm:inter_token_latency_seconds_count{model_name="tiny"} 8.0',
    ):
        assert line in text
    assert 'vllm:prompt_tokens_total{model_name="tiny"} 0.0' in idle


@pytest.mark.parametrize("seed", range(40))
async def test_orders_in_any_order_leave_a_whole_engine(embedded_dir: Path, seed: int) -> None:
    """Pauses, sleeps, updates and deaths, cancelled at random, among aborts, deadlines and callers
    who leave: every stream has one end, and the engine serves on."""
    rng = random.Random(seed)
    executor = FakeExecutor(num_blocks=60)
    executor.kills = lambda plan, model: rng.random() < 0.01

    async def client(engine: AsyncEngine, idx: int) -> None:
        await asyncio.sleep(rng.random() * 0.05)
        prompt = [idx + 1] * rng.randint(1, 40)
        num_tokens = rng.randint(1, 40)
        timeout_s = rng.choice((None, None, 0.01, 0.05))
        stream = engine.generate(prompt, greedy(num_tokens), f"client-{idx}", timeout_s=timeout_s)
        leaves_at = rng.choice((None, None, 1, num_tokens // 2))
        ends = 0
        async for output in stream:
            end = output.outputs[0]
            ends += end.finish_reason is not None
            if leaves_at is not None and len(end.token_ids) >= leaves_at:
                await stream.aclose()
                assert f"client-{idx}" not in engine.core.scheduler
                return
        assert ends == 1
        assert end.finish_reason in ("length", "abort")
        whole = expected_output(prompt, num_tokens, VOCAB)
        assert end.token_ids == whole[: len(end.token_ids)]
        assert end.finish_reason == "abort" or len(end.token_ids) == num_tokens

    async def control(engine: AsyncEngine) -> None:
        async def aborts() -> None:
            engine.abort(f"client-{rng.randrange(12)}")

        await asyncio.sleep(rng.random() * 0.05)
        order = rng.choice(
            [
                lambda: engine.pause(rng.choice(("abort", "wait", "keep"))),
                engine.resume,
                lambda: engine.sleep(rng.choice((1, 2)), rng.choice(("abort", "wait", "keep"))),
                engine.wake_up,
                lambda: engine.update_weights("/any"),
                lambda: engine.start_profile("/tmp"),
                aborts,
            ]
        )
        allowed = (TimeoutError, errors.EngineClosedError, errors.WorkerError)
        with contextlib.suppress(*allowed):
            await asyncio.wait_for(order(), rng.choice((0.0005, 0.005, 0.02)))

    async with fake_engine(embedded_dir, executor, max_model_len=256) as engine:
        clients = [asyncio.create_task(client(engine, idx)) for idx in range(12)]
        await asyncio.gather(*(control(engine) for _ in range(10)))
        for _ in range(100):  # a worker may die of any of these
            with contextlib.suppress(errors.WorkerError):
                await engine.wake_up()
                break
            await asyncio.sleep(0.01)
        await asyncio.wait_for(asyncio.gather(*clients), 20)
        assert not engine.is_paused
        assert not engine.is_sleeping
        engine.core.scheduler.blocks.check_integrity()


async def test_a_cancelled_update_is_carried_through(embedded_dir: Path) -> None:
    """Once the workers load, the caller's cancellation waits, so that the weights and their epoch
    go together."""
    executor = FakeExecutor(delay_s=0.05)
    async with fake_engine(embedded_dir, executor) as engine:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.update_weights("/any"), 0.01)
        assert executor.orders == [LoadWeights("/any", None)]
        assert engine.core.scheduler.blocks.weight_epoch == 1
        end = await answer(engine.generate(PROMPT, greedy(4)))
        assert end.token_ids == expected_output(PROMPT, 4, VOCAB)


async def test_a_cancelled_pause_leaves_the_engine_as_it_was(embedded_dir: Path) -> None:
    """A pause that waits too long for the requests can be given up."""
    async with fake_engine(embedded_dir, FakeExecutor(delay_s=0.01)) as engine:
        stream = asyncio.create_task(answer(engine.generate(PROMPT, greedy(30))))
        await asyncio.sleep(0.03)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.pause("wait"), 0.03)
        assert not engine.is_paused
        assert (await stream).finish_reason == "length"
        assert (await answer(engine.generate([1], greedy(2)))).finish_reason == "length"


async def test_abort_overtakes_a_pause_that_waits(embedded_dir: Path) -> None:
    """While one pause waits for the requests, another may end them."""
    async with fake_engine(embedded_dir, FakeExecutor(delay_s=0.01)) as engine:
        stream = asyncio.create_task(answer(engine.generate(PROMPT, greedy(1000))))
        await asyncio.sleep(0.03)
        waiting = asyncio.create_task(engine.pause("wait"))
        await asyncio.sleep(0.01)
        await asyncio.wait_for(engine.pause("abort"), 5)
        await asyncio.wait_for(waiting, 5)
        assert (await stream).finish_reason == "abort"


async def test_shutdown_ends_a_pause_that_waits(embedded_dir: Path) -> None:
    """Who waits for rest is told that the engine has closed."""
    async with fake_engine(embedded_dir, FakeExecutor(delay_s=0.01)) as engine:
        stream = asyncio.create_task(answer(engine.generate(PROMPT, greedy(1000))))
        await asyncio.sleep(0.03)
        waiting = asyncio.create_task(engine.pause("wait"))
        await asyncio.sleep(0.01)
        await engine.shutdown()
    with pytest.raises(errors.EngineClosedError):
        await asyncio.wait_for(waiting, 5)
    assert (await stream).finish_reason == "abort"
