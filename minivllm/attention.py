"""The KV cache's layout, and attention over it: one function for decode, chunk and verification.

    T  tokens in the step      P  block size        D  head dim        L  layers
    R  rows (requests)         H  query heads       E  hidden          k  drafts
    B  blocks per row          K  key/value heads   V  vocabulary      S  rows that sample
    N  blocks in the cache

All rows of a step are flattened into one sequence of T tokens, without padding. Row r owns the
queries query_starts[r] : query_starts[r + 1]; they are the last ones of its kv_lens[r] positions:

    row r   [ context ................ | queries ]     decode: 1 query; verification: k + 1;
            0                            kv_lens[r]    a chunk of a prompt: many. No other phases.

Position p of a row lives in slot block_tables[r, p // P] * P + p % P. `store_kv` writes the step's
keys and values into their slots, then `paged_attention` reads whole rows through their tables.

Several implementations, one signature: the torch twins are written for reading and are the oracle
in tests; on a GPU, Triton kernels (`attention_kernels`, imported when first needed, so that a
machine without a GPU needs no Triton); on a CPU in float32, numba reads blocks in place where a row
has few queries, and a row's keys are gathered for matrix products where it has many.

Invariants: nothing beyond kv_lens[r] is read, so what an unused slot holds (NaN too) never matters;
rows are independent. Which slot belongs to whom: `blocks`. PagedAttention: Kwon et al., SOSP 2023;
online softmax: Milakov and Gimelshein, 2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch  # before numba, which then shares torch's OpenMP runtime
import torch.nn.functional as F
from numba import njit, prange

# Rows with more queries than this are faster as matrix products over gathered keys.
_MAX_LOOP_QUERIES = 4
# Queries per matrix product: bounds the score matrix, and skips most of what causality masks.
_TILE = 256
# The largest number of float8_e4m3fn.
E4M3_MAX = 448.0
# Below this many key reads a second thread costs more than it brings.
_MIN_PARALLEL_KEYS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """The tensors of one step; see the module header."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, in each token's own sequence
    slots: torch.Tensor  # [T] int64, where each token's key and value are stored
    query_starts: torch.Tensor  # [R + 1] int32
    kv_lens: torch.Tensor  # [R] int32, this step's tokens included
    block_tables: torch.Tensor  # [R, B] int32, 0 past a row's blocks
    logits_idx: torch.Tensor  # [S] int64, which of the T tokens need logits


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values; a float8 cache holds them divided by their scales."""

    k: torch.Tensor  # [N, P, K, D]
    v: torch.Tensor  # [N, P, K, D]
    k_scale: float = 1.0
    v_scale: float = 1.0


def allocate_kv_cache(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[LayerCache]:
    """A zeroed cache per layer. On a CPU the memory is only taken when a block is first written."""
    shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
    if torch.device(device).type == "cpu":  # torch.zeros would write every page
        pages = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
        return [LayerCache(k, v) for k, v in pages.view(dtype).view(shape)]
    return [LayerCache(k, v) for k, v in torch.zeros(shape, dtype=dtype, device=device)]


def kv_block_bytes(
    *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes of one block over all layers.

    >>> kv_block_bytes(
    ...     num_layers=30, block_size=16, num_kv_heads=3, head_dim=64, dtype=torch.float32
    ... )
    737280
    """
    return num_layers * 2 * block_size * num_kv_heads * head_dim * dtype.itemsize


# ------------------------------------------------------------------------------------ store_kv


def store_kv(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> None:
    """Write the step's keys and values into their slots.

    Shapes: k, v [T, K, D]; slots [T]
    """
    if k.is_cuda:
        from minivllm import attention_kernels

        attention_kernels.store_kv(
            k, v, cache.k, cache.v, slots, k_scale=cache.k_scale, v_scale=cache.v_scale
        )
    elif on_numba(k) and on_numba(cache.k):
        _store_kv_loop(k.numpy(), v.numpy(), cache.k.numpy(), cache.v.numpy(), slots.numpy())
    else:
        store_kv_torch(k, v, cache, slots)


def store_kv_torch(
    k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slots: torch.Tensor
) -> None:
    """The twin of `store_kv`."""
    for x, stored, scale in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        if stored.dtype == torch.float8_e4m3fn:
            x = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(stored.dtype)
            # Its bytes: torch cannot assign float8 by index on every device.
            x, stored = x.view(torch.uint8), stored.view(torch.uint8)
        stored.flatten(0, 1)[slots] = x.to(stored.dtype)


@njit(nogil=True, cache=True)
def _store_kv_loop(k, v, k_cache, v_cache, slots):  # noqa: ANN001, ANN202 (numba infers)
    P = k_cache.shape[1]
    for t in range(len(slots)):
        block, offset = slots[t] // P, slots[t] % P
        k_cache[block, offset] = k[t]
        v_cache[block, offset] = v[t]


# ----------------------------------------------------------------------------- paged attention


def paged_attention(
    q: torch.Tensor,
    cache: LayerCache,
    batch: ForwardBatch,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of the step's queries over each row's cached keys.

    `window` > 0: a query sees only the last `window` positions, its own included.
    `soft_cap` > 0: scores s become soft_cap * tanh(s / soft_cap).

    Shapes: q [T, H, D]; out [T, H, D]
    Needs:  the step's own keys and values stored
    """
    if q.is_cuda:
        from minivllm import attention_kernels

        return attention_kernels.paged_attention(
            q,
            cache.k,
            cache.v,
            batch.query_starts,
            batch.kv_lens,
            batch.block_tables,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            num_sms=torch.cuda.get_device_properties(q.device).multi_processor_count,
        )
    if not (on_numba(q) and on_numba(cache.k)):
        return paged_attention_torch(
            q, cache, batch, scale=scale, window=window, soft_cap=soft_cap
        )
    return _paged_attention_cpu(q, cache, batch, scale=scale, window=window, soft_cap=soft_cap)


def _paged_attention_cpu(
    q: torch.Tensor,
    cache: LayerCache,
    batch: ForwardBatch,
    *,
    scale: float,
    window: int,
    soft_cap: float,
) -> torch.Tensor:
    """`paged_attention` in float32 on a CPU."""
    out = torch.empty_like(q)
    starts, kv_lens = batch.query_starts.numpy(), batch.kv_lens.numpy()
    query_lens = starts[1:] - starts[:-1]
    long_rows = np.flatnonzero(query_lens > _MAX_LOOP_QUERIES)
    if len(long_rows) < len(query_lens):
        loop = _attend_parallel if kv_lens.sum() >= _MIN_PARALLEL_KEYS else _attend_serial
        loop(
            q.numpy(),
            cache.k.numpy(),
            cache.v.numpy(),
            starts,
            kv_lens,
            batch.block_tables.numpy(),
            np.float32(scale),
            window,
            np.float32(soft_cap),
            out.numpy(),
        )
    for r in long_rows.tolist():
        first, last = int(starts[r]), int(starts[r + 1])
        k, v = _gather(cache, batch.block_tables[r], int(kv_lens[r]))
        for start in range(first, last, _TILE):
            end = min(start + _TILE, last)
            seen = int(kv_lens[r]) - (last - end)
            out[start:end] = _attend_tile(
                q[start:end], k[:seen], v[:seen], scale=scale, window=window, soft_cap=soft_cap
            )
    return out


def paged_attention_torch(
    q: torch.Tensor,
    cache: LayerCache,
    batch: ForwardBatch,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """The twin of `paged_attention`: row by row, the scores written out."""
    out = torch.empty_like(q)
    starts = batch.query_starts.tolist()
    for r, kv_len in enumerate(batch.kv_lens.tolist()):
        queries = slice(starts[r], starts[r + 1])
        k, v = (x.to(q.dtype) for x in _gather(cache, batch.block_tables[r], kv_len))
        if cache.k.dtype == torch.float8_e4m3fn:
            k, v = k * cache.k_scale, v * cache.v_scale
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,shd->hqs", q[queries], k).float() * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        visible = _visible(starts[r + 1] - starts[r], kv_len, window, q.device)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        out[queries] = torch.einsum("hqs,shd->qhd", weights.to(v.dtype), v)
    return out


def _gather(
    cache: LayerCache, block_table: torch.Tensor, kv_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A row's keys and values, in order and without what its last block holds beyond them.

    Shapes: block_table [B]; out k, v [kv_len, K, D]
    """
    blocks = block_table[: -(-kv_len // cache.k.shape[1])]
    return cache.k[blocks].flatten(0, 1)[:kv_len], cache.v[blocks].flatten(0, 1)[:kv_len]


def _visible(query_len: int, kv_len: int, window: int, device: torch.device) -> torch.Tensor:
    """Which keys each query sees: bottom-right aligned, as queries are the last positions.

    >>> _visible(2, 4, 0, torch.device("cpu")).int().tolist()
    [[1, 1, 1, 0], [1, 1, 1, 1]]
    >>> _visible(2, 4, 2, torch.device("cpu")).int().tolist()
    [[0, 1, 1, 0], [0, 0, 1, 1]]
    """
    query_pos = torch.arange(kv_len - query_len, kv_len, device=device).unsqueeze(1)
    distance = query_pos - torch.arange(kv_len, device=device)
    visible = distance >= 0
    return visible & (distance < window) if window else visible


def _attend_tile(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int,
    soft_cap: float,
) -> torch.Tensor:
    """Attention of the last positions of one row, as matrix products.

    The G = H / K query heads of a group are stacked, so that keys are not repeated for them.

    Shapes: q [Q, H, D]; k, v [S, K, D]; out [Q, H, D]
    """
    (Q, H, D), K = q.shape, k.shape[1]
    visible = _visible(Q, len(k), window, q.device).repeat(H // K, 1)  # [G * Q, S]
    # [Q, K, G, D] -> [K, G * Q, D]
    stacked = q.view(Q, K, H // K, D).permute(1, 2, 0, 3).reshape(K, -1, D)
    k, v = k.transpose(0, 1), v.transpose(0, 1)  # [K, S, D]
    if soft_cap:
        scores = soft_cap * torch.tanh(stacked @ k.transpose(1, 2) * (scale / soft_cap))
        out = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ v
    else:
        out = F.scaled_dot_product_attention(
            stacked[None], k[None], v[None], attn_mask=visible, scale=scale
        )[0]
    return out.view(K, H // K, Q, D).permute(2, 0, 1, 3).reshape(Q, H, D)


def on_numba(x: torch.Tensor) -> bool:
    """Whether numba kernels compute on `x`; all else is torch's."""
    return x.device.type == "cpu" and x.dtype == torch.float32


# NaN and infinity must behave (a row that holds them must show it), so no "nnan" or "ninf".
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


@njit(nogil=True, cache=True, fastmath=FASTMATH)
def _attend_head(q, k_cache, v_cache, table, first, kv_len, h, scale, soft_cap, out):  # noqa: ANN001, ANN202
    """One query position, one key/value head `h` with its G query heads; keys first : kv_len.

    Online softmax, a block at a time: `top` is the highest score so far, `total` the sum of
    exp(score - top), `out` the weighted sum of values; all are rescaled when `top` rises.

    Shapes: q, out [H, D]; table [B]
    """
    P, K, D = k_cache.shape[1], k_cache.shape[2], k_cache.shape[3]
    G = q.shape[0] // K
    scores = np.empty(P, np.float32)
    for g in range(h * G, (h + 1) * G):
        top = np.float32(-np.inf)
        total = np.float32(0)
        for d in range(D):
            out[g, d] = 0
        for b in range(first // P, (kv_len + P - 1) // P):
            block = table[b]
            begin = max(first - b * P, 0)
            end = min(kv_len - b * P, P)
            block_top = np.float32(-np.inf)
            for o in range(begin, end):
                s = np.float32(0)
                for d in range(D):
                    s += q[g, d] * k_cache[block, o, h, d]
                s *= scale
                if soft_cap > 0:
                    s = soft_cap * np.float32(math.tanh(s / soft_cap))
                scores[o] = s
                block_top = max(block_top, s)
            if block_top > top:
                rescale = np.float32(math.exp(top - block_top))
                top = block_top
                total *= rescale
                for d in range(D):
                    out[g, d] *= rescale
            for o in range(begin, end):
                w = np.float32(math.exp(scores[o] - top))
                total += w
                for d in range(D):
                    out[g, d] += w * v_cache[block, o, h, d]
        for d in range(D):
            out[g, d] /= total


@njit(nogil=True, cache=True, fastmath=FASTMATH)
def _attend_row_head(q, k_cache, v_cache, starts, kv_lens, tables, scale, window, soft_cap, out, i):  # noqa: ANN001, ANN202
    """Item i of R * K: all queries of row i // K with head i % K; rows with many are not ours."""
    K = k_cache.shape[2]
    r, h = i // K, i % K
    query_len = starts[r + 1] - starts[r]
    if query_len > _MAX_LOOP_QUERIES:
        return
    for t in range(starts[r], starts[r + 1]):
        kv_len = kv_lens[r] - (starts[r + 1] - 1 - t)
        first = max(0, kv_len - window) if window > 0 else 0
        _attend_head(q[t], k_cache, v_cache, tables[r], first, kv_len, h, scale, soft_cap, out[t])


@njit(nogil=True, cache=True)
def _attend_serial(q, k_cache, v_cache, starts, kv_lens, tables, scale, window, soft_cap, out):  # noqa: ANN001, ANN202
    for i in range(len(kv_lens) * k_cache.shape[2]):
        _attend_row_head(
            q, k_cache, v_cache, starts, kv_lens, tables, scale, window, soft_cap, out, i
        )


@njit(nogil=True, cache=True, parallel=True)
def _attend_parallel(q, k_cache, v_cache, starts, kv_lens, tables, scale, window, soft_cap, out):  # noqa: ANN001, ANN202
    for i in prange(len(kv_lens) * k_cache.shape[2]):
        _attend_row_head(
            q, k_cache, v_cache, starts, kv_lens, tables, scale, window, soft_cap, out, i
        )
