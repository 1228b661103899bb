from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from serving import served

from minivllm import bench_serve, cli
from minivllm.bench_serve import Load, arrival_times, best_rate, plain_tokens, read_grid, save
from minivllm.errors import ConfigError, ServerError
from minivllm.measures import Answer
from minivllm.tokenizer import Tokenizer
from minivllm.workloads import Arrivals, Dataset, ServeOptions, Work

HEAD = [
    "date",
    "backend",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
]


def load_of(model: Path, dataset: dict[str, Any], **options: Any) -> Load:
    return Load(Dataset(**dataset), ServeOptions(tokenizer=str(model), **options))


RANDOM = {"num_prompts": 8, "input_len": 12, "output_len": 5}


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
async def test_a_load_on_a_server(embedded_dir: Path, tmp_path: Path, backend: str) -> None:
    """Every prompt is sent with its length, and what came back is summed and saved."""
    load = load_of(embedded_dir, RANDOM, backend=backend, ignore_eos=True, max_concurrency=3)
    async with served(embedded_dir) as server:
        result, answers = await load.send(
            server.client, Arrivals(request_rate=500), goodput_ms={"e2el": 60_000}
        )
    assert list(result)[: len(HEAD)] == HEAD
    assert (result["completed"], result["failed"]) == (8, 0)
    assert result["total_output_tokens"] == 8 * 5
    if backend == "openai":
        assert result["total_input_tokens"] == 8 * 12, "token ids are sent, none is lost"
    assert result["request_goodput"] == result["request_throughput"]
    assert 1 <= result["max_concurrent_requests"] <= 3
    assert "p99_ttft_ms" in result
    file = save(result, answers, tmp_path / "results", None)
    assert file.name.startswith(f"{backend}-500qps-")
    saved = json.loads(file.read_text())
    assert saved["output_lens"] == [5] * 8
    assert save(result, answers, tmp_path, "name.json") == tmp_path / "name.json"


async def test_refused_requests_are_counted(embedded_dir: Path) -> None:
    """Requests that a server refuses have failed; when all have, the run has."""
    load = load_of(embedded_dir, RANDOM)
    load.works[3] = Work([10**9], 1, 5)
    async with served(embedded_dir) as server:
        result, answers = await load.send(server.client, Arrivals(), goodput_ms={})
        assert (result["completed"], result["failed"]) == (7, 1)
        assert "status 400" in answers[3].error
        load.works[:] = [Work([10**9], 1, 5)]
        with pytest.raises(ServerError, match=r"no request was answered: .*status 400"):
            await load.send(server.client, Arrivals(), goodput_ms={})


async def test_a_salt_keeps_loads_apart(embedded_dir: Path) -> None:
    """A load with a salt finds nothing in the prefix cache that another has left."""
    load = load_of(embedded_dir, {"num_prompts": 1, "input_len": 40, "output_len": 2})
    async with served(embedded_dir) as server:
        hits = []
        for salt in ("a", "b", "b"):
            await load.send(server.client, Arrivals(), goodput_ms={}, cache_salt=salt)
            hits.append(server.engine.core.scheduler.stats.prefix_hits)
    assert hits == [0, 0, 32]


def test_plain_tokens(embedded_dir: Path) -> None:
    """Made-up prompts have no tokens that are marks."""
    tokenizer = Tokenizer.from_dir(embedded_dir)
    tokens = set(plain_tokens(tokenizer))
    marks = set(tokenizer.encode("<|im_start|><|im_end|><|endoftext|>"))
    assert len(marks) == 3
    assert not tokens & marks
    assert len(tokens) > 0.99 * len(tokenizer)


def test_a_trace_keeps_its_times() -> None:
    """Arrivals that a data set has go before those that would be drawn."""
    works = [Work([1], 1, 1, 0.5), Work([1], 1, 1, 7.0)]
    assert arrival_times(works, Arrivals(request_rate=1), 0) == [0.5, 7.0]
    untimed = [Work([1], 1, 1)]
    assert arrival_times(untimed, Arrivals(request_rate=4, burstiness=float("inf")), 0) == [0.25]


def test_a_grid() -> None:
    """Every combination, with values as JSON has them and words as they are."""
    grid = read_grid(["max-num-seqs=4,8", "dtype=float32"])
    assert grid == [
        {"max_num_seqs": 4, "dtype": "float32"},
        {"max_num_seqs": 8, "dtype": "float32"},
    ]
    for word in ("max_num_seqs", "speed=1"):
        with pytest.raises(ConfigError, match="param must be a setting of the engine"):
            read_grid([word])


class Limited:
    """A load that keeps its objective up to a rate."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.salts: set[str] = set()

    async def send(self, client: Any, arrivals: Arrivals, **options: Any) -> Any:
        self.salts.add(options["cache_salt"])
        rate = arrivals.request_rate
        ttfts_s = [0.1] * 9 + [0.1 if rate <= self.limit else 9.0]
        answers = [Answer(1, 0.0, ttft_s=ttft_s, output_len=1) for ttft_s in ttfts_s]
        return {"request_rate": rate, "output_throughput": rate}, answers


@pytest.mark.parametrize(
    ("limit", "rates"),
    [
        (5.2, [1, 2, 4, 8, 6, 5]),  # doubled until it fails, then halved between
        (0.3, [1, 0.5, 0.25]),
    ],
)
async def test_the_search_for_a_rate(limit: float, rates: list[float]) -> None:
    """The rate doubles while the share of good answers holds, then the gap is halved."""
    load = Limited(limit)
    runs = await best_rate(
        load,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        goodput_ms={"ttft": 500},
        slo_share=1.0,
        start_rate=1.0,
        num_halvings=2,
    )
    assert [run["request_rate"] for run in runs] == rates
    assert [run["keeps_slo"] for run in runs] == [rate <= limit for rate in rates]
    assert {run["slo_share"] for run in runs} == {1.0, 0.9}
    assert len(load.salts) == len(runs)


async def test_a_sweep_of_a_real_engine(
    embedded_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each setting is started, loaded and told, the best first."""
    monkeypatch.setattr(bench_serve, "_MAX_RATE", 20.0)
    settings = {
        "model": str(embedded_dir),
        "distributed_executor_backend": "inline",
        "max_model_len": 64,
        "kv_cache_memory_bytes": 32 << 20,
    }
    load = load_of(
        embedded_dir, {"num_prompts": 3, "input_len": 4, "output_len": 3}, ignore_eos=True
    )
    options = {"goodput_ms": {"e2el": 600_000}, "start_rate": 20.0, "num_halvings": 0}
    result = await bench_serve.sweep(settings, read_grid(["max_num_seqs=1,4"]), load, **options)
    assert {one["settings"]["max_num_seqs"] for one in result["found"]} == {1, 4}
    for one in result["found"]:
        assert one["best"] == one["runs"][0]
        assert one["best"]["total_output_tokens"] == 9
    first, second = (one["best"]["output_throughput"] for one in result["found"])
    assert first >= second
    with pytest.raises(ConfigError, match="slo_share must be"):
        await bench_serve.sweep(settings, [], load, goodput_ms={"ttft": 1}, slo_share=0)


async def test_the_command(
    embedded_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`bench serve` asks a server by its address, prints the figures and saves them."""
    words = "bench serve --num-prompts 4 --random-input-len 8 --random-output-len 3 --ignore-eos"
    outputs = f"--save-result --result-filename one.json --result-dir {tmp_path} --plot {tmp_path}"
    async with served(embedded_dir) as server:
        argv = [*f"{words} {outputs}".split(), "--tokenizer", str(embedded_dir)]
        status = await asyncio.to_thread(cli.main, [*argv, "--base-url", server.url])
    assert status == 0
    assert "Total generated tokens:                  12" in capsys.readouterr().out
    assert json.loads((tmp_path / "one.json").read_text())["completed"] == 4
    assert (tmp_path / "requests.png").stat().st_size > 0
