from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from minivllm.batch import Ready, SampleInputs
from minivllm.metrics import EngineMetrics, Gauges, finished_line, start_line
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


GAUGES = Gauges(
    num_running=3,
    num_waiting=2,
    kv_cache_usage=0.25,
    prefix_queries=40,
    prefix_hits=30,
    num_preemptions=4,
    num_blocks=100,
    block_size=16,
    sleep_level=0,
)


def read(text: bytes) -> dict[tuple[str, ...], float]:
    """Values by name and labels other than the model's."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "tiny"
            found[sample.name, *sample.labels.values()] = sample.value
    return found


def test_a_request_is_counted_from_its_first_token_to_its_end() -> None:
    """Token counters, latencies in their buckets, and one end by its reason."""
    metrics = EngineMetrics()
    request = make_request(
        3, "length", arrival_s=10.0, scheduled_s=10.5, num_cached_tokens=8, num_preemptions=1
    )
    metrics.count_step(12)
    stats = request.stats
    for now_s in (12.0, 12.25, 12.75):
        metrics.count_tokens(request, 1, now_s)
        stats.first_token_s = stats.first_token_s or now_s
        stats.last_token_s = now_s
    stats.finished_s = 13.0
    metrics.count_end(request)
    metrics.count_rejection("max_num_queued_reqs")
    found = read(metrics.render(GAUGES, {"model_name": "tiny"}))
    expected = {
        ("vllm:prompt_tokens_total",): 12,
        ("vllm:prompt_tokens_cached_total",): 8,
        ("vllm:prompt_tokens_by_source_total", "local_compute"): 4,
        ("vllm:prompt_tokens_by_source_total", "local_cache_hit"): 8,
        ("vllm:generation_tokens_total",): 3,
        ("vllm:request_success_total", "length"): 1,
        ("vllm:admission_rejections_total", "max_num_queued_reqs"): 1,
        ("vllm:time_to_first_token_seconds_sum",): 2.0,
        ("vllm:time_to_first_token_seconds_bucket", "1.0"): 0,
        ("vllm:time_to_first_token_seconds_bucket", "2.5"): 1,
        ("vllm:inter_token_latency_seconds_count",): 2,
        ("vllm:inter_token_latency_seconds_sum",): 0.75,
        ("vllm:request_time_per_output_token_seconds_sum",): 0.375,
        ("vllm:e2e_request_latency_seconds_sum",): 3.0,
        ("vllm:request_queue_time_seconds_sum",): 0.5,
        ("vllm:request_prefill_time_seconds_sum",): 1.5,
        ("vllm:request_decode_time_seconds_sum",): 0.75,
        ("vllm:request_inference_time_seconds_sum",): 2.25,
        ("vllm:request_prompt_tokens_sum",): 12,
        ("vllm:request_generation_tokens_sum",): 3,
        ("vllm:request_prefill_kv_computed_tokens_sum",): 4,
        ("vllm:request_params_n_sum",): 1,
        ("vllm:request_params_max_tokens_sum",): 16,
        ("vllm:request_num_preemptions_sum",): 1,
        ("vllm:iteration_tokens_total_sum",): 12,
    }
    assert {key: found[key] for key in expected} == expected


def test_gauges_are_read_as_they_stand() -> None:
    """What others count is shown as it is when somebody looks, each with the labels given."""
    found = read(EngineMetrics().render(GAUGES, {"model_name": "tiny"}))
    expected = {
        ("vllm:num_requests_running",): 3,
        ("vllm:num_requests_waiting",): 2,
        ("vllm:kv_cache_usage_perc",): 0.25,
        ("vllm:prefix_cache_queries_total",): 40,
        ("vllm:prefix_cache_hits_total",): 30,
        ("vllm:num_preemptions_total",): 4,
        ("vllm:engine_sleep_state", "awake"): 1,
        ("vllm:engine_sleep_state", "discard_all"): 0,
        ("vllm:cache_config_info", "16", "100"): 1,
    }
    assert {key: found[key] for key in expected} == expected


def test_a_request_that_never_ran_has_an_end_and_no_latency() -> None:
    """Times that there are none of are in no histogram."""
    metrics = EngineMetrics()
    metrics.count_end(make_request(0, "abort", arrival_s=100.0, finished_s=101.5))
    found = read(metrics.render(GAUGES, {"model_name": "tiny"}))
    assert found["vllm:request_success_total", "abort"] == 1
    assert found["vllm:e2e_request_latency_seconds_sum",] == 1.5
    assert found["vllm:request_queue_time_seconds_count",] == 0
