"""One worker's model: load it, size its KV cache, launch one step at a time.

    StepPlan ─> row table ─> Staging ─> graph or Decoder ─> sample ─> Readback ─> StepResult
               (differences) (one copy)                       │
                    ^                   device: tokens stay <─┤
                    └──────────────── host: tokens, later ────┘

`launch` prepares a step and queues it on the device, and never waits for the device; the `Pending`
that it returns is waited for. So the host prepares step n+1 while a GPU computes step n, whose
tokens step n+1 takes from the device. Only a row whose tokens the host must see first makes it
wait: one with penalties, bans or other adjustments that look at its history, and one that starts
anew where another row's tokens are still on their way; and every row where tokens are drafted, for
drafts follow from them. On a CPU the same code has nothing to wait for.

The memory of a GPU is shared out in this order. Weights are loaded. A step as large as any is run
on a cache that is only the null block: its peak is what activations need. The largest and the
smallest graph are recorded on that cache, measured, and forgotten, because they hold its address.
What is left of `gpu_memory_utilization` becomes the KV cache, and graphs are recorded for good: the
small ones now, the others when a step first needs them.

Invariants: plans come in order, without gaps; a row whose numbers are not finite fails alone.
What the tensors of a step mean: `attention`. Who decides what a step contains: `scheduler`.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
    SampleInputs,
    Sleep,
    StepPlan,
    WakeUp,
)
from minivllm.config import WorkerConfig
from minivllm.device import (
    Staging,
    available_bytes,
    pick_device,
    pick_dtype,
    pick_kv_dtype,
    upload,
)
from minivllm.dist import Group
from minivllm.errors import ConfigError, WorkerError
from minivllm.graphs import Capture, Captured, CudaCapture, Forwarded, StepGraphs, ladder
from minivllm.loader import dummy_model, load_model
from minivllm.models import Decoder
from minivllm.pending import Drafted, Pending
from minivllm.rows import FORWARD_ARRAYS, RowTable, decode_token_ids, spread
from minivllm.sampling import (
    LOGPROB_ROWS,
    AdjustedRow,
    Logprobs,
    LogprobsMode,
    SampleOutput,
    SamplingBatch,
    gather_logprobs,
    sample,
)
from minivllm.spec import Proposer, make_proposer

_T = TypeVar("_T")

_NO_DRAFT = np.array([-1])

# Block tables are cut to a multiple of this many blocks: kernels are compiled anew for a width that
# is not a multiple of 16.
_WIDTH = 16
# Graphs that are recorded before the first request.
_NUM_EARLY_GRAPHS = 4
# Numbers per row and per token that a step sends, at most 8 bytes each.
_NUM_STAGED = 16


class ModelRunner:
    """A loaded model with its KV cache, ready for steps."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        capture: Capture | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        """Load, size and warm up. `capture` records graphs in place of `CudaCapture`, and then on a
        CPU too, which has none of its own; `proposer` drafts in place of the config's.

        Raises: `ModelError` for weights that cannot be used; `ConfigError` when the memory for KV
                does not hold a single request
        """
        self._config = config
        self._phase_s: dict[str, float] = {}
        self._device = device = pick_device(config.device)
        self._is_cuda = device.type == "cuda"
        if config.torch_compile and not self._is_cuda:
            raise ConfigError("torch_compile", True, f"is for a GPU, the device is {device}")
        free_bytes = torch.cuda.mem_get_info()[0] if self._is_cuda else 0
        self._hf_config = json.loads((Path(config.model_path) / "config.json").read_text())
        self._dtype = pick_dtype(config.dtype, device, self._hf_config)
        self._kv_dtype = pick_kv_dtype(config.kv_cache_dtype, self._dtype)
        self._place(self._timed("load", lambda: self._load(config.model_path, device=device)))
        weights_bytes = sum(p.numel() * p.element_size() for p in self._model.parameters())
        self._memory_bytes = {"weights": weights_bytes}

        R, blocks = config.max_num_seqs, -(-config.max_model_len // config.block_size)
        blocks += -blocks % _WIDTH
        self._rows = RowTable(R, config.max_model_len, config.block_size, blocks)
        self._block_tables = torch.zeros((R + 1, blocks), dtype=torch.int32, device=device)
        self._last_token_ids = torch.zeros(R + 1, dtype=torch.int64, device=device)
        self._max_changes = R + config.max_num_batched_tokens
        self._staging = Staging(8 * _NUM_STAGED * (R + self._max_changes + 64), device)
        self._graphs = self._make_graphs(capture)
        self._latest: Pending | None = None
        self._proposer = proposer
        if proposer is None and config.speculative is not None:
            self._proposer = make_proposer(config.speculative, R)
        self._next_step = 0
        self._logprobs_mode = LogprobsMode(
            processed=config.logprobs_mode.startswith("processed"),
            normalized=config.logprobs_mode.endswith("logprobs"),
        )
        self._profiler: torch.profiler.profile | None = None
        self._profile_dir = ""

        limit = self._timed("profile", lambda: self._memory_left(free_bytes))
        self._num_blocks = config.num_blocks or self._blocks_in(limit)
        self._caches = self._timed("kv_cache", lambda: self._allocate(self._num_blocks))
        self._memory_bytes["kv_cache"] = self._num_blocks * self._block_bytes()
        self._timed("warm_up", self._warm_up)

    def ready(self, generation: int) -> Ready:
        """What the host must know before its first plan."""
        return Ready(
            generation,
            self._num_blocks,
            self._model.config.vocab_size,
            self._phase_s,
            self._memory_bytes,
        )

    def _timed(self, phase: str, work: Callable[[], _T]) -> _T:
        start_s = time.perf_counter()
        done = work()
        self._phase_s[phase] = time.perf_counter() - start_s
        return done

    # ---- weights and memory ----------------------------------------------------------------

    def _load(
        self,
        path: str | None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        device: torch.device,
    ) -> Decoder:
        make = {
            "dtype": self._dtype,
            "device": device,
            "max_model_len": self._config.max_model_len,
            "group": Group(),
        }
        if self._config.load_format == "dummy" and tensors is None:
            model = dummy_model(self._hf_config, **make)
        else:
            place = None if path is None else Path(path)
            model = load_model(place, self._hf_config, tensors=tensors, **make)
        model.pack()
        return model

    def _place(self, model: Decoder) -> None:
        self._model = model
        self._compute_hidden = model
        if self._config.torch_compile:
            self._compute_hidden = torch.compile(model, dynamic=True)

    def _make_graphs(self, capture: Capture | None) -> StepGraphs:
        config = self._config
        if config.enforce_eager or (capture is None and not self._is_cuda):
            return StepGraphs([], 1, lambda: _no_capture)
        max_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        sizes = config.cudagraph_capture_sizes
        if sizes is None:
            sizes = ladder(max_rows)
        kept = {size for size in sizes if size <= max_rows}
        return StepGraphs(sorted(kept), 1, CudaCapture if capture is None else lambda: capture)

    def _block_bytes(self) -> int:
        model = self._model.config
        return kv_block_bytes(
            num_layers=model.num_layers,
            block_size=self._config.block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self._kv_dtype,
        )

    def _allocate(self, num_blocks: int) -> list[LayerCache]:
        model = self._model.config
        return allocate_kv_cache(
            num_layers=model.num_layers,
            num_blocks=num_blocks,
            block_size=self._config.block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self._kv_dtype,
            device=self._device,
        )

    def _memory_left(self, free_at_start_bytes: int) -> int:
        """Bytes for KV when everything else has its share; see the header."""
        if not self._is_cuda:
            return available_bytes() // 4
        self._caches = self._allocate(1)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._run_empty(self._largest_step(), SampleInputs(seed=0, top_p=0.9, num_logprobs=0))
        activations = torch.cuda.max_memory_allocated() - before
        costs = []
        sizes = self._graphs.sizes
        for size in sizes[-1:] + sizes[:-1][:1]:
            free_bytes = torch.cuda.mem_get_info()[0]
            self._run_empty([1] * size)
            costs.append(max(0, free_bytes - torch.cuda.mem_get_info()[0]))
        # The largest, and the others, which share its memory and add what the smallest did.
        graphs = sum(costs[:1]) + sum(costs[1:]) * (len(sizes) - 1)
        self._release()
        self._memory_bytes |= {"graphs": graphs, "activations": activations}
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        budget = int(total_bytes * self._config.gpu_memory_utilization)
        left = min(budget - (free_at_start_bytes - free_bytes), free_bytes)
        return left - graphs - activations

    def _largest_step(self) -> list[int]:
        """Query lengths of a step with as many tokens and rows as there can be."""
        config = self._config
        R = min(config.max_num_seqs, config.max_num_batched_tokens)
        T = min(config.max_num_batched_tokens, R * config.max_model_len)
        return [T // R + (row < T % R) for row in range(R)]

    def _blocks_in(self, memory_bytes: int) -> int:
        """Blocks that the memory for KV holds."""
        config, block_bytes = self._config, self._block_bytes()
        name, value = "kv_cache_memory_bytes", config.kv_cache_memory_bytes
        if value is None and self._is_cuda:
            name, value = "gpu_memory_utilization", config.gpu_memory_utilization
        memory_bytes = config.kv_cache_memory_bytes or memory_bytes
        if memory_bytes < 2 * block_bytes:
            rule = f"must leave 2 blocks of {block_bytes} bytes for KV (one is the null block)"
            plan = ", ".join(f"{k} {v}" for k, v in self._memory_bytes.items())
            rule += f", it leaves {memory_bytes} bytes; needed beside it: {plan}"
            raise ConfigError(name, value, rule)
        return memory_bytes // block_bytes

    def _release(self) -> None:
        """Let go of the KV cache and of the graphs that hold its address."""
        self._caches = []
        self._graphs.clear()
        if self._is_cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def _warm_up(self) -> None:
        """Run short steps on the null block, so that no request pays for the kernels that every
        step needs. On a CPU they are too short for the parallel forms of these. Triton compiles a
        kernel anew for a number of tokens or rows that is 1, that is a multiple of 16, and that is
        neither: a GPU sees each of them with each."""
        config = self._config
        longest = min(64, config.max_num_batched_tokens, config.block_size, config.max_model_len)
        steps = [[1], [longest]]
        if self._is_cuda:
            rows = [[1] * 2, [1] * 16, [2] * 8, [3, 2], [2] * 16, [3] + [2] * 15]
            fits = [lens for lens in rows if len(lens) <= config.max_num_seqs]
            steps += [lens for lens in fits if sum(lens) <= config.max_num_batched_tokens]
        steps += [[1] * size for size in self._graphs.sizes[:_NUM_EARLY_GRAPHS]]
        for query_lens in steps:
            for temperature in (0.0, 1.0):
                inputs = SampleInputs(seed=0, temperature=temperature, num_logprobs=0)
                self._run_empty(query_lens, inputs)
        for cache in self._caches:
            cache.k[0].zero_()
            cache.v[0].zero_()

    def _run_empty(self, query_lens: Sequence[int], inputs: SampleInputs | None = None) -> None:
        """A step of new rows, of which every block is the null block."""
        inputs = inputs or SampleInputs(seed=0)
        R, P = len(query_lens), self._config.block_size
        new = [NewRow(row, bytes(4 * n), 0, n, inputs) for row, n in enumerate(query_lens)]
        blocks = [(row, [0] * -(-n // P)) for row, n in enumerate(query_lens)]
        plan = StepPlan(0, 0, new, list(range(R)), list(query_lens), [True] * R, blocks)
        self._next_step = 0
        self.launch(plan).result()
        self._next_step = 0

    # ---- orders ----------------------------------------------------------------------------

    def carry_out(self, order: Order) -> None:
        """Do what an order says, between two steps; see `batch`.

        Raises: `ModelError` for weights that cannot be used, and the old ones stay
        """
        if isinstance(order, LoadWeights):
            self._load_weights(order)
        elif isinstance(order, Sleep):
            if order.level == 2:
                self._model.drop()
            elif self._is_cuda:
                self._model.to("cpu")
            self._release()
        elif isinstance(order, WakeUp):
            if self._model.is_dropped:
                self._place(self._load(self._config.model_path, device=self._device))
            self._model.to(self._device)
            self._caches = self._allocate(self._num_blocks)
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

    def _load_weights(self, order: LoadWeights) -> None:
        """A GPU has no room for two models, and its graphs hold the addresses of the weights: the
        new ones are put together on the host, and copied over the old ones."""
        model = self._load(order.path, order.tensors, device=torch.device("cpu"))
        if not self._is_cuda:
            self._place(model)
            return
        for old, new in zip(self._model.parameters(), model.parameters(), strict=True):
            old.copy_(new)

    # ---- steps -----------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Queue one plan's step on the device.

        Raises: `WorkerError` for a plan that is out of order
        """
        start_s = time.perf_counter()
        if plan.step != self._next_step:
            raise WorkerError(f"step {plan.step} came when {self._next_step} was due")
        self._next_step += 1
        rows = np.array(plan.rows)
        samples = np.array(plan.samples)
        query_lens = np.array(plan.query_lens)
        self._await_tokens(plan, rows[samples])
        for new in plan.new_rows:
            self._start(new)
        changes = self._rows.add_blocks(plan.new_blocks)
        drafted = self._draft(plan, rows, query_lens, samples)
        known_lens = (self._rows.num_computed[rows] + query_lens)[samples]
        num_drafts = np.zeros_like(query_lens)
        if drafted is not None:
            num_drafts[samples] = drafted.num_drafts
        computed_lens = query_lens + num_drafts

        size = self._graphs.size_for(computed_lens)
        counts = 1 + num_drafts[samples]
        sampled_rows = np.repeat(rows[samples], counts)
        sampling = self._sampling_batch(sampled_rows, spread(known_lens, counts))
        picked = {
            "logits_idx": spread(np.cumsum(computed_lens)[samples] - counts, counts),
            "sampling_rows": sampled_rows,
        }
        staged = self._send(rows, computed_lens, picked, size or len(rows), sampling, changes)
        hidden, finite = self._forward(staged, rows, computed_lens, size)
        prompt_logprobs = self._score_prompts(hidden, rows, computed_lens)
        on_device = {name: staged[f"sample_{name}"] for name in sampling.arrays()}
        sampling = replace(sampling, on_device=on_device)
        output = self._sample(hidden[staged["logits_idx"]], sampled_rows, sampling)
        if drafted is None:
            self._last_token_ids.index_copy_(0, staged["sampling_rows"], output.token_ids)
        self._rows.advance(rows, query_lens, rows[samples])
        self._latest = Pending(
            plan,
            self._rows,
            output,
            finite[: len(rows)],
            prompt_logprobs,
            drafted,
            previous=self._latest,
            start_s=start_s,
        )
        return self._latest

    def _start(self, new: NewRow) -> None:
        self._rows.start(new)
        if self._proposer is not None:
            self._proposer.start(new.row)

    def _draft(
        self, plan: StepPlan, rows: np.ndarray, query_lens: np.ndarray, samples: np.ndarray
    ) -> Drafted | None:
        """Put drafts behind the tokens of the rows that may have some."""
        if self._proposer is None or not plan.num_drafts:
            return None
        table = self._rows
        num_drafts = np.zeros_like(rows)
        draft_ids = []
        known_lens = table.num_computed[rows] + query_lens
        most = np.minimum(plan.num_drafts, table.max_len[rows] - known_lens - 1)
        for idx in np.flatnonzero(samples).tolist():
            row, known_len = int(rows[idx]), int(known_lens[idx])
            if most[idx] > 0:
                known = table.token_ids[row, :known_len]
                found = self._proposer.propose(row, known, int(most[idx]))
                num_drafts[idx] = len(found)
                table.draft(row, known_len, found)
                draft_ids.append(found)
            draft_ids.append(_NO_DRAFT)
        if not num_drafts.any():
            return None
        return Drafted(num_drafts[samples], np.concatenate(draft_ids))

    def _await_tokens(self, plan: StepPlan, sampling_rows: np.ndarray) -> None:
        """See to it that the host knows the tokens that it needs for this step."""
        table = self._rows
        restarted = [new.row for new in plan.new_rows]
        adjusted = sampling_rows[table.is_adjusted[sampling_rows]]
        if self._latest is not None and (
            self._proposer is not None
            or table.num_awaited[restarted].any()
            or table.num_awaited[adjusted].any()
        ):
            self._latest.result()

    def _send(
        self,
        rows: np.ndarray,
        query_lens: np.ndarray,
        picked: Mapping[str, np.ndarray],
        num_rows: int,
        sampling: SamplingBatch,
        changes: np.ndarray,
    ) -> dict[str, torch.Tensor]:
        """All that the step needs on the device, padded with null rows to `num_rows`."""
        table = self._rows
        padding = num_rows - len(rows)
        arrays = table.flatten(
            np.append(rows, np.full(padding, table.null_row)),
            np.append(query_lens, np.full(padding, query_lens[0])),
        )
        arrays |= picked
        arrays |= {f"sample_{name}": array for name, array in sampling.arrays().items()}
        while len(changes) > self._max_changes:  # rows whose long prefix was in the cache
            self._change_tables(upload(changes[: self._max_changes], self._device))
            changes = changes[self._max_changes :]
        arrays["changes"] = changes
        staged = self._staging.send(arrays)
        self._change_tables(staged["changes"])
        return staged

    def _change_tables(self, changes: torch.Tensor) -> None:
        """Shapes: changes [U, 2] int64; see `RowTable.add_blocks`"""
        if len(changes):
            places, block_ids = changes.unbind(1)
            self._block_tables.view(-1).index_copy_(0, places, block_ids.int())

    def _forward(
        self,
        staged: Mapping[str, torch.Tensor],
        rows: np.ndarray,
        query_lens: np.ndarray,
        size: int | None,
    ) -> Forwarded:
        """The forward pass of what was staged, by the graph for `size` rows if there is one."""
        width = self._block_tables.shape[1]
        if size is None:
            longest = int((self._rows.num_computed[rows] + query_lens).max())
            blocks = -(-longest // self._config.block_size)
            width = min(width, blocks + -blocks % _WIDTH)

        def run() -> Forwarded:
            batch = ForwardBatch(
                token_ids=decode_token_ids(staged["token_ids"], self._last_token_ids),
                positions=staged["positions"],
                slots=staged["slots"],
                query_starts=staged["query_starts"],
                kv_lens=staged["kv_lens"],
                block_tables=self._block_tables[:, :width].index_select(0, staged["row_ids"]),
                logits_idx=staged["logits_idx"],
            )
            hidden = self._compute_hidden(batch, self._caches)
            # What is wrong with an earlier token of a row shows in its last one, which attends to
            # it.
            last = hidden[batch.query_starts[1:].long() - 1]
            return Forwarded(hidden, torch.isfinite(last).all(dim=1))

        if size is None:
            return run()
        return self._graphs.run(size, {name: staged[name] for name in FORWARD_ARRAYS}, run)

    def _score_prompts(
        self, hidden: torch.Tensor, rows: np.ndarray, query_lens: np.ndarray
    ) -> list[tuple[int, Logprobs]]:
        """Log-probabilities of prompt tokens, for the rows that asked. The logits of position p
        score the token after it; a few positions at a time, so that the memory is bounded. Their
        place is made before: small tensors kept from every turn would lie between the large ones,
        and no freed logits would be large enough for the next."""
        known = self._rows
        scored = []
        ends = np.cumsum(query_lens)
        for idx in np.flatnonzero(known.num_scored[rows] < known.prompt_len[rows]).tolist():
            row, end = rows[idx], int(ends[idx])
            num_computed = int(known.num_computed[row])
            first = int(known.num_scored[row])
            last = min(num_computed + int(query_lens[idx]), int(known.prompt_len[row]) - 1)
            count = known.inputs[row].num_prompt_logprobs
            if last < first:
                continue
            places = torch.arange(last + 1 - first, device=self._device)
            found = Logprobs.padding(places, count)
            for start in range(first, last + 1, LOGPROB_ROWS):
                targets = known.token_ids[row, start : min(start + LOGPROB_ROWS, last + 1)]
                offset = end - int(query_lens[idx]) + start - 1 - num_computed
                part = gather_logprobs(
                    self._model.compute_logits(hidden[offset : offset + len(targets)]),
                    upload(targets, self._device),
                    np.full(len(targets), count),
                    normalized=self._logprobs_mode.normalized,
                )
                found.put(start - first, part)
            known.num_scored[row] = last + 1
            scored.append((idx, found))
        return scored

    def _sampling_batch(self, rows: np.ndarray, positions: np.ndarray) -> SamplingBatch:
        known = self._rows
        return SamplingBatch(
            temperature=known.temperature[rows],
            top_k=known.top_k[rows],
            top_p=known.top_p[rows],
            min_p=known.min_p[rows],
            seeds=known.seed[rows].view(np.int64),
            children=known.child[rows],
            positions=positions,
            num_logprobs=known.num_logprobs[rows],
        )

    def _sample(self, hidden: torch.Tensor, rows: np.ndarray, batch: SamplingBatch) -> SampleOutput:
        known = self._rows
        adjusted = [
            AdjustedRow(
                idx, known.inputs[rows[idx]], known.token_ids[rows[idx], : batch.positions[idx]]
            )
            for idx in np.flatnonzero(known.is_adjusted[rows]).tolist()
        ]
        logits = self._model.compute_logits(hidden)
        return sample(logits, batch, adjusted, self._logprobs_mode)


def _no_capture(_run: Callable[[], Forwarded]) -> Captured:
    raise AssertionError("a ladder without sizes records nothing")
