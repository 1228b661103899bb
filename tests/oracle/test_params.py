"""Every sampling parameter on the real model: each has its effect, and the same one with every
feature of the engine on. Run with -s to see the table."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm.channel import ProcessExecutor
from minivllm.config import EngineConfig
from minivllm.engine import AsyncEngine
from minivllm.request import (
    CompletionOutput,
    FlatLogprobs,
    RepetitionDetection,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from minivllm.tokenizer import Tokenizer

PROMPT = (
    "Once upon a time, in a small village by the sea, there lived an old fisherman who every"
    " morning took his little boat and"
)
NUM_OUT = 16
EOS = 2
GREEDY = {"temperature": 0.0, "max_tokens": NUM_OUT}
SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": NUM_OUT}


@dataclass(frozen=True)
class Plain:
    """What the model says without the parameter in question."""

    greedy: CompletionOutput
    sampled: CompletionOutput
    repetitive: CompletionOutput
    tokenizer: Tokenizer

    def first_words(self) -> tuple[str, str]:
        words = self.greedy.text.split()
        return words[2], words[4]


Check = Callable[[Plain, Sequence[RequestOutput]], None]
CASES: dict[str, tuple[Callable[[Plain], dict[str, Any]], Check]] = {}


def case(make: Callable[[Plain], dict[str, Any]]) -> Callable[[Check], Check]:
    """Register a check under the name of its parameter; `make` gives a request that uses it."""

    def register(check: Check) -> Check:
        CASES[check.__name__] = (make, check)
        return check

    return register


def final(looks: Sequence[RequestOutput]) -> CompletionOutput:
    assert looks[-1].finished
    return looks[-1].outputs[0]


def num_distinct(answer: CompletionOutput) -> int:
    return len(set(answer.token_ids))


@case(lambda _: SAMPLED | {"n": 3})
def n(plain, looks):
    answers = looks[-1].outputs
    assert [a.index for a in answers] == [0, 1, 2]
    assert answers[0].token_ids == plain.sampled.token_ids
    assert len({tuple(a.token_ids) for a in answers}) == 3


@case(lambda _: GREEDY)
def temperature(plain, looks):
    assert final(looks).token_ids == plain.greedy.token_ids != plain.sampled.token_ids


@case(lambda _: SAMPLED | {"top_p": 1e-6})
def top_p(plain, looks):
    assert final(looks).token_ids == plain.greedy.token_ids


@case(lambda _: SAMPLED | {"top_k": 1})
def top_k(plain, looks):
    assert final(looks).token_ids == plain.greedy.token_ids


@case(lambda _: SAMPLED | {"min_p": 1.0})
def min_p(plain, looks):
    assert final(looks).token_ids == plain.greedy.token_ids


REPETITIVE = {"prompt": "a b a b a b a b a b a b a b a b a b a b a b a b"} | GREEDY


@case(lambda _: REPETITIVE | {"presence_penalty": 2.0})
def presence_penalty(plain, looks):
    assert num_distinct(final(looks)) > num_distinct(plain.repetitive)


@case(lambda _: REPETITIVE | {"frequency_penalty": 2.0})
def frequency_penalty(plain, looks):
    assert num_distinct(final(looks)) > num_distinct(plain.repetitive)


@case(lambda _: REPETITIVE | {"repetition_penalty": 2.0})
def repetition_penalty(plain, looks):
    prompt = set(looks[-1].prompt_token_ids)
    assert prompt & set(plain.repetitive.token_ids)
    assert not prompt & set(final(looks).token_ids)


@case(lambda _: SAMPLED | {"logit_bias": {1234: 100.0}})
def logit_bias(_plain, looks):
    assert final(looks).token_ids == [1234] * NUM_OUT


@case(lambda _: SAMPLED | {"allowed_token_ids": [100, 200, 300]})
def allowed_token_ids(_plain, looks):
    assert set(final(looks).token_ids) <= {100, 200, 300}


@case(lambda plain: GREEDY | {"bad_words": list(plain.first_words())})
def bad_words(plain, looks):
    for word in plain.first_words():
        assert word in plain.greedy.text.split()
        assert word not in final(looks).text.split()


@case(lambda _: SAMPLED | {"seed": 6})
def seed(plain, looks):
    assert final(looks).token_ids != plain.sampled.token_ids


@case(lambda _: GREEDY | {"max_tokens": 5})
def max_tokens(plain, looks):
    assert final(looks).token_ids == plain.greedy.token_ids[:5]
    assert final(looks).finish_reason == "length"


@case(lambda plain: GREEDY | {"stop_token_ids": plain.greedy.token_ids[1:3], "min_tokens": 9})
def min_tokens(plain, looks):
    answer = final(looks)
    assert len(answer.token_ids) >= 9
    assert not set(answer.token_ids[:8]) & set(plain.greedy.token_ids[1:3])


@case(lambda plain: GREEDY | {"stop": plain.greedy.text[10:14]})
def stop(plain, looks):
    answer = final(looks)
    text = plain.greedy.text
    assert answer.text == text[: text.index(text[10:14])]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", text[10:14])


@case(lambda plain: GREEDY | {"stop_regex": "[" + plain.greedy.text[10:12] + "]{2}"})
def stop_regex(plain, looks):
    answer = final(looks)
    assert answer.finish_reason == "stop"
    assert plain.greedy.text.startswith(answer.text)
    assert answer.text != plain.greedy.text


@case(lambda plain: GREEDY | {"stop_token_ids": [plain.greedy.token_ids[3]]})
def stop_token_ids(plain, looks):
    answer = final(looks)
    end = plain.greedy.token_ids.index(plain.greedy.token_ids[3])
    assert answer.token_ids == plain.greedy.token_ids[: end + 1]
    assert answer.text == plain.tokenizer.decode(answer.token_ids[:-1])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", answer.token_ids[-1])


@case(
    lambda plain: GREEDY | {"stop": plain.greedy.text[10:14], "include_stop_str_in_output": True}
)
def include_stop_str_in_output(plain, looks):
    text = plain.greedy.text
    assert final(looks).text == text[: text.index(text[10:14]) + 4]


@case(lambda _: GREEDY | {"logit_bias": {EOS: 100.0}, "ignore_eos": True})
def ignore_eos(_plain, looks):
    assert final(looks).token_ids == [EOS] * NUM_OUT
    assert final(looks).finish_reason == "length"


@case(
    lambda _: GREEDY
    | {
        "logit_bias": {1234: 100.0},
        "repetition_detection": RepetitionDetection(max_pattern_size=2, min_count=4),
    }
)
def repetition_detection(_plain, looks):
    assert final(looks).token_ids == [1234] * 4
    assert final(looks).finish_reason == "repetition"


@case(lambda _: GREEDY | {"logprobs": 2})
def logprobs(plain, looks):
    found = final(looks).logprobs
    assert [len(entry) for entry in found] == [2] * NUM_OUT  # greedy: the sampled one is among them
    for token_id, entry in zip(plain.greedy.token_ids, found, strict=True):
        assert entry[token_id].rank == 1
        assert entry[token_id].logprob == max(e.logprob for e in entry.values()) < 0


@case(lambda _: GREEDY | {"prompt_logprobs": 1, "max_tokens": 2})
def prompt_logprobs(_plain, looks):
    found = looks[-1].prompt_logprobs
    prompt = looks[-1].prompt_token_ids
    assert len(found) == len(prompt)
    assert found[0] is None
    for token_id, entry in zip(prompt[1:], found[1:], strict=True):
        assert 1 <= len(entry) <= 2
        assert entry[token_id].logprob < 0


@case(lambda _: GREEDY | {"logprob_token_ids": [7, 3000], "max_tokens": 3})
def logprob_token_ids(plain, looks):
    for token_id, entry in zip(plain.greedy.token_ids, final(looks).logprobs, strict=False):
        assert list(entry) == [token_id, 7, 3000]
        assert entry[7].rank is None


@case(lambda _: GREEDY | {"logprobs": 2, "prompt_logprobs": 0, "flat_logprobs": True})
def flat_logprobs(plain, looks):
    assert isinstance(final(looks).logprobs, FlatLogprobs)
    assert isinstance(looks[-1].prompt_logprobs, FlatLogprobs)
    for token_id, entry in zip(plain.greedy.token_ids, final(looks).logprobs, strict=True):
        assert entry[token_id].rank == 1


@case(lambda _: GREEDY | {"detokenize": False})
def detokenize(plain, looks):
    assert (final(looks).text, final(looks).token_ids) == ("", plain.greedy.token_ids)


SPECIAL = {"trace_decode_token_ids": [4, 5, 100, 101], "max_tokens": 4}


@case(lambda _: GREEDY | SPECIAL | {"skip_special_tokens": False})
def skip_special_tokens(plain, looks):
    assert final(looks).text == plain.tokenizer.decode([4, 5, 100, 101], skip_special_tokens=False)
    assert final(looks).text != plain.tokenizer.decode([4, 5, 100, 101])


@case(
    lambda _: GREEDY
    | SPECIAL
    | {"skip_special_tokens": False, "spaces_between_special_tokens": False}
)
def spaces_between_special_tokens(plain, looks):
    # Inert for a byte-level tokenizer, here as in transformers: nothing is put between.
    assert final(looks).text == plain.tokenizer.decode([4, 5, 100, 101], skip_special_tokens=False)


@case(lambda _: GREEDY | {"truncate_prompt_tokens": 7})
def truncate_prompt_tokens(plain, looks):
    assert looks[-1].prompt_token_ids == plain.tokenizer.encode(PROMPT)[-7:]
    assert final(looks).token_ids != plain.greedy.token_ids


@case(lambda _: GREEDY | {"skip_reading_prefix_cache": True})
def skip_reading_prefix_cache(plain, looks):
    assert looks[-1].num_cached_tokens == 0
    assert final(looks).token_ids == plain.greedy.token_ids


@case(
    lambda plain: GREEDY
    | {
        "trace_decode_token_ids": plain.tokenizer.encode("<think>"),
        "thinking_token_budget": 3,
    }
)
def thinking_token_budget(plain, looks):
    start, end = (plain.tokenizer.encode(mark) for mark in ("<think>", "</think>"))
    budget = len(start) + 3
    assert final(looks).token_ids[budget : budget + len(end)] == end


@case(lambda _: GREEDY | {"trace_decode_token_ids": [500, 600]})
def trace_decode_token_ids(plain, looks):
    assert final(looks).token_ids[:2] == [500, 600]
    assert len(final(looks).token_ids) == NUM_OUT
    assert final(looks).token_ids != plain.greedy.token_ids


def only_even(_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[1::2] = -torch.inf
    return logits


@case(lambda _: SAMPLED | {"logits_processors": [only_even]})
def logits_processors(_plain, looks):
    assert all(token_id % 2 == 0 for token_id in final(looks).token_ids)


@case(lambda _: GREEDY | {"output_kind": RequestOutputKind.DELTA})
def output_kind(plain, looks):
    assert [t for look in looks for t in look.outputs[0].token_ids] == plain.greedy.token_ids
    assert "".join(look.outputs[0].text for look in looks) == plain.greedy.text
    assert len(looks) > 1


@case(lambda _: GREEDY | {"stream_interval": 6})
def stream_interval(plain, looks):
    lens = [len(look.outputs[0].token_ids) for look in looks]
    assert all(b - a >= 6 for a, b in itertools.pairwise(lens[:-1]))
    assert final(looks).token_ids == plain.greedy.token_ids


# ---- the engine's features ----

SIZE = {"max_model_len": 96, "block_size": 8, "max_num_seqs": 64}
POOL = {"kv_cache_memory_bytes": 256 << 20}
INLINE = {"distributed_executor_backend": "inline"}
DRAFTING = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "alone": INLINE | {"enable_prefix_caching": False},
    "prefix cache": INLINE,
    "chunked": INLINE | {"max_num_batched_tokens": 17, "enable_prefix_caching": False},
    "preempted": INLINE | {"num_gpu_blocks_override": 40, "enable_prefix_caching": False},
    "drafted": INLINE | {"speculative_config": DRAFTING},
    "overlapped": {"distributed_executor_backend": "mp", "async_scheduling": True},
    "restarted": {"distributed_executor_backend": "mp"},
}


async def ask(
    engine: AsyncEngine, values: dict[str, Any], halfway: Callable[[], None] = lambda: None
) -> list[RequestOutput]:
    """All looks at a request; `halfway` is called at one in the middle."""
    values = dict(values)
    looks: list[RequestOutput] = []
    async for output in engine.generate(
        values.pop("prompt", PROMPT), SamplingParams(**values)
    ):
        looks.append(output)
        if len(looks) == NUM_OUT // 2:
            halfway()
    return looks


@pytest.fixture(scope="module")
def plain(embedded_dir: Path) -> Plain:
    async def ask_all() -> Plain:
        config = EngineConfig(model=str(embedded_dir), **SIZE | POOL | VARIANTS["alone"])
        async with AsyncEngine(config) as engine:
            answers = [final(await ask(engine, v)) for v in (GREEDY, SAMPLED, REPETITIVE)]
            return Plain(*answers, engine.tokenizer)

    return asyncio.run(ask_all())


async def run(
    variant: str, embedded_dir: Path, requests: dict[str, dict[str, Any]]
) -> dict[str, list[RequestOutput]]:
    """All requests at once under a variant, which is asserted to have happened."""
    config = EngineConfig(model=str(embedded_dir), **SIZE | POOL | VARIANTS[variant])
    executor = ProcessExecutor(lease_s=5.0, step_timeout_s=60.0) if variant == "restarted" else None
    async with AsyncEngine(config, executor=executor) as engine:
        stats = engine.core.scheduler.stats
        if variant == "prefix cache":
            await ask(engine, GREEDY)
            assert stats.prefix_hits == 0

        def kill() -> None:
            if executor is not None:
                assert executor.pid is not None
                os.kill(executor.pid, signal.SIGKILL)

        found = await asyncio.gather(
            *(
                ask(engine, values, kill if name == "temperature" else lambda: None)
                for name, values in requests.items()
            )
        )
        looks = dict(zip(requests, found, strict=True))
        if variant == "prefix cache":
            assert stats.prefix_hits > 0
            assert looks["temperature"][-1].num_cached_tokens > 0
        if variant == "preempted":
            assert stats.num_preemptions > 0
        assert engine.core.scheduler.generation == (variant == "restarted")
    return looks


def test_every_parameter_has_a_case() -> None:
    """A new parameter has to be given a check here."""
    assert CASES.keys() == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("variant", VARIANTS)
async def test_every_parameter_has_its_effect(
    plain: Plain, embedded_dir: Path, variant: str
) -> None:
    """Each parameter does what it says, whatever else the engine is doing meanwhile."""
    requests = {name: make(plain) for name, (make, _) in CASES.items()}
    if VARIANTS[variant]["distributed_executor_backend"] != "inline":
        del requests["logits_processors"]  # callables cannot leave their process
    looks = await run(variant, embedded_dir, requests)
    for name, found in looks.items():
        try:
            CASES[name][1](plain, found)
        except AssertionError as error:
            raise AssertionError(f"{name} under {variant}: {error}") from error
        print(f"{name:30} {variant:14} has its effect")
