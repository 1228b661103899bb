"""Every Triton kernel against its torch twin, in Triton's interpreter, over generated cases.

    TRITON_INTERPRET=1 python tests/kernel_checks.py attention store --wide 300

Triton reads TRITON_INTERPRET when a kernel is decorated, so this is a process of its own, which
`test_kernels` starts. It prints one JSON object: how many cases of each kernel were tried. A case
is one value of each option. Without --wide, there are as many as it takes for any two values of two
options to meet in one (pairwise); with it, as many random ones as it says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from test_attention import Shape, make_step
from triton.runtime import interpreter

from minivllm import attention_kernels
from minivllm.attention import LayerCache, paged_attention_torch, store_kv_torch
from minivllm.layers import rope_table, rotate_and_store_torch

Options = Mapping[str, Sequence[Any]]

FP32, FP16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
# One rounding of an output, and of the weights that a half-precision product takes.
TOLERANCE = {FP32: 2e-5, FP16: 4e-3, BF16: 3e-2}

# ---------------------------------------------------------------------------- the interpreter

_TORCH = {tl.float32: FP32, tl.float16: FP16, tl.bfloat16: BF16, tl.float8e4nv: FP8}


def convert(bits: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> np.ndarray:
    """In place of the interpreter's conversion, which cuts off what a GPU rounds to even, and knows
    no NaN of float8."""
    x = torch.from_numpy(np.ascontiguousarray(bits)).view(_TORCH[source]).to(_TORCH[target])
    return x.view(getattr(torch, f"uint{target.primitive_bitwidth}")).numpy()


def dot(self: Any, a: Any, b: Any, d: Any, *_precision: Any) -> Any:
    """In place of the interpreter's product, which takes the bits of bfloat16 for integers."""
    a, b = (self.cast_impl(x, tl.float32) for x in (a, b))
    return interpreter.TensorHandle(a.data @ b.data + d.data, d.dtype.scalar)


# ------------------------------------------------------------------------------------ attention

# (context, queries) of each row. Lengths around a tile's, a block's and a split's.
ROWS = {
    "decode": [(0, 1), (300, 1), (17, 1), (64, 1)],
    "verify": [(0, 4), (61, 4), (130, 4)],
    "chunk": [(0, 35), (41, 23)],
    "mixed": [(0, 1), (9, 2), (30, 5), (130, 1), (15, 37)],
}
ATTENTION: Options = {
    "rows": list(ROWS),
    "D": [64, 80, 96, 128, 256],
    "P": [8, 16, 32, 64],
    "heads": [(1, 1), (2, 3), (1, 4), (1, 8), (1, 20), (3, 2)],  # K, G
    "dtype": [BF16, FP16, FP32],
    "cache": ["same", FP8],
    "window": [0, 1, 37, 5000],
    "soft_cap": [0.0, 5.0],
    "num_sms": [1, 40, 132],  # from no split to many
}


def check_attention(case: Mapping[str, Any], seed: int) -> None:
    K, G = case["heads"]
    step = make_step(ROWS[case["rows"]], Shape(K, G, case["D"], case["P"]), seed=seed)
    dtype = case["dtype"]
    stored = dtype if case["cache"] == "same" else case["cache"]
    scales = (1.0, 1.0) if stored == dtype else (0.5, 2.0)
    cache = LayerCache(step.cache.k.to(stored), step.cache.v.to(stored), *scales)
    # Tables as wide as a long context's: splits that no key of these rows falls into.
    tables = step.batch.block_tables
    tables = torch.nn.functional.pad(tables, (0, 1024 // case["P"]))
    batch = replace(step.batch, block_tables=tables)
    q = step.q.to(dtype)
    options = {
        "scale": case["D"] ** -0.5,
        "window": case["window"],
        "soft_cap": case["soft_cap"],
    }
    got = attention_kernels.paged_attention(
        q,
        cache.k,
        cache.v,
        batch.query_starts,
        batch.kv_lens,
        batch.block_tables,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        num_sms=case["num_sms"],
        **options,
    )
    # The twin computes on the same numbers in float32, as the kernel does inside.
    wide = replace(cache, k=cache.k.float(), v=cache.v.float())
    if stored == FP8:
        wide = LayerCache(wide.k * cache.k_scale, wide.v * cache.v_scale)
    expected = paged_attention_torch(q.float(), wide, batch, **options)
    assert got.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------------- store

STORE: Options = {
    "T": [1, 2, 7],
    "D": [64, 80, 96, 128, 256],
    "C": ["half", "quarter", "none"],  # pairs that turn
    "P": [1, 8, 16, 64],
    "heads": [(1, 1), (4, 1), (9, 3), (16, 8), (33, 11)],  # H, K
    "dtype": [BF16, FP16, FP32],
    "cache": ["same", FP8],
    "fused": [True, False],
}


def check_store(case: Mapping[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    T, D, P = case["T"], case["D"], case["P"]
    H, K = case["heads"]
    C = {"half": D // 2, "quarter": D // 4, "none": 0}[case["C"]]
    dtype = case["dtype"]
    stored = dtype if case["cache"] == "same" else case["cache"]
    scales = (1.0, 1.0) if stored == dtype else (0.01, 0.5)  # the first: out of float8's range
    qkv = torch.randn(T, (H + 2 * K) * D).to(dtype)
    qkv[0, -1] = torch.nan
    batch = make_step([(0, T)], Shape(K, 1, D, P)).batch
    batch = replace(batch, positions=torch.randint(0, 50, (T,)))
    rope = rope_table(torch.rand(C), 1.1, 50)
    num_blocks = 2 * -(-T // P) + 1
    caches = [
        LayerCache(*torch.ones(2, num_blocks, P, K, D).to(stored).unbind(), *scales)
        for _ in range(2)
    ]
    named = {"k_scale": scales[0], "v_scale": scales[1]}
    if case["fused"]:
        expected_q = rotate_and_store_torch(
            qkv, batch, caches[0], rope, num_heads=H, num_kv_heads=K
        )
        q = attention_kernels.rotate_and_store(
            qkv, batch.positions, rope, caches[1].k, caches[1].v, batch.slots, **named
        )
        torch.testing.assert_close(q, expected_q)
    else:
        _, k, v = (x.contiguous() for x in qkv.unflatten(1, (-1, D)).split((H, K, K), dim=1))
        store_kv_torch(k, v, caches[0], batch.slots)
        attention_kernels.store_kv(k, v, caches[1].k, caches[1].v, batch.slots, **named)
    for name in ("k", "v"):
        expected, got = (getattr(cache, name).float() for cache in caches)
        # One step of float8 where rounding differs.
        tolerance = {"rtol": 0.13, "atol": 0.01} if stored == FP8 else {}
        if not tolerance:
            tolerance = {"rtol": TOLERANCE[dtype], "atol": 1e-5}
        torch.testing.assert_close(got, expected, equal_nan=True, **tolerance)


# ------------------------------------------------------------------------------------ the cases

Check = Callable[[Mapping[str, Any], int], None]
CHECKS: dict[str, tuple[Options, Check]] = {
    "attention": (ATTENTION, check_attention),
    "store": (STORE, check_store),
}


def pairwise(options: Options) -> list[dict[str, Any]]:
    """Few cases in which each two values of two options meet: greedily, the best of some random
    ones that contain a pair which is still to come."""
    chosen = random.Random(0)
    names = list(options)
    index = {name: range(len(values)) for name, values in options.items()}
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in index[a]
        for j in index[b]
    }
    cases = []
    while missing:
        wanted = dict(chosen.choice(sorted(missing)))
        candidates = [
            {name: wanted.get(name, chosen.choice(index[name])) for name in names}
            for _ in range(50)
        ]
        covered = [missing & set(itertools.combinations(c.items(), 2)) for c in candidates]
        best = max(range(len(candidates)), key=lambda c: len(covered[c]))
        missing -= covered[best]
        cases.append({name: options[name][i] for name, i in candidates[best].items()})
    return cases


def wide(options: Options, count: int) -> list[dict[str, Any]]:
    chosen = random.Random(1)
    return [{n: chosen.choice(values) for n, values in options.items()} for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="+", choices=list(CHECKS))
    parser.add_argument("--wide", type=int, default=0, help="random cases of each kernel")
    args = parser.parse_args()
    # numpy warns where the interpreter computes lanes that a mask leaves out.
    warnings.simplefilter("ignore", RuntimeWarning)
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot
    counts = {}
    for kernel in args.kernels:
        options, check = CHECKS[kernel]
        cases = wide(options, args.wide) if args.wide else pairwise(options)
        for seed, case in enumerate(cases):
            try:
                check(case, seed)
            except Exception:
                print(f"{kernel}, seed {seed}: {case}", file=sys.stderr)
                raise
        counts[kernel] = len(cases)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
