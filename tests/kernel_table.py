"""The launches that the kernels are compiled for, and the table of what each takes.

python tests/kernel_table.py     # rewrites the table in docs/kernels.md
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from offline import Launch, compile_for, recorded

from minivllm import attention_kernels

FP32, FP16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
NAMES = {FP32: "fp32", FP16: "fp16", BF16: "bf16", FP8: "fp8"}
CAPABILITIES = (80, 90)
# (tokens, rows) of a step: every row decodes; verifies three drafts; prefills a chunk.
STEPS = {"decode": (64, 64), "verify": (256, 64), "chunk": (2048, 4)}
_DOC = Path(__file__).parents[1] / "docs/kernels.md"
_MARK = "<!-- written by tests/kernel_table.py -->"


class Variant(NamedTuple):
    """One kernel with one set of constants, on one kind of GPU."""

    name: str
    dtypes: tuple[torch.dtype, ...]  # of inputs, and of the cache
    capability: int
    launch: Launch

    def __str__(self) -> str:
        dtypes = " over ".join(NAMES[d] for d in self.dtypes)
        return f"{self.name} {dtypes} sm_{self.capability}"


def attention_launches(
    step: str,
    D: int,
    dtype: torch.dtype,
    cache: torch.dtype,
    *,
    num_rows: int | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
) -> list[Launch]:
    """What a step of a model with 8 key/value heads and 32 query heads launches."""
    T, R = STEPS[step] if num_rows is None else (num_rows, num_rows)
    kv = torch.empty(2, 16, 8, D, dtype=cache)
    with recorded(attention_kernels) as launches:
        attention_kernels.paged_attention(
            torch.empty(T, 32, D, dtype=dtype),
            kv,
            kv,
            torch.empty(R + 1, dtype=torch.int32),
            torch.empty(R, dtype=torch.int32),
            torch.empty(R, 512, dtype=torch.int32),
            scale=D**-0.5,
            window=window,
            soft_cap=soft_cap,
            k_scale=1.0,
            v_scale=1.0,
            num_sms=132,
        )
    return launches


def store_launches(D: int, C: int, dtype: torch.dtype, cache: torch.dtype) -> list[Launch]:
    """What a step stores with, q and k rotated."""
    kv = torch.empty(2, 16, 8, D, dtype=cache)
    ids = torch.empty(64, dtype=torch.int64)
    with recorded(attention_kernels) as launches:
        attention_kernels.rotate_and_store(
            torch.empty(64, 48 * D, dtype=dtype),
            ids,
            torch.empty(512, 2, C),
            kv,
            kv,
            ids,
            k_scale=1.0,
            v_scale=1.0,
        )
    return launches


def _dtypes(capability: int) -> list[tuple[torch.dtype, torch.dtype]]:
    same = [(dtype, dtype) for dtype in (BF16, FP16, FP32)]
    # float8 conversions are instructions from 8.9 on.
    return [*same, (BF16, FP8), (FP16, FP8)] if capability >= 89 else same


def variants() -> Iterator[Variant]:
    """Every kernel for the dtypes, head sizes and options that models have."""
    for capability in CAPABILITIES:
        for dtypes in _dtypes(capability):
            for D, step in itertools.product((64, 80, 96, 128, 256), STEPS):
                for launch in attention_launches(step, D, *dtypes):
                    yield Variant(f"attend {step} {D}", dtypes, capability, launch)
            for step in STEPS:  # Gemma 2
                for launch in attention_launches(step, 256, *dtypes, window=4096, soft_cap=50.0):
                    yield Variant(f"attend {step} 256 window cap", dtypes, capability, launch)
            for D in (64, 80, 96, 128, 256):
                attend, combine = attention_launches("decode", D, *dtypes, num_rows=2)
                yield Variant(f"attend split {D}", dtypes, capability, attend)
                yield Variant(f"combine {D}", dtypes, capability, combine)
                for launch in store_launches(D, D // 2, *dtypes):
                    yield Variant(f"store {D}", dtypes, capability, launch)
            for launch in store_launches(128, 32, *dtypes):
                yield Variant("store 128 partial", dtypes, capability, launch)


def write_table() -> None:
    """Replace what follows the mark in docs/kernels.md."""
    lines = ["| kernel | dtypes | GPU | warps | registers | spilled | shared |", "|" + "---|" * 7]
    for variant in variants():
        usage = compile_for(variant.launch, variant.capability)
        dtypes = " over ".join(NAMES[dtype] for dtype in dict.fromkeys(variant.dtypes))
        lines.append(
            f"| {variant.name} | {dtypes} | sm_{variant.capability} "
            f"| {variant.launch.options.get('num_warps', 4)} | {usage.registers} "
            f"| {usage.spilled_bytes} | {usage.shared_bytes:,} |"
        )
    head = _DOC.read_text().split(_MARK)[0]
    _DOC.write_text(head + _MARK + "\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    write_table()
