"""A server over fake workers in a process of its own, so that its loop and its memory can be
measured: `python fake_server.py SOCKET checked|fast`. Ends on SIGTERM with a line of JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop
from fakes import FakeExecutor

from minivllm.batch import Ready, StepPlan, StepResult
from minivllm.config import EngineConfig, ServerConfig, WorkerConfig
from minivllm.engine import AsyncEngine
from minivllm.server import serve_engine

ADMIN_KEY = "admin"
NUM_BLOCKS = 8000


class FastModel:
    """Answers in a microsecond per row, and checks nothing."""

    def step(self, plan: StepPlan) -> StepResult:
        token = 1000 + plan.step % 1000
        tokens = [[token] for samples in plan.samples if samples]
        return StepResult(plan.generation, plan.step, tokens, [], [], {}, 0.0)


class FastExecutor(FakeExecutor):
    async def start(self, generation: int, config: WorkerConfig, deliver: Callable) -> Ready:
        ready = await super().start(generation, config, deliver)
        self.model = FastModel()
        return ready

    def send(self, plan: StepPlan) -> None:
        self._queue.put_nowait(plan)  # kept nowhere, however long it runs


class ForgetfulExecutor(FakeExecutor):
    def send(self, plan: StepPlan) -> None:
        super().send(plan)
        self.plans.clear()


async def run(socket_file: str, kind: str) -> None:
    executor_type = {"fast": FastExecutor, "checked": ForgetfulExecutor}[kind]
    engine = AsyncEngine(EngineConfig(), executor=executor_type(num_blocks=NUM_BLOCKS))
    config = ServerConfig(uds=socket_file, enable_admin=True, admin_api_key=ADMIN_KEY)
    lags: list[float] = []

    async def watch() -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(0.01)
            lags.append(time.monotonic() - before_s - 0.01)

    watcher = asyncio.create_task(watch())
    status = await serve_engine(engine, config)
    watcher.cancel()
    blocks = engine._core.scheduler.blocks
    blocks.check_integrity()
    lags.sort()
    figures = {
        "status": status,
        "lag_p99_ms": round(lags[int(len(lags) * 0.99)] * 1000, 1),
        "lag_max_ms": round(lags[-1] * 1000, 1),
        "cpu_s": round(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]), 2),
        "num_lost_blocks": NUM_BLOCKS - 1 - blocks.num_free,
    }
    sys.stdout.write(json.dumps(figures))


@dataclass
class Child:
    socket_file: Path
    process: asyncio.subprocess.Process
    client: httpx.AsyncClient

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def end(self) -> dict[str, Any]:
        """The figures of its life, in which it must have had nothing to complain of."""
        self.process.send_signal(signal.SIGTERM)
        output, complaints = await asyncio.wait_for(self.process.communicate(), 30)
        assert not complaints, complaints.decode()
        return json.loads(output)


@contextlib.asynccontextmanager
async def child(socket_file: Path, kind: str) -> AsyncIterator[Child]:
    """A server in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, str(socket_file), kind),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    limits = httpx.Limits(max_connections=None)
    transport = httpx.AsyncHTTPTransport(uds=str(socket_file), limits=limits)
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://x", timeout=120
        ) as client:
            async with asyncio.timeout(30):
                while True:
                    try:
                        await client.get("/health")
                        break
                    except httpx.ConnectError:
                        await asyncio.sleep(0.05)
            yield Child(socket_file, process, client)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


if __name__ == "__main__":
    uvloop.run(run(*sys.argv[1:]))
