from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.attention import (
    ForwardBatch,
    LayerCache,
    allocate_kv_cache,
    kv_block_bytes,
    paged_attention,
    paged_attention_torch,
    store_kv,
    store_kv_torch,
)

NAN = float("nan")
Form = Callable[..., torch.Tensor]
FORMS: list[Form] = [paged_attention, paged_attention_torch]
each_form = pytest.mark.parametrize("form", FORMS, ids=["cpu", "twin"])

# A row is its context and its queries. Every kind: decode at a row's first position, at a block's
# last and far in; verification below, at and above what the loop takes; chunks with and without a
# context; queries that need one matrix product, and two.
ROWS = [(0, 1), (95, 1), (300, 1), (9, 2), (47, 4), (30, 5), (0, 23), (41, 70), (10, 300)]


class Shape(NamedTuple):
    """What all rows of a step share; see the header of `minivllm.attention`."""

    K: int = 2
    G: int = 3
    D: int = 16
    P: int = 8


class Step(NamedTuple):
    """One step's arguments, and what its blocks hold by row and position."""

    q: torch.Tensor  # [T, H, D]
    cache: LayerCache
    batch: ForwardBatch
    kv: list[tuple[torch.Tensor, torch.Tensor]]  # per row [kv_len, K, D]


def make_step(
    rows: list[tuple[int, int]], shape: Shape, *, spread: float = 2.0, seed: int = 0
) -> Step:
    """Random rows in shuffled blocks; every slot that belongs to none of them holds NaN.

    Twice as many blocks exist as are owned, and block 0, with which tables are padded, is not.
    """
    torch.manual_seed(seed)
    K, G, D, P = shape
    query_lens = torch.tensor([queries for _, queries in rows])
    kv_lens = torch.tensor([context + queries for context, queries in rows])
    counts = [-(-kv_len // P) for kv_len in kv_lens.tolist()]
    blocks = iter((torch.randperm(2 * sum(counts)) + 1).tolist())
    block_tables = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    cache = LayerCache(*torch.full((2, 2 * sum(counts) + 1, P, K, D), NAN))
    kv, positions, slots = [], [], []
    for r, (context, queries) in enumerate(rows):
        block_tables[r, : counts[r]] = torch.tensor(list(itertools.islice(blocks, counts[r])))
        kv.append(tuple(torch.randn(2, context + queries, K, D)))
        places = [int(block_tables[r, p // P]) * P + p % P for p in range(context + queries)]
        cache.k.view(-1, K, D)[places], cache.v.view(-1, K, D)[places] = kv[r]
        positions += range(context, context + queries)
        slots += places[context:]
    batch = ForwardBatch(
        token_ids=torch.zeros(len(slots), dtype=torch.int64),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_starts=torch.cat((torch.zeros(1), query_lens.cumsum(0))).int(),
        kv_lens=kv_lens.int(),
        block_tables=block_tables,
        logits_idx=query_lens.cumsum(0) - 1,
    )
    return Step(torch.randn(len(slots), K * G, D) * spread, cache, batch, kv)


def queries_of(step: Step, r: int) -> slice:
    return slice(int(step.batch.query_starts[r]), int(step.batch.query_starts[r + 1]))


def alone(step: Step, r: int) -> Step:
    """Row r in a step of its own, over the same cache."""
    queries = queries_of(step, r)
    batch = ForwardBatch(
        token_ids=step.batch.token_ids[queries],
        positions=step.batch.positions[queries],
        slots=step.batch.slots[queries],
        query_starts=torch.tensor([0, queries.stop - queries.start], dtype=torch.int32),
        kv_lens=step.batch.kv_lens[r : r + 1],
        block_tables=step.batch.block_tables[r : r + 1],
        logits_idx=torch.tensor([queries.stop - queries.start - 1]),
    )
    return Step(step.q[queries], step.cache, batch, step.kv[r : r + 1])


def reference(step: Step, *, scale: float, window: int = 0, soft_cap: float = 0.0) -> np.ndarray:
    """Dense attention in float64, head by head, from the rows themselves: no blocks, no tables."""
    out = []
    for r, (keys, values) in enumerate(step.kv):
        q = step.q[queries_of(step, r)].double().numpy()
        k, v = keys.double().numpy(), values.double().numpy()
        group = q.shape[1] // k.shape[1]
        distance = np.arange(len(k))[-len(q) :, None] - np.arange(len(k))
        hidden = (distance < 0) | (distance >= (window or len(k)))
        heads = []
        for h in range(q.shape[1]):
            scores = q[:, h] @ k[:, h // group].T * scale
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, h // group])
        out.append(np.stack(heads, axis=1))
    return np.concatenate(out)


def check(form: Form, step: Step, **options: Any) -> None:
    """`form` gives the reference's output; the slots of nobody being NaN, it has read none."""
    out = form(step.q, step.cache, step.batch, **options)
    assert out.dtype == step.q.dtype
    np.testing.assert_allclose(out.numpy(), reference(step, **options), rtol=1e-4, atol=2e-5)


# ------------------------------------------------------------------------------- paged attention


@each_form
@pytest.mark.parametrize("D", [16, 64, 80, 128])
@pytest.mark.parametrize("P", [1, 3, 8, 16, 32])
def test_every_kind_of_row_in_one_step(form: Form, P: int, D: int) -> None:
    """Rows of every kind, side by side, are the dense reference's for each head and block size."""
    check(form, make_step(ROWS, Shape(D=D, P=P)), scale=D**-0.5)


@each_form
@pytest.mark.parametrize("window", [0, 1, 7, 64, 5000])
@pytest.mark.parametrize("soft_cap", [0.0, 1.5, 30.0])
def test_window_and_soft_cap(form: Form, window: int, soft_cap: float) -> None:
    """A sliding window and capped scores, alone and together, are the dense reference's."""
    check(form, make_step(ROWS, Shape()), scale=0.25, window=window, soft_cap=soft_cap)


@each_form
@pytest.mark.parametrize(("K", "G"), [(1, 1), (4, 1), (1, 8), (3, 3), (2, 7)])
def test_groups_of_heads(form: Form, K: int, G: int) -> None:
    """Each query head reads its own group's keys and values, whatever the group."""
    check(form, make_step(ROWS, Shape(K, G)), scale=0.25)


ANY_ROW = st.one_of(
    st.tuples(st.integers(0, 400), st.just(1)),
    st.tuples(st.integers(0, 200), st.integers(2, 5)),
    st.tuples(st.integers(0, 100), st.integers(6, 60)),
    st.tuples(st.integers(0, 40), st.sampled_from([255, 256, 257, 300, 513])),
)


@settings(max_examples=30)
@given(
    rows=st.lists(ANY_ROW, min_size=1, max_size=5),
    shape=st.builds(
        Shape,
        K=st.integers(1, 3),
        G=st.integers(1, 4),
        D=st.sampled_from([16, 64, 80, 128]),
        P=st.sampled_from([1, 3, 8, 16, 32]),
    ),
    scale=st.floats(0.05, 0.25),  # 1 / sqrt(D) at most: larger scores are rounded more
    window=st.one_of(st.just(0), st.integers(1, 300)),
    soft_cap=st.one_of(st.just(0.0), st.floats(0.5, 50)),
    seed=st.integers(0, 1000),
)
def test_any_step(
    rows: list[tuple[int, int]],
    shape: Shape,
    scale: float,
    window: int,
    soft_cap: float,
    seed: int,
) -> None:
    """Both forms give the dense reference's output for random mixes of rows and settings."""
    step = make_step(rows, shape, seed=seed)
    for form in FORMS:
        check(form, step, scale=scale, window=window, soft_cap=soft_cap)


@each_form
def test_scores_beyond_the_range_of_exp(form: Form) -> None:
    """Scores of thousands, which rise and fall along a row, neither overflow nor vanish."""
    step = make_step(ROWS, Shape(), spread=1000.0)
    out = form(step.q, step.cache, step.batch, scale=1.0)
    expected = reference(step, scale=1.0)
    # A score of 10,000 is only exact to 1e-3 in float32, and so is the weight.
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_dtype_keeps_its_dtype(dtype: torch.dtype) -> None:
    """Half-precision queries over a half-precision cache are the reference's, to their rounding."""
    step = make_step(ROWS, Shape())
    half = Step(
        step.q.to(dtype),
        LayerCache(step.cache.k.to(dtype), step.cache.v.to(dtype)),
        step.batch,
        [(k.to(dtype), v.to(dtype)) for k, v in step.kv],
    )
    out = paged_attention(half.q, half.cache, half.batch, scale=0.25)
    assert out.dtype == dtype
    expected = reference(half, scale=0.25)
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=5e-2, atol=5e-2)


# ---------------------------------------------------------------------------- rows are independent


@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("tensor", ["k", "v"])
@pytest.mark.parametrize("r", range(len(ROWS)))
@each_form
def test_a_bad_row_fails_alone(form: Form, r: int, tensor: str, bad: float) -> None:
    """NaN or infinity in a row's keys or values shows in its last query and in no other row."""
    step = make_step(ROWS, Shape())
    clean = form(step.q, step.cache, step.batch, scale=0.25)
    spoiled = LayerCache(step.cache.k.clone(), step.cache.v.clone())
    p, P = int(step.batch.kv_lens[r]) // 2, step.cache.k.shape[1]
    getattr(spoiled, tensor)[int(step.batch.block_tables[r, p // P]), p % P] = bad
    dirty = form(step.q, spoiled, step.batch, scale=0.25)
    own = torch.zeros(len(clean), dtype=torch.bool)
    own[queries_of(step, r)] = True
    assert torch.equal(dirty[~own], clean[~own])
    assert not dirty[own][-1].isfinite().all()


@each_form
def test_a_bad_query_fails_alone(form: Form) -> None:
    """NaN in one row's queries leaves every other row bit-equal."""
    step = make_step(ROWS, Shape())
    clean = form(step.q, step.cache, step.batch, scale=0.25)
    for r in range(len(ROWS)):
        q, own = step.q.clone(), torch.zeros(len(step.q), dtype=torch.bool)
        own[queries_of(step, r)] = True
        q[own] = NAN
        dirty = form(q, step.cache, step.batch, scale=0.25)
        assert torch.equal(dirty[~own], clean[~own])
        assert dirty[own].isnan().all()


@pytest.mark.parametrize("D", [16, 64, 80, 128])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (20, 0.0), (0, 5.0), (20, 5.0)])
def test_a_row_is_bit_equal_alone_and_in_a_batch(D: int, window: int, soft_cap: float) -> None:
    """Every row has the same bits alone, in one thread, as in a batch that takes several."""
    decode = [(context, 1) for context in range(0, 400, 13)]
    step = make_step(decode + ROWS, Shape(D=D, P=16))
    options = {"scale": D**-0.5, "window": window, "soft_cap": soft_cap}
    together = paged_attention(step.q, step.cache, step.batch, **options)
    for r in range(len(decode + ROWS)):
        own = alone(step, r)
        out = paged_attention(own.q, own.cache, own.batch, **options)
        assert torch.equal(out, together[queries_of(step, r)]), f"row {r}"


def test_what_others_hold_changes_no_bit() -> None:
    """With other slots finite instead of NaN, no bit of any row's output changes."""
    step = make_step(ROWS, Shape())
    filled = LayerCache(step.cache.k.nan_to_num(1e30), step.cache.v.nan_to_num(1e30))
    for form in FORMS:
        out = form(step.q, step.cache, step.batch, scale=0.25)
        assert torch.equal(form(step.q, filled, step.batch, scale=0.25), out)


def test_two_threads_at_once() -> None:
    """Two threads in paged_attention with caches of their own get what each gets alone."""
    shape = Shape(K=3, G=3, D=64, P=16)
    steps = [make_step([(500, 1)] * 12 + [(0, 300)], shape, seed=seed) for seed in (1, 2)]
    expected = [paged_attention(s.q, s.cache, s.batch, scale=0.125) for s in steps]
    assert not torch.equal(*expected)
    barrier = threading.Barrier(2)
    num_equal = [0, 0]

    def run(i: int) -> None:
        barrier.wait()
        for _ in range(40):
            out = paged_attention(steps[i].q, steps[i].cache, steps[i].batch, scale=0.125)
            num_equal[i] += torch.equal(out, expected[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_equal == [40, 40]


# -------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("P", [1, 3, 8, 16, 32])
@pytest.mark.parametrize("store", [store_kv, store_kv_torch], ids=["cpu", "twin"])
def test_store_kv_writes_its_slots_and_nothing_else(store: Callable[..., None], P: int) -> None:
    """Each token's key and value land in its slot of the right cache; all else keeps its bits."""
    step = make_step(ROWS, Shape(P=P))
    k, v = torch.randn(2, len(step.q), *step.cache.k.shape[2:])
    before = LayerCache(torch.randn_like(step.cache.k), torch.randn_like(step.cache.v))
    after = LayerCache(before.k.clone(), before.v.clone())
    store(k, v, after, step.batch.slots)
    slots = step.batch.slots.tolist()
    written = torch.zeros(before.k.shape[:2], dtype=torch.bool)
    for t, slot in enumerate(slots):
        written[slot // P, slot % P] = True
        assert torch.equal(after.k[slot // P, slot % P], k[t])
        assert torch.equal(after.v[slot // P, slot % P], v[t])
    assert int(written.sum()) == len(slots)
    assert torch.equal(after.k[~written], before.k[~written])
    assert torch.equal(after.v[~written], before.v[~written])


@each_form
def test_what_is_stored_is_attended_over(form: Form) -> None:
    """A step's own keys and values, stored first, are what its queries see."""
    step = make_step(ROWS, Shape())
    filled = LayerCache(step.cache.k.clone(), step.cache.v.clone())
    k, v = step.cache.k.flatten(0, 1), step.cache.v.flatten(0, 1)
    filled.k.flatten(0, 1)[step.batch.slots] = NAN
    filled.v.flatten(0, 1)[step.batch.slots] = NAN
    store_kv(k[step.batch.slots], v[step.batch.slots], filled, step.batch.slots)
    check(form, step._replace(cache=filled), scale=0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cache_has_the_bytes_that_were_announced(dtype: torch.dtype) -> None:
    """Each layer has zeroed keys and values of its own, together as many bytes as announced."""
    sizes = {"num_layers": 3, "block_size": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": dtype}
    caches = allocate_kv_cache(num_blocks=5, device="cpu", **sizes)
    tensors = [tensor for cache in caches for tensor in (cache.k, cache.v)]
    assert len(tensors) == 2 * 3
    for tensor in tensors:
        assert tensor.shape == (5, 4, 2, 8)
        assert tensor.dtype == dtype
        assert not tensor.any()
    assert sum(tensor.nbytes for tensor in tensors) == 5 * kv_block_bytes(**sizes)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    assert [int(tensor.unique()) for tensor in tensors] == [1, 2, 3, 4, 5, 6]
