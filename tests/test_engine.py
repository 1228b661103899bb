from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from fakes import FakeExecutor, expected_output

from minivllm import errors
from minivllm.config import EngineConfig
from minivllm.engine import AsyncEngine
from minivllm.request import RequestOutput, SamplingParams

VOCAB = 49152


@contextlib.asynccontextmanager
async def fake_engine(
    model_dir: Path, executor: FakeExecutor | None = None, **config: Any
) -> AsyncIterator[AsyncEngine]:
    executor = executor or FakeExecutor()
    settings = EngineConfig(model=str(model_dir), **config)
    async with AsyncEngine(settings, executor=executor) as engine:
        yield engine


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    outputs = [output async for output in stream]
    return outputs[-1]


def greedy(max_tokens: int = 8, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True} | changes)


async def test_outputs_grow_to_the_whole(embedded_dir: Path) -> None:
    """Each output extends the one before; the last has a finish reason and the model's tokens."""
    async with fake_engine(embedded_dir) as engine:
        outputs = [o async for o in engine.generate([1, 2, 3], greedy())]
    ids = [o.outputs[0].token_ids for o in outputs]
    assert ids[-1] == expected_output([1, 2, 3], 8, VOCAB)
    assert all(b[: len(a)] == a for a, b in itertools.pairwise(ids))
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[0].finish_reason == "length"


async def test_stop_token_ends_the_output_and_stays_out_of_its_text(embedded_dir: Path) -> None:
    """A stop token is the last id and the stop reason; its text is not shown."""
    expected = expected_output([5], 8, VOCAB)
    async with fake_engine(embedded_dir) as engine:
        params = greedy(stop_token_ids=[expected[3]])
        answer = (await last(engine.generate([5], params))).outputs[0]
        text = engine.tokenizer.decode(expected[:3])
    assert answer.token_ids == expected[:4]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", expected[3])
    assert answer.text == text


async def test_stop_string_cuts_the_text(embedded_dir: Path) -> None:
    """Text ends before the stop string, which is the stop reason."""
    async with fake_engine(embedded_dir) as engine:
        whole = (await last(engine.generate([5], greedy(30)))).outputs[0]
        stop = whole.text[len(whole.text) // 2 :][:3]
        answer = (await last(engine.generate([5], greedy(30, stop=stop)))).outputs[0]
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]


async def test_closing_the_iterator_aborts(embedded_dir: Path) -> None:
    """A caller that stops reading frees the request's blocks."""
    async with fake_engine(embedded_dir) as engine:
        stream = engine.generate([1] * 40, greedy(1000))
        await anext(stream)
        await stream.aclose()
        await last(engine.generate([1], greedy(3)))
        scheduler = engine.core.scheduler
        assert scheduler.num_running == scheduler.num_waiting == 0
        assert scheduler.blocks.num_free == scheduler.blocks.num_blocks - 1


async def test_abort_ends_the_stream(embedded_dir: Path) -> None:
    """`abort` gives the caller a last output with finish reason "abort"."""
    async with fake_engine(embedded_dir) as engine:
        stream = engine.generate([1], greedy(1000), request_id="x")
        await anext(stream)
        engine.abort("x")
        assert (await last(stream)).outputs[0].finish_reason == "abort"
        engine.abort("x")


async def test_an_id_may_come_again_once_its_request_has_ended(embedded_dir: Path) -> None:
    """Even while a plan in flight still names the request that ended, or its stream has not been
    closed: the new request gets its own blocks and its own end."""
    prompt = [5] * 40
    expected = expected_output(prompt, 30, VOCAB)
    async with fake_engine(embedded_dir) as engine:
        for _ in range(3):
            stopped = await last(
                engine.generate(prompt, greedy(30, stop_token_ids=[expected[3]]), request_id="x")
            )
            assert stopped.outputs[0].token_ids == expected[:4]
        left = engine.generate(prompt, greedy(3), request_id="x")
        async for output in left:
            if output.finished:
                break
        again = engine.generate(prompt, greedy(30), request_id="x")
        await anext(again)
        await left.aclose()
        answer = (await last(again)).outputs[0]
        assert (answer.token_ids, answer.finish_reason) == (expected, "length")
        await last(engine.generate([1], greedy(3)))
        blocks = engine.core.scheduler.blocks
        blocks.check_integrity()
        assert blocks.num_free == blocks.num_blocks - 1


async def test_plans_overlap_with_steps(embedded_dir: Path) -> None:
    """With overlap a second plan is queued while the first runs; without, never."""
    for overlap, most in ((True, 2), (False, 1)):
        executor = FakeExecutor()
        async with fake_engine(embedded_dir, executor, async_scheduling=overlap) as engine:
            await last(engine.generate([1], greedy()))
        assert executor.max_in_flight == most


async def test_bad_requests_name_field_and_value(embedded_dir: Path) -> None:
    """Each kind of bad request has its own error, and the engine goes on serving."""
    async with fake_engine(embedded_dir, max_model_len=100) as engine:
        cases: list[tuple[Any, Any, type[Exception], str]] = [
            ("", greedy(), errors.EmptyPromptError, "prompt must have at least one token, got []"),
            ([], greedy(), errors.EmptyPromptError, "prompt"),
            ([1, 99999], greedy(), errors.TokenIdError, "prompt_token_ids.*got 99999"),
            ([-1], greedy(), errors.TokenIdError, "prompt_token_ids.*got -1"),
            ([True], greedy(), errors.TokenIdError, "got True"),
            ([1] * 100, greedy(), errors.PromptTooLongError, "prompt length.*100 tokens.*got 100"),
            ({"promt": "x"}, greedy(), errors.RequestError, "promt"),
            (7, greedy(), errors.RequestError, "got 7"),
            ({"prompt": 5}, greedy(), errors.RequestError, "prompt must be text, got 5"),
            (b"abc", greedy(), errors.RequestError, "prompt.*got b'abc'"),
            (np.array([1, 2]), greedy(), errors.RequestError, "prompt.*got array"),
            ({"prompt_token_ids": np.array([1, 2])}, greedy(), errors.RequestError, "got array"),
            ([1], "hot", errors.RequestError, "params must be SamplingParams, got 'hot'"),
            ([1], {}, errors.RequestError, "params must be SamplingParams, got {}"),
            ([1], greedy(stop_token_ids=[VOCAB]), errors.TokenIdError, "stop_token_ids.*49152"),
            ([1], greedy(logprobs=21), errors.RequestError, "logprobs.*max_logprobs.*got 21"),
        ]
        for prompt, params, error, text in cases:
            with pytest.raises(error, match=text.replace("[", r"\[").replace("]", r"\]")):
                await last(engine.generate(prompt, params))
        for request_id in (5, ""):
            with pytest.raises(errors.RequestError, match=f"request_id.*got {request_id!r}"):
                await last(engine.generate([1], greedy(), request_id=request_id))
        stream = engine.generate([1], greedy(50), request_id="same")
        await anext(stream)
        with pytest.raises(errors.DuplicateRequestError, match=r"request_id.*'same'"):
            await last(engine.generate([1], greedy(), request_id="same"))
        assert (await last(stream)).outputs[0].finish_reason == "length"


async def test_a_prompt_that_never_fits_the_pool_is_refused(embedded_dir: Path) -> None:
    """With an automatic context, a prompt the model could take but the pool cannot is told so."""
    async with fake_engine(embedded_dir, FakeExecutor(num_blocks=5)) as engine:
        assert engine.core.max_model_len == 64
        with pytest.raises(errors.RequestTooLargeError, match=r"KV cache.*64 tokens.*got 64"):
            await last(engine.generate([1] * 64, greedy()))
        output = await last(engine.generate([1] * 63, greedy()))
        assert len(output.outputs[0].token_ids) == 1


async def test_a_context_that_does_not_fit_the_pool_is_a_config_error(embedded_dir: Path) -> None:
    """A `max_model_len` that was asked for must fit the pool."""
    with pytest.raises(errors.ConfigError, match=r"max_model_len.*got 65"):
        async with fake_engine(embedded_dir, FakeExecutor(num_blocks=5), max_model_len=65):
            pass


async def test_generate_after_shutdown(embedded_dir: Path) -> None:
    """A closed engine says so; shutdown aborts what runs and may be called twice."""
    async with fake_engine(embedded_dir) as engine:
        stream = engine.generate([1], greedy(1000))
        await anext(stream)
        await engine.shutdown()
        assert (await last(stream)).outputs[0].finish_reason == "abort"
        with pytest.raises(errors.EngineClosedError):
            await last(engine.generate([1]))


async def test_drain_lets_requests_end(embedded_dir: Path) -> None:
    """`shutdown(drain_s)` refuses new requests and waits for those that run."""
    async with fake_engine(embedded_dir) as engine:
        stream = engine.generate([1], greedy(50))
        await anext(stream)
        closing = asyncio.create_task(engine.shutdown(drain_s=60))
        assert (await last(stream)).outputs[0].finish_reason == "length"
        await closing


async def test_worker_deaths_do_not_show_in_the_streams(embedded_dir: Path) -> None:
    """Streams go on with the same tokens over five deaths of the worker, one end each."""
    rng = random.Random(0)
    executor = FakeExecutor()
    executor.kills = lambda plan, model: len(executor.generations) < 6 and rng.random() < 0.1
    prompts = [[i] * (1 + 3 * i) for i in range(32)]
    async with fake_engine(embedded_dir, executor, max_num_batched_tokens=64) as engine:
        outputs = await asyncio.gather(
            *(last(engine.generate(prompt, greedy(30))) for prompt in prompts)
        )
    assert executor.generations == list(range(6))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == expected_output(prompt, 30, VOCAB)


async def test_a_poisonous_request_fails_alone(embedded_dir: Path) -> None:
    """A request that kills every worker it meets ends with an error; the others never notice."""
    executor = FakeExecutor()
    executor.kills = lambda plan, model: any(
        set(new.token_ids) == set(b"\x42\x00") for new in plan.new_rows
    )
    async with fake_engine(embedded_dir, executor) as engine:
        prompts = [[i] * 9 for i in range(7)] + [[0x42] * 9]
        outputs = await asyncio.gather(*(last(engine.generate(p, greedy())) for p in prompts))
    reasons = [o.outputs[0].finish_reason for o in outputs]
    assert reasons == ["length"] * 7 + ["error"]
    assert "worker" in str(outputs[-1].outputs[0].stop_reason)


async def test_an_engine_that_cannot_restart_is_dead(embedded_dir: Path) -> None:
    """When the workers do not come back every caller gets EngineDead, and so do later ones."""
    executor = FakeExecutor()
    executor.kills = lambda plan, model: True
    async with fake_engine(embedded_dir, executor) as engine:
        start = executor.start

        async def fails(*args: Any) -> Any:
            raise errors.ModelError("the weights are gone")

        executor.start = fails  # type: ignore[method-assign]
        with pytest.raises(errors.EngineDead, match="the weights are gone"):
            await last(engine.generate([1]))
        with pytest.raises(errors.EngineDead):
            await last(engine.generate([1]))
        executor.start = start  # type: ignore[method-assign]


async def test_row_that_is_not_finite_fails_alone(embedded_dir: Path) -> None:
    """The request of a failed row ends with an error; its neighbour goes on."""
    executor = FakeExecutor()
    executor.fails = lambda tokens: tokens[:2] == [13, 13]
    async with fake_engine(embedded_dir, executor) as engine:
        bad, good = await asyncio.gather(
            last(engine.generate([13, 13, 13], greedy())), last(engine.generate([1], greedy()))
        )
    assert bad.outputs[0].finish_reason == "error"
    assert "finite" in str(bad.outputs[0].stop_reason)
    assert good.outputs[0].finish_reason == "length"


async def test_random_callers_leave_nothing_behind(embedded_dir: Path) -> None:
    """300 callers that finish, leave or abort: every one gets its end and all blocks come back."""
    rng = random.Random(1)
    executor = FakeExecutor(num_blocks=20)

    async def caller(number: int, engine: AsyncEngine) -> str:
        await asyncio.sleep(rng.random() / 5)
        prompt = [rng.randrange(50)] * rng.randrange(1, 100)
        length = rng.randrange(1, 40)
        stream = engine.generate(prompt, greedy(length), request_id=str(number))
        fate = rng.choice(["read", "read", "leave", "abort"])
        async for output in stream:
            if fate == "leave" and rng.random() < 0.2:
                await stream.aclose()
                return "left"
            if fate == "abort" and rng.random() < 0.2:
                engine.abort(str(number))
            if output.finished:
                answer = output.outputs[0]
                expected = expected_output(prompt, length, VOCAB)[: len(answer.token_ids)]
                assert answer.token_ids == expected
                return str(answer.finish_reason)
        raise AssertionError("a stream ended without an end")

    async with fake_engine(embedded_dir, executor, max_num_seqs=16) as engine:
        ends = await asyncio.gather(*(caller(n, engine) for n in range(300)))
        scheduler = engine.core.scheduler
        await last(engine.generate([1], greedy(3)))  # every plan before it has been applied
        scheduler.blocks.check_integrity()
        assert scheduler.blocks.num_free == 19
        assert scheduler.stats.num_preemptions > 0
    assert {"left", "length", "abort"} <= set(ends)


async def test_numbers_of_any_type_and_size_reach_the_workers(embedded_dir: Path) -> None:
    """What `SamplingParams` accepts can be sent: numpy's floats, integers beyond 64 bits."""
    cases: list[dict[str, Any]] = [
        {name: np.float64(0.5)}
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    ]
    cases += [{"repetition_penalty": 10**30}, {"repetition_penalty": np.float64(1.5)}]
    cases += [{"logit_bias": {1: 10**30}}, {"logit_bias": {1: np.float64(0.5)}}]
    cases += [{"top_k": 2**63}, {"top_k": 2**70}, {"thinking_token_budget": 2**70}]
    cases += [{"min_tokens": 2**70, "max_tokens": None}, {"logprobs": 2**70}]
    executor = FakeExecutor()
    async with fake_engine(embedded_dir, executor, max_model_len=64, max_logprobs=-1) as engine:
        for changes in cases:
            assert (await last(engine.generate([1], greedy(**changes)))).finished
    for new in (new for plan in executor.plans for new in plan.new_rows):
        assert new.inputs.top_k < 2**63
        assert new.inputs.num_logprobs < 2**63


async def test_priority_is_refused_where_it_would_do_nothing(embedded_dir: Path) -> None:
    """Under fcfs a priority is an error that names it; bad values are under any policy."""
    async with fake_engine(embedded_dir) as engine:
        await last(engine.generate([1], greedy(), priority=0))
        with pytest.raises(errors.RequestError, match=r"priority must be 0 where.*fcfs, got -1"):
            await last(engine.generate([1], greedy(), priority=-1))
        for field, value in itertools.product(("timeout_s", "ttft_target_s"), (0, -1.0, "5", True)):
            with pytest.raises(errors.RequestError, match=f"{field} must be a positive number"):
                await last(engine.generate([1], greedy(), **{field: value}))
        with pytest.raises(errors.RequestError, match=r"priority must be an integer, got 1\.5"):
            await last(engine.generate([1], greedy(), priority=1.5))  # type: ignore[arg-type]


async def test_a_better_priority_overtakes_what_runs(embedded_dir: Path) -> None:
    """With one seat, a request of a better class that comes later ends first."""
    config: dict[str, Any] = {"scheduling_policy": "priority", "max_num_seqs": 1}
    async with fake_engine(embedded_dir, **config) as engine:
        low = engine.generate([1], greedy(500), priority=1)
        await anext(low)
        high = await last(engine.generate([2], greedy(5), priority=0))
        assert not (output := await anext(low)).finished
        assert output.metrics.num_preemptions == 1
        assert (await last(low)).outputs[0].token_ids == expected_output([1], 500, VOCAB)
        assert high.outputs[0].token_ids == expected_output([2], 5, VOCAB)


async def test_a_timeout_needs_no_step_to_be_seen(embedded_dir: Path) -> None:
    """Running, waiting and beside workers that do not answer, a request ends at its time with what
    it has; the engine then sleeps again."""
    executor = FakeExecutor()
    async with fake_engine(embedded_dir, executor, max_num_seqs=1) as engine:
        streams = [engine.generate([n], greedy(5000), timeout_s=0.2 + n / 10) for n in range(2)]
        running, waiting = await asyncio.gather(*map(last, streams))
        assert running.outputs[0].token_ids
        assert (waiting.metrics.scheduled_s or 0) >= (running.metrics.finished_s or 0)
        executor.delay_s = 60  # the next plan is never answered
        stalled = await last(engine.generate([3], greedy(), timeout_s=0.1))
        for output, timeout_s in ((running, 0.2), (waiting, 0.3), (stalled, 0.1)):
            answer, metrics = output.outputs[0], output.metrics
            assert (answer.finish_reason, answer.stop_reason) == ("abort", "timeout")
            assert metrics.finished_s is not None
            assert timeout_s <= metrics.finished_s - metrics.arrival_s < timeout_s + 0.1
        assert engine.core.scheduler.next_deadline_s is None


async def test_a_timeout_holds_while_workers_restart(embedded_dir: Path) -> None:
    """A request ends at its time though the engine is busy starting new workers; others go on."""
    executor = FakeExecutor()
    executor.kills = lambda plan, model: len(executor.generations) == 1 and plan.step == 2
    async with fake_engine(embedded_dir, executor) as engine:
        start = executor.start

        async def slow_start(*args: Any) -> Any:
            await asyncio.sleep(0.5)
            return await start(*args)

        executor.start = slow_start  # type: ignore[method-assign]
        streams = [engine.generate([1], greedy(), timeout_s=0.2), engine.generate([2], greedy())]
        hurried, other = await asyncio.gather(*map(last, streams))
    assert hurried.outputs[0].stop_reason == "timeout"
    assert (hurried.metrics.finished_s or 0) < hurried.metrics.arrival_s + 0.4
    assert other.outputs[0].token_ids == expected_output([2], 8, VOCAB)


async def test_settings_give_every_request_a_deadline(embedded_dir: Path) -> None:
    """`timeout_s` and `ttft_target_s` of the config hold where a request brings none."""
    executor = FakeExecutor(delay_s=0.15)
    async with fake_engine(embedded_dir, executor, timeout_s=0.9, ttft_target_s=0.1) as engine:
        late = await last(engine.generate([1], greedy(5000)))
        assert late.outputs[0].stop_reason == "ttft"
        patient = await last(engine.generate([1], greedy(5000), ttft_target_s=5))
        assert patient.outputs[0].stop_reason == "timeout"
        assert patient.outputs[0].token_ids


async def test_a_full_queue_refuses_at_the_door(embedded_dir: Path) -> None:
    """A request beyond the caps is an error of its own kind, and nothing is left of it."""
    async with fake_engine(embedded_dir, max_num_queued_reqs=2) as engine:
        streams = [engine.generate([1], greedy(1000), request_id=str(n)) for n in range(2)]
        for stream in streams:
            await anext(stream)
        for prompt in ("text", [1]):
            with pytest.raises(errors.EngineBusyError, match="max_num_queued_reqs is 2"):
                await last(engine.generate(prompt, greedy(), request_id="3"))
        engine.abort("0")
        assert (await last(engine.generate([1], greedy(), request_id="3"))).finished
        for stream in streams:
            await stream.aclose()
    async with fake_engine(embedded_dir, max_num_queued_tokens=10) as engine:
        with pytest.raises(errors.EngineBusyError, match="max_num_queued_tokens is 10"):
            await last(engine.generate([1] * 6, greedy(n=2)))
        assert "request-0" not in engine.core.scheduler


async def test_an_idle_engine_does_nothing(embedded_dir: Path) -> None:
    """Without requests no plan is sent and the supervisor waits."""
    executor = FakeExecutor()
    async with fake_engine(embedded_dir, executor) as engine:
        await last(engine.generate([1], greedy(2)))
        sent = len(executor.plans)
        await asyncio.sleep(0.05)
        assert len(executor.plans) == sent


async def test_finished_requests_are_logged_in_a_line(
    embedded_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One INFO line per finished request names its end, sizes and latencies."""
    with caplog.at_level(logging.INFO, logger="minivllm"):
        async with fake_engine(embedded_dir) as engine:
            await last(engine.generate([1, 2, 3], greedy(4), request_id="abc"))
    lines = [r.getMessage() for r in caplog.records if "abc" in r.getMessage()]
    assert len(lines) == 1
    for part in ("length", "queue", "3 tokens (0 cached)", "output 4", "TTFT", "ITL"):
        assert part in lines[0]


async def test_the_last_plans_are_kept_when_a_worker_dies(
    embedded_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A death is logged with the file that holds the last plans."""
    executor = FakeExecutor()
    executor.kills = lambda plan, model: len(executor.generations) == 1 and plan.step == 3
    async with fake_engine(embedded_dir, executor) as engine:
        await last(engine.generate([1, 2, 3], greedy(9)))
    message = next(r.getMessage() for r in caplog.records if "last plans" in r.getMessage())
    check_dump(Path(message.split("the last plans are in ")[1].split(";")[0]))


def check_dump(file: Path) -> None:
    assert len(file.read_text().splitlines()) >= 4
    file.unlink()


async def test_an_engine_starts_once(embedded_dir: Path) -> None:
    """A second start is refused, and costs the running engine nothing."""
    async with fake_engine(embedded_dir) as engine:
        with pytest.raises(errors.EngineClosedError, match="starts once"):
            await engine.start()
        assert (await last(engine.generate([1], greedy()))).finished


def test_an_engine_takes_only_a_config() -> None:
    """What is no config is named."""
    with pytest.raises(errors.ConfigError, match="config must be an EngineConfig, got 'tiny'"):
        AsyncEngine("tiny")


async def test_a_request_may_leave_the_prefix_cache_unread(embedded_dir: Path) -> None:
    """With `skip_reading_prefix_cache` a prompt is computed although it is cached, beside one that
    computes the same, and what it computes is cached for others."""
    known, new = list(range(1, 50)), list(range(101, 150))
    async with fake_engine(embedded_dir) as engine:

        async def num_cached(prompt: list[int], skip: bool | None) -> int:
            output = await last(
                engine.generate(prompt, greedy(3, skip_reading_prefix_cache=skip))
            )
            assert output.outputs[0].token_ids == expected_output(prompt, 3, VOCAB)
            return output.num_cached_tokens

        assert await num_cached(known, None) == 0
        assert await num_cached(known, True) == 0
        assert await num_cached(known, False) == 48
        together = await asyncio.gather(num_cached(new, True), num_cached(new, True))
        assert together == [0, 0]
        assert await num_cached(new, None) == 48


def test_any_event_loop_will_do(embedded_dir: Path) -> None:
    """On uvloop, whose transports are no subclasses of asyncio's, the worker process serves too."""

    async def serve() -> str | None:
        settings = EngineConfig(model=str(embedded_dir), max_model_len=64)
        async with AsyncEngine(settings) as engine:
            return (await last(engine.generate([1, 2, 3], greedy(2)))).outputs[0].finish_reason

    assert uvloop.run(serve()) == "length"
