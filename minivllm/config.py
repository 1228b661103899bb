"""What a user may set, and what the engine makes of it.

`EngineConfig` is flat and keyword-only, with the names of vLLM's EngineArgs where vLLM has the
setting: it is what people type, in Python or as flags. `resolve()` settles `max_model_len` against
the model's limit and returns two frozen groups, one for each side of the process wall:

    EngineConfig ──resolve(model limit)──> SchedulerConfig   host: admission, budget, blocks
                                      └──> WorkerConfig      worker: weights, KV memory, rows

`ServerConfig` is the same for the HTTP server.

Invariants: nothing writes to a config after construction; no setting comes from the environment
(it only says where converted models are kept: `convert`). What only a device can tell, how many
blocks fit and the dtype for "auto", is the worker's to settle; `fit_pool` takes its answer in.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from minivllm.errors import ConfigError, UnknownConfigKeyError

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8")
LOAD_FORMATS = ("auto", "dummy")
BACKENDS = ("inline", "mp")
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
GENERATION_CONFIGS = ("auto", "vllm")
SCHEDULING_POLICIES = ("fcfs", "priority")
TTFT_POLICIES = ("drop", "demote")
SPECULATIVE_METHODS = ("ngram",)
# What is taken from a model's generation_config.json.
GENERATION_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made and verified, in the words of vLLM's `speculative_config`.

    Raises `ConfigError` naming the key and the value when one cannot work.
    """

    method: str
    """ngram: what followed the last tokens where they stood before (prompt lookup)."""
    num_speculative_tokens: int
    """Most drafts per row and step."""
    prompt_lookup_max: int | None = None
    """Most tokens that must match; None: as many as the least, 5 where neither is given."""
    prompt_lookup_min: int | None = None
    """Fewest tokens that must match; None: as many as the most."""

    @classmethod
    def parse(cls, settings: Any) -> Self:
        """From what a user gave."""
        if not isinstance(settings, Mapping):
            raise ConfigError("speculative_config", settings, "must map names to values")
        known = [field.name for field in dataclasses.fields(cls)]
        for name, value in settings.items():
            if name not in known:
                rule = f"is not a setting of speculative_config{_did_you_mean(str(name), known)}"
                raise UnknownConfigKeyError(str(name), value, rule)
        for name in ("method", "num_speculative_tokens"):
            if name not in settings:
                raise ConfigError("speculative_config", settings, f"must have {name}")
        return cls(**settings)

    def __post_init__(self) -> None:
        if self.method not in SPECULATIVE_METHODS:
            rule = f"must be one of {', '.join(SPECULATIVE_METHODS)}"
            raise ConfigError("method", self.method, rule)
        _check_int("num_speculative_tokens", self.num_speculative_tokens, at_least=1)
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), at_least=1)
        fewest, most = self.prompt_lookup_lens
        if fewest > most:
            rule = f"must be at most prompt_lookup_max ({most})"
            raise ConfigError("prompt_lookup_min", fewest, rule)

    @property
    def prompt_lookup_lens(self) -> tuple[int, int]:
        """Fewest and most tokens that must match.

        >>> SpeculativeConfig(method="ngram", num_speculative_tokens=3).prompt_lookup_lens
        (5, 5)
        """
        most = self.prompt_lookup_max or self.prompt_lookup_min or 5
        return self.prompt_lookup_min or most, most


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The host's limits; `num_blocks` comes from the workers and is passed beside it."""

    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_active_seqs: int
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    long_prefill_token_threshold: int
    itl_target_ms: float | None
    scheduling_policy: str
    aging_s: float | None
    ttft_policy: str
    enable_prefix_caching: bool
    speculative: SpeculativeConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """All that a worker is told when it starts; crosses the process wall."""

    model_path: str
    dtype: str
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache_memory_bytes: int | None
    num_blocks: int | None
    logprobs_mode: str
    device: str
    load_format: str
    gpu_memory_utilization: float
    kv_cache_dtype: str
    enforce_eager: bool
    cudagraph_capture_sizes: tuple[int, ...] | None
    torch_compile: bool
    speculative: SpeculativeConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every setting of an engine.

    Raises `ConfigError` naming the field and the value when one is out of range, and
    `UnknownConfigKeyError`, which offers the nearest name, for one that does not exist.
    """

    model: str | None = None
    """Directory, .gguf file or hub id; None is the embedded SmolLM2-135M-Instruct."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    device: str = "auto"
    """cuda or cpu; auto is cuda where there is such a device."""
    dtype: str = "auto"
    """float32, float16 or bfloat16; auto is float32 on a CPU, on a GPU what the weights were saved
    in (bfloat16 for float32)."""
    load_format: str = "auto"
    """auto, safetensors; dummy, random weights, for which a config.json is enough."""
    max_model_len: int | str | None = None
    """Tokens of prompt and output together; "32k" works; None, -1 or "auto": the model's own, or
    as much as the KV cache holds if that is less."""
    block_size: int = 16
    """Tokens per KV block."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step."""
    max_num_seqs: int = 256
    """Most requests running at once: the rows that the workers have room for."""
    max_num_active_seqs: int | None = None
    """Most requests that the scheduler lets run, if fewer than `max_num_seqs`."""
    max_num_queued_reqs: int | None = None
    """Most requests in the engine, waiting or running; one more is an `EngineBusyError`."""
    max_num_queued_tokens: int | None = None
    """Most prompt tokens of requests that have no first token yet; more is an `EngineBusyError`."""
    scheduling_policy: str = "fcfs"
    """fcfs: in order of arrival; priority: the lower a request's `priority`, the earlier."""
    aging_s: float | None = None
    """Under priority, seconds of waiting that count as one priority; None: waiting counts not."""
    timeout_s: float | None = None
    """Seconds after arrival at which a request that brings no `timeout_s` of its own ends."""
    ttft_target_s: float | None = None
    """Seconds to the first token, for requests that bring no `ttft_target_s` of their own."""
    ttft_policy: str = "drop"
    """What becomes of a request that misses its `ttft_target_s`: drop, it ends; demote, it is
    served after all others."""
    itl_target_ms: float | None = None
    """Most milliseconds of a step in which requests decode: prompts are cut into chunks by it."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in one step while other requests are there; 0: no such cap."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompts that begin alike."""
    kv_cache_memory_bytes: int | None = None
    """Memory for KV; None: a quarter of what is free on a CPU, what `gpu_memory_utilization` leaves
    on a GPU."""
    gpu_memory_utilization: float = 0.92
    """Share of a GPU's memory that weights, graphs, activations and KV take together."""
    kv_cache_dtype: str = "auto"
    """What keys and values are kept in: float16, bfloat16 or fp8 (e4m3); auto, as they are
    computed."""
    enforce_eager: bool = False
    """Launch every step kernel by kernel, without CUDA graphs."""
    cudagraph_capture_sizes: Sequence[int] | None = None
    """Numbers of rows for which there is a CUDA graph; None: 1, 2, 4 and every 8 up to
    `max_num_seqs`."""
    speculative_config: Mapping[str, Any] | None = None
    """Draft tokens and verify several in one step, which leaves the output as it is: method (ngram)
    and num_speculative_tokens, and what the method takes; see `SpeculativeConfig`."""
    torch_compile: bool = False
    """Compile the forward pass with torch.compile on a GPU: fewer kernels, minutes at the start."""
    num_gpu_blocks_override: int | None = None
    """Exact number of KV blocks, whatever the memory says."""
    distributed_executor_backend: str | None = None
    """`inline` (a thread of this process) or `mp` (a worker process). None: `inline` for LLM,
    `mp` for AsyncEngine."""
    async_scheduling: bool | None = None
    """Plan step n+1 while step n runs; None: with a worker process yes, inline no."""
    worker_lease_s: float = 5.0
    """Seconds without a sign of life after which a worker counts as dead."""
    step_timeout_s: float = 300.0
    """Seconds that a worker process may take for one step before it counts as dead."""
    seed: int = 0
    """Source of the seeds of requests that bring none."""
    max_logprobs: int = 20
    """Most log-probabilities per token that a request may ask for; -1: the whole vocabulary."""
    logprobs_mode: str = "raw_logprobs"
    """What is reported as log-probabilities: raw_logprobs or raw_logits, as the model gives them;
    processed_logprobs or processed_logits, after penalties, bans, temperature and truncation."""
    generation_config: str = "auto"
    """Where a request without sampling parameters takes them from: auto, the model's
    generation_config.json; vllm, the defaults of `SamplingParams`."""
    override_generation_config: Mapping[str, Any] | None = None
    """Values that go before those of generation_config.json."""
    reasoning_start_str: str = "<think>"
    """What opens a model's thoughts, for `thinking_token_budget`."""
    reasoning_end_str: str = "</think>"
    """What closes them."""
    record: str | None = None
    """File to which every plan and result is written, for `minivllm replay`."""

    def __new__(cls, **settings: Any) -> Self:
        """Before `__init__`, which would refuse an unknown name with a bare `TypeError`."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name, value in settings.items():
            if name not in known:
                rule = f"is not a setting{_did_you_mean(name, known)}"
                raise UnknownConfigKeyError(name, value, rule)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_batched_tokens", "max_num_seqs"):
            _check_int(name, getattr(self, name), at_least=1)
        _check_int("long_prefill_token_threshold", self.long_prefill_token_threshold, at_least=0)
        _check_int("max_logprobs", self.max_logprobs, at_least=-1)
        for name, known in (
            ("device", DEVICES),
            ("dtype", DTYPES),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("load_format", LOAD_FORMATS),
            ("logprobs_mode", LOGPROBS_MODES),
            ("generation_config", GENERATION_CONFIGS),
            ("scheduling_policy", SCHEDULING_POLICIES),
            ("ttft_policy", TTFT_POLICIES),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(name, getattr(self, name), f"must be one of {', '.join(known)}")
        self._check_types()
        override = self.override_generation_config
        if override is not None and not isinstance(override, Mapping):
            raise ConfigError("override_generation_config", override, "must map names to values")
        for name in override or ():
            if name not in GENERATION_FIELDS:
                rule = f"may only have {', '.join(GENERATION_FIELDS)}"
                raise ConfigError("override_generation_config", name, rule)
        for name in ("reasoning_start_str", "reasoning_end_str"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigError(name, value, "must be a string that is not empty")
        for name, least in (("kv_cache_memory_bytes", 1), ("num_gpu_blocks_override", 2)):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), at_least=least)
        for name in ("max_num_active_seqs", "max_num_queued_reqs", "max_num_queued_tokens"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), at_least=1)
        if (self.max_num_active_seqs or 0) > self.max_num_seqs:
            rule = f"must be at most max_num_seqs ({self.max_num_seqs})"
            raise ConfigError("max_num_active_seqs", self.max_num_active_seqs, rule)
        for name in ("aging_s", "timeout_s", "ttft_target_s", "itl_target_ms"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.aging_s is not None and self.scheduling_policy == "fcfs":
            rule = "must be None where scheduling_policy is fcfs"
            raise ConfigError("aging_s", self.aging_s, rule)
        _check_int("seed", self.seed, at_least=0)
        if self.distributed_executor_backend not in (None, *BACKENDS):
            rule = f"must be one of {', '.join(BACKENDS)}"
            raise ConfigError(
                "distributed_executor_backend", self.distributed_executor_backend, rule
            )
        _check_positive("worker_lease_s", self.worker_lease_s)
        _check_positive("step_timeout_s", self.step_timeout_s)
        self._check_gpu()
        self._explicit_max_model_len()
        self._speculative()

    def _check_types(self) -> None:
        for name in ("model", "revision", "record"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigError(name, getattr(self, name), "must be a string")
        for name in ("enable_prefix_caching", "enforce_eager", "torch_compile"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "must be true or false")
        if not isinstance(self.async_scheduling, bool | None):
            rule = "must be true, false or None"
            raise ConfigError("async_scheduling", self.async_scheduling, rule)

    def _check_gpu(self) -> None:
        _check_positive("gpu_memory_utilization", self.gpu_memory_utilization)
        if self.gpu_memory_utilization > 1:
            rule = "must be a share, at most 1"
            raise ConfigError("gpu_memory_utilization", self.gpu_memory_utilization, rule)
        sizes = self.cudagraph_capture_sizes
        if sizes is not None:
            is_list = isinstance(sizes, Sequence) and not isinstance(sizes, str)
            if not is_list or not sizes or not all(_is_int(size, at_least=1) for size in sizes):
                rule = "must be a list of integers of at least 1"
                raise ConfigError("cudagraph_capture_sizes", sizes, rule)
            if self.enforce_eager:
                rule = "must be False where cudagraph_capture_sizes are given"
                raise ConfigError("enforce_eager", self.enforce_eager, rule)
        if self.torch_compile and (self.enforce_eager or self.device == "cpu"):
            rule = "must be False on a CPU and where enforce_eager is True"
            raise ConfigError("torch_compile", self.torch_compile, rule)

    def _speculative(self) -> SpeculativeConfig | None:
        given = self.speculative_config
        return None if given is None else SpeculativeConfig.parse(given)

    def _explicit_max_model_len(self) -> int | None:
        """`max_model_len` as a number of tokens; None stands for auto.

        >>> EngineConfig(max_model_len="2k")._explicit_max_model_len()
        2048
        """
        value = self.max_model_len
        if value in (None, -1, "-1", "auto"):
            return None
        if isinstance(value, str):
            match = re.fullmatch(r"(\d+)([kK]?)", value)
            if match is None:
                raise ConfigError("max_model_len", value, 'must be a number like 4096 or "32k"')
            value = int(match[1]) * (1024 if match[2] else 1)
        _check_int("max_model_len", value, at_least=2)
        assert isinstance(value, int)
        return value

    def resolve(
        self, *, model_path: str, model_max_len: int
    ) -> tuple[SchedulerConfig, WorkerConfig]:
        """The two sides' configs for a model whose context is `model_max_len` tokens.

        Raises `ConfigError` when `max_model_len` is more than the model was made for.
        """
        max_model_len = self._explicit_max_model_len() or model_max_len
        if max_model_len > model_max_len:
            raise ConfigError(
                "max_model_len",
                self.max_model_len,
                f"must be at most the model's {model_max_len} tokens",
            )
        scheduler = SchedulerConfig(
            block_size=self.block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_num_active_seqs=self.max_num_active_seqs or self.max_num_seqs,
            max_num_queued_reqs=self.max_num_queued_reqs,
            max_num_queued_tokens=self.max_num_queued_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            itl_target_ms=self.itl_target_ms,
            scheduling_policy=self.scheduling_policy,
            aging_s=self.aging_s,
            ttft_policy=self.ttft_policy,
            enable_prefix_caching=self.enable_prefix_caching,
            speculative=self._speculative(),
        )
        sizes = self.cudagraph_capture_sizes
        worker = WorkerConfig(
            model_path=model_path,
            dtype=self.dtype,
            block_size=self.block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            num_blocks=self.num_gpu_blocks_override,
            logprobs_mode=self.logprobs_mode,
            device=self.device,
            load_format=self.load_format,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_dtype=self.kv_cache_dtype,
            enforce_eager=self.enforce_eager,
            cudagraph_capture_sizes=None if sizes is None else tuple(sizes),
            torch_compile=self.torch_compile,
            speculative=self._speculative(),
        )
        return scheduler, worker

    def fit_pool(self, scheduler: SchedulerConfig, num_blocks: int) -> SchedulerConfig:
        """`scheduler` for a pool of `num_blocks` blocks (block 0, the null block, holds nothing).

        An automatic `max_model_len` is lowered until one request fits; a given one that does not
        fit raises `ConfigError`: it would promise what the pool cannot hold.
        """
        capacity = (num_blocks - 1) * self.block_size
        if scheduler.max_model_len <= capacity:
            return scheduler
        if self._explicit_max_model_len() is not None:
            raise ConfigError(
                "max_model_len",
                self.max_model_len,
                f"must fit the KV cache of {capacity} tokens: lower it, or raise"
                " kv_cache_memory_bytes",
            )
        if capacity < 2:
            name = "kv_cache_memory_bytes"
            if self.num_gpu_blocks_override is not None:
                name = "num_gpu_blocks_override"
            rule = f"must leave room for 2 tokens, it gives {num_blocks} blocks"
            raise ConfigError(name, getattr(self, name), rule)
        return dataclasses.replace(scheduler, max_model_len=capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Every setting of the HTTP server; those of the model and its engine are `EngineConfig`.

    Raises `ConfigError` naming the field and the value when one cannot work.
    """

    host: str | None = None
    """Address to listen on; None: every address."""
    port: int = 8000
    """TCP port; 0 takes a free one, which is logged."""
    uds: str | None = None
    """Path of a Unix socket to listen on instead."""
    served_model_name: Sequence[str] = ()
    """Names under which requests may ask for the model, the first one for answers; none: the
    model's own."""
    api_key: Sequence[str] = ()
    """Keys of which a request must bring one; none: everybody may ask."""
    enable_admin: bool = False
    """Serve the routes that pause, put to sleep, abort, profile and load weights."""
    admin_api_key: str | None = None
    """Key for those routes, which must be set with them."""
    root_path: str = ""
    """Path under which a proxy shows the server."""
    allowed_origins: Sequence[str] = ()
    """Web origins whose pages may ask (CORS), "*" for any; none: no page of another origin."""
    allow_credentials: bool = False
    """Let pages of these origins send cookies."""
    ssl_keyfile: str | None = None
    """Private key in PEM, for TLS."""
    ssl_certfile: str | None = None
    """Certificate chain in PEM, for TLS."""
    ssl_ca_certs: str | None = None
    """Certificates in PEM of which a client must show one that they signed."""
    shutdown_timeout_s: float = 30.0
    """Seconds that running requests have to end after SIGTERM or SIGINT; a second signal ends
    them at once."""
    max_body_bytes: int = 16 * 2**20
    """Most bytes of a request's body."""
    max_header_bytes: int = 64 * 2**10
    """Most bytes of a request's head."""
    chat_template: str | None = None
    """File or text of a chat template to use in place of the model's own."""
    trust_request_chat_template: bool = False
    """Run chat templates that requests bring; only for clients that may run programs here."""
    default_chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables of the chat template where a request does not set them."""
    stream_interval: int = 1
    """Tokens to gather into one event of a stream; the first and the last come at once."""
    sse_keep_alive_interval_s: float = 0.0
    """Seconds of silence after which a stream gets a comment to keep it open; 0: never."""
    enable_force_include_usage: bool = False
    """Count tokens at the end of every stream, asked or not."""
    enable_prompt_tokens_details: bool = True
    """Tell how many tokens of a prompt came from the prefix cache."""
    enable_per_request_metrics: bool = False
    """Add a request's latencies to its response."""
    max_num_responses: int = 1024
    """Responses to hold for `previous_response_id` and to be retrieved; the oldest go first."""
    enable_request_id_headers: bool = False
    """Answer with an X-Request-Id, the client's or a new one."""
    enable_log_requests: bool = False
    """Log each request's id and parameters."""
    max_log_len: int = 0
    """Most characters of its prompt in that line; 0: prompts are not logged."""
    disable_access_log: bool = False
    """Do not log each HTTP request."""

    def __post_init__(self) -> None:
        for name, least in (
            ("port", 0),
            ("max_body_bytes", 1),
            ("max_header_bytes", 1024),
            ("stream_interval", 1),
            ("max_num_responses", 0),
            ("max_log_len", 0),
        ):
            _check_int(name, getattr(self, name), at_least=least)
        if self.port >= 2**16:
            raise ConfigError("port", self.port, f"must be less than {2**16}")
        for name in ("served_model_name", "api_key", "allowed_origins"):
            value = getattr(self, name)
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            if not is_list or not all(isinstance(item, str) and item for item in value):
                raise ConfigError(name, value, "must be a list of strings that are not empty")
        if self.enable_admin and not self.admin_api_key:
            raise ConfigError("admin_api_key", None, "must be set where enable_admin is")
        if (self.ssl_keyfile or self.ssl_ca_certs) and not self.ssl_certfile:
            raise ConfigError("ssl_certfile", None, "must be set for TLS")
        for name in ("shutdown_timeout_s", "sse_keep_alive_interval_s"):
            if getattr(self, name) != 0:
                _check_positive(name, getattr(self, name))
        variables = self.default_chat_template_kwargs
        if variables is not None and not isinstance(variables, Mapping):
            rule = "must map names to values"
            raise ConfigError("default_chat_template_kwargs", variables, rule)


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _check_int(name: str, value: Any, *, at_least: int) -> None:
    if not _is_int(value, at_least=at_least):
        raise ConfigError(name, value, f"must be an integer of at least {at_least}")


def _is_int(value: Any, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _check_positive(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ConfigError(name, value, "must be a positive number")
