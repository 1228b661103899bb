"""Triton kernels of `attention`: keys and values into their slots, and attention over them.

    qkv [T, H + 2K, D] ─ _store ──> q rotated [T, H, D]
                            └─────> k rotated, v into their slots

    q ─ _attend ──> out, or, when the keys of a row are split, parts of it ─ _combine ──> out

One program of `_attend` takes a tile of queries of one row, for one key/value head: the G query
heads of the group are stacked, G = 3 and 16 lanes make 5 queries and an idle lane:

    lane     0  1  2 | 3  4  5 | .. | 12 13 14 | 15         q of query lane // G, head lane % G
    query    0       | 1       |    | 4        | -

so that a key, once loaded, meets all that attend to it, and decode, verification and chunks differ
in nothing but the height of the tile. It walks the keys in tiles of its own, whatever the block
size P: each key's slot is looked up by its position. Where programs are too few to fill the device,
a row's keys are cut into splits; each leaves a part and the logarithm of its weight, and `_combine`
adds them up. The grid follows from the shapes T, R and B alone, so a CUDA graph can hold a launch.
Numbers that change between steps are not specialised on, so that no step waits for a compilation.

Invariants: keys beyond kv_lens[r] are masked when loaded, values too, for 0 * NaN is NaN; offsets
into the cache have 64 bits; scores, weights and sums are float32. The torch twins, and what the
arguments mean: `attention`, which imports this module only for tensors on a GPU.
FlashAttention: Dao, arXiv 2307.08691. Split keys: Flash-Decoding, Dao et al., 2023.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_E4M3_MAX = tl.constexpr(448.0)

# Fewer keys than this in a split cost more to combine than they save.
_MIN_SPLIT_KEYS = 256
_MAX_SPLITS = 32
# Decode programs that one multiprocessor holds at a time, by their registers (docs/kernels.md).
_PROGRAMS_PER_SM = 4
# Heads that one program of `_store` moves.
_STORE_HEADS = 8


class Tile(NamedTuple):
    """The shape of one program of `_attend`."""

    num_lanes: int  # queries times the heads of a group
    num_keys: int  # loaded at a time
    num_warps: int
    num_stages: int  # loads in flight


def choose_tile(
    num_tokens: int, num_rows: int, group: int, head_dim: int, dtype: torch.dtype
) -> Tile:
    """As many lanes as an average row fills; what fits registers and 99 KB of shared memory."""
    wide = head_dim > 128
    is_float32 = dtype == torch.float32  # no tensor cores: the products take registers
    fits = 32 if is_float32 else 64 if wide else 128
    wanted = triton.next_power_of_2(group * triton.cdiv(num_tokens, num_rows))
    lanes = max(16, triton.next_power_of_2(group), min(wanted, fits))
    if is_float32:
        return Tile(lanes, 16, 8 if wide else 4, 1)
    keys = 32 if wide else 64
    if lanes <= 32:
        return Tile(lanes, keys, 4, 3)
    return Tile(lanes, keys, 8 if lanes > 64 or wide else 4, 2)


def choose_num_splits(num_programs: int, max_keys: int, num_sms: int) -> int:
    """Into how many parts each row's keys are cut: a power of two; 1 when the device is full.

    >>> choose_num_splits(num_programs=8, max_keys=8192, num_sms=132)
    32
    >>> choose_num_splits(num_programs=1024, max_keys=8192, num_sms=132)
    1
    """
    fill = num_sms * _PROGRAMS_PER_SM // num_programs
    most = min(fill, max_keys // _MIN_SPLIT_KEYS, _MAX_SPLITS)
    return 1 << (most.bit_length() - 1) if most > 1 else 1


# ------------------------------------------------------------------------------------ store_kv


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: float,
    v_scale: float,
) -> None:
    """`attention.store_kv`.

    Shapes: k, v [T, K, D] contiguous; k_cache, v_cache [N, P, K, D] contiguous; slots [T] int64
    """
    no_rope = k.new_empty(0, 2, 0, dtype=torch.float32)
    _launch_store(k[:, :0], k, v, k, slots, no_rope, slots, k_cache, v_cache, k_scale, v_scale)


def rotate_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    """`layers.rotate_and_store`: returns q rotated; k, rotated, and v go to their slots.

    Shapes: qkv [T, (H + 2K) * D] contiguous; positions, slots [T] int64;
            rope [max_model_len, 2, C] float32; k_cache, v_cache [N, P, K, D]; out [T, H, D]
    """
    K, D = k_cache.shape[2:]
    heads = qkv.unflatten(1, (-1, D))
    H = heads.shape[1] - 2 * K
    q, k, v = heads.split((H, K, K), dim=1)
    out = qkv.new_empty(len(qkv), H, D)
    _launch_store(q, k, v, out, positions, rope, slots, k_cache, v_cache, k_scale, v_scale)
    return out


def _launch_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_out: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    T, H, D = q.shape
    K, C = k.shape[1], rope.shape[2]
    num_parts = triton.cdiv(H, _STORE_HEADS) + 2 * triton.cdiv(K, _STORE_HEADS)
    _store[(T, num_parts)](
        q,
        k,
        v,
        q_out,
        positions,
        rope,
        slots,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        TOKEN_STRIDE=k.stride(0),
        H=H,
        K=K,
        D=D,
        C=C,
        D_PAD=triton.next_power_of_2(D),
        C_PAD=triton.next_power_of_2(max(C, 1)),
        HEADS=_STORE_HEADS,
        num_warps=2,
    )


@triton.jit
def _store(
    q,
    k,
    v,
    q_out,
    positions,
    rope,
    slots,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    TOKEN_STRIDE: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    D_PAD: tl.constexpr,
    C_PAD: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Program (t, part): up to HEADS heads of token t, all of q, of k or of v."""
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts: tl.constexpr = (H + HEADS - 1) // HEADS
    k_parts: tl.constexpr = (K + HEADS - 1) // HEADS
    slot = tl.load(slots + t)
    cos_sin = rope
    if C > 0:
        cos_sin = rope + tl.load(positions + t) * 2 * C
    # No name for the pointers: one would have to have the same type in every branch.
    if part < q_parts:
        heads = part * HEADS + tl.arange(0, HEADS)[:, None]
        _move(
            q + t * TOKEN_STRIDE + heads * D,
            q_out + (t * H + heads) * D,
            heads < H,
            cos_sin,
            1.0,
            D,
            C,
            D_PAD,
            C_PAD,
        )
    elif part < q_parts + k_parts:
        heads = (part - q_parts) * HEADS + tl.arange(0, HEADS)[:, None]
        _move(
            k + t * TOKEN_STRIDE + heads * D,
            k_cache + (slot * K + heads) * D,
            heads < K,
            cos_sin,
            k_scale,
            D,
            C,
            D_PAD,
            C_PAD,
        )
    else:
        heads = (part - q_parts - k_parts) * HEADS + tl.arange(0, HEADS)[:, None]
        _move(
            v + t * TOKEN_STRIDE + heads * D,
            v_cache + (slot * K + heads) * D,
            heads < K,
            cos_sin,
            v_scale,
            D,
            0,
            D_PAD,
            C_PAD,
        )


@triton.jit
def _move(
    x,  # [HEADS, 1] pointers to where each head begins
    out,
    is_head,
    cos_sin,
    scale,
    D: tl.constexpr,
    C: tl.constexpr,
    D_PAD: tl.constexpr,
    C_PAD: tl.constexpr,
):
    """Heads with their first C pairs turned and the rest as it is."""
    if C > 0:
        c = tl.arange(0, C_PAD)[None, :]
        mask = is_head & (c < C)
        cos = tl.load(cos_sin + c, mask=c < C, other=0.0)
        sin = tl.load(cos_sin + C + c, mask=c < C, other=0.0)
        a = tl.load(x + c, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x + C + c, mask=mask, other=0.0).to(tl.float32)
        # Rounded to the model's dtype first, as the twin does.
        _put(out + c, (a * cos - b * sin).to(x.dtype.element_ty), scale, mask)
        _put(out + C + c, (b * cos + a * sin).to(x.dtype.element_ty), scale, mask)
    if 2 * C < D:
        d = tl.arange(0, D_PAD)[None, :]
        mask = is_head & (d >= 2 * C) & (d < D)
        _put(out + d, tl.load(x + d, mask=mask, other=0.0), scale, mask)


@triton.jit
def _put(out, x, scale, mask):
    """Store, divided by `scale` where the cache is float8; what is out of its range is clamped."""
    if out.dtype.element_ty == tl.float8e4nv:
        x = x.to(tl.float32) / scale
        x = tl.where(x > _E4M3_MAX, _E4M3_MAX, x)  # false for NaN, which stays
        x = tl.where(x < -_E4M3_MAX, -_E4M3_MAX, x)
    tl.store(out, x.to(out.dtype.element_ty), mask=mask)


# ----------------------------------------------------------------------------- paged attention


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    k_scale: float,
    v_scale: float,
    num_sms: int,
) -> torch.Tensor:
    """`attention.paged_attention`; `num_sms` multiprocessors are there to be filled.

    Shapes: q [T, H, D] contiguous; k_cache, v_cache [N, P, K, D] contiguous;
            query_starts [R + 1], kv_lens [R], block_tables [R, B], all int32; out [T, H, D]
    Needs:  at least one query in every row
    """
    T, H, D = q.shape
    P, K = k_cache.shape[1:3]
    R, B = block_tables.shape
    tile = choose_tile(T, R, H // K, D, q.dtype)
    queries = tile.num_lanes // (H // K)
    # As every row has a query, T == R means one each. Otherwise row r's tiles begin at number
    # query_starts[r] // queries + r, which leaves room for all of them, and few unused.
    is_one_each = T == R
    num_tiles = R if is_one_each else T // queries + R
    num_splits = choose_num_splits(num_tiles * K, min(B * P, window or B * P), num_sms)
    out = torch.empty_like(q)
    part, weight = out, out
    if num_splits > 1:
        part = q.new_empty(num_splits, T, H, D, dtype=torch.float32)
        weight = q.new_empty(num_splits, T, H, dtype=torch.float32)
    _attend[(num_tiles, K, num_splits)](
        q,
        k_cache,
        v_cache,
        query_starts,
        kv_lens,
        block_tables,
        part,
        weight,
        scale * k_scale,
        v_scale,
        R,
        T,
        block_tables.stride(0),
        G=H // K,
        K=K,
        D=D,
        D_PAD=max(triton.next_power_of_2(D), 16),
        P=P,
        LANES=tile.num_lanes,
        KEYS=tile.num_keys,
        WINDOW=window,
        SOFT_CAP=soft_cap,
        IS_ONE_EACH=is_one_each,
        IS_SPLIT=num_splits > 1,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits > 1:
        _combine[(T, H)](
            part, weight, out, T * H, H=H, D=D, D_PAD=triton.next_power_of_2(D), SPLITS=num_splits
        )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "table_stride"])
def _attend(
    q,
    k_cache,
    v_cache,
    query_starts,
    kv_lens,
    block_tables,
    out,
    weight,
    score_scale,
    v_scale,
    num_rows,
    num_tokens,
    table_stride,
    G: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    P: tl.constexpr,
    LANES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IS_ONE_EACH: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Program (tile, h, split): a tile of one row's queries, the group of key/value head h, and
    one share of the keys that the tile sees."""
    QUERIES: tl.constexpr = LANES // G
    tile = tl.program_id(0)
    h = tl.program_id(1)
    split = tl.program_id(2)
    if IS_ONE_EACH:
        row = tile
        first_query = 0
    else:
        row = _find_row(query_starts, num_rows, tile, QUERIES)
        first_query = (tile - tl.load(query_starts + row) // QUERIES - row) * QUERIES
    row_start = tl.load(query_starts + row)
    query_len = tl.load(query_starts + row + 1) - row_start
    if first_query >= query_len:
        return
    context_len = tl.load(kv_lens + row) - query_len

    lane = tl.arange(0, LANES)
    query = first_query + lane // G
    is_query = (lane < QUERIES * G) & (query < query_len)
    head = h * G + lane % G
    d = tl.arange(0, D_PAD)
    t_head = (row_start + query).to(tl.int64) * (G * K) + head
    q_mask = is_query[:, None] & (d < D)[None, :]
    q_tile = tl.load(q + t_head[:, None] * D + d[None, :], mask=q_mask, other=0.0)
    query_pos = context_len + query

    # The keys that any query of the tile sees, and of those this split's.
    seen_from = 0
    if WINDOW > 0:
        seen_from = tl.maximum(context_len + first_query - WINDOW + 1, 0)
    seen_to = context_len + tl.minimum(first_query + QUERIES, query_len)
    begin, end = seen_from, seen_to
    if IS_SPLIT:
        share = tl.cdiv(tl.cdiv(seen_to - seen_from, KEYS), tl.num_programs(2)) * KEYS
        begin = seen_from + split * share
        end = tl.minimum(begin + share, seen_to)

    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    acc = tl.zeros([LANES, D_PAD], tl.float32)
    table = block_tables + row.to(tl.int64) * table_stride
    for start in range(begin, end, KEYS):
        pos = start + tl.arange(0, KEYS)
        is_key = pos < end
        block = tl.load(table + pos // P, mask=is_key, other=0).to(tl.int64)
        at = ((block * P + pos % P) * K + h) * D
        k_mask = (d < D)[:, None] & is_key[None, :]
        v_mask = is_key[:, None] & (d < D)[None, :]
        k_tile = tl.load(k_cache + at[None, :] + d[:, None], mask=k_mask, other=0.0)
        v_tile = tl.load(v_cache + at[:, None] + d[None, :], mask=v_mask, other=0.0)

        scores = tl.dot(q_tile, k_tile.to(q_tile.dtype), input_precision="ieee") * score_scale
        if SOFT_CAP > 0:
            scores = SOFT_CAP * _tanh(scores / SOFT_CAP)
        distance = query_pos[:, None] - pos[None, :]
        is_visible = distance >= 0
        if WINDOW > 0:
            is_visible = is_visible & (distance < WINDOW)
        # Base 2: the hardware has that exponential.
        scores = tl.where(is_visible, scores * _LOG2E, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, 1))
        # A lane that has seen no key yet: -inf - -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(top - base)
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(q_tile.dtype), v_tile.to(q_tile.dtype), acc, input_precision="ieee")
        top = new_top

    result = acc * (v_scale / total)[:, None]
    if IS_SPLIT:
        t_head += split.to(tl.int64) * num_tokens * (G * K)
        tl.store(weight + t_head, top + tl.log2(total), mask=is_query)
        q_mask = q_mask & (begin < end)
    tl.store(out + t_head[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=q_mask)


@triton.jit
def _find_row(query_starts, num_rows, tile, QUERIES: tl.constexpr):
    """The last row whose tiles begin at or before `tile`."""
    row = 0
    after = num_rows
    while after - row > 1:
        middle = (row + after) // 2
        if tl.load(query_starts + middle) // QUERIES + middle <= tile:
            row = middle
        else:
            after = middle
    return row


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit(do_not_specialize=["num_outs"])
def _combine(
    part,
    weight,
    out,
    num_outs,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (t, head): the parts of one output, each by its share of the total weight."""
    t_head = tl.program_id(0).to(tl.int64) * H + tl.program_id(1)
    at = tl.arange(0, SPLITS).to(tl.int64) * num_outs + t_head
    d = tl.arange(0, D_PAD)
    log_weight = tl.load(weight + at)
    share = tl.exp2(log_weight - tl.max(log_weight, 0))
    # A split without keys has weight 0 and an unwritten part.
    mask = (log_weight != float("-inf"))[:, None] & (d < D)[None, :]
    parts = tl.load(part + at[:, None] * D + d[None, :], mask=mask, other=0.0)
    result = tl.sum(parts * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out + t_head * D + d, result.to(out.dtype.element_ty), mask=d < D)
