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
import collections
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from minivllm.batch import (
    Done,
    Failed,
    HostMessage,
    LoadWeights,
    Order,
    Ready,
    Start,
    StepPlan,
    StepResult,
    Stop,
    decode_record,
)
from minivllm.channel import Calls, Deliver, FrameReader, Mailbox
from minivllm.config import WorkerConfig
from minivllm.errors import CorruptFileError, MinivllmError, WorkerError, to_wire
from minivllm.model_runner import ModelRunner
from minivllm.pending import Pending


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
        _serve(runner, mailbox.receive, mailbox.post, mailbox.send)
    except Exception as error:  # noqa: BLE001 (whatever it is, the host is told)
        traceback.print_exc()
        mailbox.send(Failed(*to_wire(error)))
        sys.exit(1)


def _serve(
    runner: ModelRunner,
    receive: Callable[[], Any],
    post: Callable[[Pending], None],
    tell: Callable[[StepResult | Done], None],
) -> None:
    """Answer plans and orders, in their order, until told to stop.

    A thread waits for the device and posts each step that is done to where plans come in, so that
    a plan is launched as soon as it comes, while the step before it runs.
    """
    in_flight: collections.deque[Pending] = collections.deque()
    launched: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
    watcher = threading.Thread(target=_watch, args=(launched, post), daemon=True)
    watcher.start()
    try:
        while not isinstance(message := receive(), Stop):
            if isinstance(message, StepPlan):
                pending = runner.launch(message)
                if pending.must_wait:
                    in_flight.append(pending)
                    launched.put(pending)
                else:
                    tell(pending.result())
            elif isinstance(message, Pending):
                if message in in_flight:  # an order did not wait for the watcher
                    tell(in_flight.popleft().result())
            else:
                while in_flight:
                    tell(in_flight.popleft().result())
                tell(_carry_out(runner, message))
    finally:
        launched.put(None)
        watcher.join()


def _watch(launched: queue.SimpleQueue[Pending | None], post: Callable[[Pending], None]) -> None:
    while (pending := launched.get()) is not None:
        try:
            pending.wait()
        finally:
            post(pending)  # after an error too: who asks for the result gets the error


def _carry_out(runner: ModelRunner, order: Order) -> Done:
    """An order that fails as foreseen leaves the runner as it was."""
    assert isinstance(order, Order), f"{order!r} is neither a plan nor an order"
    try:
        runner.carry_out(order)
    except MinivllmError as error:
        return Done(to_wire(error))
    return Done(None)


class InlineExecutor:
    """The model on a thread of this process; see `channel.Executor`."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[HostMessage | Pending] | None = None
        self._thread: threading.Thread | None = None
        self._calls = Calls()

    async def start(self, generation: int, config: WorkerConfig, deliver: Deliver) -> Ready:
        """See `Executor.start`."""
        await self.stop()
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[Ready] = loop.create_future()
        self._inbox = queue.SimpleQueue()

        def receive(message: StepResult | Done | WorkerError) -> None:
            if isinstance(message, Done):
                self._calls.answer(message.error)
                return
            deliver(message)
            if isinstance(message, WorkerError):
                self._calls.abandon()

        self._thread = threading.Thread(
            target=_run_inline,
            args=(self._inbox, generation, config, loop, ready, receive),
            name="minivllm-worker",
            daemon=True,
        )
        self._thread.start()
        return await ready

    def send(self, plan: StepPlan) -> None:
        """See `Executor.send`."""
        assert self._inbox is not None, "send() before start()"
        self._inbox.put(plan)

    async def call(self, order: Order) -> None:
        """See `Executor.call`."""
        assert self._inbox is not None, "call() before start()"
        done = self._calls.add()
        self._inbox.put(order)
        await done

    async def stop(self) -> None:
        """See `Executor.stop`; waits for the step that is running."""
        if self._inbox is not None and self._thread is not None:
            self._inbox.put(Stop())
            await asyncio.to_thread(self._thread.join)
            self._inbox = self._thread = None
            self._calls.abandon()


def _run_inline(
    inbox: queue.SimpleQueue[HostMessage | Pending],
    generation: int,
    config: WorkerConfig,
    loop: asyncio.AbstractEventLoop,
    ready: asyncio.Future[Ready],
    receive: Callable[[StepResult | Done | WorkerError], None],
) -> None:
    def tell(answer: StepResult | Done | WorkerError) -> None:
        if not loop.is_closed():  # a caller that left without shutdown hears nothing more
            loop.call_soon_threadsafe(receive, answer)

    start_s = time.perf_counter()
    try:
        runner = ModelRunner(config)
    except Exception as error:  # noqa: BLE001 (whatever it is, the host is told)
        known = error if isinstance(error, MinivllmError) else WorkerError(traceback.format_exc())
        loop.call_soon_threadsafe(_set_exception, ready, known)
        return
    loaded = runner.ready(generation)
    loaded.phase_s["total"] = time.perf_counter() - start_s
    loop.call_soon_threadsafe(_set_result, ready, loaded)
    try:
        _serve(runner, inbox.get, inbox.put, tell)
    except Exception:  # noqa: BLE001 (whatever it is, the host is told)
        tell(WorkerError(f"the inline worker failed:\n{traceback.format_exc()}"))


def _set_result(future: asyncio.Future[Ready], value: Ready) -> None:
    if not future.done():  # cancelled while the model was loading
        future.set_result(value)


def _set_exception(future: asyncio.Future[Ready], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def replay(file: Path) -> tuple[int, int]:
    """Run the plans of a recording (`EngineConfig.record`) again.

    Returns how many steps were run, and how many of them gave other tokens than recorded.

    Raises: `CorruptFileError` for a file that is no recording
    """
    runner: ModelRunner | None = None
    results: dict[int, StepResult] = {}
    num_steps = num_different = 0
    for payload in FrameReader().feed(file.read_bytes()):
        try:
            message = decode_record(payload)
        except msgspec.MsgspecError as error:
            raise CorruptFileError(f"{file} is not a recording: {error}") from error
        if isinstance(message, Start):
            runner = ModelRunner(message.config)
            results.clear()
        elif runner is None:
            break
        elif isinstance(message, StepPlan):
            results[message.step] = runner.launch(message).result()
        elif isinstance(message, LoadWeights):
            runner.carry_out(message)
        else:
            num_steps += 1
            num_different += results.pop(message.step).tokens != message.tokens
    if runner is None:
        raise CorruptFileError(f"{file} is not a recording: it does not begin with a start")
    return num_steps, num_different


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), time.perf_counter())
    os._exit(0)  # the mailbox's thread is still reading
