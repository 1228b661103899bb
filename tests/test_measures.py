from __future__ import annotations

import pytest

from minivllm.errors import ConfigError
from minivllm.measures import Answer, details, num_good, read_goodput, report, summarize

# Three answers that were served well, one of them of a single token, and one that failed.
FIRST = Answer(10, 0.0, ttft_s=0.1, itl_s=[0.2, 0.2], latency_s=0.5, output_len=3)
SECOND = Answer(20, 0.25, ttft_s=0.25, itl_s=[0.5], latency_s=0.75, output_len=6)
SHORT = Answer(5, 1.0, ttft_s=0.05, latency_s=0.05, output_len=1)
FAILED = Answer(99, 0.5, ttft_s=9.0, latency_s=9.0, output_len=7, error="status 500")
ANSWERS = [FIRST, SECOND, FAILED, SHORT]

HEAD = [
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
]


def test_counts_and_rates() -> None:
    """Tokens and requests are summed over those that succeeded and divided by the duration."""
    result = summarize(ANSWERS, 2.0)
    assert {key: result[key] for key in HEAD} == {
        "duration": 2.0,
        "completed": 3,
        "failed": 1,
        "total_input_tokens": 35,
        "total_output_tokens": 10,
        "request_throughput": 1.5,
        "request_goodput": None,
        "output_throughput": 5.0,
        "total_token_throughput": 22.5,
        # The first second has the pieces at 0.1, 0.3, 0.5 and 0.5; that at 1.0 is in the next.
        "max_output_tokens_per_s": 4.0,
        # The second's end and the last's start are one moment, and not two at once.
        "max_concurrent_requests": 2,
    }


def test_latencies() -> None:
    """TTFT, TPOT, ITL and E2E in milliseconds: mean, median, deviation, percentiles."""
    result = summarize(ANSWERS, 2.0, percentiles=[50, 99.9])
    assert result["mean_ttft_ms"] == pytest.approx((100 + 250 + 50) / 3)
    assert result["median_ttft_ms"] == result["p50_ttft_ms"] == pytest.approx(100)
    # (0.5 - 0.1) / 2 and (0.75 - 0.25) / 5; an answer of one token has none
    assert result["mean_tpot_ms"] == pytest.approx((200 + 100) / 2)
    assert result["std_tpot_ms"] == pytest.approx(50)
    assert result["mean_itl_ms"] == pytest.approx((200 + 200 + 500) / 3)
    assert result["mean_e2el_ms"] == pytest.approx((500 + 750 + 50) / 3)
    assert result["p99.9_itl_ms"] == pytest.approx(200 + 300 * 0.998)


def test_keys_are_vllms() -> None:
    """The keys are those of vLLM's result, for the metrics that are asked for."""
    latencies = [
        f"{kind}_{metric}_ms"
        for metric in ("ttft", "itl")
        for kind in ("mean", "median", "std", "p90", "p99")
    ]
    result = summarize(ANSWERS, 2.0, metrics=["ttft", "itl"], percentiles=[90, 99])
    assert list(result) == HEAD + latencies
    assert list(details(ANSWERS)) == [
        "input_lens",
        "output_lens",
        "start_times",
        "ttfts",
        "itls",
        "errors",
    ]
    assert details(ANSWERS)["errors"] == ["", "", "status 500", ""]


@pytest.mark.parametrize(
    ("words", "good"),
    [
        (["ttft:100"], 2),
        (["ttft:99"], 1),
        (["tpot:150"], 2),
        (["e2el:500"], 2),
        (["ttft:1000", "tpot:1000", "e2el:1000"], 3),
        (["ttft:100", "tpot:100"], 1),
    ],
)
def test_goodput(words: list[str], good: int) -> None:
    """An answer is good when it keeps every objective; the limit itself keeps it."""
    limits = read_goodput(words)
    assert num_good(ANSWERS, limits) == good
    assert summarize(ANSWERS, 2.0, goodput_ms=limits)["request_goodput"] == good / 2


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:fast", "itl:5", "ttft:-1", ":5"])
def test_bad_objectives(word: str) -> None:
    """An objective that cannot be read is refused."""
    with pytest.raises(ConfigError, match="goodput must be objectives like"):
        read_goodput([word])


def test_nothing_succeeded() -> None:
    """A run without a success has zeros and no division by them."""
    result = summarize([FAILED], 1.0, goodput_ms={"ttft": 1.0})
    assert (result["completed"], result["failed"], result["request_goodput"]) == (0, 1, 0.0)
    assert result["p99_ttft_ms"] == result["max_output_tokens_per_s"] == 0


def test_a_report_shows_all_figures() -> None:
    """Each figure has its line."""
    text = report(summarize(ANSWERS, 2.0))
    assert len(text.splitlines()) == len(HEAD) + 4 * (1 + 4)
    assert "Request goodput (req/s):                 -" in text
    assert "Output token throughput (tok/s):         5.00" in text
