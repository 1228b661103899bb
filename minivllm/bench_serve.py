"""Benchmarks of a server: one load, or a search for the settings that serve the most.

    serve   a data set at a rate, against any OpenAI server, ours or another
    sweep   for each setting of a grid, the highest rate whose answers keep their objectives

`sweep` starts an engine with each setting and asks the app over it without a socket, with the
client and the server on one loop, as a search needs no other machine and no port. The rate doubles
until too few answers are good, then the gap is halved.

Invariants: the same seed gives each setting the same requests at the same times, but for the rate.
The arithmetic: `measures`; the stream's clock: `load_client`.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from minivllm.checkpoint import find_checkpoint
from minivllm.client import connect
from minivllm.config import EngineConfig
from minivllm.errors import ConfigError, ServerError
from minivllm.load_client import body_of, run_load, served_model
from minivllm.measures import Answer, details, num_good, summarize
from minivllm.tokenizer import Tokenizer
from minivllm.workloads import Arrivals, Dataset, ServeOptions, Work

_MAX_RATE = 4096.0


class Load:
    """The work of a data set, ready to be sent at any rate."""

    def __init__(self, dataset: Dataset, options: ServeOptions, *, seed: int = 0) -> None:
        """Raises: `ConfigError`, `ModelError`"""
        checkpoint = find_checkpoint(options.tokenizer, needs_weights=False)
        self._tokenizer = Tokenizer.from_dir(checkpoint.path)
        self._options = options
        self._seed = seed
        vocabulary = plain_tokens(self._tokenizer)
        self.works = dataset.read(vocabulary, self._tokenizer.encode, seed)

    async def send(
        self,
        client: httpx.AsyncClient,
        arrivals: Arrivals,
        *,
        goodput_ms: Mapping[str, float],
        cache_salt: str | None = None,
        quiet: bool = True,
    ) -> tuple[dict[str, Any], list[Answer]]:
        """Ask for all of it; the figures under vLLM's keys, and each answer. With a salt of its
        own, a load finds nothing that an earlier one has left in the prefix cache.

        Raises: `ServerError` when the server does not answer, or answers nothing well
        """
        options = self._options
        model = options.model or await served_model(client)
        is_chat = options.path.endswith("/chat/completions")
        sampling: dict[str, Any] = {"temperature": options.temperature}
        if options.ignore_eos:
            sampling["ignore_eos"] = True
        if cache_salt is not None:
            sampling["cache_salt"] = cache_salt
        requests = [
            (
                body_of(
                    work, model=model, is_chat=is_chat, decode=self._tokenizer.decode, **sampling
                ),
                work.prompt_len,
            )
            for work in self.works
        ]
        times_s = arrival_times(self.works, arrivals, self._seed)
        answers, duration_s = await run_load(
            client,
            options.path,
            requests,
            times_s,
            max_concurrency=options.max_concurrency,
            quiet=quiet,
        )
        if all(answer.error for answer in answers):
            raise ServerError(f"no request was answered: {answers[0].error}")
        figures = summarize(
            answers,
            duration_s,
            goodput_ms=goodput_ms,
            metrics=options.metrics,
            percentiles=options.percentiles,
        )
        head = {
            "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
            "backend": options.backend,
            "model_id": model,
            "tokenizer_id": options.tokenizer or model,
            "num_prompts": len(self.works),
            "request_rate": _finite(arrivals.request_rate),
            "burstiness": _finite(arrivals.burstiness),
            "max_concurrency": options.max_concurrency,
        }
        return head | figures, answers


def plain_tokens(tokenizer: Tokenizer) -> list[int]:
    """The token ids that stand for text: no marks, which could end or begin something."""
    return [token_id for token_id in range(len(tokenizer)) if tokenizer.decode([token_id])]


def arrival_times(works: Sequence[Work], arrivals: Arrivals, seed: int) -> list[float]:
    """The data set's own times where it has them, drawn ones otherwise."""
    own = [work.arrival_s for work in works]
    drawn = arrivals.draw(len(works), seed)
    return [at if at is not None else other for at, other in zip(own, drawn, strict=True)]


def _finite(value: float) -> float | str:
    """JSON has no infinity; vLLM writes the word."""
    return value if math.isfinite(value) else "inf"


def save(
    result: Mapping[str, Any], answers: Sequence[Answer], directory: Path, name: str | None
) -> Path:
    """Write a result with the details of each request; returns the file."""
    rate = result["request_rate"]
    made = f"{result['backend']}-{rate}qps-{Path(result['model_id']).name}-{result['date']}.json"
    file = directory / (name or made)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**result, **details(answers)}) + "\n")
    return file


# ---- sweep -----------------------------------------------------------------------------------


def read_grid(words: Sequence[str]) -> list[dict[str, Any]]:
    """Every combination of `name=value,value`.

    >>> read_grid(["max_num_seqs=16,64", "enable_prefix_caching=false"])
    [{'max_num_seqs': 16, 'enable_prefix_caching': False}, {'max_num_seqs': 64, \
'enable_prefix_caching': False}]

    Raises: `ConfigError`
    """
    names, choices = [], []
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    for word in words:
        name, sign, values = word.partition("=")
        name = name.replace("-", "_")
        if not sign or name not in known:
            raise ConfigError("param", word, "must be a setting of the engine like max_num_seqs=8")
        names.append(name)
        choices.append([_value(value) for value in values.split(",")])
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*choices)]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


async def best_rate(
    load: Load,
    client: httpx.AsyncClient,
    *,
    goodput_ms: Mapping[str, float],
    slo_share: float,
    start_rate: float,
    num_halvings: int,
    burstiness: float = 1.0,
) -> list[dict[str, Any]]:
    """Loads at rates around the highest at which `slo_share` of the answers are good; each result
    says so in `keeps_slo`."""
    runs: list[dict[str, Any]] = []

    async def keeps(rate: float) -> bool:
        arrivals = Arrivals(request_rate=rate, burstiness=burstiness)
        salt = f"run {len(runs)}"
        result, answers = await load.send(client, arrivals, goodput_ms=goodput_ms, cache_salt=salt)
        result["slo_share"] = num_good(answers, goodput_ms) / len(answers)
        result["keeps_slo"] = result["slo_share"] >= slo_share
        runs.append(result)
        return bool(result["keeps_slo"])

    low, high = 0.0, start_rate
    while await keeps(high) and high < _MAX_RATE:
        low, high = high, 2 * high
    for _ in range(num_halvings):
        rate = (low + high) / 2
        if await keeps(rate):
            low = rate
        else:
            high = rate
    return runs


async def sweep(
    settings: Mapping[str, Any],
    grid: Sequence[Mapping[str, Any]],
    load: Load,
    *,
    goodput_ms: Mapping[str, float],
    slo_share: float = 0.9,
    start_rate: float = 1.0,
    num_halvings: int = 2,
    quiet: bool = True,
) -> dict[str, Any]:
    """Each combination of the grid, by its best rate under the objectives, best first.

    Raises: `ConfigError`, `ModelError`, `ServerError`
    """
    if not goodput_ms:
        raise ConfigError("goodput", "", "must be given: without objectives any load is served")
    if not 0 < slo_share <= 1:
        raise ConfigError("slo_share", slo_share, "must be above 0 and at most 1")
    if not start_rate > 0:
        raise ConfigError("start_rate", start_rate, "must be above 0")
    configs = [EngineConfig(**{**settings, **chosen}) for chosen in grid]  # all, before any runs
    found: list[dict[str, Any]] = []
    settings_left = zip(configs, grid, strict=True)
    for config, chosen in tqdm(settings_left, desc="Settings", total=len(grid), disable=quiet):
        async with connect(config=config) as client:
            await load.send(client, Arrivals(), goodput_ms=goodput_ms)  # warms the kernels up
            runs = await best_rate(
                load,
                client,
                goodput_ms=goodput_ms,
                slo_share=slo_share,
                start_rate=start_rate,
                num_halvings=num_halvings,
            )
        kept = [run for run in runs if run["keeps_slo"]]
        best = max(kept, key=lambda run: run["output_throughput"], default=None)
        found.append({"settings": dict(chosen), "best": best, "runs": runs})
    found.sort(key=lambda one: one["best"]["output_throughput"] if one["best"] else 0, reverse=True)
    return {"goodput": dict(goodput_ms), "slo_share": slo_share, "found": found}
