from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from minivllm.config import EngineConfig, SchedulerConfig, SpeculativeConfig
from minivllm.errors import ConfigError, UnknownConfigKeyError

BAD: dict[str, list[Any]] = {
    "speculative_config": ["ngram", {}, {"method": "ngram"}],
    "dtype": ["float64", "", "FLOAT32", None, 32],
    "device": ["gpu", "", None, 0],
    "enforce_eager": [None, 1, "no"],
    "torch_compile": [None, 1, "no"],
    "load_format": ["pickle", "", None],
    "kv_cache_dtype": ["float32", "int8", "", None],
    "gpu_memory_utilization": [0, -0.5, 1.01, math.nan, "0.9", None, True],
    "cudagraph_capture_sizes": [[], [0], [1, 2.0], ["1"], "12", 5, [True]],
    "max_model_len": ["32kb", "k", "", "1.5k", "-2", " 32k", 1, 0, -2, True, 4096.0, [4096]],
    "block_size": [0, -16, 16.0, "16", None, True],
    "max_num_batched_tokens": [0, -1, 2048.0, "2k", None, True],
    "max_num_seqs": [0, -1, 1.5, "256", None, True],
    "long_prefill_token_threshold": [-1, 0.5, "0", None, False],
    "kv_cache_memory_bytes": [0, -1, 1e9, "1GiB", True],
    "num_gpu_blocks_override": [1, 0, -1, 2.0, "100", True],
    "distributed_executor_backend": ["ray", "", "MP", 1],
    "worker_lease_s": [0, -1, -0.5, math.inf, math.nan, "5", None, True],
    "step_timeout_s": [0, -1, math.inf, math.nan, "5", None, True],
    "max_num_active_seqs": [0, -1, 257, 1.5, "8", True],
    "max_num_queued_reqs": [0, -1, 1.5, "8", True],
    "max_num_queued_tokens": [0, -1, 1.5, "8k", True],
    "scheduling_policy": ["lifo", "", "FCFS", None, 1],
    "aging_s": [0, -1, math.inf, math.nan, "5", True, 5.0],
    "timeout_s": [0, -1, math.inf, math.nan, "5", True],
    "ttft_target_s": [0, -1, math.inf, math.nan, "5", True],
    "ttft_policy": ["ignore", "", None, 1],
    "itl_target_ms": [0, -1, math.inf, math.nan, "50", True],
    "seed": [-1, 0.0, "0", None, True],
    "max_logprobs": [-2, 1.0, "1", None, True],
    "logprobs_mode": ["raw", None, 1],
    "generation_config": ["none", None, {}],
    "override_generation_config": [[1], "{}", 5],
    "model": [1, b"x", ["x"]],
    "revision": [1, ["x"]],
    "record": [1, ["x"]],
    "enable_prefix_caching": ["yes", 1, None],
    "async_scheduling": ["yes", 1],
    "reasoning_start_str": ["", None, 5],
    "reasoning_end_str": ["", None, 5],
}
GOOD: dict[str, list[Any]] = {
    "speculative_config": [{"method": "ngram", "num_speculative_tokens": 3}],
    "dtype": ["auto", "float32", "float16", "bfloat16"],
    "device": ["auto", "cpu", "cuda"],
    "enforce_eager": [False, True],
    "torch_compile": [False, True],
    "load_format": ["auto", "dummy"],
    "kv_cache_dtype": ["auto", "float16", "bfloat16", "fp8"],
    "gpu_memory_utilization": [0.01, 0.92, 1, 1.0],
    "cudagraph_capture_sizes": [None, [1], (8, 2), range(1, 5)],
    "max_model_len": [None, -1, "-1", "auto", "32k", "32K", "4096", "2", 2],
    "block_size": [1, 256],
    "max_num_batched_tokens": [1],
    "max_num_seqs": [1],
    "long_prefill_token_threshold": [0, 512],
    "kv_cache_memory_bytes": [None, 1],
    "num_gpu_blocks_override": [None, 2],
    "distributed_executor_backend": [None, "inline", "mp"],
    "worker_lease_s": [0.001, 5, 5.5],
    "step_timeout_s": [0.001, 5, 1e6],
    "max_num_active_seqs": [None, 1, 256],
    "max_num_queued_reqs": [None, 1],
    "max_num_queued_tokens": [None, 1],
    "scheduling_policy": ["fcfs", "priority"],
    "aging_s": [None],
    "timeout_s": [None, 0.001, 60],
    "ttft_target_s": [None, 0.001, 60],
    "ttft_policy": ["drop", "demote"],
    "itl_target_ms": [None, 0.001, 50],
    "seed": [0, 2**64],
    "max_logprobs": [-1, 0, 49152],
    "logprobs_mode": ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"],
    "generation_config": ["auto", "vllm"],
    "override_generation_config": [None, {}, {"temperature": 0.5}],
    "model": [None, "gpt2"],
    "revision": [None, "main"],
    "record": [None, "steps"],
    "enable_prefix_caching": [True, False],
    "async_scheduling": [None, True, False],
    "reasoning_start_str": ["<think>"],
    "reasoning_end_str": ["</think>"],
}


def each(table: dict[str, list[Any]]) -> pytest.MarkDecorator:
    cases = [pytest.param(n, v, id=f"{n}={v!r}") for n, values in table.items() for v in values]
    return pytest.mark.parametrize(("name", "value"), cases)


@each(BAD)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    """A value out of range raises an error that carries and shows the field and the value."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    assert type(caught.value) is ConfigError
    assert caught.value.field == name
    assert caught.value.value is value
    assert str(caught.value).startswith(f"{name} must ")
    assert str(caught.value).endswith(f", got {value!r}")


@each(GOOD)
def test_an_edge_value_is_taken(name: str, value: Any) -> None:
    """The last values inside each range are kept as they were given."""
    assert getattr(EngineConfig(**{name: value}), name) is value


def test_every_setting_is_in_the_tables() -> None:
    """A new setting has to be given its bad and good values here."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert names == BAD.keys()
    assert BAD.keys() == GOOD.keys()


DRAFTING = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("method", "oracle"),
        ("num_speculative_tokens", 0),
        ("num_speculative_tokens", True),
        ("prompt_lookup_max", 0),
        ("prompt_lookup_min", "2"),
        ("draft_len", 3),
    ],
)
def test_speculation_is_refused_by_key(name: str, value: Any) -> None:
    """What cannot work inside `speculative_config` is an error that names its key and value."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig(speculative_config=DRAFTING | {name: value})
    assert str(caught.value).startswith(f"{name} ")
    assert str(caught.value).endswith(f"got {value!r}")


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, (5, 5)), ({"max": 3}, (3, 3)), ({"min": 2}, (2, 2)), ({"min": 1, "max": 4}, (1, 4))],
)
def test_lookup_lengths_stand_in_for_each_other(given, expected) -> None:
    """One length of prompt lookup is both, and none is 5; the least must not exceed the most."""
    keys = {f"prompt_lookup_{name}": value for name, value in given.items()}
    assert SpeculativeConfig(**DRAFTING | keys).prompt_lookup_lens == expected
    with pytest.raises(ConfigError, match="prompt_lookup_min must be at most prompt_lookup_max"):
        SpeculativeConfig(**DRAFTING, prompt_lookup_min=3, prompt_lookup_max=2)


def test_aging_belongs_to_priorities() -> None:
    """`aging_s` is refused under fcfs, where it would do nothing (the tables above), and taken
    where there are priorities."""
    assert EngineConfig(scheduling_policy="priority", aging_s=0.5).aging_s == 0.5


@pytest.mark.parametrize("value", ["0", "1", "0k"])
def test_a_length_given_as_text_keeps_the_rule(value: str) -> None:
    """A number in a string is held to the same least value as one without."""
    with pytest.raises(ConfigError, match=r"^max_model_len must be an integer of at least 2, got "):
        EngineConfig(max_model_len=value)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("max_model_length", "max_model_len"),
        ("max_num_seq", "max_num_seqs"),
        ("blocksize", "block_size"),
        ("enable_prefix_cache", "enable_prefix_caching"),
        ("dytpe", "dtype"),
    ],
)
def test_an_unknown_key_is_told_the_nearest(key: str, near: str) -> None:
    """A misspelt setting raises its own error, with the name that was meant."""
    with pytest.raises(UnknownConfigKeyError) as caught:
        EngineConfig(dtype="float32", **{key: 7})
    assert str(caught.value) == f"{key} is not a setting; did you mean {near!r}?, got 7"
    assert (caught.value.field, caught.value.value) == (key, 7)


def test_an_unknown_key_like_no_other_gets_no_guess() -> None:
    """A key that resembles no setting is refused without a suggestion."""
    with pytest.raises(UnknownConfigKeyError, match=r"^zzzz is not a setting, got 'x'$"):
        EngineConfig(zzzz="x")


def test_configs_cannot_be_changed() -> None:
    """Neither what the user set nor what was made of it can be written to."""
    config = EngineConfig()
    for one in (config, *config.resolve(model_path="m", model_max_len=100)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            one.block_size = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("32k", 32768),
        ("32K", 32768),
        ("2k", 2048),
        ("4096", 4096),
        (4096, 4096),
        (40000, 40000),
        (None, 40000),
        (-1, 40000),
        ("-1", 40000),
        ("auto", 40000),
    ],
    ids=repr,
)
def test_resolve_makes_a_number_of_the_length(value: Any, expected: int) -> None:
    """Text, numbers and every spelling of auto become tokens, the same on both sides."""
    sides = EngineConfig(max_model_len=value).resolve(model_path="m", model_max_len=40000)
    assert [side.max_model_len for side in sides] == [expected, expected]


@pytest.mark.parametrize("value", [2049, "3k"])
def test_resolve_refuses_more_than_the_model_was_made_for(value: Any) -> None:
    """A length above the model's own is an error that shows what was asked and what there is."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig(max_model_len=value).resolve(model_path="m", model_max_len=2048)
    expected = f"max_model_len must be at most the model's 2048 tokens, got {value!r}"
    assert str(caught.value) == expected


def test_resolve_hands_every_setting_to_its_side() -> None:
    """Each field of the two groups has the value that was set, under its own name."""
    config = EngineConfig(
        dtype="bfloat16",
        max_model_len=300,
        block_size=8,
        max_num_batched_tokens=77,
        max_num_seqs=5,
        max_num_active_seqs=4,
        max_num_queued_reqs=6,
        max_num_queued_tokens=600,
        long_prefill_token_threshold=33,
        itl_target_ms=44.0,
        scheduling_policy="priority",
        aging_s=1.5,
        ttft_policy="demote",
        enable_prefix_caching=False,
        kv_cache_memory_bytes=12345,
        num_gpu_blocks_override=99,
        logprobs_mode="raw_logits",
        device="cuda",
        load_format="dummy",
        gpu_memory_utilization=0.5,
        kv_cache_dtype="fp8",
        cudagraph_capture_sizes=[1, 4],
        torch_compile=True,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    scheduler, worker = config.resolve(model_path="/some/dir", model_max_len=1000)
    assert dataclasses.asdict(scheduler) == {
        "block_size": 8,
        "max_model_len": 300,
        "max_num_batched_tokens": 77,
        "max_num_seqs": 5,
        "max_num_active_seqs": 4,
        "max_num_queued_reqs": 6,
        "max_num_queued_tokens": 600,
        "long_prefill_token_threshold": 33,
        "itl_target_ms": 44.0,
        "scheduling_policy": "priority",
        "aging_s": 1.5,
        "ttft_policy": "demote",
        "enable_prefix_caching": False,
        "speculative": dataclasses.asdict(speculative),
    }
    assert dataclasses.asdict(worker) == {
        "model_path": "/some/dir",
        "dtype": "bfloat16",
        "block_size": 8,
        "max_model_len": 300,
        "max_num_batched_tokens": 77,
        "max_num_seqs": 5,
        "kv_cache_memory_bytes": 12345,
        "num_blocks": 99,
        "logprobs_mode": "raw_logits",
        "device": "cuda",
        "load_format": "dummy",
        "gpu_memory_utilization": 0.5,
        "kv_cache_dtype": "fp8",
        "enforce_eager": False,
        "cudagraph_capture_sizes": (1, 4),
        "torch_compile": True,
        "speculative": dataclasses.asdict(speculative),
    }


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"enforce_eager": True, "cudagraph_capture_sizes": [1]}, "enforce_eager"),
        ({"enforce_eager": True, "torch_compile": True}, "torch_compile"),
        ({"device": "cpu", "torch_compile": True}, "torch_compile"),
    ],
)
def test_settings_that_exclude_each_other(settings: dict[str, Any], field: str) -> None:
    """What another setting would leave without effect is refused by name."""
    with pytest.raises(ConfigError, match=f"^{field} must be False"):
        EngineConfig(**settings)


def fit(num_blocks: int, **config: Any) -> SchedulerConfig:
    made = EngineConfig(**config)
    scheduler, _ = made.resolve(model_path="m", model_max_len=2048)
    return made.fit_pool(scheduler, num_blocks)


@pytest.mark.parametrize("value", [None, -1, "auto"])
def test_an_automatic_length_is_lowered_to_the_pool(value: Any) -> None:
    """Auto becomes what the blocks hold, the null block not counted, and nothing else changes."""
    lowered = fit(11, max_model_len=value)
    assert lowered == dataclasses.replace(fit(1000), max_model_len=160)


def test_a_pool_that_is_large_enough_changes_nothing() -> None:
    """With exactly enough blocks for one request the length stays; with one fewer it does not."""
    assert fit(129).max_model_len == 2048
    assert fit(128).max_model_len == 2032


def test_a_given_length_is_never_lowered() -> None:
    """A given length that fits exactly is kept; one token more raises, with the pool's size."""
    assert fit(11, max_model_len=160).max_model_len == 160
    for value in (161, "1k"):
        rule = r"^max_model_len must fit the KV cache of 160 tokens: .*kv_cache_memory_bytes, got "
        with pytest.raises(ConfigError, match=rule) as caught:
            fit(11, max_model_len=value)
        assert caught.value.value == value


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 16), (0, 16), (2, 1)])
def test_a_pool_without_room_for_two_tokens_is_refused(num_blocks: int, block_size: int) -> None:
    """Auto does not go below a prompt token and a new one: the memory is what has to change."""
    with pytest.raises(ConfigError, match=r"^kv_cache_memory_bytes must leave room .*, got 9"):
        fit(num_blocks, block_size=block_size, kv_cache_memory_bytes=9)
    assert fit(num_blocks + 2, block_size=block_size).max_model_len >= 2
