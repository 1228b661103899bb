"""The engine on an event loop: callers wait for outputs, one task keeps the workers busy.

    generate() ─> EngineCore.add ─> plan ─> executor ─> apply ─> OutputStream ─> the caller
                                     └── supervisor: one task ──┘

The supervisor keeps up to `depth` plans with the executor (two with overlap: one running, one
queued), applies what comes back, and restarts the workers when they die. Everything that it waits
for arrives in one inbox: a result, a death, or a nudge that there is new work; so an idle engine
sleeps. Deadlines have an alarm of their own, which rings whatever the supervisor waits for.

Invariants: nothing here waits on the loop, except to write a recording; a caller sees the end of
its own request or `EngineDead`, never somebody else's failure. Output is built when a caller looks,
so a slow reader costs no memory: it finds everything that came meanwhile. This module never imports
torch. Decisions and text: `core`; what dies with a worker: `scheduler`; what crosses the process
wall: `batch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from minivllm.batch import (
    LoadWeights,
    Order,
    Profile,
    Ready,
    Sleep,
    Start,
    StepPlan,
    StepResult,
    WakeUp,
)
from minivllm.channel import Executor, ProcessExecutor, frame, to_the_end
from minivllm.checkpoint import find_checkpoint
from minivllm.config import EngineConfig, WorkerConfig
from minivllm.core import EngineCore
from minivllm.errors import (
    ConfigError,
    EngineClosedError,
    EngineDead,
    RequestError,
    WorkerError,
)
from minivllm.metrics import start_line
from minivllm.request import OutputStream, Request, RequestOutput, SamplingParams
from minivllm.tokenizer import Tokenizer

logger = logging.getLogger("minivllm")

PAUSE_MODES = ("abort", "wait", "keep")
Prompt = str | Sequence[int] | Mapping[str, Any]

_MAX_FAILED_STARTS = 3
_NUM_DUMPED_PLANS = 16


class AsyncEngine:
    """The engine in an event loop, any loop: `async with AsyncEngine(config) as engine: ...`.

    Without an executor, the model runs in a worker process (`mp`), or on a thread of this process
    when the config says `inline`.
    """

    def __init__(
        self, config: EngineConfig | None = None, *, executor: Executor | None = None
    ) -> None:
        self.config = EngineConfig() if config is None else config
        if not isinstance(self.config, EngineConfig):
            raise ConfigError("config", config, "must be an EngineConfig")
        self._executor = executor or _make_executor(self.config)
        overlap = self.config.async_scheduling
        if overlap is None:
            overlap = self.config.distributed_executor_backend != "inline"
        self._depth = 2 if overlap else 1
        self._core: EngineCore | None = None
        self._tokenizer: Tokenizer | None = None
        self._worker_config: WorkerConfig | None = None
        self._inbox: asyncio.Queue[StepResult | WorkerError | None] = asyncio.Queue()
        self._streams: dict[str, asyncio.Event] = {}
        self._supervisor: asyncio.Task[None] | None = None
        self._turn = asyncio.Event()  # something ended or came to rest; see `_until`
        self._dead: BaseException | None = None
        self._started = False
        self._closing = False
        self._frozen = False  # no more plans
        self._sleep_level = 0
        self._weights: LoadWeights | None = None  # the last update, for workers that start later
        self._order_lock = asyncio.Lock()  # held while the engine comes to rest, or changes
        self._restarting = False
        self._record: IO[bytes] | None = None
        self._last_plans: deque[StepPlan] = deque(maxlen=_NUM_DUMPED_PLANS)
        self._alarm: asyncio.TimerHandle | None = None
        self._num_made_ids = 0

    # ---- life ------------------------------------------------------------------------------

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()

    async def start(self) -> None:
        """Find and load the model; returns when the engine is ready.

        Raises: `ConfigError`; `ModelError`; `EngineClosedError` when it was started before
        """
        if self._started:
            raise EngineClosedError("an engine starts once: make another one")
        self._started = True
        config = self.config
        checkpoint = await asyncio.to_thread(
            find_checkpoint,
            config.model,
            revision=config.revision,
            needs_weights=config.load_format != "dummy",
        )
        self._tokenizer = await asyncio.to_thread(Tokenizer.from_dir, checkpoint.path)
        _, self._worker_config = config.resolve(
            model_path=str(checkpoint.path), model_max_len=checkpoint.max_position_embeddings
        )
        if config.record is not None:
            self._record = await asyncio.to_thread(Path(config.record).open, "wb")
        try:
            ready = await self._start_workers(generation=0)
            self._core = EngineCore(config, checkpoint, self._tokenizer, ready)
        except BaseException:
            await self.shutdown()
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="minivllm-engine")

    async def _start_workers(self, generation: int) -> Ready:
        assert self._worker_config is not None, "start() resolves the config first"
        ready = await self._executor.start(
            generation, self._worker_config, self._inbox.put_nowait
        )
        self._write_record(Start(generation, self._worker_config, 0.0))
        if self._weights is not None:
            await self._executor.call(self._weights)
            self._write_weights(self._weights)
        if self._sleep_level:
            await self._executor.call(Sleep(self._sleep_level))
        logger.info("%s", start_line(ready, self.config.block_size))
        return ready

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Accept nothing more, give requests `drain_s` seconds to end, paused ones too, abort the
        rest, and end the workers. Safe to call twice."""
        self._closing = True
        self._turn.set()  # who waits for rest is told now
        if drain_s > 0 and self._core is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drain(self._core), drain_s)
        for request_id in list(self._streams):
            self.abort(request_id)
        if self._supervisor is not None:
            supervisor, self._supervisor = self._supervisor, None
            supervisor.cancel()
            await asyncio.wait([supervisor])
        if self._alarm is not None:
            self._alarm.cancel()
        await self._executor.stop()
        if self._record is not None:
            self._record.close()
            self._record = None

    async def _drain(self, core: EngineCore) -> None:
        async with self._order_lock:  # a change of the weights has its end first
            if self.is_sleeping:
                return
            self._resume(core)
        while self._streams and self._dead is None:
            self._turn.clear()
            await self._turn.wait()

    # ---- requests --------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        ttft_target_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request, each with everything so far, until it has ended.

        `prompt`: text, token ids, or a dict with `prompt` or `prompt_token_ids` and perhaps
        `cache_salt`, which keeps its cached KV from requests with another one. Closing the iterator
        aborts the request. `params`: None takes the model's own defaults. `request_id`: for
        `abort`; one is made if there is none.

        `priority`: the lower, the earlier it is served. `timeout_s` after its arrival the request
        ends with "abort" and stop reason "timeout", `ttft_target_s` after it, without a first
        token, with "ttft" (or as `ttft_policy` says).

        Raises: a `RequestError` for what is wrong with the request; `EngineBusyError`;
                `EngineClosedError`; `EngineDead`
        """
        core = self._live_core()
        core.check_room(1, 0)  # refused before it is tokenized
        # Before the first await, so that the order of the calls decides who gets which seed.
        seed = core.draw_seed()
        text, token_ids, cache_salt = await self._read_prompt(prompt)
        core = self._live_core()
        if request_id is None:
            request_id = self._new_id()
        requests = core.add(
            request_id,
            token_ids,
            params,
            prompt=text,
            cache_salt=cache_salt,
            seed=seed,
            priority=priority,
            timeout_s=timeout_s,
            ttft_target_s=ttft_target_s,
        )
        self._set_alarm(core)
        changed = self._streams[request_id] = asyncio.Event()
        self._inbox.put_nowait(None)
        stream = OutputStream(request_id, requests)
        try:
            output = None
            while output is None or not output.finished:
                await changed.wait()
                changed.clear()
                if self._dead is not None and not all(r.finished for r in requests):
                    raise EngineDead(f"the engine is dead: {self._dead}") from self._dead
                look = stream.look()
                if look is not None:
                    output = look
                    yield look
        finally:
            if self._streams.get(request_id) is changed:  # else the id has ended, and come again
                del self._streams[request_id]
                core.abort(request_id)
            self._turn.set()

    def _set_alarm(self, core: EngineCore) -> None:
        """Wake at the next deadline, even while the supervisor waits for something else."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        deadline_s = core.scheduler.next_deadline_s
        if deadline_s is not None:
            delay_s = max(0.0, deadline_s - core.scheduler.clock())
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self._ring, core)

    def _ring(self, core: EngineCore) -> None:
        self._notify(core.expire())
        self._inbox.put_nowait(None)
        self._set_alarm(core)

    def _new_id(self) -> str:
        """An id that no caller has given to a request of its own."""
        while True:
            request_id = f"request-{self._num_made_ids}"
            self._num_made_ids += 1
            if request_id not in self._streams:
                return request_id

    async def _read_prompt(self, prompt: Prompt) -> tuple[str | None, Sequence[int], str]:
        self._live_core()
        assert self._tokenizer is not None, "a live engine has a tokenizer"
        cache_salt = ""
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown:
                raise RequestError("prompt", sorted(unknown), "has keys that are not known")
            cache_salt = prompt.get("cache_salt") or ""
            if not isinstance(cache_salt, str):
                raise RequestError("cache_salt", cache_salt, "must be a string")
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        else:
            text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        if not isinstance(text, str | None):
            raise RequestError("prompt", text, "must be text")
        if token_ids is None:
            text = text or ""
            return text, await asyncio.to_thread(self._tokenizer.encode, text), cache_salt
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
            rule = "must be text, a list of token ids, or a dict with one of them"
            raise RequestError("prompt", token_ids, rule)
        return text, token_ids, cache_salt

    def _live_core(self) -> EngineCore:
        if self._dead is not None:
            raise EngineDead(f"the engine is dead: {self._dead}") from self._dead
        if self._core is None or self._closing:
            raise EngineClosedError("the engine is not running: it was shut down or never started")
        return self._core

    def abort(self, request_id: str) -> None:
        """End a request with finish reason "abort"; unknown ids are no error."""
        if self._core is not None:
            self._notify(self._core.abort(request_id))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep theirs."""
        self._live_core().scheduler.blocks.reset_prefix_cache()

    # ---- control ---------------------------------------------------------------------------

    async def health(self) -> str:
        """"ok" if requests are served, "degraded" while workers restart or requests wait.

        Raises: `EngineClosedError`; `EngineDead`
        """
        self._live_core()
        return "degraded" if self._restarting or self.is_paused else "ok"

    @property
    def request_ids(self) -> list[str]:
        """The requests that have not ended."""
        return list(self._streams)

    def metrics(self) -> dict[str, float]:
        """Gauges and counters by name, as they stand."""
        return self._live_core().metrics()

    def prometheus(self, **labels: str) -> bytes:
        """The metrics in Prometheus's text format, under vLLM's names; `labels` on each."""
        return self._live_core().prometheus(sleep_level=self._sleep_level, labels=labels)

    @property
    def is_paused(self) -> bool:
        """Whether new requests wait for `resume`."""
        return self._core is not None and self._core.scheduler.waiting.is_shut

    @property
    def is_sleeping(self) -> bool:
        """Whether the workers have given their memory back."""
        return self._sleep_level > 0

    async def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Come to rest; new requests wait for `resume`. Returns when nothing is computed any more.

        `mode`: what becomes of the requests that are there: "abort" ends them, "wait" lets them
        end, "keep" holds them where they are, to go on after `resume`. `clear_cache`: forget the
        cached prefixes. Cancelled, it leaves the engine as it was.

        Raises: `ConfigError` for another mode; `EngineDead`; `EngineClosedError`, also for "wait"
                while the workers sleep
        """
        self._check_mode(mode)
        if mode == "abort":
            self._abort_all()  # at once, for a pause that waits for these may hold the lock
        async with self._order_lock:
            await self._pause(mode)
            if clear_cache:
                self._live_core().scheduler.blocks.reset_prefix_cache()

    def _check_mode(self, mode: str) -> None:
        self._live_core()
        if mode not in PAUSE_MODES:
            raise ConfigError("mode", mode, f"must be one of {', '.join(PAUSE_MODES)}")

    def _abort_all(self) -> None:
        self._notify(self._live_core().abort_all())

    async def _pause(self, mode: str) -> None:
        scheduler = self._live_core().scheduler
        was_paused, was_frozen = self.is_paused, self._frozen
        scheduler.waiting.shut()
        try:
            if mode == "abort":
                self._abort_all()
            elif mode == "wait":
                if self.is_sleeping:
                    raise EngineClosedError("the engine sleeps: nothing will end before it wakes")
                self._frozen = False  # what an earlier pause has kept may end as well
                self._inbox.put_nowait(None)
                await self._until(lambda: not scheduler.admitted())
            await self._freeze()
        except BaseException:
            self._frozen = was_frozen
            if not was_paused:
                scheduler.waiting.open()
            self._inbox.put_nowait(None)
            raise

    async def resume(self) -> None:
        """Go on after `pause`, which has its end first.

        Raises: `EngineClosedError` while the workers sleep
        """
        async with self._order_lock:
            self._live_core()
            if self.is_sleeping:
                raise EngineClosedError("the engine sleeps: wake it up to resume")
            self._resume(self._live_core())

    def _resume(self, core: EngineCore) -> None:
        self._frozen = False
        core.scheduler.waiting.open()
        self._inbox.put_nowait(None)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause, and give the workers' memory back: 1, the KV cache, the weights moved to the
        host's memory; 2, the weights too. `mode`: as for `pause`; requests that are kept are
        computed again from their tokens after `wake_up`.

        Raises: `ConfigError`; `EngineDead`; `EngineClosedError`; `WorkerError` if the workers died
                of it, and then they are awake again, and paused
        """
        if level not in (1, 2):
            raise ConfigError("level", level, "must be 1 or 2")
        self._check_mode(mode)
        if mode == "abort":
            self._abort_all()
        async with self._order_lock:
            await self._pause(mode)
            await to_the_end(self._fall_asleep(level))

    async def _fall_asleep(self, level: int) -> None:
        scheduler = self._live_core().scheduler
        scheduler.set_all_aside()
        scheduler.blocks.reset_prefix_cache()
        await self._call(Sleep(level))
        self._sleep_level = max(self._sleep_level, level)

    async def wake_up(self) -> None:
        """Take the memory again, with the weights of the last update, and resume."""
        async with self._order_lock:
            self._live_core()
            if self.is_sleeping:
                await to_the_end(self._awake())
            self._resume(self._live_core())

    async def _awake(self) -> None:
        await self._call(WakeUp())
        if self._weights is not None and self._sleep_level == 2:
            await self._call(self._weights)
        self._sleep_level = 0

    async def update_weights(
        self, path: str | None = None, *, tensors: Mapping[str, Any] | None = None
    ) -> int:
        """Other weights of the same shapes, between two steps; returns the new weight epoch.

        From a directory of safetensors, or, where the model runs inline, from tensors by the names
        in such files. Running requests go on with the KV that they have; nothing that was computed
        with older weights is found in the prefix cache any more.

        Raises: `ConfigError`; `ModelError` for weights that do not fit, and the old ones stay;
                `WorkerError` if the worker died meanwhile, likewise. Once the workers load, a
                cancellation is held back until they have: nobody would know which weights they have
        """
        self._live_core()
        if (path is None) == (tensors is None):
            raise ConfigError("path", path, "or tensors must be given, and not both")
        if tensors is not None and self.config.distributed_executor_backend != "inline":
            rule = "can only be given where distributed_executor_backend is inline"
            raise ConfigError("tensors", list(tensors), rule)
        if tensors is not None and self._record is not None:
            raise ConfigError("tensors", list(tensors), "cannot be written to a recording")
        order = LoadWeights(None if path is None else _absolute("path", path), tensors)
        async with self._order_lock:
            was_frozen = self._frozen
            try:
                await self._freeze()
                return await to_the_end(self._change_weights(order))
            finally:
                self._frozen = was_frozen
                self._inbox.put_nowait(None)

    async def _change_weights(self, order: LoadWeights) -> int:
        scheduler = self._live_core().scheduler
        await self._call(order)
        self._write_weights(order)
        self._weights = order
        scheduler.raise_epoch()
        return scheduler.blocks.weight_epoch

    def _write_weights(self, order: LoadWeights) -> None:
        if order.path is not None:
            self._write_record(order)

    async def _call(self, order: Order) -> None:
        if self._restarting:  # new workers are told by `_start_workers`, and by nobody before it
            raise WorkerError("the workers are being restarted")
        await self._executor.call(order)

    async def start_profile(self, directory: str) -> None:
        """Trace the workers' steps from here on."""
        self._live_core()
        path = _absolute("directory", directory)
        await asyncio.to_thread(os.makedirs, path, exist_ok=True)
        await self._call(Profile(path))

    async def stop_profile(self) -> None:
        """End the trace, and write it as a Chrome trace into the directory."""
        self._live_core()
        await self._call(Profile(None))

    async def _freeze(self) -> None:
        """No more plans; returns when none is in flight."""
        scheduler = self._live_core().scheduler
        self._frozen = True
        await self._until(lambda: not scheduler.in_flight)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that comes true by a result, an end, or a restart.

        Raises: `EngineDead`; `EngineClosedError`
        """
        while not condition():
            self._live_core()
            self._turn.clear()
            await self._turn.wait()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self._tokenizer is None:
            raise EngineClosedError("the engine was never started")
        return self._tokenizer

    @property
    def core(self) -> EngineCore:
        """The synchronous core, to look at."""
        return self._live_core()

    def _notify(self, requests: list[Request]) -> None:
        self._turn.set()
        for request in requests:
            changed = self._streams.get(request.group_id)
            if changed is not None:
                changed.set()

    # ---- the supervisor --------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Run steps until cancelled; what it cannot survive becomes everybody's `EngineDead`."""
        core = self._live_core()
        try:
            while True:
                self._dispatch(core)
                event = await self._inbox.get()
                if isinstance(event, StepResult):
                    self._write_record(event)
                    self._notify(core.apply(event))
                elif isinstance(event, WorkerError):
                    await self._recover(core, event)
        except Exception as error:
            logger.exception("the engine cannot go on")
            self._dead = error
            self._turn.set()
            for changed in self._streams.values():
                changed.set()

    def _dispatch(self, core: EngineCore) -> None:
        """Plan steps until enough are with the workers. While suspects of a worker's death are
        tried there is only one, so that the next death names its culprit."""
        in_flight = core.scheduler.in_flight
        depth = 1 if core.scheduler.quarantined else self._depth
        while not self._frozen and len(in_flight) < depth:
            plan = core.plan()
            if plan is None:
                break
            self._write_record(plan)
            self._last_plans.append(plan)
            self._executor.send(plan)

    async def _recover(self, core: EngineCore, death: WorkerError) -> None:
        """New workers for dead ones; every stream goes on."""
        logger.error("%s; the last plans are in %s; restarting", death, await self._dump_plans())
        self._notify(core.fail_suspects())
        self._restarting = True
        for attempt in range(1, _MAX_FAILED_STARTS + 1):
            try:
                ready = await self._start_workers(core.scheduler.generation + 1)
                break
            except WorkerError:
                if attempt == _MAX_FAILED_STARTS:
                    raise
                logger.exception("the workers did not start")
                await asyncio.sleep(attempt)
        while not self._inbox.empty():  # results of the dead generation
            self._inbox.get_nowait()
        core.restart(ready)
        self._restarting = False
        self._turn.set()

    async def _dump_plans(self) -> str:
        # repr: a plan with logits processors holds functions, which have no JSON
        encode = msgspec.json.Encoder(enc_hook=repr).encode
        lines = b"\n".join(encode(plan) for plan in self._last_plans)
        self._last_plans.clear()
        return await asyncio.to_thread(_write_dump, lines)

    def _write_record(self, message: Start | StepPlan | StepResult | LoadWeights) -> None:
        if self._record is not None:
            self._record.write(frame(message))


def _absolute(field: str, path: str) -> str:
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(field, path, "must be a path")
    return str(Path(path).absolute())


def _write_dump(lines: bytes) -> str:
    fd, name = tempfile.mkstemp(prefix="minivllm-plans-", suffix=".jsonl")  # readable by us alone
    with os.fdopen(fd, "wb") as file:
        file.write(lines)
    return name


def _make_executor(config: EngineConfig) -> Executor:
    if config.distributed_executor_backend == "inline":
        # by name, because it brings torch into this process, which only inline users want
        executor: Executor = importlib.import_module("minivllm.worker").InlineExecutor()
        return executor
    return ProcessExecutor(lease_s=config.worker_lease_s, step_timeout_s=config.step_timeout_s)
