"""Where channel and runner meet: the worker process, and the same worker on a thread.

    python -m minivllm.worker FD PARENT_PID     started by `channel.ProcessExecutor`
    InlineExecutor                              the same interface, in this process

Both do the same: take plans in order, run them, answer each. Inline is for scripts, notebooks and
debuggers: one can step from `LLM.generate` into a kernel. `replay` runs recorded plans again.
Invariant: an exception in a step ends the worker, never the host. What a step does:
`model_runner`; what happens after a failure: `engine`.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

from minivllm.batch import Failed, Ready, Start, StepPlan, StepResult, Stop, decode_record
from minivllm.channel import Deliver, FrameReader, Mailbox
from minivllm.config import WorkerConfig
from minivllm.errors import MinivllmError, WorkerError, to_wire
from minivllm.model_runner import ModelRunner


def main(fd: int, parent_pid: int, start_s: float) -> None:
    """Serve the host at the other end of socket `fd` until it says stop or is gone."""
    mailbox = Mailbox(socket.socket(fileno=fd), parent_pid)
    start = mailbox.receive()
    assert isinstance(start, Start), f"the first message was {start!r}"
    try:
        runner = ModelRunner(start.config)
        ready = runner.ready(start.generation)
        ready.phase_s["total"] = time.perf_counter() - start_s
        mailbox.send(ready)
        while isinstance(plan := mailbox.receive(), StepPlan):
            mailbox.send(runner.step(plan))
    except Exception as error:  # noqa: BLE001 (whatever it is, the host is told)
        traceback.print_exc()
        mailbox.send(Failed(*to_wire(error)))
        sys.exit(1)


class InlineExecutor:
    """The model on a thread of this process; see `channel.Executor`."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[StepPlan | Stop] | None = None
        self._thread: threading.Thread | None = None

    async def start(self, generation: int, config: WorkerConfig, deliver: Deliver) -> Ready:
        """See `Executor.start`."""
        await self.stop()
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[Ready] = loop.create_future()
        self._inbox = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run_inline,
            args=(self._inbox, generation, config, loop, ready, deliver),
            name="minivllm-worker",
            daemon=True,
        )
        self._thread.start()
        return await ready

    def send(self, plan: StepPlan) -> None:
        """See `Executor.send`."""
        assert self._inbox is not None, "send() before start()"
        self._inbox.put(plan)

    async def stop(self) -> None:
        """See `Executor.stop`; waits for the step that is running."""
        if self._inbox is not None and self._thread is not None:
            self._inbox.put(Stop())
            await asyncio.to_thread(self._thread.join)
            self._inbox = self._thread = None


def _run_inline(
    inbox: queue.SimpleQueue[StepPlan | Stop],
    generation: int,
    config: WorkerConfig,
    loop: asyncio.AbstractEventLoop,
    ready: asyncio.Future[Ready],
    deliver: Deliver,
) -> None:
    def tell(result: StepResult | WorkerError) -> None:
        if not loop.is_closed():  # a caller that left without shutdown hears nothing more
            loop.call_soon_threadsafe(deliver, result)

    start_s = time.perf_counter()
    try:
        runner = ModelRunner(config)
    except Exception as error:  # noqa: BLE001 (whatever it is, the host is told)
        known = error if isinstance(error, MinivllmError) else WorkerError(traceback.format_exc())
        loop.call_soon_threadsafe(_set_exception, ready, known)
        return
    answer = runner.ready(generation)
    answer.phase_s["total"] = time.perf_counter() - start_s
    loop.call_soon_threadsafe(_set_result, ready, answer)
    while isinstance(plan := inbox.get(), StepPlan):
        try:
            result = runner.step(plan)
        except Exception:  # noqa: BLE001 (whatever it is, the host is told)
            tell(WorkerError(f"the inline worker failed:\n{traceback.format_exc()}"))
            return
        tell(result)


def _set_result(future: asyncio.Future[Ready], value: Ready) -> None:
    if not future.done():  # cancelled while the model was loading
        future.set_result(value)


def _set_exception(future: asyncio.Future[Ready], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def replay(file: Path) -> tuple[int, int]:
    """Run the plans of a recording (`EngineConfig.record`) again.

    Returns how many steps were run, and how many of them gave other tokens than recorded.
    """
    runner: ModelRunner | None = None
    results: dict[int, StepResult] = {}
    num_steps = num_different = 0
    for payload in FrameReader().feed(file.read_bytes()):
        message = decode_record(payload)
        if isinstance(message, Start):
            runner = ModelRunner(message.config)
            results.clear()
        elif isinstance(message, StepPlan):
            assert runner is not None, "a recording begins with a start"
            results[message.step] = runner.step(message)
        else:
            num_steps += 1
            num_different += results.pop(message.step).tokens != message.tokens
    return num_steps, num_different


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), time.perf_counter())
    os._exit(0)  # the mailbox's thread is still reading
