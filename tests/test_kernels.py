from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no build for this machine")

import torch
from kernel_table import FP32, Variant, variants
from offline import compile_for

from minivllm.attention_kernels import choose_num_splits, choose_tile

HERE = Path(__file__).parent
KERNELS = ["attention", "store"]


def compare(*args: str) -> dict[str, int]:
    """Run kernel_checks; how many cases it tried of each kernel."""
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join((str(HERE.parent), str(HERE))),
    }
    done = subprocess.run(
        [sys.executable, HERE / "kernel_checks.py", *args],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_equals_its_twin_for_any_two_options(kernel):
    """In the interpreter, with every two values of two options together at least once."""
    counts = compare(kernel)
    print(f"{kernel}: {counts[kernel]} cases")
    assert counts[kernel] >= 4


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_equals_its_twin_widely(kernel):
    """In the interpreter, for hundreds of random combinations."""
    assert compare(kernel, "--wide", "300") == {kernel: 300}


def check_usage(variant: Variant) -> None:
    """It compiles, spills nothing unless in float32, and fits any GPU's shared memory."""
    usage = compile_for(variant.launch, variant.capability)
    assert usage.registers > 0
    if variant.dtypes[0] != FP32:
        assert usage.spilled_bytes == 0, f"{variant}: {usage}"
    assert usage.shared_bytes <= 99 * 1024, f"{variant}: {usage}"


def test_kernels_compile_for_gpus_that_are_not_there(monkeypatch, tmp_path):
    """One in sixteen variants compiles for its GPU; none in half precision spills a register."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    some = list(variants())[::16]
    for variant in some:
        check_usage(variant)
    print(f"{len(some)} variants")


@pytest.mark.slow
def test_every_variant_compiles_without_spills(monkeypatch, tmp_path):
    """Each kernel, dtype, head size and option compiles for sm_80 and sm_90."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for variant in variants():
        check_usage(variant)


@pytest.mark.parametrize("num_programs", [1, 3, 100, 5000])
@pytest.mark.parametrize("max_keys", [1, 256, 511, 512, 100_000])
def test_splits_fill_the_device_and_stay_worth_their_cost(num_programs, max_keys):
    """The number of splits is a power of two, each may have 256 keys, and no device overflows."""
    n = choose_num_splits(num_programs, max_keys, num_sms=132)
    assert n & (n - 1) == 0
    assert 1 <= n <= 32
    assert n == 1 or n * 256 <= max_keys
    assert n == 1 or n * num_programs <= 4 * 132


@pytest.mark.parametrize("group", [1, 3, 8, 12, 20, 32, 71])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tile_holds_at_least_one_query(group, dtype):
    """However many heads share a key, a tile has lanes for one query of all of them."""
    for num_tokens in (1, 1000):
        assert choose_tile(num_tokens, 1, group, 256, dtype).num_lanes >= group
