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

The fingerprint is cheap: the file's size, its first and last mebibyte and `_VERSION`. Two files of
one size that differ only between those are taken for the same.

Finding the file: `checkpoint`. Reading it: `gguf_file`. Its tokenizer: `gguf_vocab`. The order of
rotary pairs: `permute` of convert_hf_to_gguf.py in llama.cpp.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.errors import ModelError, UnsupportedArchitectureError
from minivllm.gguf_file import GgufFile, GgufTensor, read_gguf
from minivllm.gguf_vocab import read_vocabulary

if TYPE_CHECKING:
    import numpy as np

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
        source = read_gguf(gguf_path)
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


def _write(source: GgufFile, directory: Path) -> None:
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
    vocabulary = read_vocabulary(source)
    if vocabulary.tokenizer.get_vocab_size() > config["vocab_size"]:
        raise source.damage(f"more tokens than the {config['vocab_size']} rows of the embedding")

    vocabulary.tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", vocabulary.tokenizer_config)
    _write_json(directory / "generation_config.json", vocabulary.generation_config)
    _write_json(directory / "config.json", config | vocabulary.generation_config)
    _write_weights(source, names, heads, directory / "model.safetensors")


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _weight_names(source: GgufFile, architecture: _Architecture) -> dict[str, str]:
    """GGUF name to Hugging Face name of every weight."""
    if source.metadata.get("split.count", 0) not in (0, 1):  # 0: parts that were joined again
        raise ModelError(f"{source.path} is one part of a split model; join the parts first")
    names = {_HEAD: "lm_head.weight"} if _HEAD in source.tensors else {}
    names |= architecture.tensors
    for name in source.tensors:
        if name in names or name == _ROPE_FACTORS:
            continue
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


def _config(source: GgufFile, architecture: _Architecture) -> dict[str, Any]:
    """config.json, in the spelling that every version of transformers understands."""
    prefix = source.architecture
    config = dict(architecture.settings)
    for theirs, ours in architecture.counts.items():
        config[ours] = source.count(f"{prefix}.{theirs}")
    num_heads = config["num_attention_heads"]
    config["num_key_value_heads"] = source.count(f"{prefix}.attention.head_count_kv", num_heads)
    head_dim = source.count(f"{prefix}.attention.key_length", config["hidden_size"] // num_heads)
    for key in (f"{prefix}.attention.value_length", f"{prefix}.rope.dimension_count"):
        if (value := source.count(key, head_dim)) != head_dim:
            raise ModelError(
                f"{source.path}: {key} is {value}; it must be the head dimension {head_dim}"
            )
    config["head_dim"] = head_dim
    config["rms_norm_eps"] = source.real(f"{prefix}.attention.layer_norm_rms_epsilon")
    config["rope_theta"] = source.real(f"{prefix}.rope.freq_base", 10000.0)
    config["rope_scaling"] = _rope_scaling(source, config["rope_theta"], head_dim)
    config["vocab_size"] = source.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = _HEAD not in source.tensors
    config["torch_dtype"] = "float16"
    return config


def _rope_scaling(source: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
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


def _llama3_scaling(factors: GgufTensor, theta: float, head_dim: int) -> dict[str, Any] | None:
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
    source: GgufFile, architecture: _Architecture, config: Mapping[str, Any]
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
    source: GgufFile, names: Mapping[str, str], heads: Mapping[str, int], file: Path
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


def _float16(source: GgufFile, name: str) -> np.ndarray:
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
