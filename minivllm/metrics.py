"""What an operator reads: Prometheus metrics, one log line per finished request, one per start.

    EngineCore ── a token, a step, an end ──> EngineMetrics ── registry ──┐
         └─────── Gauges, as they stand ──────────────────────────────────┴──> render() -> text

Names, labels and buckets are vLLM's, so that its dashboards work. Each engine has a registry of its
own. What another module counts anyway (`scheduler.SchedulerStats`) is read when it is asked for,
not counted twice.

Invariants: every accepted request is in `request_success` once, by its finish reason; tokens that
were computed again after a preemption or a restart are counted in no token counter.
The lines go to the logger `minivllm`; who serves the text: the HTTP server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from minivllm.batch import Ready
from minivllm.request import Request

_TTFT_S = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5]
_TTFT_S += [10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0]
_ITL_S = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5]
_ITL_S += [10.0, 20.0, 40.0, 80.0]
_REQUEST_S = [0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0]
_REQUEST_S += [120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0]
_STEP_TOKENS = [1, *(2**i for i in range(3, 15))]
_REQUEST_TOKENS = [d * 10**e for e in range(6) for d in (1, 2, 5)]
_COUNTS = [1, 2, 5, 10, 20]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """How an engine stands at one moment."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    """0 to 1."""
    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    num_blocks: int
    block_size: int
    sleep_level: int
    """0: awake."""


class EngineMetrics:
    """The counters and histograms of one engine."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed in a step", _STEP_TOKENS
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answered requests")
        self._cached_tokens = self._counter(
            "prompt_tokens_cached", "Prompt tokens found in the prefix cache"
        )
        self._by_source = self._counter(
            "prompt_tokens_by_source", "Prompt tokens by where their KV came from", "source"
        )
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self._ends = self._counter(
            "request_success", "Requests that have ended, by reason", "finished_reason"
        )
        self._num_drafts = self._counter("spec_decode_num_drafts", "Rows' steps with drafts")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified")
        self._accepted_tokens = self._counter(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted"
        )
        self._accepted_per_pos = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place among the drafts",
            "position",
        )
        self._rejections = self._counter(
            "admission_rejections", "Requests refused because a queue was full", "reason"
        )
        self._ttft_s = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token", _TTFT_S
        )
        self._itl_s = self._histogram(
            "inter_token_latency_seconds", "From one token of a request to its next", _ITL_S
        )
        self._tpot_s = self._histogram(
            "request_time_per_output_token_seconds", "A request's mean time per token", _ITL_S
        )
        self._waits_s = {
            name: self._histogram(f"{name}_seconds", text, _REQUEST_S)
            for name, text in (
                ("e2e_request_latency", "Arrival to end"),
                ("request_queue_time", "Arrival to first step"),
                ("request_inference_time", "First step to last token"),
                ("request_prefill_time", "First step to first token"),
                ("request_decode_time", "First token to last"),
            )
        }
        self._sizes = {
            name: self._histogram(name, text, buckets)
            for name, text, buckets in (
                ("request_prompt_tokens", "Tokens of a prompt", _REQUEST_TOKENS),
                ("request_generation_tokens", "Tokens of an answer", _REQUEST_TOKENS),
                (
                    "request_prefill_kv_computed_tokens",
                    "Prompt tokens computed, not found in the cache",
                    _REQUEST_TOKENS,
                ),
                ("request_params_max_tokens", "The max_tokens asked for", _REQUEST_TOKENS),
                ("request_params_n", "The n asked for", _COUNTS),
                ("request_num_preemptions", "Preemptions of a request", [0, *_COUNTS]),
            )
        }

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"vllm:{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: list[Any]) -> Histogram:
        return Histogram(f"vllm:{name}", text, buckets=buckets, registry=self._registry)

    def count_step(self, num_tokens: int) -> None:
        """A step computed so many tokens."""
        self._step_tokens.observe(num_tokens)

    def count_tokens(self, request: Request, num_tokens: int, now_s: float) -> None:
        """A request has new tokens; called before its own times say so."""
        stats = request.stats
        self._generation_tokens.inc(num_tokens)
        if stats.last_token_s is not None:
            self._itl_s.observe(now_s - stats.last_token_s)
            return
        self._ttft_s.observe(now_s - stats.arrival_s)
        num_cached = stats.num_cached_tokens
        self._prompt_tokens.inc(request.prompt_len)
        self._cached_tokens.inc(num_cached)
        self._by_source.labels("local_cache_hit").inc(num_cached)
        self._by_source.labels("local_compute").inc(request.prompt_len - num_cached)

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """A step verified drafts for a request, and the first so many of them stood."""
        self._num_drafts.inc()
        self._draft_tokens.inc(num_drafts)
        self._accepted_tokens.inc(num_accepted)
        for position in range(num_accepted):
            self._accepted_per_pos.labels(str(position)).inc()

    def count_end(self, request: Request) -> None:
        """A request has ended."""
        stats, params = request.stats, request.params
        self._ends.labels(request.finish_reason).inc()
        for name, start_s, end_s in (
            ("e2e_request_latency", stats.arrival_s, stats.finished_s),
            ("request_queue_time", stats.arrival_s, stats.scheduled_s),
            ("request_inference_time", stats.scheduled_s, stats.last_token_s),
            ("request_prefill_time", stats.scheduled_s, stats.first_token_s),
            ("request_decode_time", stats.first_token_s, stats.last_token_s),
        ):
            if start_s is not None and end_s is not None:
                self._waits_s[name].observe(end_s - start_s)
        num_output = request.num_output_tokens
        if num_output > 1 and stats.last_token_s is not None and stats.first_token_s is not None:
            self._tpot_s.observe((stats.last_token_s - stats.first_token_s) / (num_output - 1))
        for name, size in (
            ("request_prompt_tokens", request.prompt_len),
            ("request_generation_tokens", num_output),
            (
                "request_prefill_kv_computed_tokens",
                request.prompt_len - stats.num_cached_tokens,
            ),
            ("request_params_n", params.n),
            ("request_num_preemptions", stats.num_preemptions),
        ):
            self._sizes[name].observe(size)
        if params.max_tokens is not None:
            self._sizes["request_params_max_tokens"].observe(params.max_tokens)

    def count_rejection(self, reason: str) -> None:
        """A request was refused because `reason`, a setting, was reached."""
        self._rejections.labels(reason).inc()

    def render(self, gauges: Gauges, labels: Mapping[str, str]) -> bytes:
        """All of it in Prometheus's text format, each sample with `labels` too."""
        return generate_latest(_Labelled(self._registry, gauges, labels))


class _Labelled(CollectorRegistry):
    """A look at a registry and the gauges, with labels added to every sample."""

    def __init__(
        self, registry: CollectorRegistry, gauges: Gauges, labels: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._registry, self._gauges, self._labels = registry, gauges, dict(labels)

    def collect(self) -> Iterator[Metric]:
        """Every family, the engine's own first."""
        for source in (self._registry.collect(), _families(self._gauges)):
            for family in source:
                family.samples = [
                    sample._replace(labels=self._labels | sample.labels)
                    for sample in family.samples
                ]
                yield family


def _families(gauges: Gauges) -> Iterator[Metric]:
    for name, text, value in (
        ("num_requests_running", "Requests in the batch", gauges.num_running),
        ("num_requests_waiting", "Requests that wait for room", gauges.num_waiting),
        ("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", gauges.kv_cache_usage),
    ):
        yield GaugeMetricFamily(f"vllm:{name}", text, value)
    for name, text, value in (
        ("prefix_cache_queries", "Tokens looked up in the prefix cache", gauges.prefix_queries),
        ("prefix_cache_hits", "Tokens found in the prefix cache", gauges.prefix_hits),
        ("num_preemptions", "Requests put back to wait for KV blocks", gauges.num_preemptions),
    ):
        yield CounterMetricFamily(f"vllm:{name}", text, value)
    sleep = GaugeMetricFamily("vllm:engine_sleep_state", "1 for the state", labels=["sleep_state"])
    for level, state in enumerate(("awake", "weights_offloaded", "discard_all")):
        sleep.add_metric([state], float(gauges.sleep_level == level))
    yield sleep
    info = GaugeMetricFamily(
        "vllm:cache_config_info", "The KV cache", labels=["block_size", "num_gpu_blocks"]
    )
    info.add_metric([str(gauges.block_size), str(gauges.num_blocks)], 1)
    yield info


def finished_line(request: Request) -> str:
    """How one request fared: waits, sizes, latencies, end.

    TTFT is counted from arrival; ITL is the mean time between the output's tokens.
    """
    stats = request.stats
    num_output = request.num_output_tokens
    parts = [
        f"request {request.id}: {request.finish_reason}",
        f"queue {_ms(stats.arrival_s, stats.scheduled_s)}",
        f"prompt {request.prompt_len} tokens ({stats.num_cached_tokens} cached)",
        f"output {num_output} tokens",
        f"preemptions {stats.num_preemptions}",
        f"restarts {stats.num_restarts}",
        f"TTFT {_ms(stats.arrival_s, stats.first_token_s)}",
        f"ITL {_ms(stats.first_token_s, stats.last_token_s, max(1, num_output - 1))}",
        f"end-to-end {_ms(stats.arrival_s, stats.finished_s)}",
    ]
    if stats.num_draft_tokens:
        parts.append(f"drafts {stats.num_draft_tokens} ({stats.num_accepted_tokens} accepted)")
    return ", ".join(parts)


def start_line(ready: Ready, block_size: int) -> str:
    """Seconds per phase of a start, and the memory plan."""
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in ready.phase_s.items())
    sizes = ready.memory_bytes.items()
    memory = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sizes)
    num_tokens = (ready.num_blocks - 1) * block_size
    return (
        f"worker ready (generation {ready.generation}): {phases}; {memory};"
        f" {ready.num_blocks} KV blocks for {num_tokens} tokens"
    )


def _ms(start_s: float | None, end_s: float | None, count: int = 1) -> str:
    if start_s is None or end_s is None:
        return "-"
    return f"{(end_s - start_s) / count * 1000:.1f} ms"
