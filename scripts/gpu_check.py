"""Checks and measures minivllm on one GPU: a table, and one JSON line.

    python scripts/gpu_check.py --state check.json   all parts; made for 8 minutes on an H200
    python scripts/gpu_check.py --part attention     one part
    python scripts/gpu_check.py --dry-run            the same code on a CPU, at toy sizes

    kernels     each kernel against a float64 reference
    tokens      graphs on and off, launched ahead or not: the same tokens
    decode      step time against the bytes a step must read, at the bandwidth measured here
    prefill     step time against the operations it must do, at the GEMM rate measured here
    attention   alone: TB/s and TFLOP/s, beside torch's SDPA and FlexAttention
    engine      256 sequences of 100 to 1,024 tokens in and out; the share of time the GPU idles

Nothing is downloaded: the models are real shapes with random weights, made on the device. Every
case is written to the state file when it is done, and is not run again; so a run that was killed
goes on where it was. Figures of a dry run mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from minivllm import LLM, SamplingParams
from minivllm.attention import ForwardBatch, LayerCache, paged_attention, store_kv
from minivllm.batch import NewRow, SampleInputs, StepPlan
from minivllm.config import EngineConfig
from minivllm.layers import rms_norm, rope_table, split_qkv
from minivllm.model_runner import ModelRunner
from minivllm.pending import Pending
from minivllm.sampling import SamplingBatch, sample

Figures = dict[str, Any]
Case = tuple[str, Callable[[], Figures]]

P = 16  # block size
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def _config(family: str, sizes: tuple[int, ...], **more: Any) -> Figures:
    shared = {"architectures": [f"{family}ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    return shared | dict(zip(_SIZES, sizes, strict=True)) | {"tie_word_embeddings": True} | more


MODELS = {
    "Qwen3-0.6B": _config("Qwen3", (1024, 3072, 28, 16, 8, 128, 151936, 40960)),
    "Qwen3-4B": _config("Qwen3", (2560, 9728, 36, 32, 8, 128, 151936, 40960)),
    "Llama-3.1-8B": _config(
        "Llama",
        (4096, 14336, 32, 32, 8, 128, 128256, 131072),
        tie_word_embeddings=False,
    ),
}
TOY = _config("Qwen3", (64, 96, 2, 4, 2, 16, 300, 512))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large everything is; by default, for a card."""

    device: torch.device = torch.device("cuda")  # noqa: RUF009 (it cannot change)
    dtype: torch.dtype = torch.bfloat16
    models: Mapping[str, Figures] = field(default_factory=lambda: MODELS)
    batches: tuple[int, ...] = (1, 8, 64, 256)
    contexts: tuple[int, ...] = (512, 8192)
    prompt_lens: tuple[int, ...] = (2048, 8192)
    heads: tuple[int, int, int] = (32, 8, 128)
    """Query heads, key/value heads, head dimension of the attention that is measured alone."""
    num_seqs: int = 256
    seq_lens: tuple[int, int] = (100, 1024)
    num_steps: int = 40
    stream_bytes: int = 4 << 30
    gemm_size: int = 8192


DRY = Scale(
    device=torch.device("cpu"),
    dtype=torch.float32,
    models={"toy": TOY},
    batches=(1, 3),
    contexts=(20, 40),
    prompt_lens=(32,),
    heads=(4, 2, 16),
    num_seqs=4,
    seq_lens=(5, 12),
    num_steps=3,
    stream_bytes=1 << 20,
    gemm_size=64,
)


# ------------------------------------------------------------------------------------ measuring


def synchronize(scale: Scale) -> None:
    """Wait until the device has done all that was asked of it."""
    if scale.device.type == "cuda":
        torch.cuda.synchronize()


def seconds(scale: Scale, work: Callable[[], object]) -> float:
    """The median time of one call, of which many are queued, after some for nothing."""
    for _ in range(3):
        work()
    times = []
    for _ in range(5):
        synchronize(scale)
        start_s = time.perf_counter()
        for _ in range(scale.num_steps):
            work()
        synchronize(scale)
        times.append((time.perf_counter() - start_s) / scale.num_steps)
    return statistics.median(times)


def bandwidth(scale: Scale) -> float:
    """Bytes per second that a sum over a large tensor reads: what decoding can hope for."""
    x = torch.zeros(scale.stream_bytes // 4, device=scale.device)
    return scale.stream_bytes / seconds(scale, x.sum)


def gemm_rate(scale: Scale) -> float:
    """Operations per second of a large square product."""
    n = scale.gemm_size
    a, b = (torch.randn(n, n, device=scale.device, dtype=scale.dtype) for _ in range(2))
    return 2 * n**3 / seconds(scale, lambda: a @ b)


# -------------------------------------------------------------------------------------- kernels


def make_batch(scale: Scale, contexts: list[int], query_lens: list[int]) -> ForwardBatch:
    """Rows whose blocks lie in random order; block 0 stays the null block."""
    kv_lens = [c + q for c, q in zip(contexts, query_lens, strict=True)]
    widths = [-(-n // P) for n in kv_lens]
    width = -(-max(widths) // 16) * 16
    blocks = (torch.randperm(sum(widths)) + 1).int()
    tables = torch.zeros(len(kv_lens), width, dtype=torch.int32)
    for row, part in enumerate(blocks.split(widths)):
        tables[row, : len(part)] = part
    positions = [torch.arange(c, c + q) for c, q in zip(contexts, query_lens, strict=True)]
    slots = [tables[row, p // P].long() * P + p % P for row, p in enumerate(positions)]
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    tensors = {
        "token_ids": torch.zeros(sum(query_lens), dtype=torch.int64),
        "positions": torch.cat(positions),
        "slots": torch.cat(slots),
        "query_starts": starts,
        "kv_lens": torch.tensor(kv_lens).int(),
        "block_tables": tables,
        "logits_idx": starts[1:].long() - 1,
    }
    return ForwardBatch(**{name: x.to(scale.device) for name, x in tensors.items()})


def make_cache(batch: ForwardBatch, K: int, D: int, dtype: torch.dtype) -> LayerCache:
    """A cache of random keys and values, as large as the batch needs."""
    shape = (int(batch.block_tables.max()) + 1, P, K, D)
    device = batch.kv_lens.device
    k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    return LayerCache(k, v)


def exact_attention(
    q: torch.Tensor, cache: LayerCache, batch: ForwardBatch, window: int, soft_cap: float
) -> torch.Tensor:
    """In float64, row by row. Shapes: q [T, H, D]; out [T, H, D]"""
    out = []
    group = q.shape[1] // cache.k.shape[2]
    starts = batch.query_starts.tolist()
    for r, kv_len in enumerate(batch.kv_lens.tolist()):
        blocks = batch.block_tables[r, : -(-kv_len // P)].long()
        k, v = (
            x[blocks].double().flatten(0, 1)[:kv_len].repeat_interleave(group, 1)
            for x in (cache.k, cache.v)
        )
        rows = q[starts[r] : starts[r + 1]].double()
        scores = torch.einsum("qhd,shd->hqs", rows, k) / math.sqrt(q.shape[2])
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        at = torch.arange(kv_len - len(rows), kv_len, device=q.device)[:, None]
        distance = at - torch.arange(kv_len, device=q.device)
        hidden = (distance < 0) | (distance >= (window or kv_len))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqs,shd->qhd", weights, v))
    return torch.cat(out)


def error(found: torch.Tensor, exact: torch.Tensor) -> Figures:
    """The largest difference, beside the largest that the dtype's own rounding explains."""
    worst = (found.double() - exact).abs().max().item()
    # Sums of many terms lose more of float32 than the rounding to 16 bits hides.
    steps = 16 if found.dtype == torch.float32 else 4
    bound = steps * torch.finfo(found.dtype).eps * max(1.0, exact.abs().max().item())
    return {"max_error": worst, "bound": bound, "ok": worst <= bound}


def check_attention(
    scale: Scale, dtype: torch.dtype, D: int, window: int, soft_cap: float
) -> Figures:
    """Decode, chunk, verification and a long context in one batch, after `store_kv`."""
    K, H = 2, 8
    longest = 16 * max(scale.contexts) // 64 * 4
    batch = make_batch(scale, [longest, 0, 37, 5, 0], [1, 1, 4, 21, 16])
    cache = make_cache(batch, K, D, dtype)
    T = len(batch.positions)
    q, k, v = (torch.randn(T, n, D, device=scale.device).to(dtype) for n in (H, K, K))
    store_kv(k, v, cache, batch.slots)
    stored = cache.k.flatten(0, 1)[batch.slots]
    scale_factor = D**-0.5
    found = paged_attention(q, cache, batch, scale=scale_factor, window=window, soft_cap=soft_cap)
    figures = error(found, exact_attention(q, cache, batch, window, soft_cap))
    figures["ok"] &= torch.equal(stored, k)
    return figures


def check_layers(scale: Scale, dtype: torch.dtype) -> Figures:
    """Norm, and the rotation of q and k."""
    x = torch.randn(33, 256, device=scale.device).to(dtype)
    weight = torch.randn(256, device=scale.device).to(dtype)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    figures = error(rms_norm(x, weight, eps=1e-6), exact * weight.double())
    rope = rope_table(1e4 ** -(torch.arange(32) / 32), 1.0, 64).to(scale.device)
    qkv = torch.randn(33, 8 * 64, device=scale.device).to(dtype)
    positions = torch.arange(33, device=scale.device)
    q, k, v = split_qkv(qkv, positions, rope, num_heads=4, num_kv_heads=2)
    heads = qkv.double().view(33, 8, 64)
    cos, sin = rope[positions].double().unsqueeze(2).unbind(1)
    a, b = heads[:, :6].chunk(2, -1)
    exact = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    rotated = error(torch.cat((q, k), 1), exact)
    return {
        "max_error": max(figures["max_error"], rotated["max_error"]),
        "bound": max(figures["bound"], rotated["bound"]),
        "ok": figures["ok"] and rotated["ok"] and torch.equal(v, qkv.view(33, 8, 64)[:, 6:]),
    }


def check_sampling(scale: Scale) -> Figures:
    """Draws on the device are those of the CPU, whose noise is correctly rounded."""
    rng = np.random.default_rng(0)
    S, V = 64, 5000
    logits = torch.from_numpy(rng.standard_normal((S, V)).astype(np.float32) * 3)
    batch = SamplingBatch(
        temperature=(np.arange(S) % 4 / 2).astype(np.float32),
        top_k=np.where(np.arange(S) % 3 == 0, 50, 0),
        top_p=np.where(np.arange(S) % 5 == 0, 0.9, 1.0).astype(np.float32),
        min_p=np.zeros(S, np.float32),
        seeds=rng.integers(-(2**62), 2**62, S),
        children=np.arange(S) % 2,
        positions=rng.integers(0, 10000, S),
        num_logprobs=np.full(S, -1),
    )
    found = sample(logits.to(scale.device), batch).token_ids.cpu()
    num_different = int((found != sample(logits, batch).token_ids).sum())
    return {"rows": S, "different": num_different, "ok": num_different == 0}


def kernels(scale: Scale) -> Iterator[Case]:
    """Each kernel over the dtypes, head dimensions and options that models have."""
    sizes = {torch.float32: (64, 80, 96, 128, 256)}
    if scale.device.type == "cuda":  # each is compiled, so not everything with everything
        sizes |= {torch.bfloat16: sizes[torch.float32], torch.float16: (128,)}
        sizes[torch.float32] = (128,)
    for dtype, head_dims in sizes.items():
        name = str(dtype).removeprefix("torch.")
        for D, (window, soft_cap) in itertools.product(head_dims, ((0, 0), (19, 0), (0, 30))):
            yield (
                f"attention {name} D={D} window={window} cap={soft_cap}",
                functools.partial(check_attention, scale, dtype, D, window, soft_cap),
            )
        yield f"norm, rope {name}", functools.partial(check_layers, scale, dtype)
    yield "sampling", functools.partial(check_sampling, scale)


# ---------------------------------------------------------------------------------- whole models


def model_dir(hf_config: Figures) -> Path:
    """A directory with that config, and a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    (path / "config.json").write_text(json.dumps(hf_config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def settings(scale: Scale, model: str, **changes: Any) -> Figures:
    """What all engines here share."""
    longest = max(*scale.contexts, *scale.prompt_lens) + 256
    return {
        "model": str(model_dir(scale.models[model])),
        "device": scale.device.type,
        "load_format": "dummy",
        "block_size": P,
        "max_num_seqs": max(scale.batches),
        "max_model_len": min(longest, scale.models[model]["max_position_embeddings"]),
        "max_num_batched_tokens": max(2048, *scale.prompt_lens),
        "kv_cache_memory_bytes": None if scale.device.type == "cuda" else 64 << 20,
    } | changes


class Steps:
    """A runner, and the host's part: plans for rows that begin with a context of their own."""

    def __init__(self, scale: Scale, model: str, **changes: Any) -> None:
        values = settings(scale, model, **changes)
        _, config = EngineConfig(**values).resolve(
            model_path=values["model"], model_max_len=values["max_model_len"]
        )
        free(scale)
        self.scale = scale
        self.runner = ModelRunner(config)
        self.ready = self.runner.ready(0)
        self.max_model_len = config.max_model_len
        self._step = 0
        self._rows: list[int] = []

    def fits(self, batch: int, context: int) -> bool:
        """Whether the KV cache holds so many rows."""
        return batch * -(-(context + 200) // P) < self.ready.num_blocks

    def start(self, contexts: list[int], query_len: int, temperature: float = 0.0) -> Pending:
        """Rows whose first tokens are taken to be in the cache; what that holds does not matter."""
        self._rows = list(range(len(contexts)))
        new, tables, first = [], [], 1
        rng = np.random.default_rng(0)
        for row, context in enumerate(contexts):
            known = context + query_len
            num_blocks = -(-min(known + 200, self.max_model_len) // P)
            inputs = SampleInputs(seed=row, temperature=temperature, prompt_len=known)
            token_ids = rng.integers(0, 256, known, np.int32).tobytes()
            new.append(NewRow(row, token_ids, context, known, inputs))
            tables.append((row, list(range(first, first + num_blocks))))
            first += num_blocks
        return self._launch(new, tables, query_len)

    def decode(self) -> Pending:
        """One more token for each row."""
        return self._launch([], [], 1)

    def _launch(self, new: list[NewRow], tables: list[Any], query_len: int) -> Pending:
        count = len(self._rows)
        plan = StepPlan(0, self._step, new, self._rows, [query_len] * count, [True] * count, tables)
        self._step += 1
        return self.runner.launch(plan)

    def step_s(self) -> float:
        """Median seconds of a decoding step, each launched before the last one's result."""
        last = self.decode()
        times = []
        for _ in range(2 * self.scale.num_steps):
            start_s = time.perf_counter()
            following = self.decode()
            last.result()
            last = following
            times.append(time.perf_counter() - start_s)
        last.result()
        return statistics.median(times[len(times) // 4 :])

    def close(self) -> None:
        """Give the memory back."""
        del self.runner
        free(self.scale)


def free(scale: Scale) -> None:
    """Return unused memory to the device."""
    gc.collect()
    if scale.device.type == "cuda":
        torch.cuda.empty_cache()


def generate(steps: Steps, depth: int, temperature: float) -> list[list[int]]:
    """What 8 rows generate, with `depth` steps launched before the first result is asked for."""
    rows = min(8, max(steps.scale.batches))
    pending = [steps.start([0] * rows, 16, temperature)]
    found: list[list[int]] = [[] for _ in range(rows)]
    for n in range(2 * steps.scale.num_steps + depth):
        if n >= depth - 1:
            for row, new in enumerate(pending.pop(0).result().tokens):
                found[row] += new
        if n < 2 * steps.scale.num_steps:
            pending.append(steps.decode())
    return found


def tokens(scale: Scale) -> Iterator[Case]:
    """Graphs and overlap against neither: how many of 8 rows differ, greedy and sampled."""

    def compare() -> Figures:
        figures: Figures = {}
        expected = {}
        for mode in ("eager", "graph"):
            eager = mode == "eager"
            steps = Steps(
                scale,
                next(iter(scale.models)),
                kv_cache_memory_bytes=1 << 28,
                enforce_eager=eager,
            )
            for temperature, depth in itertools.product((0.0, 1.0), (1, 2)):
                found = generate(steps, depth, temperature)
                old = expected.setdefault(temperature, found)
                name = f"{mode} t={temperature:g} {'ahead' if depth == 2 else 'in turn'}"
                figures[name] = sum(a != b for a, b in zip(found, old, strict=True))
            steps.close()
        return figures | {"ok": not any(figures.values())}

    yield "rows with other tokens", compare


def kv_token_bytes(hf_config: Figures) -> int:
    """Bytes of keys and values per token, in 16 bits."""
    sizes = ("num_hidden_layers", "num_key_value_heads", "head_dim")
    return 4 * math.prod(hf_config[name] for name in sizes)


def per_model(
    scale: Scale, cases: Callable[[str, Callable[[], Steps]], Iterator[Case]]
) -> Iterator[Case]:
    """Cases of each model; its runner is made when it is first needed, and closed after them."""
    for model in scale.models:
        steps = functools.cache(functools.partial(Steps, scale, model))
        yield from cases(model, steps)
        if steps.cache_info().currsize:
            steps().close()


def decode(scale: Scale) -> Iterator[Case]:
    """Each model at each batch and context that fits."""
    rate = functools.cache(lambda: bandwidth(scale))

    def measure(steps: Callable[[], Steps], model: str, batch: int, context: int) -> Figures:
        rate()  # before the KV cache takes the memory
        if not steps().fits(batch, context):
            return {"skipped": "does not fit in memory"}
        steps().start([context - 1] * batch, 1).result()
        step_s = steps().step_s()
        config = scale.models[model]
        weights = steps().ready.memory_bytes["weights"]
        if not config["tie_word_embeddings"]:  # of the embedding only a few lines are read
            weights -= 2 * config["vocab_size"] * config["hidden_size"]
        needed = weights + batch * context * kv_token_bytes(config)
        return {
            "step_ms": step_s * 1e3,
            "limit_ms": needed / rate() * 1e3,
            "of_bandwidth": needed / rate() / step_s,
            "measured_TB_s": rate() / 1e12,
        }

    def cases(model: str, steps: Callable[[], Steps]) -> Iterator[Case]:
        for batch, context in itertools.product(scale.batches, scale.contexts):
            name = f"decode {model} batch={batch} context={context}"
            yield name, functools.partial(measure, steps, model, batch, context)

    yield from per_model(scale, cases)


def prefill(scale: Scale) -> Iterator[Case]:
    """One prompt in one step."""
    rate = functools.cache(lambda: gemm_rate(scale))

    def measure(steps: Callable[[], Steps], model: str, length: int) -> Figures:
        rate()
        config = scale.models[model]
        runner = steps()
        times = []
        for _ in range(5):
            synchronize(scale)
            start_s = time.perf_counter()
            runner.start([0], length).result()
            times.append(time.perf_counter() - start_s)
        step_s = statistics.median(times[1:])
        num_weights = runner.ready.memory_bytes["weights"] // scale.dtype.itemsize
        num_weights -= config["vocab_size"] * config["hidden_size"]  # looked up, not multiplied
        if not config["tie_word_embeddings"]:  # logits are computed of the last token alone
            num_weights -= config["vocab_size"] * config["hidden_size"]
        heads = kv_token_bytes(config) // 4 * config["num_attention_heads"]  # and layers
        heads //= config["num_key_value_heads"]
        num_ops = 2 * num_weights * length + 2 * heads * length**2
        return {
            "step_ms": step_s * 1e3,
            "TFLOP_s": num_ops / step_s / 1e12,
            "of_gemm_rate": num_ops / step_s / rate(),
            "gemm_TFLOP_s": rate() / 1e12,
        }

    def cases(model: str, steps: Callable[[], Steps]) -> Iterator[Case]:
        for length in scale.prompt_lens:
            yield f"prefill {model} T={length}", functools.partial(measure, steps, model, length)

    yield from per_model(scale, cases)


# ------------------------------------------------------------------------------------ attention


def attention(scale: Scale) -> Iterator[Case]:
    """Decode in TB/s of keys and values, prefill in TFLOP/s; torch's forms on contiguous rows."""
    H, K, D = scale.heads
    rate = functools.cache(lambda: bandwidth(scale))

    def contiguous(batch: int, context: int, queries: int) -> list[torch.Tensor]:
        shapes = ((batch, H, queries, D), (batch, K, context, D), (batch, K, context, D))
        return [torch.randn(s, device=scale.device, dtype=scale.dtype) for s in shapes]

    def flex_s(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> float:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = None
        if causal:
            mask = create_block_mask(
                lambda _b, _h, i, j: i >= j, None, None, q.shape[2], k.shape[2], str(q.device)
            )
        run = torch.compile(flex_attention) if scale.device.type == "cuda" else flex_attention
        return seconds(scale, lambda: run(q, k, v, block_mask=mask, enable_gqa=True))

    def measure(batch: int, context: int, queries: int) -> Figures:
        needed = 2 * batch * context * K * D * scale.dtype.itemsize
        num_ops = 4 * batch * H * D * queries * (context - (queries - 1) / 2)
        if scale.device.type == "cuda" and 4 * needed > torch.cuda.mem_get_info()[0]:
            return {"skipped": "does not fit in memory"}
        step = make_batch(scale, [context - queries] * batch, [queries] * batch)
        cache = make_cache(step, K, D, scale.dtype)
        x = torch.randn(batch * queries, H, D, device=scale.device, dtype=scale.dtype)
        ours = functools.partial(paged_attention, x, cache, step, scale=D**-0.5)
        ours_s = seconds(scale, ours)
        del cache, ours
        q, k, v = contiguous(batch, context, queries)
        causal = queries > 1
        sdpa_s = seconds(
            scale,
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
        )
        times = {"ours": ours_s, "sdpa": sdpa_s}
        if context == max(scale.contexts):  # each shape is compiled
            times["flex"] = flex_s(q, k, v, causal)
        figures: Figures = {f"{name}_ms": s * 1e3 for name, s in times.items()}
        figures |= {f"{name}_TB_s": needed / s / 1e12 for name, s in times.items()}
        figures |= {f"{name}_TFLOP_s": num_ops / s / 1e12 for name, s in times.items()}
        if not causal:
            figures["of_bandwidth"] = needed / rate() / ours_s
        free(scale)
        return figures

    for batch, context in itertools.product(scale.batches, scale.contexts):
        name = f"attention decode batch={batch} context={context}"
        yield name, functools.partial(measure, batch, context, 1)
    for length in scale.prompt_lens:
        yield f"attention prefill T={length}", functools.partial(measure, 1, length, length)


# --------------------------------------------------------------------------------------- engine


def engine(scale: Scale) -> Iterator[Case]:
    """Throughput as a user sees it, with a worker process; and how long the device idles."""

    def requests(low: int, high: int) -> tuple[list[list[int]], list[SamplingParams]]:
        rng = random.Random(0)
        lens = [(rng.randint(low, high), rng.randint(low, high)) for _ in range(scale.num_seqs)]
        prompts = [[rng.randrange(256) for _ in range(num_in)] for num_in, _ in lens]
        shared = {"temperature": 0.6, "ignore_eos": True}
        return prompts, [SamplingParams(max_tokens=num_out, **shared) for _, num_out in lens]

    def measure(model: str) -> Figures:
        prompts, params = requests(*scale.seq_lens)
        few = scale.seq_lens[0]
        short, _ = requests(few, few)
        shared = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=few)
        traces = Path(tempfile.mkdtemp(prefix="gpu-check-trace-"))
        changes = {"max_model_len": 2 * scale.seq_lens[1], "distributed_executor_backend": "mp"}
        with LLM(**settings(scale, model, **changes)) as llm:
            llm.generate(short, shared, use_tqdm=False)  # records the graphs
            start_s = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            wall_s = time.perf_counter() - start_s
            llm.start_profile(str(traces))
            llm.generate(short, shared, use_tqdm=False)
            llm.stop_profile()
        num_in = sum(map(len, prompts))
        num_out = sum(len(output.outputs[0].token_ids) for output in outputs)
        (trace,) = traces.glob("*.json")
        is_gpu = scale.device.type == "cuda"
        return {
            "seconds": wall_s,
            "tokens_in": num_in,
            "tokens_out": num_out,
            "out_tok_s": num_out / wall_s,
            "total_tok_s": (num_in + num_out) / wall_s,
            "idle_share": idle_share(trace, _GPU_EVENTS if is_gpu else {"cpu_op"}),
        }

    for model in dict.fromkeys((next(iter(scale.models)), list(scale.models)[-1])):
        yield f"engine {model}", functools.partial(measure, model)


_GPU_EVENTS = {"kernel", "gpu_memcpy", "gpu_memset"}


def idle_share(trace: Path, categories: set[str]) -> float:
    """The share of the middle half of a trace in which no event of these categories runs."""
    spans = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in json.loads(trace.read_text())["traceEvents"]
        if event.get("cat") in categories and "dur" in event
    )
    first, last = spans[0][0], max(end for _, end in spans)
    low, high = first + (last - first) / 4, last - (last - first) / 4
    busy, reached = 0.0, low
    for start, end in spans:
        start, end = max(start, reached), min(end, high)
        if end > start:
            busy += end - start
            reached = end
    return 1 - busy / (high - low)


# ------------------------------------------------------------------------------------------ main

PARTS: dict[str, Callable[[Scale], Iterator[Case]]] = {
    "kernels": kernels,
    "tokens": tokens,
    "decode": decode,
    "prefill": prefill,
    "attention": attention,
    "engine": engine,
}


class State:
    """What has been measured, by case; kept in a file if there is one."""

    def __init__(self, file: Path | None, scale: Scale) -> None:
        where = "cpu, dry run"
        if scale.device.type == "cuda":
            where = torch.cuda.get_device_name()
        header = {"device": where, "torch": torch.__version__, "cases": {}}
        self.values: Figures = header
        self._file = file
        if file is not None and file.exists():
            self.values = json.loads(file.read_text())
            for name in ("device", "torch"):
                if self.values[name] != header[name]:
                    sys.exit(f"{file} is of {self.values[name]}, this is {header[name]}")

    def add(self, name: str, figures: Figures) -> None:
        """Keep a case; a kill at any moment leaves the old file or the new one."""
        self.values["cases"][name] = figures
        if self._file is not None:
            part = self._file.with_suffix(".part")
            part.write_text(json.dumps(self.values))
            part.replace(self._file)


def run(scale: Scale, parts: list[str], state: State) -> None:
    """Every case that is not in the state yet. One that raises is kept as such."""
    for part in parts:
        for name, measure in PARTS[part](scale):
            if name not in state.values["cases"]:
                try:
                    figures = measure()
                except Exception as why:  # noqa: BLE001 (the other cases are still worth having)
                    figures = {"ok": False, "raised": f"{type(why).__name__}: {why}"[:500]}
                state.add(name, figures)
            print(line(name, state.values["cases"][name]), flush=True)


def line(name: str, figures: Figures) -> str:
    """A row of the table."""
    shown = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items())
    return f"{name:52} {'  '.join(shown)}"


def main() -> int:
    """Run what the flags say; 1 if any case failed."""
    parser = argparse.ArgumentParser(description="check and measure minivllm on one GPU")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this part")
    parser.add_argument("--state", type=Path, help="JSON file to go on from, and to write")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, at toy sizes")
    args = parser.parse_args()
    if args.dry_run and "TRITON_INTERPRET" not in os.environ:  # read when a kernel is decorated
        env = os.environ | {"TRITON_INTERPRET": "1"}
        return subprocess.run([sys.executable, *sys.argv], env=env, check=False).returncode
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --dry-run runs on a CPU")
    scale = DRY if args.dry_run else Scale()
    state = State(args.state, scale)
    start_s = time.perf_counter()
    with torch.inference_mode():
        run(scale, args.part or list(PARTS), state)
    cases = state.values["cases"]
    failed = [name for name, figures in cases.items() if not figures.get("ok", True)]
    print(f"{len(cases)} cases, {len(failed)} failed, {time.perf_counter() - start_s:.0f} s")
    print(json.dumps(state.values))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
