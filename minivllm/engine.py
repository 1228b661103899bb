"""The engine: a synchronous core that decides, and an asynchronous shell that waits.

    generate() ─> Request ─> EngineCore.plan() ─> executor ─> EngineCore.apply() ─> RequestOutput
                                  │                               │
                                  scheduler, blocks               tokens, text, stops, ends

`EngineCore` is plain code without a loop or a model: `plan` makes the next step, `apply` takes its
result. `AsyncEngine` runs one supervisor task that keeps up to `depth` plans with the executor
(two with overlap: one running, one queued), applies what comes back, and restarts the workers when
they die. Everything the supervisor waits for arrives in one inbox: a result, a death, or a nudge
that there is new work; so an idle engine sleeps.

Invariants: nothing here blocks the loop; every accepted request gets exactly one end; a caller
sees the end of its own request or `EngineDead`, never somebody else's failure. Output is built when
a caller looks, so a slow reader costs no memory: it finds everything that came meanwhile.
This module never imports torch. Where blocks are freed: `scheduler`; what crosses the process
wall: `batch`; how a stop cuts text: `tokenizer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from minivllm.batch import Ready, RowLogprobs, Start, StepPlan, StepResult
from minivllm.channel import Executor, ProcessExecutor, frame
from minivllm.checkpoint import Checkpoint, find_checkpoint
from minivllm.config import EngineConfig, WorkerConfig
from minivllm.errors import (
    DuplicateRequestError,
    EmptyPromptError,
    EngineClosedError,
    EngineDead,
    PromptTooLongError,
    RequestError,
    RequestTooLargeError,
    TokenIdError,
    WorkerError,
)
from minivllm.metrics import finished_line, start_line
from minivllm.request import Logprob, Request, RequestOutput, SamplingParams
from minivllm.scheduler import Scheduler, Update
from minivllm.tokenizer import Detokenizer, Tokenizer

logger = logging.getLogger("minivllm")

Prompt = str | Sequence[int] | Mapping[str, Any]

_MAX_FAILED_STARTS = 3
_NUM_DUMPED_PLANS = 16


class EngineCore:
    """Requests in, steps out, results in, ends out: the engine without a loop."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        ready: Ready,
    ) -> None:
        self._config = config
        self._model_max_len = checkpoint.max_position_embeddings
        self._vocab_size = ready.vocab_size
        self._eos_ids = frozenset(checkpoint.eos_token_ids)
        self._tokenizer = tokenizer
        limits, _ = config.resolve(
            model_path=str(checkpoint.path), model_max_len=self._model_max_len
        )
        self.scheduler = Scheduler(config.fit_pool(limits, ready.num_blocks), ready.num_blocks)
        self._detokenizers: dict[str, Detokenizer] = {}
        self._num_requests = 0
        self._seeds = random.Random(config.seed)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output that one request may have."""
        return self.scheduler.config.max_model_len

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        cache_salt: str = "",
    ) -> Request:
        """Accept a request.

        Raises: a `RequestError` naming the field and the value; then nothing has changed
        """
        if request_id in self.scheduler:
            raise DuplicateRequestError("request_id", request_id, "must not be in use")
        self._check_prompt(token_ids)
        self._check_params(params)
        stop_ids = frozenset(params.stop_token_ids or ())
        seed = params.seed if params.seed not in (None, -1) else self._seeds.getrandbits(64)
        assert seed is not None, "a seed was drawn"
        request = Request(
            id=request_id,
            number=self._num_requests,
            prompt=prompt,
            prompt_token_ids=token_ids,
            params=params,
            seed=seed,
            max_len=min(self.max_model_len, len(token_ids) + (params.max_tokens or sys.maxsize)),
            stop_ids=stop_ids if params.ignore_eos else stop_ids | self._eos_ids,
            cache_salt=cache_salt,
        )
        self._num_requests += 1
        self._detokenizers[request_id] = Detokenizer(self._tokenizer, stop=params.stop_strings)
        self.scheduler.add(request)
        return request

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise EmptyPromptError("prompt", token_ids, "must have at least one token")
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise TokenIdError("prompt_token_ids", token_id, "must be integers")
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._vocab_size:
                rule = f"must be from 0 to {self._vocab_size - 1}"
                raise TokenIdError("prompt_token_ids", token_id, rule)
        num_tokens = len(token_ids)
        if num_tokens >= self.max_model_len:
            limit = f"the context is {self.max_model_len} tokens: reduce the length of the prompt"
            if num_tokens >= self._model_max_len or self.max_model_len < self._pool_tokens():
                rule = f"must leave room for a new token; {limit}"
                raise PromptTooLongError("prompt length", num_tokens, rule)
            rule = f"must fit in the KV cache; {limit}, or raise kv_cache_memory_bytes"
            raise RequestTooLargeError("prompt length", num_tokens, rule)

    def _pool_tokens(self) -> int:
        blocks = self.scheduler.blocks
        return (blocks.num_blocks - 1) * blocks.block_size

    def _check_params(self, params: SamplingParams) -> None:
        for token_id in params.stop_token_ids or ():
            if token_id >= self._vocab_size:
                rule = f"must be from 0 to {self._vocab_size - 1}"
                raise TokenIdError("stop_token_ids", token_id, rule)
        if params.logprobs is not None and params.logprobs > self._config.max_logprobs:
            rule = f"must be at most max_logprobs ({self._config.max_logprobs})"
            raise RequestError("logprobs", params.logprobs, rule)

    def plan(self) -> StepPlan | None:
        """The next step for the workers, or None until a result or a request arrives."""
        return self.scheduler.plan()

    def apply(self, result: StepResult) -> list[Request]:
        """Take the result of the oldest plan in flight; returns the requests that moved on."""
        now_s = time.monotonic()
        updates = self.scheduler.complete(result)
        for update in updates:
            if update.tokens is None:
                self._end(update.request, "error", "the model's numbers were not finite")
            else:
                self._extend(update, now_s)
        return [update.request for update in updates]

    def _extend(self, update: Update, now_s: float) -> None:
        request, tokens, row_logprobs = update
        assert tokens is not None, "a failed row has no tokens"
        stats = request.stats
        if stats.first_token_s is None:
            stats.first_token_s = now_s
        stats.last_token_s = now_s
        if request.logprobs is not None and row_logprobs is not None:
            request.logprobs.append(self._logprobs(row_logprobs))
        detokenizer = self._detokenizers[request.id]
        for token_id in tokens:
            if token_id in request.stop_ids:
                is_eos = token_id in self._eos_ids and not request.params.ignore_eos
                self._end(request, "stop", None if is_eos else token_id)
                return
            stop = detokenizer.push([token_id]).stop
            if stop is not None:
                self._end(request, "stop", stop)
                return
        if len(request.tokens) >= request.max_len:
            self._end(request, "length")
            return
        request.text = detokenizer.text

    def _logprobs(self, row: RowLogprobs) -> dict[int, Logprob]:
        ranks: list[int] = [row.rank, *range(1, len(row.token_ids))]
        entry: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(row.token_ids, row.logprobs, ranks, strict=True):
            # the sampled token comes first, and keeps its own rank where it is listed again
            entry.setdefault(token_id, Logprob(logprob, rank, self._tokenizer.token_text(token_id)))
        return entry

    def _end(self, request: Request, reason: str, stop_reason: str | int | None = None) -> None:
        request.text = self._detokenizers.pop(request.id).finish()
        self.scheduler.finish(request, reason, stop_reason)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", finished_line(request))

    def abort(self, request_id: str) -> Request | None:
        """End a request with "abort"; None when it is unknown or has ended."""
        request = self.scheduler.get(request_id)
        if request is not None:
            self._end(request, "abort")
        return request

    def fail_suspects(self) -> list[Request]:
        """After a death of the workers: end the requests that have killed them too often."""
        failed = self.scheduler.blame()
        for request in failed:
            self._end(request, "error", "the request ended its worker every time it ran alone")
        return failed

    def restart(self, ready: Ready) -> None:
        """Go on with new workers: every unfinished request is computed again from its tokens."""
        self.scheduler.restart(ready.num_blocks)


class AsyncEngine:
    """The engine in an event loop, any loop: `async with AsyncEngine(config) as engine: ...`.

    Without an executor, the model runs in a worker process (`mp`), or on a thread of this process
    when the config says `inline`.
    """

    def __init__(
        self, config: EngineConfig | None = None, *, executor: Executor | None = None
    ) -> None:
        self.config = config or EngineConfig()
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
        self._drained = asyncio.Event()
        self._dead: BaseException | None = None
        self._closing = False
        self._record: IO[bytes] | None = None
        self._last_plans: deque[StepPlan] = deque(maxlen=_NUM_DUMPED_PLANS)
        self._num_made_ids = 0

    # ---- life ------------------------------------------------------------------------------

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()

    async def start(self) -> None:
        """Find and load the model; returns when the engine is ready.

        Raises: `ConfigError`, `ModelError`
        """
        config = self.config
        checkpoint = await asyncio.to_thread(
            find_checkpoint, config.model, revision=config.revision
        )
        self._tokenizer = await asyncio.to_thread(Tokenizer.from_dir, checkpoint.path)
        _, self._worker_config = config.resolve(
            model_path=str(checkpoint.path), model_max_len=checkpoint.max_position_embeddings
        )
        if config.record is not None:
            self._record = await asyncio.to_thread(Path(config.record).open, "wb")
        ready = await self._start_workers(generation=0)
        try:
            self._core = EngineCore(config, checkpoint, self._tokenizer, ready)
        except BaseException:
            await self._executor.stop()
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="minivllm-engine")

    async def _start_workers(self, generation: int) -> Ready:
        assert self._worker_config is not None, "start() resolves the config first"
        ready = await self._executor.start(
            generation, self._worker_config, self._inbox.put_nowait
        )
        self._write_record(Start(generation, self._worker_config, 0.0))
        logger.info("%s", start_line(ready, self.config.block_size))
        return ready

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Accept nothing more, give running requests `drain_s` seconds to end, abort the rest,
        and end the workers. Safe to call twice."""
        self._closing = True
        if drain_s > 0 and self._streams:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), drain_s)
        for request_id in list(self._streams):
            self.abort(request_id)
        if self._supervisor is not None:
            supervisor, self._supervisor = self._supervisor, None
            supervisor.cancel()
            await asyncio.wait([supervisor])
        await self._executor.stop()
        if self._record is not None:
            self._record.close()
            self._record = None

    # ---- requests --------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one request, each with everything so far, until it has ended.

        `prompt`: text, token ids, or a dict with `prompt` or `prompt_token_ids` and perhaps
        `cache_salt`, which keeps its cached KV from requests with another one. Closing the iterator
        aborts the request.

        Raises: a `RequestError` for what is wrong with the request; `EngineClosedError`;
                `EngineDead`
        """
        text, token_ids, cache_salt = await self._read_prompt(prompt)
        core = self._live_core()
        if request_id is None:
            request_id = f"request-{self._num_made_ids}"
            self._num_made_ids += 1
        request = core.add(
            request_id, token_ids, params or SamplingParams(), prompt=text, cache_salt=cache_salt
        )
        changed = self._streams[request_id] = asyncio.Event()
        self._inbox.put_nowait(None)
        try:
            output = None
            while output is None or not output.finished:
                await changed.wait()
                changed.clear()
                if self._dead is not None and not request.finished:
                    raise EngineDead(f"the engine is dead: {self._dead}") from self._dead
                output = request.output()
                yield output
        finally:
            del self._streams[request_id]
            core.abort(request_id)
            if self._closing and not self._streams:
                self._drained.set()

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
            content: Any = prompt.get("prompt_token_ids") or prompt.get("prompt") or ""
        else:
            content = prompt
        if isinstance(content, str):
            return content, await asyncio.to_thread(self._tokenizer.encode, content), cache_salt
        if not isinstance(content, Sequence):
            raise RequestError("prompt", content, "must be text, token ids or a dict of them")
        return None, content, cache_salt

    def _live_core(self) -> EngineCore:
        if self._dead is not None:
            raise EngineDead(f"the engine is dead: {self._dead}") from self._dead
        if self._core is None or self._closing:
            raise EngineClosedError("the engine is not running: it was shut down or never started")
        return self._core

    def abort(self, request_id: str) -> None:
        """End a request with finish reason "abort"; unknown ids are no error."""
        if self._core is not None:
            request = self._core.abort(request_id)
            if request is not None:
                self._notify([request])

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep theirs."""
        self._live_core().scheduler.blocks.reset_prefix_cache()

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
        for request in requests:
            changed = self._streams.get(request.id)
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
            for changed in self._streams.values():
                changed.set()

    def _dispatch(self, core: EngineCore) -> None:
        """Plan steps until enough are with the workers. While suspects of a worker's death are
        tried there is only one, so that the next death names its culprit."""
        in_flight = core.scheduler.in_flight
        while len(in_flight) < (1 if core.scheduler.quarantined else self._depth):
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

    async def _dump_plans(self) -> str:
        lines = b"\n".join(msgspec.json.encode(plan) for plan in self._last_plans)
        self._last_plans.clear()
        return await asyncio.to_thread(_write_dump, lines)

    def _write_record(self, message: Start | StepPlan | StepResult) -> None:
        if self._record is not None:
            self._record.write(frame(message))


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
    return ProcessExecutor(lease_s=config.worker_lease_s)
