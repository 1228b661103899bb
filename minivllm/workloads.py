"""What a benchmark asks, when and how: data sets, arrival processes, options of a load.

    data set (a generator or a file) ──> [Work, ...]     prompt, its tokens, tokens to generate
    arrival process                  ──> [0.0, 0.4, ...]  seconds after the start, one for each

Data sets, by vLLM's names: `random`, `prefix_repetition`, `sharegpt` (the published JSON),
`sharegpt_synthetic` (its lengths without its texts), `custom` (JSONL) and `timed_trace` (JSONL in
the form of Mooncake's traces, which bring their own arrivals). Prompts that are made up are token
ids, so that their length is exact whatever the tokenizer; prompts from a file are text.

Invariants: all is drawn from one seed, so equal seeds give equal work; a line that cannot be used
is named, never skipped. What is sent and timed: `load_client`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minivllm.errors import ConfigError
from minivllm.measures import METRICS

# Mean tokens of ShareGPT's prompts and answers (Kwon et al., SOSP 2023, section 6.1). The shape is
# log-normal, as chat lengths are; its spread is ours.
_SHAREGPT_MEANS = (161.31, 337.99)
_SHAREGPT_SPREADS = (1.2, 0.9)  # of the logarithm
_SHAREGPT_MAX = (1024, 2048)  # tokens of a prompt, and of prompt and answer, as vLLM keeps them
_MIN_LEN = 4
_TRACE_BLOCK = 512  # tokens that one hash id of a trace stands for

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Work:
    """One request of a benchmark."""

    prompt: str | list[int]
    prompt_len: int
    output_len: int
    arrival_s: float | None = None
    """After the start of the run, in data sets that say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Which work, and how much of it. The names are the flags of vLLM's benchmarks."""

    dataset_name: str = "random"
    """random, prefix_repetition, sharegpt, sharegpt_synthetic, custom or timed_trace."""
    dataset_path: str | None = None
    """The file of sharegpt, custom and timed_trace."""
    num_prompts: int = 1000
    """Requests to send."""
    input_len: int = 1024
    """random: tokens of a prompt, beside its prefix."""
    output_len: int | None = None
    """Tokens to generate; None: 128, or what the data set says."""
    random_range_ratio: float = 0.0
    """random: lengths are drawn from length * (1 - ratio) to length * (1 + ratio)."""
    random_prefix_len: int = 0
    """random: tokens that all prompts begin with."""
    prefix_repetition_prefix_len: int = 256
    """prefix_repetition: tokens of a shared prefix."""
    prefix_repetition_suffix_len: int = 256
    """prefix_repetition: tokens of each prompt's own."""
    prefix_repetition_num_prefixes: int = 10
    """prefix_repetition: how many prefixes there are."""

    def __post_init__(self) -> None:
        if self.dataset_name not in _READERS:
            names = ", ".join(_READERS)
            raise ConfigError("dataset_name", self.dataset_name, f"must be one of {names}")
        for name, least in (
            ("num_prompts", 1),
            ("input_len", 1),
            ("random_prefix_len", 0),
            ("prefix_repetition_prefix_len", 0),
            ("prefix_repetition_suffix_len", 1),
            ("prefix_repetition_num_prefixes", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(name, getattr(self, name), f"must be at least {least}")
        if self.output_len is not None and self.output_len < 1:
            raise ConfigError("output_len", self.output_len, "must be at least 1")
        if not 0 <= self.random_range_ratio < 1:
            rule = "must be at least 0 and below 1"
            raise ConfigError("random_range_ratio", self.random_range_ratio, rule)
        needs_path = self.dataset_name in ("sharegpt", "custom", "timed_trace")
        if needs_path != (self.dataset_path is not None):
            rule = f"must be {'given' if needs_path else 'left out'} for {self.dataset_name}"
            raise ConfigError("dataset_path", self.dataset_path, rule)

    def read(
        self, vocabulary: Sequence[int], encode: Callable[[str], Sequence[object]], seed: int = 0
    ) -> list[Work]:
        """The work. `vocabulary`: token ids that a made-up prompt may have; `encode` counts the
        tokens of a text.

        Raises: `ConfigError` for a file that cannot be used, or has no work
        """
        maker = _Maker(self, np.asarray(vocabulary), encode, np.random.default_rng(seed), seed)
        works = _READERS[self.dataset_name](maker)
        if not works:
            raise ConfigError("dataset_path", self.dataset_path, "has nothing that can be asked")
        return works


@dataclass(frozen=True, slots=True)
class _Maker:
    dataset: Dataset
    vocabulary: np.ndarray
    encode: Callable[[str], Sequence[object]]
    rng: np.random.Generator
    seed: int

    def output_len(self, otherwise: int = 128) -> int:
        given = self.dataset.output_len
        return otherwise if given is None else given

    def ids(self, count: int, rng: np.random.Generator | None = None) -> list[int]:
        """Token ids without meaning."""
        drawn: list[int] = (rng or self.rng).choice(self.vocabulary, count).tolist()
        return drawn

    def lens(self, middle: int) -> list[int]:
        spread = int(middle * self.dataset.random_range_ratio)
        drawn = self.rng.integers(middle - spread, middle + spread + 1, self.dataset.num_prompts)
        return [int(one) for one in np.maximum(drawn, 1)]


def _random(maker: _Maker) -> list[Work]:
    prefix = maker.ids(maker.dataset.random_prefix_len)
    lens = zip(maker.lens(maker.dataset.input_len), maker.lens(maker.output_len()), strict=True)
    return [
        Work(prefix + maker.ids(input_len), len(prefix) + input_len, output_len)
        for input_len, output_len in lens
    ]


def _prefix_repetition(maker: _Maker) -> list[Work]:
    dataset = maker.dataset
    num_prefixes = dataset.prefix_repetition_num_prefixes
    prefix_len = dataset.prefix_repetition_prefix_len
    prefixes = [maker.ids(prefix_len) for _ in range(num_prefixes)]
    suffix_len = dataset.prefix_repetition_suffix_len
    works = [
        Work(
            prefixes[number % num_prefixes] + maker.ids(suffix_len),
            prefix_len + suffix_len,
            maker.output_len(),
        )
        for number in range(dataset.num_prompts)
    ]
    return [works[idx] for idx in maker.rng.permutation(len(works))]


def _sharegpt(maker: _Maker) -> list[Work]:
    """First turns and the lengths of their answers, those that vLLM keeps, in a drawn order."""
    file = _file(maker)
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        turns = [entry["conversations"] for entry in entries]
        pairs = [(str(turn[0]["value"]), str(turn[1]["value"])) for turn in turns if len(turn) > 1]
    except (ValueError, LookupError, TypeError) as error:
        rule = f"must be ShareGPT's JSON: a list of conversations ({error!r})"
        raise ConfigError("dataset_path", str(file), rule) from error
    works: list[Work] = []
    for idx in maker.rng.permutation(len(pairs)):
        if len(works) == maker.dataset.num_prompts:
            break
        prompt, answer = pairs[idx]
        prompt_len = len(maker.encode(prompt))
        output_len = maker.output_len(len(maker.encode(answer)))
        max_prompt_len, max_len = _SHAREGPT_MAX
        is_kept = min(prompt_len, output_len) >= _MIN_LEN and prompt_len <= max_prompt_len
        if is_kept and prompt_len + output_len <= max_len:
            works.append(Work(prompt, prompt_len, output_len))
    return works


def _sharegpt_synthetic(maker: _Maker) -> list[Work]:
    count = maker.dataset.num_prompts
    max_prompt_len, max_len = _SHAREGPT_MAX
    limits = (max_prompt_len, max_len - max_prompt_len)
    lens = [
        _log_normal(maker.rng, mean, spread, limit, count)
        for mean, spread, limit in zip(_SHAREGPT_MEANS, _SHAREGPT_SPREADS, limits, strict=True)
    ]
    return [
        Work(maker.ids(int(prompt_len)), int(prompt_len), maker.output_len(int(output_len)))
        for prompt_len, output_len in zip(*lens, strict=True)
    ]


def _log_normal(
    rng: np.random.Generator, mean: float, spread: float, limit: int, count: int
) -> np.ndarray:
    """Integers from `_MIN_LEN` to `limit`, log-normal but clipped, with that mean all the same."""
    grid = np.exp(spread * _normal_quantiles())
    low, high = 0.0, float(limit)
    for _ in range(50):  # bisection for the scale: the clipped mean grows with it
        scale = (low + high) / 2
        is_low = np.clip(scale * grid, _MIN_LEN, limit).mean() < mean
        low, high = (scale, high) if is_low else (low, scale)
    drawn = np.exp(spread * rng.standard_normal(count)) * scale
    return np.clip(np.rint(drawn), _MIN_LEN, limit).astype(int)


def _normal_quantiles() -> np.ndarray:
    return np.sort(np.random.default_rng(0).standard_normal(100_000))


def _custom(maker: _Maker) -> list[Work]:
    """Lines {"prompt": text} or {"prompt": text, "output_tokens": n}; from the first again when
    there are fewer than `num_prompts`."""
    works = []
    for place, line in _lines(_file(maker)):
        prompt = line.get("prompt")
        output_len = line.get("output_tokens", 128)
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f"prompt in {place}", prompt, "must be text")
        if not _is_count(output_len):
            raise ConfigError(f"output_tokens in {place}", output_len, "must be at least 1")
        works.append(Work(prompt, len(maker.encode(prompt)), maker.output_len(output_len)))
    return [works[i % len(works)] for i in range(maker.dataset.num_prompts)] if works else []


def _timed_trace(maker: _Maker) -> list[Work]:
    """Lines {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}: equal hash
    ids stand for equal blocks of 512 tokens, so prompts share the prefixes that they had."""
    works = []
    for place, line in _lines(_file(maker)):
        for name in ("input_length", "output_length"):
            if not _is_count(line.get(name)):
                raise ConfigError(f"{name} in {place}", line.get(name), "must be at least 1")
        timestamp = line.get("timestamp")
        if not isinstance(timestamp, int | float) or timestamp < 0:
            raise ConfigError(f"timestamp in {place}", timestamp, "must be milliseconds")
        ids: list[int] = []
        for hash_id in line.get("hash_ids", []):
            ids += maker.ids(_TRACE_BLOCK, np.random.default_rng([maker.seed, 1, int(hash_id)]))
        ids = ids[: line["input_length"]]
        ids += maker.ids(line["input_length"] - len(ids))
        output_len = maker.output_len(line["output_length"])
        works.append(Work(ids, len(ids), output_len, timestamp / 1000))
    works.sort(key=lambda work: work.arrival_s or 0.0)
    return works[: maker.dataset.num_prompts]


_READERS: dict[str, Callable[[_Maker], list[Work]]] = {
    "random": _random,
    "prefix_repetition": _prefix_repetition,
    "sharegpt": _sharegpt,
    "sharegpt_synthetic": _sharegpt_synthetic,
    "custom": _custom,
    "timed_trace": _timed_trace,
}


def _file(maker: _Maker) -> Path:
    assert maker.dataset.dataset_path is not None, "a Dataset checks that"
    return Path(maker.dataset.dataset_path)


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        place = f"line {number} of {file}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:  # not UTF-8, too
            raise ConfigError(place, line, f"must be JSON ({error})") from error
        if not isinstance(value, dict):
            raise ConfigError(place, line, "must be a JSON object")
        yield place, value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When requests come. The names are the flags of vLLM's `bench serve`."""

    request_rate: float = float("inf")
    """Requests per second; inf: all at once."""
    burstiness: float = 1.0
    """Shape of the gaps' gamma distribution: 1 is Poisson, less comes in bursts, more evenly."""
    ramp_up_strategy: str | None = None
    """linear or exponential: the rate moves from `ramp_up_start_rps` to `ramp_up_end_rps`."""
    ramp_up_start_rps: float | None = None
    """Requests per second of the first request."""
    ramp_up_end_rps: float | None = None
    """Requests per second of the last request."""

    def __post_init__(self) -> None:
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, getattr(self, name), "must be above 0")
        if self.ramp_up_strategy not in (None, "linear", "exponential"):
            rule = "must be linear or exponential"
            raise ConfigError("ramp_up_strategy", self.ramp_up_strategy, rule)
        for name in ("ramp_up_start_rps", "ramp_up_end_rps"):
            value = getattr(self, name)
            if self.ramp_up_strategy is None and value is not None:
                raise ConfigError(name, value, "must be left out without ramp_up_strategy")
            if self.ramp_up_strategy is not None and not (value is not None and value > 0):
                raise ConfigError(name, value, "must be above 0 with ramp_up_strategy")
        if self.ramp_up_strategy is not None and self.request_rate != float("inf"):
            rule = "must be left out with ramp_up_strategy"
            raise ConfigError("request_rate", self.request_rate, rule)

    def draw(self, count: int, seed: int = 0) -> list[float]:
        """Seconds after the start, in order. Without a ramp the last is at count / rate exactly, so
        that seeds differ in order and not in load.

        >>> Arrivals(request_rate=2, burstiness=float("inf")).draw(4)
        [0.5, 1.0, 1.5, 2.0]
        """
        rates = self._rates(count)
        if np.isinf(self.burstiness):
            gaps = np.ones(count)
        else:
            rng = np.random.default_rng(seed)
            gaps = rng.gamma(self.burstiness, 1 / self.burstiness, count)
        times = np.cumsum(gaps / rates)
        if self.ramp_up_strategy is None and times[-1] > 0:
            times *= count / self.request_rate / times[-1]
        drawn: list[float] = times.tolist()
        return drawn

    def _rates(self, count: int) -> np.ndarray:
        if self.ramp_up_strategy is None:
            return np.full(count, self.request_rate)
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        assert start is not None, "checked at construction"
        assert end is not None, "checked at construction"
        share = np.arange(count) / max(1, count - 1)
        if self.ramp_up_strategy == "linear":
            return start + (end - start) * share
        return start * np.power(end / start, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How a load is sent and summed up. The names are the flags of vLLM's `bench serve`."""

    backend: str = "openai"
    """openai: completions; openai-chat: chats; vllm is another word for openai."""
    endpoint: str | None = None
    """The path to ask; None: the backend's own."""
    model: str | None = None
    """The name to ask for; None: the server's first."""
    tokenizer: str | None = None
    """Directory, .gguf file or hub id of the model, for its vocabulary; None: the embedded one."""
    max_concurrency: int | None = None
    """Most requests at once."""
    ignore_eos: bool = False
    """Generate as many tokens as the data set says."""
    temperature: float = 0.0
    """Of the sampling; 0 is greedy."""
    percentile_metrics: str = "ttft,tpot,itl"
    """Which latencies are told: ttft, tpot, itl, e2el, with commas."""
    metric_percentiles: str = "99"
    """Which percentiles of them, with commas."""

    def __post_init__(self) -> None:
        if self.backend not in (*ENDPOINTS, "vllm"):
            raise ConfigError("backend", self.backend, "must be openai, openai-chat or vllm")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError("max_concurrency", self.max_concurrency, "must be at least 1")
        if not set(self.metrics) <= set(METRICS):
            rule = f"must be some of {','.join(METRICS)}"
            raise ConfigError("percentile_metrics", self.percentile_metrics, rule)
        try:
            bad = [p for p in self.percentiles if not 0 <= p <= 100]
        except ValueError:
            bad = [math.nan]
        if bad:
            rule = "must be numbers from 0 to 100"
            raise ConfigError("metric_percentiles", self.metric_percentiles, rule)

    @property
    def metrics(self) -> list[str]:
        """The latencies that are told."""
        return self.percentile_metrics.split(",")

    @property
    def percentiles(self) -> list[float]:
        """The percentiles that are told."""
        return [float(word) for word in self.metric_percentiles.split(",")]

    @property
    def path(self) -> str:
        """The path that is asked."""
        return self.endpoint or ENDPOINTS["openai" if self.backend == "vllm" else self.backend]
