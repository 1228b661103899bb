from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_gguf import GgmlType, write_gguf, write_small_gguf

from minivllm.errors import CorruptFileError, ModelError
from minivllm.gguf_file import read_gguf


@pytest.mark.parametrize(
    "kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"]
)
def test_the_gguf_package_reads_the_same(tmp_path: Path, kind: str) -> None:
    """Settings, lists and dequantized weights are those that the package's own reader finds."""
    path = tmp_path / "tiny.gguf"
    metadata = {"a.flag": True, "a.real": 0.1, "a.text": "é", "a.reals": [0.5, -2.0]}
    write_gguf(path, GgmlType[kind], metadata=metadata)
    source, oracle = read_gguf(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in oracle.fields.items()}
    assert {f"GGUF.{key}" for key in ("version", "tensor_count", "kv_count")} < fields.keys()
    assert source.metadata == {k: v for k, v in fields.items() if not k.startswith("GGUF.")}
    assert list(source.tensors) == [tensor.name for tensor in oracle.tensors]
    for tensor in oracle.tensors:
        found = source.tensors[tensor.name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert found.shape == values.shape == tuple(reversed(tensor.shape.tolist()))
        np.testing.assert_array_equal(found.dequantized(), values, err_msg=tensor.name)


def test_unsupported_type_is_refused(tmp_path: Path) -> None:
    """A tensor of another type is an error that names the tensor and the type."""
    write_gguf(tmp_path / "tiny.gguf", GgmlType.Q5_1, without="token_embd.weight")
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.weight has the type Q5_1"):
        read_gguf(tmp_path / "tiny.gguf")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    """A file cut anywhere is an error that names it."""
    whole = write_small_gguf(tmp_path / "whole.gguf")
    file = tmp_path / "cut.gguf"
    data_start = len(whole) - 200_000
    cuts = {*range(64), *range(64, data_start, 97), *range(data_start, len(whole), 9973)}
    for cut in sorted(cuts | set(range(len(whole) - 40, len(whole)))):
        file.write_bytes(whole[:cut])
        with pytest.raises(CorruptFileError, match=r"cut\.gguf ends early"):
            read_gguf(file)
    file.write_bytes(whole)
    assert read_gguf(file).architecture == "llama"


@pytest.mark.parametrize("num_dims", [0, 5, 100, 1 << 31])
def test_impossible_dimensions_are_damage(tmp_path: Path, num_dims: int) -> None:
    """A tensor of no dimension, or of more than GGUF has, is named."""
    whole = write_small_gguf(tmp_path / "tiny.gguf")
    at = whole.rindex(b"output_norm.weight") + len(b"output_norm.weight")
    damaged = whole[:at] + num_dims.to_bytes(4, "little") + (1).to_bytes(8, "little") * 200
    (tmp_path / "tiny.gguf").write_bytes(damaged)
    with pytest.raises(CorruptFileError, match=r"output_norm\.weight' .* dimensions"):
        read_gguf(tmp_path / "tiny.gguf")


def test_other_files_are_not_gguf(tmp_path: Path) -> None:
    """A file that does not begin like a GGUF file, or is of another version, is named."""
    file = tmp_path / "other.gguf"
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CorruptFileError, match=r"other\.gguf is not a GGUF file"):
        read_gguf(file)
    file.write_bytes(b"GGUF\x01" + bytes(100))
    with pytest.raises(ModelError, match="version 1; supported: 2 and 3"):
        read_gguf(file)
