"""The blocking face of the engine, for scripts and notebooks: `LLM(model).generate(prompts)`.

The event loop runs on a thread of its own, so a caller needs no loop, may have one running (as
notebooks do), and needs no `__main__` guard. Ctrl-C aborts the requests of the call and keeps the
engine. Invariant: outputs come in the order of the prompts. All the work: `engine`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

from minivllm.channel import Executor
from minivllm.config import EngineConfig
from minivllm.engine import AsyncEngine, Prompt
from minivllm.errors import ConfigError, EngineClosedError
from minivllm.request import RequestOutput, SamplingParams
from minivllm.tokenizer import Tokenizer

_T = TypeVar("_T")


class LLM:
    """A model to call; also a context manager that shuts it down.

    Settings are those of `EngineConfig`. The model runs on a thread of this process unless
    `distributed_executor_backend="mp"` asks for a worker process.

    Raises: `ConfigError`, `ModelError`
    """

    def __init__(
        self, model: str | None = None, *, executor: Executor | None = None, **config: Any
    ) -> None:
        resolved = EngineConfig.from_kwargs(model=model, **config)
        if resolved.distributed_executor_backend is None:
            resolved = dataclasses.replace(resolved, distributed_executor_backend="inline")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="minivllm-loop", daemon=True
        )
        self._thread.start()
        self._engine = AsyncEngine(resolved, executor=executor)
        try:
            self._call(self._engine.start())
        except BaseException:
            self.shutdown()
            raise

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C: closes the iterators, which aborts their requests
            raise

    @property
    def engine(self) -> AsyncEngine:
        """The engine inside; it lives on this object's loop."""
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; the outputs come in the order of the prompts.

        Raises: a `RequestError` for the first prompt that is wrong, the others are aborted;
                `EngineClosedError`
        """
        if self._loop.is_closed():
            raise EngineClosedError("the LLM was shut down")
        items: list[Any]
        if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
            items = [prompts]
        else:
            items = list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * len(items)
        else:
            params = list(sampling_params)
        if len(params) != len(items):
            rule = f"must be one, or one per prompt ({len(items)})"
            raise ConfigError("sampling_params", f"{len(params)} of them", rule)
        return self._call(self._generate_all(items, params, use_tqdm))

    async def _generate_all(
        self, prompts: list[Prompt], params: list[SamplingParams | None], use_tqdm: bool
    ) -> list[RequestOutput]:
        with tqdm(total=len(prompts), desc="Prompts", disable=not use_tqdm) as bar:
            progress = _Progress(bar)
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._generate_one(prompt, param, progress))
                        for prompt, param in zip(prompts, params, strict=True)
                    ]
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _generate_one(
        self, prompt: Prompt, params: SamplingParams | None, progress: _Progress
    ) -> RequestOutput:
        last = None
        async for output in self._engine.generate(prompt, params):
            last = output
        assert last is not None, "a request ends with an output"
        progress.finished(last)
        return last

    def shutdown(self) -> None:
        """End the engine and its thread. Safe to call twice."""
        if self._loop.is_closed():
            return
        self._call(self._engine.shutdown())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()


class _Progress:
    """Tokens per second, in and out, beside the bar."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._start_s = time.monotonic()
        self._num_in = 0
        self._num_out = 0

    def finished(self, output: RequestOutput) -> None:
        self._num_in += len(output.prompt_token_ids)
        self._num_out += sum(len(answer.token_ids) for answer in output.outputs)
        seconds = max(time.monotonic() - self._start_s, 1e-9)
        rates = f"in {self._num_in / seconds:.1f} tok/s, out {self._num_out / seconds:.1f} tok/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update()
