from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minivllm import bench, cli
from minivllm.config import EngineConfig
from minivllm.errors import ConfigError, WorkerError
from minivllm.roofline import Machine
from minivllm.workloads import Work

SMALL = {"max_model_len": 128, "kv_cache_memory_bytes": 32 << 20, "enable_prefix_caching": False}


@pytest.fixture(autouse=True)
def _quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's limits are not what is tested here."""
    monkeypatch.setattr(bench, "measure", lambda device, dtype: Machine(1e10, 1e11))


def test_latency(embedded_dir: Path) -> None:
    """The timed rounds alone are counted, and their steps set against the limits."""
    config = EngineConfig(model=str(embedded_dir), **SMALL)
    result, steps = bench.latency(
        config, input_len=20, output_len=4, batch_size=3, num_iters_warmup=2, num_iters=2
    )
    assert list(result) == [
        "avg_latency",
        "latencies",
        "percentiles",
        "output_tokens_per_second",
        "roofline",
    ]
    assert len(result["latencies"]) == 2
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 2)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert [step.num_tokens for step in steps] == [60, 3, 3, 3] * 2
    assert [step.num_keys for step in steps] == [60, 63, 66, 69] * 2
    assert result["roofline"]["decode"]["num_steps"] == 6
    assert result["roofline"]["prefill"]["num_tokens"] == 60
    assert sum(step.seconds for step in steps) < sum(result["latencies"])


def test_throughput(embedded_dir: Path, tmp_path: Path) -> None:
    """All tokens of all prompts and samples are counted; the user's own recording is kept."""
    file = tmp_path / "record"
    config = EngineConfig(
        model=str(embedded_dir), record=str(file), distributed_executor_backend="inline", **SMALL
    )
    works = [Work([7, 8, 9 + number], 3, 2 + number) for number in range(3)]
    result, steps = bench.throughput(config, works, n=2, use_async=True)
    assert list(result) == [
        "elapsed_time",
        "num_requests",
        "total_num_tokens",
        "requests_per_second",
        "tokens_per_second",
        "output_tokens_per_second",
        "roofline",
    ]
    assert (result["num_requests"], result["total_num_tokens"]) == (3, 9 + 2 * (2 + 3 + 4))
    assert result["tokens_per_second"] == pytest.approx(27 / result["elapsed_time"])
    assert sum(step.num_sampled for step in steps) == 18
    assert file.stat().st_size > 0


@pytest.mark.parametrize(
    ("field", "least"), [("batch_size", 1), ("num_iters", 1), ("n", 1), ("num_iters_warmup", 0)]
)
def test_bad_counts(field: str, least: int) -> None:
    """A benchmark of nothing is refused before anything is loaded."""
    with pytest.raises(ConfigError, match=f"{field} must be at least {least}"):
        bench.latency(EngineConfig(), **{field: least - 1})


def test_startup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold starts have a cache of their own each, warm ones share one that a start has filled."""
    caches: list[str] = []

    def start_once(settings: dict[str, Any], cache: Path) -> dict[str, float]:
        caches.append(cache.name)
        return {"imports": 1.0, "engine": float(len(caches)), "first_token": 0.5}

    monkeypatch.setattr(bench, "_start_once", start_once)
    result = bench.startup({}, num_iters_cold=2, num_iters_warmup=1, num_iters_warm=2)
    assert caches == ["cold0", "cold1", "warm", "warm", "warm"]
    assert result["cold_startup_times"] == [2.5, 3.5]
    assert result["avg_cold_startup_time"] == 3.0
    assert result["warm_startup_times"] == [5.5, 6.5]
    assert result["warm_phase_s"] == {"imports": 1.0, "engine": 4.5, "first_token": 0.5}
    with pytest.raises(ConfigError, match="num_iters_warm must be at least 1"):
        bench.startup({}, num_iters_warm=0)


@pytest.mark.slow
def test_one_start(embedded_dir: Path, tmp_path: Path) -> None:
    """A start is a process whose kernels go to the cache that it is given."""
    phases = bench._start_once({"model": str(embedded_dir), **SMALL}, tmp_path / "cache")
    assert list(phases) == ["imports", "engine", "first_token"]
    assert all(seconds > 0 for seconds in phases.values())
    assert any((tmp_path / "cache").rglob("*.nbi")), "numba's index of a compiled kernel"


def test_a_start_that_fails(tmp_path: Path) -> None:
    """The last that the process said is told."""
    with pytest.raises(WorkerError, match=r"a start failed: .*/nowhere does not exist"):
        bench._start_once({"model": "/nowhere"}, tmp_path)


def test_commands(embedded_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bench throughput` reads its data set, writes its JSON and a picture."""
    file = tmp_path / "result.json"
    words = f"""bench throughput --num-prompts 3 --input-tokens 8 --output-tokens 2
        --output-json {file} --plot {tmp_path} --model {embedded_dir}
        --max-model-len 64 --kv-cache-memory-bytes {32 << 20}"""
    assert cli.main(words.split()) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("Throughput: ")
    assert "decode: " in out
    assert json.loads(file.read_text())["total_num_tokens"] == 30
    assert (tmp_path / "steps.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bench", "latency", "--inputlen", "3"], "no flag --inputlen; did you mean --input-len?"),
        (["bench", "latency", "--output-json", "/nowhere/x"], "must be in a directory that exists"),
        (["bench"], "the following arguments are required: bench"),
        (["bench", "speed"], "invalid choice: 'speed'"),
        (["bench", "throughput", "--dataset-name", "hf"], "dataset_name must be one of random"),
        (["bench", "serve", "--goodput", "fast:1"], "goodput must be objectives"),
        (["bench", "serve", "--port", "1", "--num-prompts", "1"], "does not answer"),
        (
            ["bench", "sweep", "--param", "speed=1", "--goodput", "ttft:1"],
            "param must be a setting",
        ),
        (["bench", "sweep", "--param", "max_num_seqs=1"], "goodput must be given"),
        (["bench", "latency", "--block-size", "0"], "block_size must be"),
    ],
)
def test_errors(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong with a benchmark is told in a line, with the nearest flag for a wrong one."""
    try:
        status = cli.main(argv)
    except SystemExit as done:  # argparse
        status = int(done.code or 0)
    assert status != 0
    assert message in capsys.readouterr().err
