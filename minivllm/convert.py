"""Turns a GGUF file into a Hugging Face directory, once.

    x.gguf ── fingerprint ──> cache/x-0f3a...   there already: nothing to do
       └── metadata, tensors ──> config.json, generation_config.json, model.safetensors,
                                 tokenizer.json, tokenizer_config.json

GGUF has names of its own, weights in blocks of a few bits and the vocabulary as lists. All that
comes after this module sees float16 weights and the files that transformers reads, and so does the
oracle of the tests.

Invariants: a directory under its final name is complete (it is written elsewhere and renamed; of
two processes that convert at once, one wins and both use its result); every tensor of the file is
mapped or refused by name; one tensor at a time is in memory.

The header is read here because the gguf package's reader takes bytes past the end of a file for
empty values and keeps several arrays per token (2.5 s for 49,152 tokens, against 0.1 s); values are
dequantized by the package.

The fingerprint is cheap: the file's size, its first and last mebibyte and `_VERSION`. Two files of
one size that differ only between those are taken for the same.

Finding the file: `checkpoint`. The format: gguf.md in the documentation of ggml.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.errors import CorruptFileError, ModelError, UnsupportedArchitectureError

if TYPE_CHECKING:
    import gguf
    import numpy as np
    import tokenizers

_VERSION = 1  # raise it when the same file is to become a different directory
_MEBIBYTE = 1 << 20


def convert_gguf(gguf_path: Path, cache_root: Path | None = None) -> Path:
    """The Hugging Face directory that holds what `gguf_path` does; made on the first call.

    `cache_root` is where it lies; None: `$MINIVLLM_CACHE`, else `$XDG_CACHE_HOME/minivllm`, else
    `~/.cache/minivllm`.

    Raises: `CorruptFileError` for a file that is no GGUF file, ends early or contradicts itself;
            `UnsupportedArchitectureError` for an architecture that is not in the table;
            `ModelError` for a tensor, a setting or a vocabulary that cannot be mapped, a file that
            cannot be read and a cache that cannot be written
    """
    root = cache_root or _default_cache_root()
    try:
        target = root / f"{gguf_path.stem}-{_fingerprint(gguf_path)}"
        if target.is_dir():
            return target
        source = _read(gguf_path)
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".converting-") as scratch:
            written = Path(scratch) / "model"
            written.mkdir()
            _write(source, written)
            try:
                written.rename(target)
            except OSError:
                if not target.is_dir():  # else another process was faster, with the same result
                    raise
    except OSError as error:
        raise ModelError(f"{gguf_path} cannot be converted into {root}: {error}") from error
    return target


def _default_cache_root() -> Path:
    if own := os.environ.get("MINIVLLM_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "minivllm"


def _fingerprint(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(f"{_VERSION} {size} ".encode())
    with path.open("rb") as file:
        digest.update(file.read(_MEBIBYTE))
        file.seek(max(0, size - _MEBIBYTE))
        digest.update(file.read(_MEBIBYTE))
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------ reading a file


class _Tensor(NamedTuple):
    """A tensor as it lies in the file; shapes are numpy's, the reverse of GGUF's."""

    type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray  # [..., bytes of a row] uint8, mapped

    def dequantized(self) -> np.ndarray:
        """Shapes: out `self.shape` float32"""
        from gguf.quants import dequantize

        return dequantize(self.data, self.type)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gguf:
    """A GGUF file whose tensors all lie inside it."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, _Tensor]

    @property
    def architecture(self) -> str:
        return str(self.value("general.architecture"))

    def damage(self, what: str) -> CorruptFileError:
        return CorruptFileError(f"{self.path} is damaged: {what}")

    def value(self, key: str) -> Any:
        if key not in self.metadata:
            raise self.damage(f"the metadata lack {key}")
        return self.metadata[key]

    def count(self, key: str) -> int:
        """The positive integer under `key`."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.damage(f"{key} must be a positive integer, it is {value!r:.50}")
        return value

    def real(self, key: str) -> float:
        """The positive number under `key`, an integer if it is one."""
        value: float = self.value(key)
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


def _read(path: Path) -> _Gguf:
    """Map `path` and check that all it announces is there."""
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
        shape = tuple(cursor.scalars("<Q", cursor.u32())[::-1])
        if name in places or not shape or 0 in shape:
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
    return _Gguf(path=path, metadata=metadata, tensors=tensors)


def _tensor(cursor: _Cursor, name: str, type_number: int, shape: tuple[int, ...]) -> _Tensor:
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {GGMLQuantizationType[type_name].value: type_name for type_name in _TENSOR_TYPES}
    if type_number not in known:
        names = {kind.value: kind.name for kind in GGMLQuantizationType}
        raise ModelError(
            f"tensor {name} has the type {names.get(type_number, type_number)}; supported:"
            f" {', '.join(_TENSOR_TYPES)}"
        )
    kind = GGMLQuantizationType(type_number)
    block_len, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_len:
        raise cursor.damage(f"a row of {name} has {shape[-1]} values, not blocks of {block_len}")
    row_bytes = shape[-1] // block_len * block_bytes
    data = np.frombuffer(cursor.take(math.prod(shape[:-1]) * row_bytes), np.uint8)
    return _Tensor(kind, shape, data.reshape(*shape[:-1], row_bytes))


# ------------------------------------------------------------------------------- architectures


class _Architecture(NamedTuple):
    """What an architecture is called on both sides."""

    settings: Mapping[str, Any]
    """What config.json always says."""
    counts: Mapping[str, str]
    """Metadata key, behind the architecture's name, to key of config.json."""
    tensors: Mapping[str, str]
    layer_tensors: Mapping[str, str]
    """The names behind `blk.N.` and `model.layers.N.`."""
    interleaved: Mapping[str, str]
    """Of the layer tensors those whose rows are in GGUF's order of rotary pairs, and the key of
    config.json that counts their heads."""


_ARCHITECTURES = {
    "llama": _Architecture(
        settings={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        },
        counts={
            "block_count": "num_hidden_layers",
            "context_length": "max_position_embeddings",
            "embedding_length": "hidden_size",
            "feed_forward_length": "intermediate_size",
            "attention.head_count": "num_attention_heads",
        },
        tensors={
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
        },
        layer_tensors={
            "attn_norm.weight": "input_layernorm.weight",
            "attn_q.weight": "self_attn.q_proj.weight",
            "attn_k.weight": "self_attn.k_proj.weight",
            "attn_v.weight": "self_attn.v_proj.weight",
            "attn_output.weight": "self_attn.o_proj.weight",
            "ffn_norm.weight": "post_attention_layernorm.weight",
            "ffn_gate.weight": "mlp.gate_proj.weight",
            "ffn_up.weight": "mlp.up_proj.weight",
            "ffn_down.weight": "mlp.down_proj.weight",
        },
        interleaved={
            "attn_q.weight": "num_attention_heads",
            "attn_k.weight": "num_key_value_heads",
        },
    ),
}

_HEAD = "output.weight"  # absent: the head is the embedding
_ROPE_FACTORS = "rope_freqs.weight"

_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def _write(source: _Gguf, directory: Path) -> None:
    """Fill the empty `directory`; all is checked before the weights are written."""
    architecture = _ARCHITECTURES.get(source.architecture)
    if architecture is None:
        raise UnsupportedArchitectureError(
            f"{source.path} has the architecture {source.architecture!r}; supported in GGUF files:"
            f" {', '.join(_ARCHITECTURES)}"
        )
    names = _weight_names(source, architecture)
    config = _config(source, architecture)
    heads = _interleaved_heads(source, architecture, config)
    special_ids = _special_ids(source)
    tokenizer, tokenizer_config = _tokenizer(source, special_ids)
    if tokenizer.get_vocab_size() > config["vocab_size"]:
        raise source.damage(f"more tokens than the {config['vocab_size']} rows of the embedding")

    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    generation = _generation(source, special_ids)
    _write_json(directory / "generation_config.json", generation)
    _write_json(directory / "config.json", config | generation)
    _write_weights(source, names, heads, directory / "model.safetensors")


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _weight_names(source: _Gguf, architecture: _Architecture) -> dict[str, str]:
    """GGUF name to Hugging Face name of every weight."""
    if source.metadata.get("split.count", 1) != 1:
        raise ModelError(f"{source.path} is one part of a split model; join the parts first")
    names = {_HEAD: "lm_head.weight"} if _HEAD in source.tensors else {}
    names |= architecture.tensors
    for name in source.tensors.keys() - names.keys() - {_ROPE_FACTORS}:
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if match is None or match[2] not in architecture.layer_tensors:
            raise ModelError(f"{source.path}: tensor {name} is not part of a plain decoder")
        names[name] = f"model.layers.{match[1]}.{architecture.layer_tensors[match[2]]}"
    for i in range(source.count(f"{source.architecture}.block_count")):
        for name in architecture.layer_tensors:
            if f"blk.{i}.{name}" not in names:
                raise source.damage(f"the tensor blk.{i}.{name} is missing")
    for name in architecture.tensors:
        if name not in source.tensors:
            raise source.damage(f"the tensor {name} is missing")
    return names


def _config(source: _Gguf, architecture: _Architecture) -> dict[str, Any]:
    """config.json, in the spelling that every version of transformers understands."""
    prefix = source.architecture
    config = dict(architecture.settings)
    for theirs, ours in architecture.counts.items():
        config[ours] = source.count(f"{prefix}.{theirs}")

    def count_or(key: str, default: int) -> int:
        return source.count(f"{prefix}.{key}") if f"{prefix}.{key}" in source.metadata else default

    num_heads = config["num_attention_heads"]
    config["num_key_value_heads"] = count_or("attention.head_count_kv", num_heads)
    head_dim = count_or("attention.key_length", config["hidden_size"] // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if count_or(key, head_dim) != head_dim:
            raise ModelError(
                f"{source.path}: {prefix}.{key} is {count_or(key, head_dim)}; it must be the head"
                f" dimension {head_dim}"
            )
    config["head_dim"] = head_dim
    config["rms_norm_eps"] = source.real(f"{prefix}.attention.layer_norm_rms_epsilon")
    config["rope_theta"] = 10000.0
    if f"{prefix}.rope.freq_base" in source.metadata:
        config["rope_theta"] = source.real(f"{prefix}.rope.freq_base")
    config["rope_scaling"] = _rope_scaling(source, config["rope_theta"], head_dim)
    config["vocab_size"] = source.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = _HEAD not in source.tensors
    config["torch_dtype"] = "float16"
    return config


def _rope_scaling(source: _Gguf, theta: float, head_dim: int) -> dict[str, Any] | None:
    """How angles are stretched for long texts.

    Raises: `ModelError` for a kind that has no exact counterpart
    """
    prefix = f"{source.architecture}.rope.scaling."
    given = {
        key.removeprefix(prefix): value
        for key, value in source.metadata.items()
        if key.startswith(prefix)
    }
    given.pop("finetuned", None)  # history, without effect
    kind = given.pop("type", "linear" if given else "none")
    if f"{source.architecture}.rope.scale_linear" in source.metadata:
        raise ModelError(f"{source.path}: rope.scale_linear is not supported")
    if _ROPE_FACTORS in source.tensors:
        scaling = _llama3_scaling(source.tensors[_ROPE_FACTORS], theta, head_dim)
        if scaling is None or kind != "none":
            raise ModelError(f"{source.path}: {_ROPE_FACTORS} is not Llama 3's scaling alone")
        return scaling
    if kind == "none":
        return None
    unknown = given.keys() - _SCALING.keys()
    if kind not in ("linear", "yarn") or unknown:
        what = f"key {min(unknown)!r}" if unknown else f"type {kind!r:.50}"
        raise ModelError(f"{source.path}: the {what} of {prefix}* is not supported")
    scaling = {ours: source.real(prefix + key) for key, ours in _SCALING.items() if key in given}
    return {"rope_type": kind, "factor": source.real(prefix + "factor"), **scaling}


def _llama3_scaling(factors: _Tensor, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The parameters behind Llama 3's per-pair divisors; None: they come from something else.

    Only the factor differs between the published models (8 or 32). It divides the slowest pair,
    so it is the largest divisor; the others follow from it and are compared.

    Shapes: factors [head_dim / 2]
    """
    import numpy as np

    if factors.shape != (head_dim // 2,):
        return None
    divisors = factors.dequantized()
    factor = float(divisors.max())
    tokens_per_turn = 2 * math.pi * theta ** (2 * np.arange(head_dim // 2) / head_dim)
    kept = ((8192 / tokens_per_turn - 1) / (4 - 1)).clip(0, 1)
    if not factor >= 1 or not np.allclose(1 / ((1 - kept) / factor + kept), divisors, rtol=1e-3):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


# ------------------------------------------------------------------------------------- weights


def _interleaved_heads(
    source: _Gguf, architecture: _Architecture, config: Mapping[str, Any]
) -> dict[str, int]:
    """The tensors whose rows are to be put in order, and how many heads share them."""
    heads = {}
    for i in range(config["num_hidden_layers"]):
        for name, key in architecture.interleaved.items():
            tensor = f"blk.{i}.{name}"
            num_rows = config[key] * config["head_dim"]
            if source.tensors[tensor].shape[0] != num_rows or config["head_dim"] % 2:
                raise source.damage(
                    f"{tensor} has {source.tensors[tensor].shape[0]} rows, not {config[key]} heads"
                    f" of {config['head_dim']}, an even number"
                )
            heads[tensor] = config[key]
    return heads


def _write_weights(
    source: _Gguf, names: Mapping[str, str], heads: Mapping[str, int], file: Path
) -> None:
    """A safetensors file: length of the header, header, the tensors one after the other.

    By hand, because the library wants all tensors at once, and their bytes a second time.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for theirs, ours in names.items():
        shape = source.tensors[theirs].shape
        start, end = end, end + 2 * math.prod(shape)
        header[ours] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little"))
        out.write(encoded)
        for theirs in names:
            values = _float16(source, theirs)
            out.write((_deinterleaved(values, heads[theirs]) if theirs in heads else values).data)


def _float16(source: _Gguf, name: str) -> np.ndarray:
    import numpy as np

    # What overflows is infinite, and found below.
    with np.errstate(over="ignore", invalid="ignore"):
        values = source.tensors[name].dequantized().astype(np.float16)
    if not np.isfinite(values).all():
        raise ModelError(f"{source.path}: tensor {name} has values that do not fit in float16")
    return values


def _deinterleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rotary pairs as (i, i + D/2), where GGUF's llama has them as (2i, 2i + 1).

    Rows of a head with D = 6 in the file: 0 3 1 4 2 5.

    Shapes: weight [num_heads * D, E]; out the same
    """
    import numpy as np

    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


# ---------------------------------------------------------------------------------- vocabulary

_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4

_SPECIAL_IDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


class _PreTokenizer(NamedTuple):
    """How text is split before merges apply: by each pattern in turn, matches and gaps alike."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    """Whether a piece that is a token as a whole stays one, whatever the merges say."""
    add_bos: bool = False
    """Whether a file that does not say wants BOS in front."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_PRE_TOKENIZERS = {
    "default": _PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _PreTokenizer((_GPT2,)),
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "qwen2": _PreTokenizer((_LLAMA3.replace("{1,3}", ""),), nfc=True),
}


def _special_ids(source: _Gguf) -> dict[str, int]:
    """Ids of the named tokens that the file names, by Hugging Face's names."""
    num_tokens = len(source.items("tokenizer.ggml.tokens", str))
    ids = {name: source.value(key) for name, key in _SPECIAL_IDS.items() if key in source.metadata}
    for name, token_id in ids.items():
        if not isinstance(token_id, int) or not 0 <= token_id < num_tokens:
            raise source.damage(f"{_SPECIAL_IDS[name]} is {token_id!r:.50}, not a token")
    return ids


def _generation(source: _Gguf, special_ids: Mapping[str, int]) -> dict[str, Any]:
    """generation_config.json; the end of a turn ends a generation like the end of a text."""
    ends = [special_ids.get("eos_token")]
    ends += [source.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    eos_ids = list(dict.fromkeys(token_id for token_id in ends if isinstance(token_id, int)))
    return {
        "bos_token_id": special_ids.get("bos_token"),
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
        "pad_token_id": special_ids.get("pad_token"),
    }


def _tokenizer(
    source: _Gguf, special_ids: Mapping[str, int]
) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """What goes into tokenizer.json and tokenizer_config.json."""
    from tokenizers import AddedToken, processors

    kind = source.value("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{source.path}: vocabulary {kind!r:.50} is not supported: gpt2, llama")
    tokens = source.items("tokenizer.ggml.tokens", str)
    types = [_NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in source.metadata:
        types = source.items("tokenizer.ggml.token_type", int)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(types) != len(tokens):
        raise source.damage("a token is listed twice or has no type")
    try:
        if kind == "gpt2":
            tokenizer, add_bos = _byte_level(source, vocab)
        else:
            tokenizer, add_bos = _sentencepiece(source, vocab, types, special_ids), True
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise source.damage(f"its vocabulary cannot be used: {error}") from error

    added = [
        AddedToken(token, normalized=False, special=token_type != _USER_DEFINED)
        for token, token_type in zip(tokens, types, strict=True)
        if token and token_type in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    add_bos = bool(source.metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    add_eos = bool(source.metadata.get("tokenizer.ggml.add_eos_token", False))
    named = {name: tokens[token_id] for name, token_id in special_ids.items()}
    before = [named["bos_token"]] if add_bos and "bos_token" in named else []
    after = [named["eos_token"]] if add_eos and "eos_token" in named else []
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=[(token, vocab[token]) for token in {*before, *after}],
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(before),
        "add_eos_token": bool(after),
        **named,
    }
    if isinstance(template := source.metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    return tokenizer, config


def _byte_level(source: _Gguf, vocab: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    """GPT-2's kind: merges over bytes written as letters. Also whether it wants BOS by default."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = source.metadata.get("tokenizer.ggml.pre", "default")
    rules = _PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if rules is None:
        raise ModelError(
            f"{source.path}: tokenizer.ggml.pre {name!r:.50} is not supported; supported:"
            f" {', '.join(_PRE_TOKENIZERS)}"
        )
    merges = [tuple(merge.split(" ")) for merge in source.items("tokenizer.ggml.merges", str)]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=rules.ignore_merges))
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rules.add_bos


def _sentencepiece(
    source: _Gguf, vocab: dict[str, int], types: list[int], special_ids: Mapping[str, int]
) -> tokenizers.Tokenizer:
    """Llama 2's kind: pieces of text with ▁ for a space, and bytes for what no piece covers."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = source.items("tokenizer.ggml.scores", float)
    if len(scores) != len(vocab):
        raise source.damage("a token has no score")
    pieces = {
        token: score
        for (token, token_id), score in zip(vocab.items(), scores, strict=True)
        if types[token_id] == _NORMAL
    }
    unk_id = special_ids.get("unk_token")
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            _merges(pieces),
            unk_token=None if unk_id is None else list(vocab)[unk_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(source.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """Merges that do what sentencepiece does: always form the piece with the highest score.

    A merge ranks as the piece that it forms; a trained vocabulary has no two equal scores.

    >>> _merges({"a": -3.0, "b": -4.0, "ab": -2.0, "aba": -1.0})
    [('ab', 'a'), ('a', 'b')]
    """
    ranked = sorted(pieces, key=lambda piece: -pieces[piece])
    return [
        (piece[:cut], piece[cut:])
        for piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
