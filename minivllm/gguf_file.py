"""Reads a GGUF file: settings and vocabulary as values, weights as mapped blocks.

    "GGUF" version counts │ key kind value, ... │ name shape type offset, ... │ pad │ blocks ...
                            metadata              tensors                             data

Numbers are little-endian; strings and arrays carry their length in front. A weight is a matrix of
rows, a row a sequence of blocks of a few bits per value and a scale; it stays in the file until
`GgufTensor.dequantized` makes it numbers.

The header is read here because the gguf package's reader takes bytes past the end of a file for
empty values and keeps several arrays per token (2.5 s for 49,152 tokens, against 0.1 s); values are
dequantized by the package.

Invariants: in a `GgufFile` that exists every tensor lies inside the file and is of a type that can
be dequantized; damage is told as a `CorruptFileError` that names the file and the place.

What the values mean: `gguf_vocab`, `convert`. The format: gguf.md in the documentation of ggml.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.errors import CorruptFileError, ModelError

if TYPE_CHECKING:
    import gguf
    import numpy as np


class GgufTensor(NamedTuple):
    """A tensor as it lies in the file; shapes are numpy's, the reverse of GGUF's."""

    type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray  # [..., bytes of a row] uint8, mapped

    def dequantized(self) -> np.ndarray:
        """The values.

        Shapes: out `self.shape` float32
        """
        from gguf.quants import dequantize

        return dequantize(self.data, self.type)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A GGUF file whose tensors all lie inside it."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """What the model is called; its settings have the name in front."""
        return str(self.value("general.architecture"))

    def damage(self, what: str) -> CorruptFileError:
        """The error to raise for `what` is wrong with the file."""
        return CorruptFileError(f"{self.path} is damaged: {what}")

    def value(self, key: str) -> Any:
        """The value under `key`, which must be there."""
        if key not in self.metadata:
            raise self.damage(f"the metadata lack {key}")
        return self.metadata[key]

    def count(self, key: str, default: int | None = None) -> int:
        """The positive integer under `key`."""
        value = self._value_or(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.damage(f"{key} must be a positive integer, it is {value!r:.50}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """The positive number under `key`, an integer if it is one."""
        value: float = self._value_or(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise self.damage(f"{key} must be a positive number, it is {value!r:.50}")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """The array under `key`; all its items are of `kind`."""
        value = self.value(key)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self.damage(f"{key} must be an array of {kind.__name__}")
        return value

    def _value_or(self, key: str, default: Any) -> Any:
        """A default of None means that the key must be there."""
        if default is not None and key not in self.metadata:
            return default
        return self.value(key)


# GGUF's numbers for the types of metadata; 8 is a string and 9 an array.
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING = 8
_ARRAY = 9

_MAX_DIMS = 4
_TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")


class _Cursor:
    """Reads little-endian values one after the other; what would lie past the end is an error."""

    __slots__ = ("_data", "_path", "offset")

    def __init__(self, path: Path, data: memoryview) -> None:
        self._path = path
        self._data = data
        self.offset = 0

    def take(self, num_bytes: int) -> memoryview:
        end = self.offset + num_bytes
        if end > len(self._data):
            raise CorruptFileError(
                f"{self._path} ends early: it has {len(self._data)} bytes and needs {end} or more"
            )
        taken = self._data[self.offset : end]
        self.offset = end
        return taken

    def scalars(self, layout: str, count: int = 1) -> list[Any]:
        data = self.take(struct.calcsize(layout) * count)
        return [value for (value,) in struct.iter_unpack(layout, data)]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        data = self.take(self.u64())
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise self.damage(f"a string before byte {self.offset} is no UTF-8") from error

    def value(self) -> Any:
        kind = self.u32()
        if kind != _ARRAY:
            return self.values(kind, 1)[0]
        return self.values(self.u32(), self.u64())

    def values(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise self.damage(f"metadata before byte {self.offset} have the unknown type {kind}")
        return self.scalars(_SCALARS[kind], count)

    def damage(self, what: str) -> CorruptFileError:
        return CorruptFileError(f"{self._path} is damaged: {what}")


def read_gguf(path: Path) -> GgufFile:
    """Map `path` and check that all it announces is there.

    Raises: `CorruptFileError` for a file that is no GGUF file, ends early or contradicts itself;
            `ModelError` for a version or a type of weights that is not supported
    """
    import numpy as np

    # An empty file cannot be mapped.
    is_empty = path.stat().st_size == 0
    cursor = _Cursor(path, memoryview(b"") if is_empty else np.memmap(path, np.uint8, "r").data)
    if bytes(cursor.take(4)) != b"GGUF":
        raise CorruptFileError(f"{path} is not a GGUF file")
    version = cursor.u32()
    if version not in (2, 3):  # 1 had other widths; a big-endian file shows as 3 << 24
        raise ModelError(f"{path} has GGUF version {version}; supported: 2 and 3, little-endian")
    num_tensors = cursor.u64()
    num_values = cursor.u64()
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value()
    places: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        if not 1 <= (num_dims := cursor.u32()) <= _MAX_DIMS:
            raise cursor.damage(f"the tensor {name!r} has {num_dims} dimensions")
        shape = tuple(cursor.scalars("<Q", num_dims)[::-1])
        if name in places or 0 in shape:
            raise cursor.damage(f"the tensor {name!r} is listed twice or has no elements")
        places[name] = (cursor.u32(), shape, cursor.u64())

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.damage(f"general.alignment is {alignment!r:.50}")
    start = -(-cursor.offset // alignment) * alignment
    tensors = {}
    for name, (type_number, shape, offset) in places.items():
        cursor.offset = start + offset
        tensors[name] = _tensor(cursor, name, type_number, shape)
    return GgufFile(path=path, metadata=metadata, tensors=tensors)


def _tensor(cursor: _Cursor, name: str, type_number: int, shape: tuple[int, ...]) -> GgufTensor:
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    kinds = {kind.value: kind for kind in GGMLQuantizationType}
    kind = kinds.get(type_number)
    if kind is None or kind.name not in _TENSOR_TYPES:
        raise ModelError(
            f"tensor {name} has the type {kind.name if kind else type_number}; supported:"
            f" {', '.join(_TENSOR_TYPES)}"
        )
    block_len, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_len:
        raise cursor.damage(f"a row of {name} has {shape[-1]} values, not blocks of {block_len}")
    row_bytes = shape[-1] // block_len * block_bytes
    data = np.frombuffer(cursor.take(math.prod(shape[:-1]) * row_bytes), np.uint8)
    return GgufTensor(kind, shape, data.reshape(*shape[:-1], row_bytes))
