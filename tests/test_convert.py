from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_gguf import (
    BYTE_LEVEL,
    HEAD_DIM,
    HIDDEN,
    NUM_HEADS,
    SHAPES,
    SIZES,
    GgmlType,
    convert,
    embedded_gguf,
    entries,
    read_json,
    write_gguf,
    write_small_gguf,
)

import minivllm.convert
from minivllm.convert import convert_gguf
from minivllm.errors import CorruptFileError, ModelError, UnsupportedArchitectureError

ROOT = Path(__file__).parents[1]


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


# ------------------------------------------------------------------------------ damage and cache


def test_damage_is_a_model_error(tmp_path: Path) -> None:
    """Flipped bits in header, metadata and tensor list give a model or a ModelError."""
    whole = write_small_gguf(tmp_path / "whole.gguf")
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


def test_split_file_is_refused(tmp_path: Path) -> None:
    """One part of a model that was split is not taken for the model."""
    with pytest.raises(ModelError, match="one part of a split model"):
        convert(tmp_path, metadata={"split.count": 2})


@pytest.mark.parametrize("count", [0, 1])
def test_whole_file_with_a_split_count_is_converted(tmp_path: Path, count: int) -> None:
    """Parts that llama.cpp has joined again say 0, a model in one part says 1."""
    assert convert(tmp_path, metadata={"split.count": count}).is_dir()


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


@pytest.mark.slow
def test_embedded_weights(tmp_path: Path) -> None:
    """Every weight of the embedded model is what transformers reads from its GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    embedded = embedded_gguf()
    converted = convert_gguf(embedded, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(converted)
    oracle = load_gguf_checkpoint(str(embedded), return_tensors=True, model_to_load=model)
    state = model.state_dict()
    assert oracle["tensors"].keys() == state.keys() - {"lm_head.weight"}
    for name, tensor in oracle["tensors"].items():
        assert torch.equal(state[name], tensor.to(torch.float16)), name
    shutil.rmtree(converted)  # 270 MB, which pytest would keep
