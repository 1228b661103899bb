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
from minivllm.request import RequestOutput, RequestOutputKind, SamplingParams
from minivllm.tokenizer import Tokenizer

Message = Mapping[str, Any]

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
        resolved = EngineConfig(model=model, **config)
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
        # Ctrl-C may come at any line of this, so it is for the loop to say whether there is a
        # task to cancel. Cancelling closes the iterators, which aborts their requests.
        tasks: list[asyncio.Task[Any] | None] = []
        left = False

        async def run() -> _T:
            if left:
                work.close()
                raise asyncio.CancelledError
            tasks.append(asyncio.current_task())
            return await work

        def leave() -> None:
            nonlocal left
            left = True
            for task in tasks:
                if task is not None:
                    task.cancel()

        try:
            return asyncio.run_coroutine_threadsafe(run(), self._loop).result()
        except BaseException:
            self._loop.call_soon_threadsafe(leave)
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
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; the outputs come in the order of the prompts.

        Parameters and priorities are one for all, or one for each. `output_kind` has no effect
        here: what comes back is the end.

        Raises: a `RequestError` for the first prompt that is wrong, the others are aborted;
                `ConfigError` for a wrong number of parameters; `EngineClosedError`
        """
        if self._loop.is_closed():
            raise EngineClosedError("the LLM was shut down")
        items: list[Any]
        if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
            items = [prompts]
        else:
            items = list(prompts)
        params = _one_each("sampling_params", sampling_params, len(items))
        priorities = _one_each("priority", priority, len(items))
        return self._call(self._generate_all(items, params, priorities, use_tqdm))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or many; the outputs come in their order.

        A message is `{"role": "user", "content": "Hi"}`. The options are those of
        `Tokenizer.apply_chat_template`; `chat_template_kwargs` are the template's own variables.

        Raises: what `generate` raises; `RequestError` when the model has no chat template, or the
                template refuses the messages
        """
        conversations: list[Any]
        if messages and isinstance(messages[0], Mapping):
            conversations = [messages]
        else:
            conversations = list(messages)
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template": chat_template,
            **(chat_template_kwargs or {}),
        }
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = self.tokenizer.apply_chat_template(conversation, **options)
            token_ids = self.tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": token_ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    async def _generate_all(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams | None],
        priorities: list[int],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        with tqdm(total=len(prompts), desc="Prompts", disable=not use_tqdm) as bar:
            progress = _Progress(bar)
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._generate_one(*request, progress))
                        for request in zip(prompts, params, priorities, strict=True)
                    ]
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _generate_one(
        self, prompt: Prompt, params: SamplingParams | None, priority: int, progress: _Progress
    ) -> RequestOutput:
        last = None
        params = params or self.get_default_sampling_params()
        final = dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
        async for output in self._engine.generate(prompt, final, priority=priority):
            last = output
        assert last is not None, "a request ends with an output"
        progress.finished(last)
        return last

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without parameters uses: the model's own defaults, then the config's."""
        return self._engine.core.default_params

    def get_metrics(self) -> dict[str, float]:
        """Gauges and counters by name, as they stand."""
        return self._engine.metrics()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""

        async def reset() -> None:
            self._engine.reset_prefix_cache()

        self._call(reset())

    def sleep(self, level: int = 1) -> None:
        """See `AsyncEngine.sleep`."""
        self._call(self._engine.sleep(level))

    def wake_up(self) -> None:
        """See `AsyncEngine.wake_up`."""
        self._call(self._engine.wake_up())

    def update_weights(
        self, path: str | None = None, *, tensors: Mapping[str, Any] | None = None
    ) -> int:
        """See `AsyncEngine.update_weights`."""
        return self._call(self._engine.update_weights(path, tensors=tensors))

    def start_profile(self, directory: str) -> None:
        """See `AsyncEngine.start_profile`."""
        self._call(self._engine.start_profile(directory))

    def stop_profile(self) -> None:
        """See `AsyncEngine.stop_profile`."""
        self._call(self._engine.stop_profile())

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


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    """`value` for each of `count` prompts: itself, or one per prompt where it is a sequence."""
    values = list(value) if isinstance(value, Sequence) else [value] * count
    if len(values) != count:
        rule = f"must be one, or one per prompt ({count})"
        raise ConfigError(name, f"{len(values)} of them", rule)
    return values


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
