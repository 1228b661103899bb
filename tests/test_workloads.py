from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minivllm.errors import ConfigError
from minivllm.workloads import Arrivals, Dataset, ServeOptions, Work

VOCABULARY = range(100, 1000)


def read(seed: int = 0, **fields: Any) -> list[Work]:
    """The work of a data set; a word is a token."""
    return Dataset(**fields).read(VOCABULARY, str.split, seed)


def write(file: Path, lines: list[Any]) -> str:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def test_random_lengths_are_exact() -> None:
    """Prompts have the asked length behind a shared prefix, and differ behind it."""
    works = read(num_prompts=20, input_len=30, output_len=7, random_prefix_len=5)
    assert {(len(w.prompt), w.prompt_len, w.output_len) for w in works} == {(35, 35, 7)}
    assert len({tuple(w.prompt[:5]) for w in works}) == 1
    assert len({tuple(w.prompt[5:]) for w in works}) == 20
    assert all(token in VOCABULARY for w in works for token in w.prompt)


def test_random_range() -> None:
    """A ratio of one half draws lengths from half to one and a half, evenly."""
    works = read(num_prompts=4000, input_len=100, output_len=10, random_range_ratio=0.5)
    lens = [w.prompt_len for w in works]
    assert (min(lens), max(lens)) == (50, 150)
    assert abs(np.mean(lens) - 100) < 2
    assert {w.output_len for w in works} == set(range(5, 16))


def test_seeds() -> None:
    """Equal seeds give equal work, other seeds other work."""
    fields = {"num_prompts": 5, "input_len": 8}
    assert read(1, **fields) == read(1, **fields) != read(2, **fields)


def test_prefixes_repeat() -> None:
    """Each prefix begins an equal share of the prompts, whose rest is their own."""
    works = read(
        dataset_name="prefix_repetition",
        num_prompts=12,
        prefix_repetition_prefix_len=16,
        prefix_repetition_suffix_len=4,
        prefix_repetition_num_prefixes=3,
    )
    counts: dict[tuple[int, ...], int] = {}
    for work in works:
        assert work.prompt_len == len(work.prompt) == 20
        counts[tuple(work.prompt[:16])] = counts.get(tuple(work.prompt[:16]), 0) + 1
    assert sorted(counts.values()) == [4, 4, 4]
    assert len({tuple(w.prompt[16:]) for w in works}) == 12


def test_sharegpt_keeps_what_vllm_keeps(tmp_path: Path) -> None:
    """First turns of usable length, each once, with their answer's length for an output."""

    def talk(*lens: int) -> dict[str, Any]:
        turns = [{"from": "x", "value": "w " * size} for size in lens]
        return {"id": "a", "conversations": turns}

    kept = [talk(4, 4), talk(1024, 1024), talk(50, 60, 70)]
    dropped = [talk(3, 9), talk(9, 3), talk(1025, 9), talk(900, 1200), talk(9)]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps(kept + dropped))
    works = read(dataset_name="sharegpt", dataset_path=str(file), num_prompts=100)
    assert sorted((w.prompt_len, w.output_len) for w in works) == [(4, 4), (50, 60), (1024, 1024)]
    assert all(isinstance(w.prompt, str) for w in works)
    few = read(dataset_name="sharegpt", dataset_path=str(file), num_prompts=2, output_len=9)
    assert [w.output_len for w in few] == [9, 9]


def test_synthetic_sharegpt_has_the_published_means() -> None:
    """161.31 tokens in and 337.99 out on average, within limits, with a long tail."""
    works = read(dataset_name="sharegpt_synthetic", num_prompts=20_000)
    prompts, outputs = (
        np.array([getattr(w, name) for w in works]) for name in ("prompt_len", "output_len")
    )
    assert abs(prompts.mean() / 161.31 - 1) < 0.03
    assert abs(outputs.mean() / 337.99 - 1) < 0.03
    assert prompts.min() >= 4
    assert prompts.max() <= 1024
    assert (prompts + outputs).max() <= 2048
    assert np.median(prompts) < 0.75 * prompts.mean()


def test_custom_lines(tmp_path: Path) -> None:
    """Lines come in order, and again from the first when they are too few."""
    lines = [{"prompt": "a b c", "output_tokens": 5}, {"prompt": "d"}]
    path = write(tmp_path / "lines", lines)
    works = read(dataset_name="custom", dataset_path=path, num_prompts=3)
    assert [(w.prompt, w.prompt_len, w.output_len) for w in works] == [
        ("a b c", 3, 5),
        ("d", 1, 128),
        ("a b c", 3, 5),
    ]


def test_a_trace_brings_its_times_and_prefixes(tmp_path: Path) -> None:
    """Requests come at their times, and equal hash ids are equal blocks of 512 tokens."""
    lines = [
        {"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]},
        {"timestamp": 0, "input_length": 1030, "output_length": 6, "hash_ids": [7, 8]},
        {"timestamp": 2000, "input_length": 3, "output_length": 1},
    ]
    path = write(tmp_path / "trace", lines)
    works = read(dataset_name="timed_trace", dataset_path=path, num_prompts=9)
    assert [(w.arrival_s, w.prompt_len, w.output_len) for w in works] == [
        (0.0, 1030, 6),
        (1.5, 600, 5),
        (2.0, 3, 1),
    ]
    assert all(len(w.prompt) == w.prompt_len for w in works)
    first, second = works[0].prompt, works[1].prompt
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:]


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("custom", {"text": "a"}, "prompt in line 2 of"),
        ("custom", {"prompt": "a", "output_tokens": 0}, "output_tokens in line 2 of"),
        ("custom", "a", "line 2 of"),
        ("timed_trace", {"timestamp": 0, "input_length": 4}, "output_length in line 2 of"),
        (
            "timed_trace",
            {"timestamp": -1, "input_length": 4, "output_length": 4},
            "timestamp in line 2 of",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, name: str, line: Any, message: str) -> None:
    """What is wrong with a file is told by the line and the field."""
    good = {"prompt": "a", "timestamp": 0, "input_length": 4, "output_length": 4}
    path = write(tmp_path / "lines", [good, line])
    with pytest.raises(ConfigError, match=message):
        read(dataset_name=name, dataset_path=path, num_prompts=9)


def test_a_line_that_is_not_text(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are named by their line."""
    file = tmp_path / "lines"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"line 2 of .* must be JSON"):
        read(dataset_name="custom", dataset_path=str(file))


@pytest.mark.parametrize("text", ["{", "{}", '[{"conversations": [{}, {}]}]', "[]"])
def test_bad_sharegpt_files(tmp_path: Path, text: str) -> None:
    """A file that is not ShareGPT's JSON, or has no conversation of use, is refused."""
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="dataset_path"):
        read(dataset_name="sharegpt", dataset_path=str(file))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset_name": "hf"}, "dataset_name must be one of random, prefix_repetition"),
        ({"dataset_name": "custom"}, "dataset_path must be given for custom"),
        ({"dataset_path": "x"}, "dataset_path must be left out for random"),
        ({"num_prompts": 0}, "num_prompts must be at least 1"),
        ({"output_len": 0}, "output_len must be at least 1"),
        ({"random_range_ratio": 1.0}, "random_range_ratio must be"),
    ],
)
def test_bad_datasets(fields: dict[str, Any], message: str) -> None:
    """A data set that cannot be is refused by field and value."""
    with pytest.raises(ConfigError, match=message):
        Dataset(**fields)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_of_a_gamma_distribution(burstiness: float) -> None:
    """The gaps' mean is one over the rate, and their variation one over the root of the shape."""
    times = Arrivals(request_rate=5, burstiness=burstiness).draw(20_000, seed=3)
    assert times[-1] == pytest.approx(20_000 / 5)
    gaps = np.diff([0.0, *times])
    assert gaps.min() >= 0
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_all_at_once() -> None:
    """Without a rate everything comes at the start."""
    assert Arrivals().draw(3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 50.5), ("exponential", 10.0)])
def test_ramps(strategy: str, middle: float) -> None:
    """The rate goes from its start to its end, straight or by equal factors."""
    arrivals = Arrivals(
        ramp_up_strategy=strategy, ramp_up_start_rps=1, ramp_up_end_rps=100, burstiness=np.inf
    )
    gaps = np.diff([0.0, *arrivals.draw(101)])
    assert [1 / gaps[0], 1 / gaps[50], 1 / gaps[100]] == pytest.approx([1, middle, 100])


@pytest.mark.parametrize(
    "fields",
    [
        {"request_rate": 0},
        {"burstiness": 0},
        {"ramp_up_strategy": "steep"},
        {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1},
        {"ramp_up_start_rps": 1},
        {
            "ramp_up_strategy": "linear",
            "ramp_up_start_rps": 1,
            "ramp_up_end_rps": 2,
            "request_rate": 3,
        },
    ],
)
def test_bad_arrivals(fields: dict[str, Any]) -> None:
    """Rates and ramps that cannot be are refused."""
    with pytest.raises(ConfigError, match="must be"):
        Arrivals(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"backend": "tgi"},
        {"max_concurrency": 0},
        {"percentile_metrics": "ttft,speed"},
        {"metric_percentiles": "101"},
        {"metric_percentiles": "most"},
    ],
)
def test_bad_options(fields: dict[str, Any]) -> None:
    """Options of a load that cannot be are refused by name."""
    with pytest.raises(ConfigError, match=next(iter(fields))):
        ServeOptions(**fields)


def test_paths() -> None:
    """A backend has its endpoint, which can be replaced."""
    assert ServeOptions(backend="vllm").path == "/v1/completions"
    assert ServeOptions(backend="openai-chat").path == "/v1/chat/completions"
    assert ServeOptions(endpoint="/x").path == "/x"
