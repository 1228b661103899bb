"""The device: which one, in which dtypes, how much memory, and how numbers travel to it and back.

A step on a GPU must never make the host wait for the device: the host would then idle while the
device computes, and the device while the host prepares. So everything travels without a wait:

    arrays ─> Staging: one pinned buffer ── one copy ──> one device buffer, cut into tensors
    array ──> upload: pinned, for the rare stage that needs more
    result <─ Readback: copies in the background, and an event that says when they are there

On a CPU all of these are views of the same memory and nothing is copied twice.

Invariants: a pinned buffer is written again only when its copy has been done (two take turns); the
device buffer needs no such care, as its next copy runs after the step before it, in stream order.
What a step sends: `rows`. When a result is waited for: `worker`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minivllm.errors import ConfigError

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_ALIGN_BYTES = 16  # what Triton and vectorised loads want of an address


def pick_device(name: str) -> torch.device:
    """The device that `name` stands for; "auto" is a GPU where there is one.

    Raises: `ConfigError` for a device that is not there
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("device", name, "is not there: torch sees no CUDA device")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)


def pick_dtype(name: str, device: torch.device, hf_config: Mapping[str, Any]) -> torch.dtype:
    """What to compute in. "auto": on a GPU as the checkpoint was saved, bfloat16 for float32, which
    has no tensor cores; on a CPU float32, in which it is fastest.

    >>> pick_dtype("auto", torch.device("cuda"), {"torch_dtype": "float16"})
    torch.float16
    >>> pick_dtype("auto", torch.device("cuda"), {"dtype": "float32"})
    torch.bfloat16
    >>> pick_dtype("auto", torch.device("cpu"), {"dtype": "bfloat16"})
    torch.float32
    """
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    saved = hf_config.get("dtype") or hf_config.get("torch_dtype")
    return torch.float16 if saved == "float16" else torch.bfloat16


def pick_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What keys and values are kept in; "auto" is what is computed in."""
    if name == "auto":
        return dtype
    return torch.float8_e4m3fn if name == "fp8" else _DTYPES[name]


def available_bytes() -> int:
    """Host memory that new allocations can take without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` on `device`, without waiting for the device as `Tensor.to` does. The pinned copy
    comes from torch's pool, which hands it out again when the transfer has been done."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Staging:
    """A buffer on the host and one on the device: many arrays go over in one copy.

    Arrays with the same shapes in the same order lie at the same addresses every time, which is
    what a captured graph relies on.
    """

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        self._on_device = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        self._on_host = [self._on_device]
        self._copied: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._on_host = [
                torch.empty(capacity_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]
            self._copied = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def send(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """The arrays as tensors on the device, valid until the next call.

        >>> sent = Staging(64, torch.device("cpu")).send({"a": np.arange(3), "b": np.ones((1, 2))})
        >>> sent["a"].tolist(), sent["b"].tolist()
        ([0, 1, 2], [[1.0, 1.0]])
        """
        self._turn = (self._turn + 1) % len(self._on_host)
        host = self._on_host[self._turn]
        if self._copied:
            self._copied[self._turn].synchronize()
        sent, end = {}, 0
        for name, array in arrays.items():
            start, end = end, end + array.nbytes
            host[start:end].numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            typed = self._on_device[start:end].view(_torch_dtype(array.dtype))
            sent[name] = typed.view(array.shape)
            end += -end % _ALIGN_BYTES
        assert end <= len(host) + _ALIGN_BYTES, f"{end} bytes do not fit in {len(host)}"
        if self._copied:
            self._on_device[:end].copy_(host[:end], non_blocking=True)
            self._copied[self._turn].record()
        return sent


def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class Readback:
    """Copies of tensors, on their way to the host; on a CPU they are there."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [tensor.to("cpu", non_blocking=True, copy=True) for tensor in tensors]
        self._arrived: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._arrived = torch.cuda.Event(blocking=True)  # sleeps instead of spinning
            self._arrived.record()

    @property
    def must_wait(self) -> bool:
        """Whether `tensors` hold nothing before `wait` has returned."""
        return self._arrived is not None

    def wait(self) -> None:
        """Return when `tensors` are there. May be called by any thread."""
        if self._arrived is not None:
            self._arrived.synchronize()
