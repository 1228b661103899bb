from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm import channel, errors
from minivllm.batch import (
    Beat,
    Failed,
    LoadWeights,
    NewRow,
    Ready,
    SampleInputs,
    Start,
    StepPlan,
    StepResult,
    Stop,
    WorkerMessage,
    decode_worker_message,
)
from minivllm.channel import FrameReader, ProcessExecutor, frame
from minivllm.config import WorkerConfig

CONFIG = WorkerConfig(
    model_path="/nowhere",
    dtype="auto",
    block_size=16,
    max_model_len=64,
    max_num_batched_tokens=64,
    max_num_seqs=4,
    kv_cache_memory_bytes=None,
    num_blocks=None,
    logprobs_mode="raw_logprobs",
    device="cpu",
    load_format="auto",
    gpu_memory_utilization=0.92,
    kv_cache_dtype="auto",
    enforce_eager=False,
    cudagraph_capture_sizes=(1, 2),
    torch_compile=False,
)
READY = Ready(0, 10, 100, {}, {})
WAIT_S = 30.0  # long enough for any machine; only a failing test waits so long

# ---- frames ------------------------------------------------------------------------------------


def raw(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


def in_chunks(stream: bytes, sizes: list[int]) -> Iterator[bytes]:
    start = 0
    for size in sizes:
        yield stream[start : start + size]
        start += size
    yield stream[start:]


PAYLOADS = st.lists(st.one_of(st.binary(max_size=40), st.binary(min_size=200, max_size=700)))


@given(PAYLOADS, st.lists(st.integers(0, 50)))
def test_frames_come_out_whole_however_cut(payloads: list[bytes], sizes: list[int]) -> None:
    """Whatever the chunks, each frame comes once, in order, with the chunk that completes it."""
    stream = b"".join(map(raw, payloads))
    ends = [len(b"".join(map(raw, payloads[: i + 1]))) for i in range(len(payloads))]
    reader = FrameReader()
    frames: list[bytes] = []
    num_fed = 0
    for chunk in in_chunks(stream, sizes):
        num_fed += len(chunk)
        frames += reader.feed(chunk)
        assert len(frames) == sum(end <= num_fed for end in ends)
    assert frames == payloads


@given(PAYLOADS)
def test_frames_come_out_whole_byte_by_byte(payloads: list[bytes]) -> None:
    """A stream of single bytes gives the same frames as the stream in one piece."""
    stream = b"".join(map(raw, payloads))
    reader = FrameReader()
    one_by_one = [part for i in range(len(stream)) for part in reader.feed(stream[i : i + 1])]
    assert one_by_one == FrameReader().feed(stream) == payloads


def test_a_frame_is_kept_back_until_its_last_byte() -> None:
    """A frame cut short stays out, and what was fed of it is not lost."""
    reader = FrameReader()
    assert reader.feed(raw(b"abc") + raw(b"defgh")[:-1]) == [b"abc"]
    assert reader.feed(b"") == []
    assert reader.feed(b"h") == [b"defgh"]


def test_frame_puts_the_length_before_the_message() -> None:
    """`frame` is a little-endian length and then the message as `batch` encodes it."""
    message = Failed("ModelError", "x" * 300)
    data = frame(message)
    assert int.from_bytes(data[:4], "little") == len(data) - 4
    assert decode_worker_message(data[4:]) == message


# ---- a host and fake workers -------------------------------------------------------------------

HEAD = """
import os, select, socket, sys, time
sock = socket.socket(fileno=int(sys.argv[1]))
parent_pid = int(sys.argv[2])

def live_on():  # until killed
    while True:
        time.sleep(60)
"""

# A worker as the real one is, with the model left out: it says how long the prompts were.
ECHO = """
from minivllm.batch import Ready, StepPlan, StepResult
from minivllm.channel import Mailbox
mailbox = Mailbox(sock, parent_pid)
start = mailbox.receive()
mailbox.send(Ready(start.generation, 10, 100, {}, {}))
time.sleep(start.config.max_num_seqs)
while isinstance(plan := mailbox.receive(), StepPlan):
    sizes = [len(row.token_ids) for row in plan.new_rows]
    rows = dict.fromkeys(plan.rows, "")
    mailbox.send(StepResult(plan.generation, plan.step, [sizes], [], [], rows, 0.0))
"""


HANGS = """
from minivllm.batch import LoadWeights, Ready, StepResult
from minivllm.channel import Mailbox
mailbox = Mailbox(sock, parent_pid)
mailbox.receive()
mailbox.send(Ready(0, 10, 100, {}, {}))
if not isinstance(mailbox.receive(), LoadWeights):
    mailbox.send(StepResult(0, 0, [], [], [], {}, 0.0))
live_on()
"""


def sends(*messages: WorkerMessage) -> str:
    return f"sock.sendall({b''.join(map(frame, messages))!r})\n"


def run_worker(code: str, fd: int, parent_pid: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + code, str(fd), str(parent_pid)],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


class Host:
    """A `ProcessExecutor` whose worker runs `code`, and what it delivers."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, lease_s: float, step_timeout_s: float
    ) -> None:
        self._monkeypatch = monkeypatch
        self.executor = ProcessExecutor(lease_s=lease_s, step_timeout_s=step_timeout_s)
        self.delivered: asyncio.Queue[StepResult | errors.WorkerError] = asyncio.Queue()

    async def start(self, code: str, *, generation: int = 0, busy_s: int = 0) -> Ready:
        self._monkeypatch.setattr(
            channel, "_launch", lambda fd: run_worker(code, fd, os.getpid())
        )
        config = dataclasses.replace(CONFIG, max_num_seqs=busy_s)
        deliver = self.delivered.put_nowait
        return await asyncio.wait_for(self.executor.start(generation, config, deliver), WAIT_S)

    async def next(self) -> StepResult:
        result = await asyncio.wait_for(self.delivered.get(), WAIT_S)
        assert isinstance(result, StepResult), result
        return result

    async def death(self) -> str:
        error = await asyncio.wait_for(self.delivered.get(), WAIT_S)
        assert type(error) is errors.WorkerError
        assert self.delivered.empty()
        return str(error)


@contextlib.asynccontextmanager
async def hosting(
    monkeypatch: pytest.MonkeyPatch, *, lease_s: float = 60.0, step_timeout_s: float = 60.0
) -> AsyncIterator[Host]:
    host = Host(monkeypatch, lease_s, step_timeout_s)
    try:
        yield host
    finally:
        await host.executor.stop()


def make_plan(step: int, prompt: bytes = b"") -> StepPlan:
    rows = [NewRow(0, prompt, 0, 0, SampleInputs(seed=0))]
    return StepPlan(0, step, rows, [0], [1], [True], [])


def is_gone(pid: int) -> bool:
    """Whether a child has ended and been reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_results_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans sent at once are answered one by one in their order."""
    async with hosting(monkeypatch) as host:
        assert await host.start(ECHO, generation=3) == Ready(3, 10, 100, {}, {})
        for step in range(100):
            host.executor.send(make_plan(step, b"x" * step))
        results = [await host.next() for _ in range(100)]
    assert [result.step for result in results] == list(range(100))
    assert [result.tokens for result in results] == [[[step]] for step in range(100)]


async def test_messages_larger_than_any_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes in one message cross the wall in both directions, and so does what follows."""
    async with hosting(monkeypatch) as host:
        await host.start(ECHO)
        rows = list(range(1_000_000))
        plan = make_plan(0, b"x" * (8 << 20))
        host.executor.send(StepPlan(0, 0, plan.new_rows, rows, [], [], []))
        host.executor.send(make_plan(1))
        large, small = await host.next(), await host.next()
    assert large.tokens == [[8 << 20]]
    assert list(large.failed) == rows
    assert small.tokens == [[0]]


async def test_death_before_ready_is_told_with_the_last_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When the worker exits while it starts, `start` raises with the end of its stderr."""
    code = "print(*('line %d' % i for i in range(100)), sep='\\n', file=sys.stderr)\nos._exit(3)"
    async with hosting(monkeypatch) as host:
        with (
            caplog.at_level(logging.INFO, logger="minivllm.worker"),
            pytest.raises(errors.WorkerError, match=r"^worker \d+ closed its socket") as caught,
        ):
            await host.start(code)
        assert host.executor.pid is None
        assert host.delivered.empty()
    assert str(caught.value).endswith("\nline 98\nline 99")
    assert "line 59\n" not in str(caught.value), "only the last 40 lines"
    assert [r.getMessage() for r in caplog.records] == [f"line {i}" for i in range(100)]


async def test_death_after_ready_is_delivered_with_the_last_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that dies later is delivered as one error with its pid and stderr, any bytes."""
    code = "sock.recv(1000000)\nos.write(2, b'bad \\xff byte\\nthe end')\nsys.exit(1)"
    async with hosting(monkeypatch) as host:
        await host.start("sock.recv(1000000)\n" + sends(READY) + code)
        pid = host.executor.pid
        host.executor.send(make_plan(0))
        text = await host.death()
        host.executor.send(make_plan(1))  # to nobody, and no error
    assert text.startswith(f"worker {pid} closed its socket")
    assert text.endswith("; the end of its stderr:\nbad \N{REPLACEMENT CHARACTER} byte\nthe end")


async def test_a_closed_socket_is_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that closes its socket counts as dead though its process lives; `stop` ends it."""
    async with hosting(monkeypatch) as host:
        await host.start(sends(READY) + "sock.close()\nlive_on()")
        pid = host.executor.pid
        assert pid is not None
        assert (await host.death()).startswith(f"worker {pid} closed its socket")
        assert not is_gone(pid)
        await host.executor.stop()
        assert is_gone(pid)


@pytest.mark.parametrize(
    "garbage", [b"\xc1", b"", b"hello", frame(Stop())[4:]], ids=["byte", "none", "text", "stop"]
)
async def test_garbage_is_a_death(monkeypatch: pytest.MonkeyPatch, garbage: bytes) -> None:
    """A frame that is no message ends the worker with one error; what follows it is not heard."""
    result = StepResult(0, 0, [], [], [], {}, 0.0)
    stream = frame(READY) + frame(result) + raw(garbage) * 2 + frame(result)
    async with hosting(monkeypatch) as host:
        await host.start(f"sock.sendall({stream!r})\nlive_on()")
        assert await host.next() == result
        assert "sent what is not a message" in await host.death()


async def test_garbage_before_ready_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """`start` raises when the first frame is no message."""
    async with hosting(monkeypatch) as host:
        with pytest.raises(errors.WorkerError, match="sent what is not a message"):
            await host.start(f"sock.sendall({raw(b'hello')!r})\nlive_on()")
        assert host.executor.pid is None


async def test_a_worker_that_falls_silent_loses_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """No frame for the length of the lease is a death, and not before that."""
    async with hosting(monkeypatch, lease_s=0.4) as host:
        await host.start(sends(READY) + "live_on()")
        start_s = time.monotonic()
        assert (await host.death()).endswith("gave no sign of life for 0.4 s")
        assert time.monotonic() - start_s > 0.35


async def test_a_frame_that_never_ends_loses_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A length that no frame has is seen by the silence after it."""
    async with hosting(monkeypatch, lease_s=0.2) as host:
        await host.start(sends(READY) + "sock.sendall(b'\\xff' * 100)\nlive_on()")
        assert (await host.death()).endswith("gave no sign of life for 0.2 s")


async def test_the_lease_begins_with_the_first_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that takes many leases to load its libraries is waited for."""
    async with hosting(monkeypatch, lease_s=0.1) as host:
        assert await host.start("time.sleep(0.6)\n" + sends(READY) + "live_on()") == READY


async def test_a_busy_worker_keeps_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mailbox gives signs of life while the main thread is computing."""
    async with hosting(monkeypatch, lease_s=1.0) as host:
        await host.start(ECHO, busy_s=2)
        host.executor.send(make_plan(0))
        assert (await host.next()).step == 0


async def test_a_step_that_never_ends_is_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that beats but does not get on with its oldest plan counts as dead in time."""
    async with hosting(monkeypatch, lease_s=0.4, step_timeout_s=1.0) as host:
        await host.start(HANGS)
        for step in range(3):
            host.executor.send(make_plan(step))
        assert (await host.next()).step == 0
        start_s = time.monotonic()
        assert (await host.death()).endswith("was busy with one step for 1 s")
        assert time.monotonic() - start_s > 0.8


async def test_only_steps_run_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle worker, and one that works on an order with a plan behind it, are left alone."""
    async with hosting(monkeypatch, lease_s=0.2, step_timeout_s=0.3) as host:
        await host.start(ECHO)
        host.executor.send(make_plan(0))
        assert (await host.next()).step == 0
        await asyncio.sleep(1.0)
        await host.start(HANGS)
        loading = asyncio.create_task(host.executor.call(LoadWeights("/any")))
        await asyncio.sleep(0)  # the order goes first
        host.executor.send(make_plan(0))
        await asyncio.sleep(1.0)
        assert host.delivered.empty()
        await host.executor.stop()
        with pytest.raises(errors.WorkerError):
            await loading


def hold_up(seconds: float) -> None:
    time.sleep(seconds)


async def test_nobody_is_blamed_while_the_loop_is_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in which the host's own loop stood still does not count against the lease."""
    async with hosting(monkeypatch, lease_s=0.8) as host:
        await host.start(ECHO)
        hold_up(2.0)
        host.executor.send(make_plan(0))
        assert (await host.next()).step == 0


@pytest.mark.parametrize(
    ("failed", "error", "text"),
    [
        (Failed("CorruptFileError", "x ends early"), errors.CorruptFileError, "^x ends early$"),
        (Failed("ConfigError", "a must be b, got 1"), errors.ConfigError, "^a must be b, got 1$"),
        (Failed("KeyError", "'x'"), errors.WorkerError, "^KeyError: 'x'$"),
    ],
    ids=["model", "config", "foreign"],
)
async def test_a_failed_start_raises_its_own_error(
    monkeypatch: pytest.MonkeyPatch, failed: Failed, error: type[Exception], text: str
) -> None:
    """What kept the worker from starting is raised as its own class, and the worker is ended."""
    async with hosting(monkeypatch) as host:
        with pytest.raises(error, match=text) as caught:
            await host.start(sends(failed) + "live_on()")
        assert type(caught.value) is error
        assert host.executor.pid is None
        assert host.delivered.empty()


async def test_a_failed_step_is_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a later step is delivered as a WorkerError that quotes it."""
    failed = Failed("ValueError", "no such row")
    async with hosting(monkeypatch) as host:
        late = StepResult(0, 0, [], [], [], {}, 0.0)
        await host.start(sends(READY, Beat(), failed, late, failed) + "live_on()")
        assert (await host.death()).endswith("failed: ValueError: no such row")


async def test_stop_ends_the_worker_and_may_be_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`stop` kills and reaps whatever the worker is doing; before a start it does nothing."""
    async with hosting(monkeypatch) as host:
        await host.executor.stop()
        await host.start(sends(READY) + "live_on()")
        pid = host.executor.pid
        assert pid is not None
        for _ in range(3):
            await host.executor.stop()
            assert is_gone(pid)
            assert host.executor.pid is None
        assert host.delivered.empty(), "the end was asked for and is no death"


async def test_send_without_a_worker_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan before `start`, or after `stop`, is a mistake of the caller."""
    async with hosting(monkeypatch) as host:
        with pytest.raises(AssertionError, match="before start"):
            host.executor.send(make_plan(0))
        await host.start(sends(READY) + "live_on()")
        await host.executor.stop()
        with pytest.raises(AssertionError, match="before start"):
            host.executor.send(make_plan(0))


async def test_start_replaces_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second `start` ends the first worker, and delivers only what the second one says."""
    async with hosting(monkeypatch) as host:
        await host.start(sends(READY) + "live_on()")
        first = host.executor.pid
        assert first is not None
        await host.start(ECHO, generation=1)
        assert is_gone(first)
        assert host.executor.pid not in (None, first)
        host.executor.send(make_plan(5))
        assert (await host.next()).step == 5
        assert host.delivered.empty()


async def test_start_works_again_after_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a death has been delivered the executor can be started like a new one."""
    async with hosting(monkeypatch) as host:
        await host.start(sends(READY))
        await host.death()
        await host.start(ECHO, generation=1)
        host.executor.send(make_plan(0))
        assert (await host.next()).step == 0


async def test_a_cancelled_start_leaves_no_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When nobody waits for the start any more, the worker is ended."""
    async with hosting(monkeypatch) as host:
        heard = asyncio.Event()
        loop = asyncio.get_running_loop()
        handler = logging.Handler()
        handler.emit = lambda record: loop.call_soon_threadsafe(heard.set)  # type: ignore
        monkeypatch.setattr(channel.logger, "handlers", [handler])
        caplog.set_level(logging.INFO, logger="minivllm.worker")
        starting = asyncio.create_task(host.start("print('here', file=sys.stderr)\nlive_on()"))
        await asyncio.wait_for(heard.wait(), WAIT_S)
        pid = host.executor.pid
        assert pid is not None
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert is_gone(pid)
        assert host.executor.pid is None


async def test_a_start_cancelled_while_it_launches_leaves_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process that a thread is about to make is ended, and its socket is not another file."""
    launched: list[subprocess.Popen[bytes]] = []
    may_launch, is_launching = threading.Event(), threading.Event()

    def launch(fd: int) -> subprocess.Popen[bytes]:
        is_launching.set()
        may_launch.wait(WAIT_S)
        assert stat.S_ISSOCK(os.fstat(fd).st_mode), "the worker's socket was closed too early"
        launched.append(run_worker("live_on()", fd, os.getpid()))
        return launched[0]

    executor = ProcessExecutor(lease_s=60.0, step_timeout_s=60.0)
    monkeypatch.setattr(channel, "_launch", launch)
    starting = asyncio.create_task(executor.start(0, CONFIG, lambda result: None))
    await asyncio.to_thread(is_launching.wait)
    starting.cancel()
    await asyncio.sleep(0.05)
    may_launch.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await executor.stop()
    assert len(launched) == 1
    assert is_gone(launched[0].pid)


# ---- the worker's end --------------------------------------------------------------------------


class Peer:
    """The host's end of a socket to a worker that runs `code`, without an executor."""

    def __init__(self, code: str, parent_pid: int) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(WAIT_S)
        with theirs:
            self.process = run_worker(code, theirs.fileno(), parent_pid)
        self._reader = FrameReader()
        self._frames: list[bytes] = []

    def receive(self) -> WorkerMessage:
        while not self._frames:
            data = self.sock.recv(1 << 20)
            assert data, "the worker is gone"
            self._frames = self._reader.feed(data)
        return decode_worker_message(self._frames.pop(0))


@contextlib.contextmanager
def peer(code: str, parent_pid: int) -> Iterator[Peer]:
    made = Peer(code, parent_pid)
    with made.process, made.sock:
        try:
            yield made
        finally:
            made.process.kill()


BUSY = "from minivllm.channel import Mailbox\nmailbox = Mailbox(sock, parent_pid)\n"


def test_a_worker_beats_as_often_as_it_is_told() -> None:
    """The start message sets the pace of the signs of life."""
    with peer(BUSY + "live_on()", os.getpid()) as worker:
        worker.sock.sendall(frame(Start(0, CONFIG, 0.01)))
        start_s = time.monotonic()
        assert [worker.receive() for _ in range(100)] == [Beat()] * 100
        assert time.monotonic() - start_s < 40, "100 beats at the pace before a start take 50 s"


def test_a_worker_ends_with_its_host() -> None:
    """At the end of file the mailbox ends the process at once, whatever it is computing."""
    with peer(BUSY + sends(READY) + "live_on()", os.getpid()) as worker:
        assert worker.receive() == READY
        worker.sock.close()
        assert worker.process.wait(WAIT_S) == 1


def test_a_worker_without_its_parent_ends() -> None:
    """A worker whose parent is another than it was told ends though its socket is open."""
    with peer(BUSY + "live_on()", parent_pid=0) as worker:
        assert worker.process.wait(WAIT_S) == 1
