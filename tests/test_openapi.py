"""Requests made from the server's own description of itself, by schemathesis."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from fakes import FakeExecutor
from serving import listening

from minivllm.config import EngineConfig, ServerConfig
from minivllm.engine import AsyncEngine
from minivllm.server import create_app

CONFIG = ServerConfig(enable_admin=True, admin_api_key="key")
SCHEMA = schemathesis.openapi.from_dict(create_app(AsyncEngine(), CONFIG).openapi())
# /start_profile would make the directories that it is told to
OPERATIONS = [
    (path, method) for path in SCHEMA if path != "/start_profile" for method in SCHEMA[path]
]


@pytest.fixture(scope="module")
def url(embedded_dir: Path) -> Iterator[str]:
    """A server on a thread of its own, as schemathesis blocks."""
    ready = threading.Event()
    found: list[Any] = []

    async def run() -> None:
        stop = asyncio.Event()
        config = EngineConfig(model=str(embedded_dir), max_model_len=64, timeout_s=1)
        engine = AsyncEngine(config, executor=FakeExecutor())
        async with engine, listening(engine, CONFIG) as address:
            found.extend((address, asyncio.get_running_loop(), stop))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    ready.wait(30)
    yield found[0]
    found[1].call_soon_threadsafe(found[2].set)
    thread.join()


def check_case(url: str, case: Any) -> None:
    response = case.call(base_url=url, headers={"authorization": "Bearer key"}, timeout=30)
    assert response.status_code != 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == response.status_code
        assert error["message"]


def run_cases(url: str, path: str, method: str, num_cases: int) -> None:
    @hypothesis.given(case=SCHEMA[path][method].as_strategy())
    @hypothesis.settings(
        max_examples=num_cases,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    def check(case: Any) -> None:
        check_case(url, case)

    check()


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_any_request_gets_a_proper_answer(url: str, path: str, method: str) -> None:
    """Whatever the description allows is answered, or refused in the form of all errors."""
    run_cases(url, path, method, 200)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_many_requests_get_proper_answers(url: str, path: str, method: str) -> None:
    """The same, ten times as long."""
    run_cases(url, path, method, 2000)
