"""The engine without a loop: requests in, steps out, results in, ends out.

    add() ─> Request ─> plan() ─> StepPlan ···> StepResult ─> apply() ─> tokens, text, stops, ends

`EngineCore` is plain code over the scheduler, testable without a loop or a model. It makes requests
from prompts and parameters (checks, defaults, the words of parameters made into numbers), and it
turns what the workers sampled into text, log-probabilities and ends.

Invariants: a request is accepted whole or not at all; every accepted request gets exactly one end,
in `apply`, unless it is aborted (`abort`), its time is over (`expire`) or it keeps killing workers
(`fail_suspects`). Where blocks are freed: `blocks`; how a stop cuts text: `detokenizer`; who waits
for what: `engine`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from minivllm.batch import Ready, RowLogprobs, SampleInputs, StepPlan, StepResult, Thinking
from minivllm.checkpoint import Checkpoint
from minivllm.config import GENERATION_FIELDS, EngineConfig
from minivllm.detokenizer import Detokenizer
from minivllm.errors import (
    ConfigError,
    DuplicateRequestError,
    EmptyPromptError,
    EngineBusyError,
    PromptTooLongError,
    RequestError,
    RequestTooLargeError,
    TokenIdError,
)
from minivllm.metrics import EngineMetrics, Gauges, finished_line
from minivllm.request import Logprob, Request, SamplingParams
from minivllm.scheduler import Scheduler, Update
from minivllm.tokenizer import Tokenizer

logger = logging.getLogger("minivllm")

_MIN_TEMPERATURE = 0.01
_TOKEN_ID_FIELDS = (
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "logprob_token_ids",
    "trace_decode_token_ids",
)


class _End(NamedTuple):
    """How a request ends with one of its new tokens."""

    num_dropped: int
    """Tokens behind that one."""
    reason: str
    stop_reason: str | int | None = None


class EngineCore:
    """Requests in, steps out, results in, ends out; see the module header."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        ready: Ready,
    ) -> None:
        self._config = config
        self.model_name = checkpoint.name
        """What the user asked for."""
        self._model_max_len = checkpoint.max_position_embeddings
        self.default_params = _default_params(config, checkpoint)
        """What a request without parameters gets."""
        self._vocab_size = ready.vocab_size
        self._eos_ids = frozenset(checkpoint.eos_token_ids)
        self._tokenizer = tokenizer
        limits, _ = config.resolve(
            model_path=str(checkpoint.path), model_max_len=self._model_max_len
        )
        self.scheduler = Scheduler(config.fit_pool(limits, ready.num_blocks), ready.num_blocks)
        self._detokenizers: dict[str, Detokenizer] = {}
        self._groups: dict[str, list[Request]] = {}  # by the caller's id; the samples of one prompt
        self._num_requests = 0
        self._counts: Counter[str] = Counter()  # of requests that have ended
        self._metrics = EngineMetrics()
        self._seeds = random.Random(config.seed)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output that one request may have."""
        return self.scheduler.config.max_model_len

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        prompt: str | None = None,
        cache_salt: str = "",
        seed: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        ttft_target_s: float | None = None,
    ) -> list[Request]:
        """Accept a prompt: a request per sample that its parameters ask for. `seed` counts where
        the parameters have none; without either, one is drawn.

        Raises: a `RequestError` naming the field and the value, or `EngineBusyError`; then nothing
                has changed
        """
        if params is None:
            params = self.default_params
        if not isinstance(params, SamplingParams):
            raise RequestError("params", params, "must be SamplingParams")
        if not isinstance(request_id, str) or not request_id:
            raise RequestError("request_id", request_id, "must be a string that is not empty")
        ids = [request_id]
        if params.n > 1:
            ids = [f"{request_id}[{child}]" for child in range(params.n)]
        if request_id in self._groups or any(id in self.scheduler for id in ids):
            raise DuplicateRequestError("request_id", request_id, "must not be in use")
        token_ids = self._truncated(token_ids, params)
        self._check_prompt(token_ids)
        self._check_params(params)
        self._check_priority(priority)
        if timeout_s is None:
            timeout_s = self._config.timeout_s
        if ttft_target_s is None:
            ttft_target_s = self._config.ttft_target_s
        _check_seconds("timeout_s", timeout_s)
        _check_seconds("ttft_target_s", ttft_target_s)
        self.check_room(len(ids), len(ids) * len(token_ids))
        if params.seed not in (None, -1):
            seed = params.seed
        elif seed is None:
            seed = self.draw_seed()
        assert seed is not None, "a seed was drawn"
        stop_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_ids |= self._eos_ids
        max_len = min(self.max_model_len, len(token_ids) + (params.max_tokens or sys.maxsize))
        inputs = self._sample_inputs(params, len(token_ids), max_len, stop_ids, seed)
        detokenizers = [self._detokenizer(params, token_ids) for _ in ids]
        requests = [
            Request(
                id=id,
                group_id=request_id,
                number=self._num_requests + child,
                prompt=prompt,
                prompt_token_ids=token_ids,
                params=params,
                inputs=msgspec.structs.replace(inputs, child=child),
                max_len=max_len,
                stop_ids=stop_ids,
                cache_salt=cache_salt,
                priority=priority,
                timeout_s=timeout_s,
                ttft_target_s=ttft_target_s,
            )
            for child, id in enumerate(ids)
        ]
        self._num_requests += len(requests)
        self._groups[request_id] = requests
        for request, detokenizer in zip(requests, detokenizers, strict=True):
            self._detokenizers[request.id] = detokenizer
            self.scheduler.add(request)
        return requests

    def check_room(self, num_reqs: int, num_tokens: int) -> None:
        """Refuse so many requests, with so many prompt tokens together, if they are too many.

        Raises: `EngineBusyError`
        """
        try:
            self.scheduler.check_room(num_reqs, num_tokens)
        except EngineBusyError as error:
            self._metrics.count_rejection(error.limit)
            raise

    def draw_seed(self) -> int:
        """The seed of the next request that brings none."""
        return self._seeds.getrandbits(64)

    def _truncated(self, token_ids: Sequence[int], params: SamplingParams) -> Sequence[int]:
        limit = params.truncate_prompt_tokens
        if limit is None:
            return token_ids
        if limit == -1:
            limit = max(1, self.max_model_len - (params.max_tokens or 1))
        return token_ids[-limit:]

    def _detokenizer(self, params: SamplingParams, token_ids: Sequence[int]) -> Detokenizer:
        return Detokenizer(
            self._tokenizer,
            stop=params.stop_strings,
            stop_regex=params.stop_patterns,
            min_tokens=params.min_tokens,
            prompt_token_ids=token_ids,
            skip_special_tokens=params.skip_special_tokens,
            include_stop_str=params.include_stop_str_in_output,
            detokenize=params.detokenize,
        )

    def _sample_inputs(
        self,
        params: SamplingParams,
        prompt_len: int,
        max_len: int,
        stop_ids: frozenset[int],
        seed: int,
    ) -> SampleInputs:
        """The worker's part of the parameters, words and defaults made into numbers: plain ones of
        bounded size, as a message cannot carry numpy's, nor integers of more than 64 bits."""
        listed = list(params.logprob_token_ids or ())
        num_logprobs = len(listed) if listed else params.logprobs
        return SampleInputs(
            seed=seed,
            prompt_len=prompt_len,
            temperature=_temperature(params.temperature),
            top_k=min(max(0, params.top_k), self._vocab_size),
            top_p=float(params.top_p),
            min_p=float(params.min_p),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            repetition_penalty=float(params.repetition_penalty),
            logit_bias=[(id, float(bias)) for id, bias in (params.logit_bias or {}).items()],
            allowed_token_ids=sorted(set(params.allowed_token_ids or ())),
            bad_words=self._spell_bad_words(params.bad_words or ()),
            max_len=max_len,
            min_len=prompt_len + self._bounded(params.min_tokens) if params.min_tokens else 0,
            end_ids=sorted(stop_ids) if params.min_tokens else [],
            forced_ids=list(params.trace_decode_token_ids or ()),
            thinking=self._thinking(params.thinking_token_budget),
            num_logprobs=self._num_logprobs(num_logprobs),
            logprob_token_ids=listed,
            num_prompt_logprobs=self._num_logprobs(params.prompt_logprobs),
            processors=tuple(params.logits_processors or ()),
        )

    def _num_logprobs(self, num_logprobs: int | None) -> int:
        """-1 for none, as the worker has it, from -1 for all, as users have it."""
        if num_logprobs is None:
            return -1
        return self._vocab_size if num_logprobs == -1 else min(num_logprobs, self._vocab_size)

    def _spell_bad_words(self, words: Sequence[str]) -> list[list[tuple[int, int, int]]]:
        graphs = []
        for word in words:
            bare = word.removeprefix(" ")
            found = [self._tokenizer.spellings(text) for text in (bare, f" {bare}")]
            found = [graph for graph in found if graph]
            if not found:
                raise RequestError("bad_words", word, "cannot be written in the model's vocabulary")
            graphs += found
        return graphs

    def _thinking(self, budget: int | None) -> Thinking | None:
        if budget in (None, -1):
            return None
        assert budget is not None, "None was handled"
        marks = (self._config.reasoning_start_str, self._config.reasoning_end_str)
        ids = [self._tokenizer.encode(mark, add_special_tokens=False) for mark in marks]
        return Thinking(self._bounded(budget), *ids)

    def _bounded(self, num_tokens: int) -> int:
        """No output is longer than the context."""
        return min(num_tokens, self.max_model_len)

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise EmptyPromptError("prompt", token_ids, "must have at least one token")
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise TokenIdError("prompt_token_ids", token_id, "must be integers")
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._vocab_size:
                rule = f"must be from 0 to {self._vocab_size - 1}"
                raise TokenIdError("prompt_token_ids", token_id, rule)
        num_tokens = len(token_ids)
        if num_tokens >= self.max_model_len:
            limit = f"the context is {self.max_model_len} tokens: reduce the length of the prompt"
            if num_tokens >= self._model_max_len or self.max_model_len < self._pool_tokens():
                rule = f"must leave room for a new token; {limit}"
                raise PromptTooLongError("prompt length", num_tokens, rule)
            rule = f"must fit in the KV cache; {limit}, or raise kv_cache_memory_bytes"
            raise RequestTooLargeError("prompt length", num_tokens, rule)

    def _pool_tokens(self) -> int:
        blocks = self.scheduler.blocks
        return (blocks.num_blocks - 1) * blocks.block_size

    def _check_params(self, params: SamplingParams) -> None:
        for name in _TOKEN_ID_FIELDS:
            for token_id in getattr(params, name) or ():
                if token_id >= self._vocab_size:
                    rule = f"must be from 0 to {self._vocab_size - 1}"
                    raise TokenIdError(name, token_id, rule)
        limit = self._config.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and limit != -1 and not 0 <= count <= limit:
                raise RequestError(name, count, f"must be at most max_logprobs ({limit})")
        if params.logits_processors and self._config.distributed_executor_backend != "inline":
            rule = "can only be used where distributed_executor_backend is inline"
            raise RequestError("logits_processors", params.logits_processors, rule)
        if params.logits_processors and self._config.record is not None:
            rule = "cannot be written to a recording: set record or them, not both"
            raise RequestError("logits_processors", params.logits_processors, rule)

    def _check_priority(self, priority: int) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError("priority", priority, "must be an integer")
        if priority != 0 and self._config.scheduling_policy == "fcfs":
            raise RequestError("priority", priority, "must be 0 where scheduling_policy is fcfs")

    def plan(self) -> StepPlan | None:
        """The next step for the workers, or None until a result or a request arrives."""
        return self.scheduler.plan()

    def expire(self) -> list[Request]:
        """End the requests whose time is over; returns them."""
        overdue = self.scheduler.overdue()
        for request, deadline in overdue:
            self._end(request, "abort", deadline)
        return [request for request, _ in overdue]

    def apply(self, result: StepResult) -> list[Request]:
        """Take the result of the oldest plan in flight; returns the requests that moved on. What
        comes after a request's deadline comes too late."""
        expired = self.expire()
        now_s = self.scheduler.clock()
        self._metrics.count_step(sum(self.scheduler.in_flight[0].plan.query_lens))
        updates = self.scheduler.complete(result)
        for update in updates:
            if update.error is not None:
                self._end(update.request, "error", update.error)
            else:
                self._extend(update, now_s)
        return [*expired, *(update.request for update in updates)]

    def _extend(self, update: Update, now_s: float) -> None:
        request, params, stats = update.request, update.request.params, update.request.stats
        if request.prompt_logprobs is not None:
            for scored in update.prompt_logprobs:
                request.prompt_logprobs.append(self._logprobs(scored))
        if not update.tokens:
            return
        end = self._read(update)
        if update.num_drafts:
            stats.num_drafts += 1
            stats.num_draft_tokens += update.num_drafts
            stats.num_accepted_tokens += len(update.tokens) - 1
            self._metrics.count_drafts(update.num_drafts, len(update.tokens) - 1)
        num_tokens = len(update.tokens)
        if end is not None and end.num_dropped:
            num_tokens -= end.num_dropped
            del request.tokens[-end.num_dropped :]
        self._metrics.count_tokens(request, num_tokens, now_s)
        if stats.first_token_s is None:
            stats.first_token_s = now_s
        stats.last_token_s = now_s
        request.count_tokens(self.scheduler.blocks.weight_epoch, num_tokens)
        if request.logprobs is not None:
            listed = bool(params.logprob_token_ids)
            for row in update.logprobs[:num_tokens]:
                request.logprobs.append(self._logprobs(row, listed=listed))
                request.cumulative_logprob += row.logprobs[0]
        if end is not None:
            self._end(request, end.reason, end.stop_reason)
        else:
            request.text = self._detokenizers[request.id].text

    def _read(self, update: Update) -> _End | None:
        """Read the new tokens one by one; the end that one of them brings, if any. Tokens that were
        accepted behind it are dropped: plain decoding would not have come to them."""
        request, params = update.request, update.request.params
        detokenizer = self._detokenizers[request.id]
        for num_dropped, token_id in zip(
            reversed(range(len(update.tokens))), update.tokens, strict=True
        ):
            num_known = len(request.tokens) - num_dropped
            may_stop = num_known - request.prompt_len >= params.min_tokens
            is_end = may_stop and token_id in request.stop_ids
            stop = None
            if not is_end or params.include_stop_str_in_output:
                try:
                    stop = detokenizer.push([token_id]).stop
                except RequestError as error:  # a pattern that takes too long to search for
                    return _End(num_dropped, "error", str(error))
            if is_end:
                is_eos = token_id in self._eos_ids and not params.ignore_eos
                return _End(num_dropped, "stop", None if is_eos else token_id)
            if stop is not None:
                return _End(num_dropped, "stop", stop)
            if num_known >= request.max_len:
                return _End(num_dropped, "length")
            if may_stop and _is_repetitive(request, num_known):
                return _End(num_dropped, "repetition")
        return None

    def _logprobs(self, row: RowLogprobs, *, listed: bool = False) -> dict[int, Logprob]:
        """`listed`: behind the first are tokens that the request named, whose rank is not known."""
        others = range(1, len(row.token_ids))
        ranks: list[int | None] = [row.rank, *([None] * len(others) if listed else others)]
        entry: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(row.token_ids, row.logprobs, ranks, strict=True):
            # the sampled token comes first, and keeps its own rank where it is listed again
            entry.setdefault(token_id, Logprob(logprob, rank, self._tokenizer.token_text(token_id)))
        return entry

    def _end(self, request: Request, reason: str, stop_reason: str | int | None = None) -> None:
        request.text = self._detokenizers.pop(request.id).finish()
        self.scheduler.finish(request, reason, stop_reason)
        self._counts["prompt_tokens"] += request.prompt_len
        self._counts["generation_tokens"] += request.num_output_tokens
        self._counts[f"request_success_{reason}"] += 1
        self._metrics.count_end(request)
        if all(sample.finished for sample in self._groups[request.group_id]):
            del self._groups[request.group_id]
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", finished_line(request))

    def abort(self, request_id: str) -> list[Request]:
        """End a request, all its samples, with "abort"; returns those that had not ended."""
        requests = [r for r in self._groups.get(request_id, ()) if not r.finished]
        for request in requests:
            self._end(request, "abort")
        return requests

    def abort_all(self) -> list[Request]:
        """End every request with "abort", but for those that are held."""
        requests = self.scheduler.admitted()
        for request in requests:
            self._end(request, "abort")
        return requests

    def fail_suspects(self) -> list[Request]:
        """After a death of the workers: end the requests that have killed them too often."""
        failed = self.scheduler.blame()
        for request in failed:
            self._end(request, "error", "the request ended its worker every time it ran alone")
        return failed

    def metrics(self) -> dict[str, float]:
        """Gauges and counters, as they stand."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        counts = dataclasses.asdict(scheduler.stats)
        return counts | self._counts | {
            "num_requests_running": scheduler.num_running,
            "num_requests_waiting": scheduler.num_waiting,
            "kv_cache_usage": blocks.usage,
            "weight_epoch": blocks.weight_epoch,
            "generation": scheduler.generation,
        }

    def prometheus(self, *, sleep_level: int, labels: Mapping[str, str]) -> bytes:
        """Gauges, counters and histograms in Prometheus's text format."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        gauges = Gauges(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=blocks.usage,
            prefix_queries=scheduler.stats.prefix_queries,
            prefix_hits=scheduler.stats.prefix_hits,
            num_preemptions=scheduler.stats.num_preemptions,
            num_blocks=blocks.num_blocks,
            block_size=blocks.block_size,
            sleep_level=sleep_level,
        )
        return self._metrics.render(gauges, labels)

    def restart(self, ready: Ready) -> None:
        """Go on with new workers: every unfinished request is computed again from its tokens."""
        self.scheduler.restart(ready.num_blocks)


def _temperature(value: float) -> float:
    return max(float(value), _MIN_TEMPERATURE) if value else 0.0


def _check_seconds(name: str, value: Any) -> None:
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise RequestError(name, value, "must be a positive number of seconds")


def _default_params(config: EngineConfig, checkpoint: Checkpoint) -> SamplingParams:
    """The sampling parameters of a request that brings none: the model's own, then the config's.

    Raises: `ConfigError` for values that `SamplingParams` refuses
    """
    values = {} if config.generation_config == "vllm" else dict(checkpoint.generation_config)
    values |= config.override_generation_config or {}
    chosen = {name: values[name] for name in GENERATION_FIELDS if values.get(name) is not None}
    if "max_new_tokens" in chosen:
        chosen["max_tokens"] = chosen.pop("max_new_tokens")
    try:
        return SamplingParams(**chosen)
    except RequestError as error:
        raise ConfigError("generation_config", error.value, f"has a bad {error.field}") from error


def _is_repetitive(request: Request, num_known: int) -> bool:
    """Whether the first `num_known` tokens end in a pattern as often as `repetition_detection`
    says."""
    rule = request.params.repetition_detection
    if rule is None:
        return False
    longest = rule.max_pattern_size * rule.min_count
    tail = request.tokens[max(request.prompt_len, num_known - longest) : num_known]
    return any(
        len(tail) >= size * rule.min_count
        and tail[-size * rule.min_count :] == tail[-size:] * rule.min_count
        for size in range(rule.min_pattern_size, rule.max_pattern_size + 1)
    )
