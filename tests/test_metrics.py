from __future__ import annotations

from typing import Any

from minivllm.batch import Ready, SampleInputs
from minivllm.metrics import finished_line, start_line
from minivllm.request import Request, RequestStats, SamplingParams


def make_request(num_output: int, reason: str, **stats: Any) -> Request:
    request = Request(
        id="abc",
        group_id="g",
        number=0,
        prompt=None,
        prompt_token_ids=range(12),
        params=SamplingParams(),
        inputs=SampleInputs(seed=0),
        max_len=100,
        stop_ids=frozenset(),
    )
    request.tokens.extend([5] * num_output)
    request.finish_reason = reason
    request.stats = RequestStats(**stats)
    return request


def test_the_line_of_a_finished_request() -> None:
    """Each wait, size and latency is what the times and counts make it."""
    request = make_request(
        5,
        "length",
        arrival_s=100.0,
        scheduled_s=100.0125,
        first_token_s=100.25,
        last_token_s=100.75,  # four pauses after the first token
        finished_s=100.8,
        num_cached_tokens=8,
        num_preemptions=2,
        num_restarts=1,
    )
    assert finished_line(request) == (
        "request abc: length, queue 12.5 ms, prompt 12 tokens (8 cached), output 5 tokens,"
        " preemptions 2, restarts 1, TTFT 250.0 ms, ITL 125.0 ms, end-to-end 800.0 ms"
    )


def test_the_line_of_a_request_that_never_ran() -> None:
    """Times that there are none of are shown as a dash, not as a number."""
    request = make_request(0, "abort", arrival_s=100.0, finished_s=101.5)
    assert finished_line(request) == (
        "request abc: abort, queue -, prompt 12 tokens (0 cached), output 0 tokens,"
        " preemptions 0, restarts 0, TTFT -, ITL -, end-to-end 1500.0 ms"
    )


def test_the_line_of_a_request_with_one_token() -> None:
    """One token has no pause: the line divides by nothing."""
    request = make_request(
        1,
        "stop",
        arrival_s=0.0,
        scheduled_s=0.0,
        first_token_s=0.0304,
        last_token_s=0.0304,
        finished_s=0.0304,
    )
    assert "output 1 tokens" in finished_line(request)
    assert "TTFT 30.4 ms, ITL 0.0 ms, end-to-end 30.4 ms" in finished_line(request)


def test_the_line_of_a_start() -> None:
    """Seconds per phase, MiB per use of memory, and the tokens that the blocks hold."""
    ready = Ready(
        3,
        101,
        49152,
        {"load": 1.234, "kv_cache": 0.5, "total": 2.0},
        {"weights": 513 * 2**20, "kv_cache": 2**20 * 3 // 4},
    )
    assert start_line(ready, block_size=16) == (
        "worker ready (generation 3): load 1.23 s, kv_cache 0.50 s, total 2.00 s;"
        " weights 513 MiB, kv_cache 1 MiB; 101 KV blocks for 1600 tokens"
    )
