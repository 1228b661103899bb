"""The arithmetic of serving benchmarks: timed answers to the figures that vLLM reports.

        asked        first piece   second        last
          │─── TTFT ───│─── ITL ───│─── ITL ─────│
          │──────────────── E2E latency ─────────│        TPOT = (E2E − TTFT) / (tokens − 1)

A piece of a stream may carry several tokens, so inter-token latencies are between pieces, while
TPOT counts tokens. Goodput counts the answers that kept every objective; an answer of one token
has no TPOT and keeps any.

Invariants: names and units are those of vLLM's `bench serve`; failed requests count in `failed` and
nowhere else. Who takes the times: `load_client`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minivllm.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el")
_TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token, without the first",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


@dataclass(slots=True)
class Answer:
    """One request as a client saw it; times are in seconds of one clock."""

    prompt_len: int
    start_s: float
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    output_len: int = 0
    error: str = ""
    """Why it failed; empty if it did not."""

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first; 0 where there is none.

        >>> Answer(8, 0.0, ttft_s=1.0, latency_s=3.0, output_len=5).tpot_s
        0.5
        """
        if self.output_len < 2:
            return 0.0
        return (self.latency_s - self.ttft_s) / (self.output_len - 1)


def read_goodput(words: Sequence[str]) -> dict[str, float]:
    """Objectives in milliseconds, by metric.

    >>> read_goodput(["ttft:500", "tpot:50"])
    {'ttft': 500.0, 'tpot': 50.0}

    Raises: `ConfigError`
    """
    limits = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or not limits[name] >= 0:
            rule = "must be objectives like ttft:500, tpot:50 or e2el:5000, in milliseconds"
            raise ConfigError("goodput", word, rule)
    return limits


def num_good(answers: Sequence[Answer], limits_ms: Mapping[str, float]) -> int:
    """How many answers kept every objective."""
    return sum(
        not answer.error
        and all(
            value_s * 1000 <= limits_ms[name]
            for name, value_s in (
                ("ttft", answer.ttft_s),
                ("tpot", answer.tpot_s),
                ("e2el", answer.latency_s),
            )
            if name in limits_ms
        )
        for answer in answers
    )


def summarize(
    answers: Sequence[Answer],
    duration_s: float,
    *,
    goodput_ms: Mapping[str, float] | None = None,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (99.0,),
) -> dict[str, Any]:
    """The figures of a run, under vLLM's keys."""
    done = [answer for answer in answers if not answer.error]
    num_input = sum(answer.prompt_len for answer in done)
    num_output = sum(answer.output_len for answer in done)
    good = num_good(done, goodput_ms) / duration_s if goodput_ms else None
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": good,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": _max_tokens_per_s(done),
        "max_concurrent_requests": _max_concurrent(done),
    }
    values_s = {
        "ttft": [answer.ttft_s for answer in done],
        "tpot": [answer.tpot_s for answer in done if answer.output_len > 1],
        "itl": [itl_s for answer in done for itl_s in answer.itl_s],
        "e2el": [answer.latency_s for answer in done],
    }
    for name in metrics:
        values_ms = np.asarray(values_s[name] or [0.0]) * 1000
        result[f"mean_{name}_ms"] = float(values_ms.mean())
        result[f"median_{name}_ms"] = float(np.median(values_ms))
        result[f"std_{name}_ms"] = float(values_ms.std())
        for percentile in percentiles:
            result[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values_ms, percentile))
    return result


def details(answers: Sequence[Answer]) -> dict[str, list[Any]]:
    """What is kept of each request, under vLLM's keys."""
    return {
        "input_lens": [answer.prompt_len for answer in answers],
        "output_lens": [answer.output_len for answer in answers],
        "start_times": [answer.start_s for answer in answers],
        "ttfts": [answer.ttft_s for answer in answers],
        "itls": [answer.itl_s for answer in answers],
        "errors": [answer.error for answer in answers],
    }


def _max_tokens_per_s(done: Sequence[Answer]) -> float:
    """Pieces in the fullest whole second after the first request was sent."""
    if not done:
        return 0.0
    start_s = min(answer.start_s for answer in done)
    times = [
        answer.start_s - start_s + answer.ttft_s + np.cumsum([0.0, *answer.itl_s])
        for answer in done
    ]
    return float(np.bincount(np.concatenate(times).astype(int)).max())


def _max_concurrent(done: Sequence[Answer]) -> int:
    """Most requests open at once; one that ends as another comes is not beside it."""
    changes = [(answer.start_s, 1) for answer in done]
    changes += [(answer.start_s + answer.latency_s, -1) for answer in done]
    most = count = 0
    for _, change in sorted(changes):
        count += change
        most = max(most, count)
    return most


def report(result: Mapping[str, Any]) -> str:
    """The figures as a table to read.

    >>> print(report({"completed": 3, "duration": 1.5, "p99_ttft_ms": 7.0}))
    Successful requests:                     3
    Benchmark duration (s):                  1.50
    Time to first token
    P99 (ms):                                7.00
    """
    names = {
        "completed": "Successful requests",
        "failed": "Failed requests",
        "duration": "Benchmark duration (s)",
        "total_input_tokens": "Total input tokens",
        "total_output_tokens": "Total generated tokens",
        "request_throughput": "Request throughput (req/s)",
        "request_goodput": "Request goodput (req/s)",
        "output_throughput": "Output token throughput (tok/s)",
        "total_token_throughput": "Total token throughput (tok/s)",
        "max_output_tokens_per_s": "Peak pieces in a second",
        "max_concurrent_requests": "Peak concurrent requests",
    }
    lines = [_line(title, result[key]) for key, title in names.items() if key in result]
    for metric, title in _TITLES.items():
        keys = [key for key in result if key.endswith(f"_{metric}_ms")]
        if keys:
            lines.append(title)
        lines += [_line(f"{key.partition('_')[0].capitalize()} (ms)", result[key]) for key in keys]
    return "\n".join(lines)


def _line(title: str, value: Any) -> str:
    shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{title + ':':<41}{shown}"
