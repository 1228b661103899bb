"""The process wall: framed messages over a socket, and the worker process behind it.

    host (event loop)                            worker (`python -m minivllm.worker FD PARENT_PID`)
    ProcessExecutor ── socketpair: [length][message] ──> Mailbox (a thread) ──> main thread
         ^    ^                                              │
         │    └── lease: some frame every few seconds <──────┘ Beat
         └─────── end of file: the worker is gone

An executor runs plans and delivers results, in order, by a callback on the event loop's thread.
`ProcessExecutor` is one; the inline executor in `worker` is the other. An executor lives for one
generation at a time: after it has delivered a `WorkerError` it stays silent until it is started
again.

How a death is seen: a closed socket at once, but for the moment in which the end of stderr comes;
a process that stands still when its lease lapses; a step that hangs, while the mailbox goes on
beating, when it takes too long; an error by its message. How a host's death is seen: by end of
file, or by a change of parent where a fork of the host keeps the socket open. No signal is handled,
so any loop in any thread will do. Beside the socket only the worker's stderr crosses, into the log.
What is sent: `batch`. What to do after a death: `engine` and `scheduler`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import queue
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import IO, Any, Protocol, TypeVar, cast

import msgspec

from minivllm.batch import (
    Beat,
    Done,
    Failed,
    HostMessage,
    Order,
    Ready,
    Start,
    StepPlan,
    StepResult,
    WorkerMessage,
    decode_host_message,
    decode_worker_message,
    encode,
)
from minivllm.config import WorkerConfig
from minivllm.errors import WorkerError, from_wire

# How long OpenMP's threads spin before they sleep. The default, milliseconds, is for a machine that
# nothing else uses: with one busy process beside it, or the two OpenMP runtimes of torch and numba
# in turn, steps become several times slower. This costs a few percent when all is quiet.
WORKER_ENV = {"GOMP_SPINCOUNT": "1000"}

_HEADER_BYTES = 4
_BEATS_PER_LEASE = 4
_STDERR_LINES = 40
_LAST_WORDS_S = 1.0  # most to wait for the end of stderr after the end of the socket

logger = logging.getLogger("minivllm.worker")

Deliver = Callable[[StepResult | WorkerError], None]
_T = TypeVar("_T")


class Executor(Protocol):
    """Runs the steps of one model, wherever its tensors are."""

    async def start(self, generation: int, config: WorkerConfig, deliver: Deliver) -> Ready:
        """Load the model. Results, or one `WorkerError`, come through `deliver`.

        Raises: the `MinivllmError` for which the model cannot be loaded
        """

    def send(self, plan: StepPlan) -> None:
        """Run a plan after those sent before; never blocks."""

    async def call(self, order: Order) -> None:
        """Have an order carried out after the plans sent before.

        Raises: the `MinivllmError` for which it was not; `WorkerError` if the worker died of it
        """

    async def stop(self) -> None:
        """End the worker, whatever it is doing; nothing is delivered any more."""


def frame(message: HostMessage | WorkerMessage) -> bytes:
    """A message with its length before it."""
    data = encode(message)
    return len(data).to_bytes(_HEADER_BYTES, "little") + data


class FrameReader:
    """Cuts a stream of bytes into frames.

    >>> beat, reader = frame(Beat()), FrameReader()
    >>> reader.feed(beat[:3]), len(reader.feed(beat[3:] + beat))
    ([], 2)
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes."""
        buffer = self._buffer
        buffer += data
        frames = []
        start = 0
        while len(buffer) - start >= _HEADER_BYTES:
            end = start + _HEADER_BYTES
            end += int.from_bytes(buffer[start:end], "little")
            if len(buffer) < end:
                break
            frames.append(bytes(buffer[start + _HEADER_BYTES : end]))
            start = end
        del buffer[:start]
        return frames


class Calls:
    """Orders that wait for their answers, which come in the order of the orders."""

    def __init__(self) -> None:
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    def add(self) -> asyncio.Future[None]:
        """What the sender of an order waits for."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        return done

    def answer(self, error: tuple[str, str] | None) -> None:
        """The oldest order was carried out, or failed."""
        done = self._waiting.popleft()
        if done.done():
            return  # its sender did not wait
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(from_wire(*error))

    def abandon(self) -> None:
        """The worker has ended: nothing will be answered any more."""
        while self._waiting:
            self.answer(("WorkerError", "the worker ended before it was done"))


async def to_the_end(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which a cancellation of the caller does not cut off, as it is not to be
    left half done. The cancellation is raised when the work is done.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()  # seen, and of less interest than the cancellation
        raise cancelled
    return task.result()


class ProcessExecutor:
    """The model in a worker process of its own."""

    def __init__(self, *, lease_s: float, step_timeout_s: float) -> None:
        self._lease_s = lease_s
        self._step_timeout_s = step_timeout_s
        self._worker: _Worker | None = None

    async def start(self, generation: int, config: WorkerConfig, deliver: Deliver) -> Ready:
        """See `Executor.start`; a process that is still there is killed first."""
        await self.stop()
        try:
            worker = await to_the_end(self._launch(deliver))
            worker.send(Start(generation, config, self._lease_s / _BEATS_PER_LEASE))
            return await worker.ready
        except BaseException:
            await self.stop()
            raise

    async def _launch(self, deliver: Deliver) -> _Worker:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.to_thread(_launch, theirs.fileno())
        self._worker = worker = _Worker(loop, process, deliver, self._lease_s, self._step_timeout_s)
        await loop.create_unix_connection(lambda: worker, sock=ours)
        return worker

    def send(self, plan: StepPlan) -> None:
        """See `Executor.send`."""
        assert self._worker is not None, "send() before start()"
        self._worker.send(plan)

    async def call(self, order: Order) -> None:
        """See `Executor.call`."""
        if self._worker is None:  # between a death and the restart
            raise WorkerError("there is no worker now")
        await self._worker.call(order)

    async def stop(self) -> None:
        """See `Executor.stop`."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.silence()
            await asyncio.to_thread(worker.kill)

    @property
    def pid(self) -> int | None:
        """The worker's process id."""
        return self._worker.process.pid if self._worker is not None else None


def _launch(fd: int) -> subprocess.Popen[bytes]:
    # A session of its own: a Ctrl-C in the terminal is for the host alone to interpret.
    return subprocess.Popen(
        [sys.executable, "-m", "minivllm.worker", str(fd), str(os.getpid())],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=WORKER_ENV | os.environ,
        start_new_session=True,
    )


class _Worker(asyncio.Protocol):
    """One worker process, from launch to death, as the event loop sees it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        process: subprocess.Popen[bytes],
        deliver: Deliver,
        lease_s: float,
        step_timeout_s: float,
    ) -> None:
        self.process = process
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self._loop = loop
        self._deliver = deliver
        self._lease_s = lease_s
        self._step_timeout_s = step_timeout_s
        self._reader = FrameReader()
        self._calls = Calls()
        self._transport: asyncio.Transport | None = None
        self._silent = False
        self._missed = 0
        self._unanswered: collections.deque[HostMessage] = collections.deque()
        self._num_busy_turns = 0  # spent with the oldest of them
        self._timer: asyncio.TimerHandle | None = None
        assert process.stderr is not None, "the worker's stderr is a pipe"
        self._stderr: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES)
        self._stderr_thread = threading.Thread(
            target=_forward_lines, args=(process.stderr, self._stderr), daemon=True
        )
        self._stderr_thread.start()

    def send(self, message: HostMessage) -> None:
        if self._transport is not None:  # without one the death has been delivered, or will be
            self._transport.write(frame(message))
            self._unanswered.append(message)

    async def call(self, order: Order) -> None:
        if self._transport is None:
            raise WorkerError(f"worker {self.process.pid} is gone")
        done = self._calls.add()
        self.send(order)
        await done

    def silence(self) -> None:
        """Deliver nothing any more and let go of the socket."""
        self._silent = True
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        if not self.ready.done():
            self.ready.cancel()
        self._calls.abandon()

    def kill(self) -> None:
        """End the process and reap it; blocks for a moment."""
        self.process.kill()
        self.process.wait()
        self._stderr_thread.join()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because another loop's transport (uvloop's) need not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._missed = 0
        if self._timer is None:  # importing torch may take long; the lease begins when it is done
            self._tick()
        for payload in self._reader.feed(data):
            if self._silent:
                return
            try:
                message = decode_worker_message(payload)
            except msgspec.MsgspecError as error:
                self._die(f"sent what is not a message: {error}")
                return
            if self._unanswered and isinstance(message, Ready | StepResult | Done):
                self._unanswered.popleft()
                self._num_busy_turns = 0
            if isinstance(message, StepResult):
                self._deliver(message)
            elif isinstance(message, Done):
                self._calls.answer(message.error)
            elif isinstance(message, Ready):
                self.ready.set_result(message)
            elif isinstance(message, Failed):
                self._fail(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        how = f"closed its socket ({exc})" if exc else "closed its socket"
        last_words = self._loop.run_in_executor(None, self._stderr_thread.join, _LAST_WORDS_S)
        last_words.add_done_callback(lambda _: self._die(how))

    def _tick(self) -> None:
        """Count the turns without a frame, and those spent on one step (loading may take any time).
        Turns, not seconds: while the loop itself is held up, no turn passes and nobody is blamed
        for it."""
        turn_s = self._lease_s / _BEATS_PER_LEASE
        self._missed += 1
        if self._missed > _BEATS_PER_LEASE + 1:
            self._die(f"gave no sign of life for {self._lease_s:g} s")
            return
        if self._num_busy_turns * turn_s >= self._step_timeout_s:
            self._die(f"was busy with one step for {self._step_timeout_s:g} s")
            return
        if self._unanswered and isinstance(self._unanswered[0], StepPlan):
            self._num_busy_turns += 1
        self._timer = self._loop.call_later(turn_s, self._tick)

    def _fail(self, message: Failed) -> None:
        error = from_wire(message.name, message.text)
        if not self.ready.done():
            self.ready.set_exception(error)
            self.silence()
        else:
            self._die(f"failed: {error}")

    def _die(self, how: str) -> None:
        if self._silent:
            return
        error = WorkerError(f"worker {self.process.pid} {how}{self._last_words()}")
        if self.ready.done():
            self._deliver(error)
        else:
            self.ready.set_exception(error)
        self.silence()

    def _last_words(self) -> str:
        lines = "\n".join(self._stderr)
        return f"; the end of its stderr:\n{lines}" if lines else ""


def _forward_lines(stream: IO[bytes], lines: collections.deque[str]) -> None:
    with stream:
        for raw in stream:
            line = raw.decode(errors="replace").rstrip()
            lines.append(line)
            logger.info("%s", line)


class Mailbox:
    """The worker's end: a thread that reads the host's messages and keeps the lease.

    When the host is gone the thread ends the process at once, whatever it is computing.
    """

    def __init__(self, sock: socket.socket, parent_pid: int) -> None:
        self._sock = sock
        self._parent_pid = parent_pid
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._send_lock = threading.Lock()
        self._beat_s = 0.5
        threading.Thread(target=self._read, daemon=True).start()

    def receive(self) -> Any:
        """The host's next message, or what was posted; waits for it."""
        return self._inbox.get()

    def post(self, news: Any) -> None:
        """Something of the worker's own, from another of its threads, into the same queue."""
        self._inbox.put(news)

    def send(self, message: WorkerMessage) -> None:
        """Send to the host; a host that is gone is the reading thread's to notice."""
        with self._send_lock, contextlib.suppress(OSError):
            self._sock.sendall(frame(message))

    def _read(self) -> None:
        reader = FrameReader()
        while True:
            readable, _, _ = select.select([self._sock], [], [], self._beat_s)
            if os.getppid() != self._parent_pid:
                os._exit(1)
            if not readable:
                self.send(Beat())
                continue
            data = b""
            with contextlib.suppress(OSError):  # a reset is as good as an end of file
                data = self._sock.recv(1 << 20)
            if not data:
                os._exit(1)
            for payload in reader.feed(data):
                message = decode_host_message(payload)
                if isinstance(message, Start):
                    self._beat_s = message.beat_s
                self._inbox.put(message)
