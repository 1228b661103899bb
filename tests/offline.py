"""Compile Triton kernels as their launchers launch them, for a GPU that is not there.

A recorder in a kernel's place takes the launch: the arguments, dtypes and constants are the ones
that production passes, and nothing is run. `python tests/kernel_table.py` writes the table.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
}
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Launch(NamedTuple):
    """A kernel with the arguments that it was launched with."""

    kernel: JITFunction
    grid: tuple[int, ...]
    args: dict[str, Any]
    options: dict[str, int]  # num_warps, num_stages


class Usage(NamedTuple):
    """What one program of a compiled kernel takes."""

    registers: int  # per thread
    spilled_bytes: int  # per thread, of local memory
    shared_bytes: int


class _Recorder:
    def __init__(self, kernel: JITFunction, launches: list[Launch]) -> None:
        self._kernel = kernel
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            options = {
                name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs
            }
            named = dict(zip(self._kernel.arg_names, args, strict=False)) | kwargs
            self._launches.append(Launch(self._kernel, grid, named, options))

        return launch


@contextmanager
def recorded(module: ModuleType) -> Iterator[list[Launch]]:
    """Within, launches of the module's kernels are noted and not made."""
    kernels = {name: x for name, x in vars(module).items() if isinstance(x, JITFunction)}
    launches: list[Launch] = []
    try:
        for name, kernel in kernels.items():
            setattr(module, name, _Recorder(kernel, launches))
        yield launches
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)


def compile_for(launch: Launch, capability: int) -> Usage:
    """Compile a launch to a cubin, as the launch itself would have on such a GPU."""
    signature, constants, attrs = {}, {}, {}
    for i, param in enumerate(launch.kernel.params):
        value = launch.args[param.name]
        if param.is_constexpr:
            signature[param.name] = "constexpr"
            constants[param.name] = value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = _TYPES[value.dtype]
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[param.name] = "i32"
            if not param.do_not_specialize and value % 16 == 0:
                attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[param.name] = "fp32"
    source = ASTSource(launch.kernel, signature, constants, attrs)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        listed = subprocess.run(
            [_TOOLS / "cuobjdump", "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    # The compiler puts nothing but spilled registers into local memory, on the stack.
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", listed)}
    return Usage(
        registers=found["REG"],
        spilled_bytes=found["STACK"] + found["LOCAL"],
        shared_bytes=compiled.metadata.shared,
    )
