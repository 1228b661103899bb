from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm.dist import Group
from minivllm.errors import CorruptFileError, UnsupportedArchitectureError, WeightsError
from minivllm.loader import dummy_model, load_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
}
EMBED = "model.embed_tokens.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def make_tensors(dtype=torch.float32):
    """A checkpoint of CONFIG, as published: no part fused."""
    shapes = {EMBED: (11, 8), "lm_head.weight": (11, 8), "model.norm.weight": (8,)}
    for i in range(2):
        layer = f"model.layers.{i}."
        for part, num_rows in (("q", 8), ("k", 4), ("v", 4), ("o", 8)):
            shapes[f"{layer}self_attn.{part}_proj.weight"] = (num_rows, 8)
            shapes[f"{layer}self_attn.{part}_proj.bias"] = (num_rows,)
        shapes[f"{layer}mlp.gate_proj.weight"] = (12, 8)
        shapes[f"{layer}mlp.up_proj.weight"] = (12, 8)
        shapes[f"{layer}mlp.down_proj.weight"] = (8, 12)
        shapes[f"{layer}input_layernorm.weight"] = (8,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (8,)
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def load(path, *, dtype=torch.float32, **changes):
    """The model of CONFIG, with `changes`, from the files in `path`."""
    return load_model(
        path, CONFIG | changes, dtype=dtype, device="cpu", max_model_len=16, group=Group()
    )


def save(tensors, path):
    """All in one file."""
    save_file(tensors, path / "model.safetensors")


def save_sharded(tensors, path, num_files=3):
    """Dealt round over several files, so that fused parts lie in different ones."""
    names = sorted(tensors)
    weight_map = {}
    for i in range(num_files):
        file = f"model-{i + 1:05}-of-{num_files:05}.safetensors"
        save_file({name: tensors[name] for name in names[i::num_files]}, path / file)
        weight_map.update(dict.fromkeys(names[i::num_files], file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def assert_loaded(model, tensors):
    """Every parameter holds its tensors' values, fused parts stacked in order."""
    expected = {
        "embed": tensors[EMBED],
        "head": tensors["lm_head.weight"],
        "norm.weight": tensors["model.norm.weight"],
    }
    for i in range(2):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        for kind in ("weight", "bias"):
            expected[f"{ours}attention.qkv.{kind}"] = torch.cat(
                [tensors[f"{theirs}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            )
            expected[f"{ours}attention.o.{kind}"] = tensors[f"{theirs}self_attn.o_proj.{kind}"]
        expected[f"{ours}mlp.gate_up.weight"] = torch.cat(
            [tensors[f"{theirs}mlp.{part}_proj.weight"] for part in ("gate", "up")]
        )
        expected[f"{ours}mlp.down.weight"] = tensors[f"{theirs}mlp.down_proj.weight"]
        expected[f"{ours}attention_norm.weight"] = tensors[f"{theirs}input_layernorm.weight"]
        expected[f"{ours}mlp_norm.weight"] = tensors[f"{theirs}post_attention_layernorm.weight"]
    parameters = dict(model.named_parameters())
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, expected[name].to(parameter.dtype)), name
        assert not parameter.requires_grad


def test_a_single_file_fills_the_fused_parameters(tmp_path):
    """Each tensor lands in its rows of its parameter."""
    tensors = make_tensors()
    save(tensors, tmp_path)
    assert_loaded(load(tmp_path), tensors)


def test_a_sharded_checkpoint_loads_like_a_single_file(tmp_path):
    """The index's files together fill the model, parts of one parameter in different files too."""
    tensors = make_tensors()
    save_sharded(tensors, tmp_path)
    assert_loaded(load(tmp_path), tensors)


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_weights_are_converted_to_the_wanted_dtype(saved, wanted, tmp_path):
    """A file in one dtype loads into a model in another, value by value."""
    tensors = make_tensors(saved)
    save(tensors, tmp_path)
    model = load(tmp_path, dtype=wanted)
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    assert_loaded(model, tensors)


def test_the_model_outlives_its_files(tmp_path):
    """Nothing in the loaded model refers to the mapped file."""
    tensors = make_tensors()
    save(tensors, tmp_path)
    model = load(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert_loaded(model, tensors)


@pytest.mark.parametrize("save_as", [save, save_sharded])
@pytest.mark.parametrize("name", [*make_tensors()])
def test_any_missing_tensor_is_named(name, save_as, tmp_path):
    """Without one tensor, whichever it is, nothing loads and the error names it."""
    tensors = make_tensors()
    del tensors[name]
    save_as(tensors, tmp_path)
    with pytest.raises(WeightsError, match=f"lacks 1 tensors, among them {name}$"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["model.layers.2.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.bias", "score.weight"],
)
def test_an_unexpected_tensor_is_named(name, tmp_path):
    """A tensor with no place in the model is an error, not a silent loss."""
    save(make_tensors() | {name: torch.zeros(12)}, tmp_path)
    with pytest.raises(WeightsError, match=f"{name} is unexpected"):
        load(tmp_path)


def test_a_misshaped_tensor_is_named_with_both_shapes(tmp_path):
    """A tensor of another shape is an error that shows what it is and what it should be."""
    save(make_tensors() | {K_PROJ: torch.zeros(5, 8)}, tmp_path)
    with pytest.raises(WeightsError, match=rf"{K_PROJ} has the shape \[5, 8\].* \[4, 8\]"):
        load(tmp_path)


def test_a_tensor_that_would_broadcast_is_misshaped(tmp_path):
    """One row where four belong is refused, though a copy would have repeated it."""
    save(make_tensors() | {K_PROJ: torch.zeros(1, 8)}, tmp_path)
    with pytest.raises(WeightsError, match=K_PROJ):
        load(tmp_path)


def test_a_tensor_of_integers_is_refused(tmp_path):
    """Quantised numbers are not taken for weights."""
    save(make_tensors() | {K_PROJ: torch.zeros(4, 8, dtype=torch.int8)}, tmp_path)
    with pytest.raises(WeightsError, match=rf"{K_PROJ} holds torch.int8"):
        load(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    """Which of two copies would count is not left to the order of the files."""
    tensors = make_tensors()
    save_sharded(tensors, tmp_path)
    for file in sorted(tmp_path.glob("*.safetensors"))[:2]:
        save_file(load_file(file) | {K_PROJ: tensors[K_PROJ]}, file)
    with pytest.raises(WeightsError, match=f"{K_PROJ} was already in an earlier file"):
        load(tmp_path)


def test_tensors_that_carry_nothing_are_skipped(tmp_path):
    """Old checkpoints' rotary frequencies do no harm."""
    tensors = make_tensors()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(1)}
    save(tensors | extra, tmp_path)
    assert_loaded(load(tmp_path), tensors)


def test_a_tied_head_may_be_saved_beside_its_embedding(tmp_path):
    """With tied embeddings the copy in the file is not read, and its absence is no error."""
    tensors = make_tensors()
    for _ in range(2):
        save(tensors, tmp_path)
        model = load(tmp_path, tie_word_embeddings=True)
        assert torch.equal(model.head, tensors[EMBED])
        tensors.pop("lm_head.weight", None)


def test_every_truncation_is_a_corrupt_file(tmp_path):
    """Wherever a file ends early, in length, header or data, the error names the file."""
    save(make_tensors(), tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for size in [0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:size])
        with pytest.raises(CorruptFileError, match=r"model\.safetensors is damaged"):
            load(tmp_path)


def test_a_damaged_shard_is_named_among_the_others(tmp_path):
    """With several files, the error says which one is damaged."""
    save_sharded(make_tensors(), tmp_path)
    file = tmp_path / "model-00002-of-00003.safetensors"
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(CorruptFileError, match=r"model-00002-of-00003\.safetensors is damaged"):
        load(tmp_path)


def test_an_index_that_names_an_absent_file_is_an_error(tmp_path):
    """An incomplete download says which file did not arrive."""
    save_sharded(make_tensors(), tmp_path)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"names model-00003-of-00003\.safetensors, which"):
        load(tmp_path)


@pytest.mark.parametrize(
    "text", ['{"weight_map": ', "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": []}}']
)
def test_a_damaged_index_is_a_corrupt_file(text, tmp_path):
    """An index that is cut off or of another form is named."""
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptFileError, match=r"index\.json is damaged"):
        load(tmp_path)


def test_a_directory_without_safetensors_is_an_error(tmp_path):
    """The error says which names were looked for."""
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor model\.safetensors\."):
        load(tmp_path)


def test_an_unsupported_architecture_is_refused_before_any_file_is_read(tmp_path):
    """The config decides first; the directory need not even hold weights."""
    with pytest.raises(UnsupportedArchitectureError):
        load(tmp_path, architectures=["GPT2LMHeadModel"])


def test_dummy_weights_are_scaled_random_numbers():
    """The same every time; products keep the scale of their input, norms and biases do nothing."""
    models = [
        dummy_model(CONFIG, dtype=torch.float32, device="cpu", max_model_len=16, group=Group())
        for _ in range(2)
    ]
    for (name, one), other in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert torch.equal(one, other)
        if one.dim() == 2:
            assert 0.5 < one.std() * one.shape[1] ** 0.5 < 1.5
        else:
            assert (one == (0 if name.endswith("bias") else 1)).all()
