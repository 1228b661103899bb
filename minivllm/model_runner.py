"""One worker's model: load it, size its KV cache, run one step at a time.

    StepPlan ──> row table ──> ForwardBatch ──> Decoder ──> logits ──> sample ──> StepResult
                (differences)   (flattened)                            │
                     ^──────────── sampled tokens are appended ────────┘

The row table holds, per row, the tokens, the block ids and the sampling parameters, as plain arrays
with one line per row, so that a step is prepared without a loop over rows. It is the worker's own
truth about lengths: the host may plan the next step before it has seen the tokens of this one.

Invariants: plans come in order, without gaps; a row whose numbers are not finite fails alone.
What the tensors of a step mean: `attention`. Who decides what a step contains: `scheduler`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from minivllm.attention import ForwardBatch, LayerCache, allocate_kv_cache, kv_block_bytes
from minivllm.batch import (
    LoadWeights,
    NewRow,
    Order,
    Ready,
    RowLogprobs,
    SampleInputs,
    Sleep,
    StepPlan,
    StepResult,
    WakeUp,
)
from minivllm.config import WorkerConfig
from minivllm.dist import Group
from minivllm.errors import ConfigError, WorkerError
from minivllm.loader import load_model
from minivllm.models import Decoder
from minivllm.sampling import (
    LOGPROB_ROWS,
    NOT_FINITE,
    AdjustedRow,
    Logprobs,
    LogprobsMode,
    SampleOutput,
    SamplingBatch,
    gather_logprobs,
    sample,
)

_T = TypeVar("_T")

_DTYPES = {
    "auto": torch.float32,  # a CPU computes fastest in it
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


_SCALARS = ("temperature", "top_k", "top_p", "min_p", "seed", "child", "num_logprobs")


class _Rows:
    """What the worker knows of each row, one line per row."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((num_rows, max_model_len + 1), np.int64)
        self.block_table = np.zeros((num_rows, max_blocks), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.num_computed = np.zeros(num_rows, np.int64)
        self.num_scored = np.zeros(num_rows, np.int64)
        self.prompt_len = np.zeros(num_rows, np.int64)
        self.inputs: list[SampleInputs] = [SampleInputs(seed=0)] * num_rows
        self.is_adjusted = np.zeros(num_rows, bool)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.top_p = np.zeros(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.seed = np.zeros(num_rows, np.uint64)
        self.child = np.zeros(num_rows, np.int64)
        self.num_logprobs = np.zeros(num_rows, np.int64)

    def start(self, new: NewRow) -> None:
        row = new.row
        token_ids = np.frombuffer(new.token_ids, np.int32)
        self.token_ids[row, : len(token_ids)] = token_ids
        self.block_table[row] = 0
        self.num_blocks[row] = 0
        self.num_computed[row] = new.num_computed
        self.num_scored[row] = new.num_scored
        inputs = new.inputs
        self.inputs[row] = inputs
        self.is_adjusted[row] = inputs.adjusts or bool(inputs.logprob_token_ids)
        for name in ("prompt_len", *_SCALARS):
            getattr(self, name)[row] = getattr(inputs, name)

    def add_blocks(self, row: int, block_ids: list[int]) -> None:
        start = self.num_blocks[row]
        self.block_table[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] += len(block_ids)


class ModelRunner:
    """A loaded model with its KV cache, ready for steps."""

    def __init__(self, config: WorkerConfig) -> None:
        """Load, size and warm up.

        Raises: `ModelError` for weights that cannot be used; `ConfigError` when the memory for KV
                does not hold a single request
        """
        self._config = config
        self._phase_s: dict[str, float] = {}
        self._dtype = _DTYPES[config.dtype]
        self._hf_config = json.loads((Path(config.model_path) / "config.json").read_text())
        self._model = self._timed("load", lambda: self._load(config.model_path))
        model = self._model.config
        block_bytes = kv_block_bytes(
            num_layers=model.num_layers,
            block_size=config.block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self._dtype,
        )
        self._num_blocks = config.num_blocks or _num_blocks(config, block_bytes)
        self._caches = self._timed("kv_cache", self._allocate)
        self._memory_bytes = {
            "weights": sum(p.numel() * p.element_size() for p in self._model.parameters()),
            "kv_cache": self._num_blocks * block_bytes,
        }
        self._rows = _Rows(config.max_num_seqs, config.max_model_len, config.block_size)
        self._next_step = 0
        self._logprobs_mode = LogprobsMode(
            processed=config.logprobs_mode.startswith("processed"),
            normalized=config.logprobs_mode.endswith("logprobs"),
        )
        self._profiler: torch.profiler.profile | None = None
        self._profile_dir = ""
        self._timed("warm_up", self._warm_up)

    def _load(self, path: str | None, tensors: Mapping[str, torch.Tensor] | None = None) -> Decoder:
        model = load_model(
            None if path is None else Path(path),
            self._hf_config,
            dtype=self._dtype,
            device="cpu",
            max_model_len=self._config.max_model_len,
            group=Group(),
            tensors=tensors,
        )
        model.pack()
        return model

    def _allocate(self) -> list[LayerCache]:
        model = self._model.config
        return allocate_kv_cache(
            num_layers=model.num_layers,
            num_blocks=self._num_blocks,
            block_size=self._config.block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self._dtype,
            device="cpu",
        )

    def _timed(self, phase: str, work: Callable[[], _T]) -> _T:
        start_s = time.perf_counter()
        done = work()
        self._phase_s[phase] = time.perf_counter() - start_s
        return done

    def ready(self, generation: int) -> Ready:
        """What the host must know before its first plan."""
        return Ready(
            generation,
            self._num_blocks,
            self._model.config.vocab_size,
            self._phase_s,
            self._memory_bytes,
        )

    def carry_out(self, order: Order) -> None:
        """Do what an order says, between two steps; see `batch`.

        Raises: `ModelError` for weights that cannot be used, and the old ones stay
        """
        if isinstance(order, LoadWeights):
            self._model = self._load(order.path, order.tensors)
        elif isinstance(order, Sleep):
            self._caches = []
            if order.level == 2:
                self._model.drop()
        elif isinstance(order, WakeUp):
            if self._model.is_dropped:
                self._model = self._load(self._config.model_path)
            self._caches = self._allocate()
        elif order.directory is not None:
            self._profile_dir = order.directory
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        elif self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            profiler.export_chrome_trace(
                str(Path(self._profile_dir) / f"minivllm-{os.getpid()}-{time.time_ns()}.json")
            )

    def _warm_up(self) -> None:
        """Run two short steps on the null block, so that no request pays for the kernels that every
        step needs. They are too short for the parallel forms of these."""
        config = self._config
        longest = min(
            64, config.max_num_batched_tokens, config.block_size, config.max_model_len
        )
        for num_tokens in (1, longest):
            inputs = SampleInputs(seed=0, num_logprobs=0)
            new = NewRow(0, bytes(4 * num_tokens), 0, num_tokens, inputs)
            plan = StepPlan(0, self._next_step, [new], [0], [num_tokens], [True], [(0, [0])])
            self.step(plan)
        for cache in self._caches:
            cache.k[0].zero_()
            cache.v[0].zero_()
        self._next_step = 0

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Run one plan.

        Raises: `WorkerError` for a plan that is out of order
        """
        start_s = time.perf_counter()
        if plan.step != self._next_step:
            raise WorkerError(f"step {plan.step} came when {self._next_step} was due")
        self._next_step += 1
        for new in plan.new_rows:
            self._rows.start(new)
        for row, block_ids in plan.new_blocks:
            self._rows.add_blocks(row, block_ids)

        rows = np.array(plan.rows)
        samples = np.array(plan.samples)
        query_lens = np.array(plan.query_lens)
        batch = self._forward_batch(rows, query_lens, samples)
        hidden = self._model(batch, self._caches)
        failed = self._failed(hidden, batch)
        prompt_logprobs = self._score_prompts(hidden, rows, query_lens)

        sampling_rows = rows[samples]
        positions = (self._rows.num_computed[rows] + query_lens)[samples]
        output = self._sample(hidden[batch.logits_idx], sampling_rows, positions)
        sampled_idx = np.flatnonzero(samples).tolist()
        failed |= {sampled_idx[row]: why for row, why in output.failed.items()}
        token_ids = output.token_ids.numpy()
        self._rows.token_ids[sampling_rows, positions] = token_ids
        self._rows.num_computed[rows] += query_lens
        return StepResult(
            generation=plan.generation,
            step=plan.step,
            tokens=[[token_id] for token_id in token_ids.tolist()],
            logprobs=_row_logprobs(output, self._rows.num_logprobs[sampling_rows]),
            prompt_logprobs=prompt_logprobs,
            failed=failed,
            seconds=time.perf_counter() - start_s,
        )

    def _forward_batch(
        self, rows: np.ndarray, query_lens: np.ndarray, samples: np.ndarray
    ) -> ForwardBatch:
        """The step's rows, flattened: row i contributes `query_lens[i]` tokens."""
        P = self._config.block_size
        ends = np.cumsum(query_lens)
        T = int(ends[-1])
        context_lens = self._rows.num_computed[rows]
        kv_lens = context_lens + query_lens
        row_of_token = np.repeat(rows, query_lens)
        # [0 1 2 | 0 | 0 1] + where each row's computed tokens end
        positions = np.arange(T) + np.repeat(context_lens - (ends - query_lens), query_lens)
        blocks = self._rows.block_table[row_of_token, positions // P].astype(np.int64)
        max_blocks = -(-int(kv_lens.max()) // P)
        return ForwardBatch(
            token_ids=torch.from_numpy(self._rows.token_ids[row_of_token, positions]),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(blocks * P + positions % P),
            query_starts=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
            kv_lens=torch.from_numpy(kv_lens.astype(np.int32)),
            block_tables=torch.from_numpy(self._rows.block_table[rows, :max_blocks]),
            logits_idx=torch.from_numpy(ends[samples] - 1),
        )

    def _failed(self, hidden: torch.Tensor, batch: ForwardBatch) -> dict[int, str]:
        """The rows whose last hidden state is not finite. What is wrong with an earlier token of a
        row shows in its last one, which attends to it."""
        last = hidden[batch.query_starts[1:].long() - 1]
        finite = torch.isfinite(last).all(dim=1)
        return dict.fromkeys(torch.nonzero(~finite).flatten().tolist(), NOT_FINITE)

    def _score_prompts(
        self, hidden: torch.Tensor, rows: np.ndarray, query_lens: np.ndarray
    ) -> list[tuple[int, list[RowLogprobs]]]:
        """Log-probabilities of prompt tokens, for the rows that asked. The logits of position p
        score the token after it; a few positions at a time, so that the memory is bounded."""
        known = self._rows
        scored = []
        ends = np.cumsum(query_lens)
        for idx in np.flatnonzero(known.num_scored[rows] < known.prompt_len[rows]).tolist():
            row, end = rows[idx], int(ends[idx])
            num_computed = int(known.num_computed[row])
            first = int(known.num_scored[row])
            last = min(num_computed + int(query_lens[idx]), int(known.prompt_len[row]) - 1)
            count = known.inputs[row].num_prompt_logprobs
            found: list[RowLogprobs] = []
            for start in range(first, last + 1, LOGPROB_ROWS):
                targets = known.token_ids[row, start : min(start + LOGPROB_ROWS, last + 1)]
                offset = end - int(query_lens[idx]) + start - 1 - num_computed
                logprobs = gather_logprobs(
                    self._model.compute_logits(hidden[offset : offset + len(targets)]),
                    torch.from_numpy(targets).to(hidden.device),
                    np.full(len(targets), count),
                    normalized=self._logprobs_mode.normalized,
                )
                found += _as_rows(logprobs)
            if found:
                known.num_scored[row] += len(found)
                scored.append((idx, found))
        return scored

    def _sample(
        self, hidden: torch.Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> SampleOutput:
        known = self._rows
        batch = SamplingBatch(
            temperature=known.temperature[rows],
            top_k=known.top_k[rows],
            top_p=known.top_p[rows],
            min_p=known.min_p[rows],
            seeds=known.seed[rows].view(np.int64),
            children=known.child[rows],
            positions=positions,
            num_logprobs=known.num_logprobs[rows],
        )
        adjusted = [
            AdjustedRow(idx, known.inputs[rows[idx]], known.token_ids[rows[idx], : positions[idx]])
            for idx in np.flatnonzero(known.is_adjusted[rows]).tolist()
        ]
        logits = self._model.compute_logits(hidden)
        return sample(logits, batch, adjusted, self._logprobs_mode)


def _row_logprobs(output: SampleOutput, num_logprobs: np.ndarray) -> list[RowLogprobs | None]:
    """Per sampling row what it asked for; empty when none asked."""
    if output.logprobs is None:
        return []
    per_row: list[RowLogprobs | None] = [None] * len(num_logprobs)
    for row, found in zip(output.logprobs.rows.tolist(), _as_rows(output.logprobs), strict=True):
        count = 1 + int(num_logprobs[row])
        per_row[row] = RowLogprobs(found.token_ids[:count], found.logprobs[:count], found.rank)
    return per_row


def _as_rows(found: Logprobs) -> list[RowLogprobs]:
    columns = (found.token_ids.tolist(), found.logprobs.tolist(), found.ranks.tolist())
    return [RowLogprobs(*row) for row in zip(*columns, strict=True)]


def _num_blocks(config: WorkerConfig, block_bytes: int) -> int:
    """Blocks that the memory for KV holds."""
    memory_bytes = config.kv_cache_memory_bytes or available_bytes() // 4
    num_blocks = memory_bytes // block_bytes
    if num_blocks < 2:
        rule = f"must hold 2 blocks of {block_bytes} bytes (one is the null block)"
        raise ConfigError("kv_cache_memory_bytes", memory_bytes, rule)
    return num_blocks


def available_bytes() -> int:
    """Memory that new allocations can take without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
