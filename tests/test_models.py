from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minivllm.attention import ForwardBatch, allocate_kv_cache
from minivllm.dist import Group
from minivllm.errors import ModelError, UnsupportedArchitectureError
from minivllm.loader import load_model
from minivllm.models import Decoder, model_config, weight_slices

CPU = torch.device("cpu")
BLOCK_SIZE = 4
VOCAB_SIZE = 61
MINIMAL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def make_oracle(**changes):
    """A random transformers model whose logits are far apart, with norms and biases that matter."""
    settings = {key: value for key, value in MINIMAL.items() if key != "architectures"}
    torch.manual_seed(0)
    oracle = LlamaForCausalLM(LlamaConfig(**settings | changes)).eval().requires_grad_(False)
    for name, parameter in oracle.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(std=0.25)
    return oracle


def load(oracle, directory, *, max_model_len, v4=False):
    """Our model with the oracle's weights, through the files that the oracle saves."""
    oracle.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    if v4:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        config["torch_dtype"] = config.pop("dtype")
    return load_model(
        directory,
        config,
        dtype=torch.float32,
        device=CPU,
        max_model_len=max_model_len,
        group=Group(),
    )


def run_in_steps(model, sequences):
    """Logits of every token, computed in steps that mix chunks of odd sizes and single tokens.

    Sequence i starts at step i; its chunks are 5, 1, 3, 1, 7 tokens and so on, each sequence
    entering that cycle at another place, so decode rows lie beside chunks of other sequences.
    Blocks are dealt from a shuffled pool in which block 0, the null block, is not.
    """
    cycle = [5, 1, 3, 1, 7]
    config = model.config
    blocks_each = -(-max(map(len, sequences)) // BLOCK_SIZE)
    num_blocks = 1 + blocks_each * len(sequences)
    caches = allocate_kv_cache(
        config.num_layers,
        num_blocks,
        BLOCK_SIZE,
        config.num_kv_heads,
        config.head_dim,
        torch.float32,
        CPU,
    )
    generator = torch.Generator().manual_seed(1)
    tables = (1 + torch.randperm(num_blocks - 1, generator=generator)).view(len(sequences), -1)
    done = [0] * len(sequences)
    logits = [[] for _ in sequences]
    step = 0
    while any(n < len(sequence) for n, sequence in zip(done, sequences, strict=True)):
        chunks = []
        for i, sequence in enumerate(sequences[: step + 1]):
            size = min(cycle[(step + i) % len(cycle)], len(sequence) - done[i])
            if size:
                chunks.append((i, size))
        positions = [torch.arange(done[i], done[i] + size) for i, size in chunks]
        slots = [
            tables[i][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for (i, _), p in zip(chunks, positions, strict=True)
        ]
        token_ids = [sequences[i][done[i] : done[i] + size] for i, size in chunks]
        sizes = torch.tensor([size for _, size in chunks])
        batch = ForwardBatch(
            token_ids=torch.cat(token_ids),
            positions=torch.cat(positions),
            slots=torch.cat(slots),
            query_starts=torch.cat((torch.zeros(1), sizes.cumsum(0))).int(),
            kv_lens=torch.tensor([done[i] + size for i, size in chunks], dtype=torch.int32),
            block_tables=tables[[i for i, _ in chunks]].int(),
            logits_idx=torch.arange(int(sizes.sum())),
        )
        with torch.inference_mode():
            out = model.compute_logits(model(batch, caches)[batch.logits_idx])
        for (i, size), part in zip(chunks, out.split(sizes.tolist()), strict=True):
            logits[i].append(part)
            done[i] += size
        step += 1
    return [torch.cat(parts) for parts in logits]


def assert_parity(oracle, model, lengths):
    """Random sequences of these lengths get the oracle's logits, token by token."""
    generator = torch.Generator().manual_seed(2)
    sequences = [torch.randint(VOCAB_SIZE, (n,), generator=generator) for n in lengths]
    got = run_in_steps(model, sequences)
    for sequence, logits in zip(sequences, got, strict=True):
        expected = oracle(sequence[None]).logits[0]
        assert expected.std() > 0.5  # otherwise 1e-4 would say little
        assert logits.dtype == torch.float32
        assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 4},
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16},
        {"head_dim": 32},
        {"attention_bias": True},
        {"mlp_bias": True, "attention_bias": True},
        {"tie_word_embeddings": True},
        {"rms_norm_eps": 0.1, "num_hidden_layers": 3},
    ],
    ids=lambda changes: ",".join(f"{key}={value}" for key, value in changes.items()),
)
@pytest.mark.parametrize("v4", [False, True], ids=["v5", "v4"])
def test_logits_equal_transformers(changes, v4, tmp_path):
    """Any shape of decoder gives transformers' logits, however the tokens are cut into steps."""
    oracle = make_oracle(**changes)
    assert_parity(oracle, load(oracle, tmp_path, max_model_len=64, v4=v4), [1, 30, 17, 23])


# The trained context is 16 tokens, the config's 32. A type that looks at the sequence's length is
# fixed by max_model_len here and by the sequence in transformers: all sequences have that length.
TRAINED = {"original_max_position_embeddings": 16}
ROPES = {
    "default": {"rope_theta": 500.0},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 2.0, **TRAINED},
    "longrope": {"short_factor": [1.1] * 6, "long_factor": [3.0] * 6, "factor": 2.0, **TRAINED},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("length", [15, 40])
@pytest.mark.parametrize("v4", [False, True], ids=["v5", "v4"])
@pytest.mark.parametrize("rope_type", ROPES)
def test_logits_equal_transformers_with_every_rope_type(rope_type, v4, length, tmp_path):
    """Inside the trained context and beyond it, every rope type gives transformers' logits."""
    rope = {"rope_type": rope_type, "rope_theta": 1000.0, **ROPES[rope_type]}
    oracle = make_oracle(max_position_embeddings=32, rope_parameters=rope)
    assert_parity(oracle, load(oracle, tmp_path, max_model_len=length, v4=v4), [length] * 3)


def test_rope_parameters_are_read_from_both_versions_spellings():
    """Version 4's three keys, its older `type`, and version 5's one dict mean the same."""
    scaling = {"factor": 2.0, "original_max_position_embeddings": 16}
    spellings = [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 7.0, **scaling}},
        {"rope_theta": 7.0, "rope_scaling": {"rope_type": "yarn", **scaling}},
        {"rope_theta": 7.0, "rope_scaling": {"type": "yarn", **scaling}},
        {
            "rope_theta": 7.0,
            "rope_scaling": {"type": "yarn", "factor": 2.0},
            "original_max_position_embeddings": 16,
        },
    ]
    expected = {"rope_type": "yarn", "rope_theta": 7.0, **scaling}
    for spelling in spellings:
        assert model_config(MINIMAL | spelling).rope == expected


def test_the_trained_context_of_a_rope_defaults_to_the_models_own():
    """A config that leaves it out is read as transformers reads it."""
    config = model_config(MINIMAL | {"rope_scaling": {"type": "yarn", "factor": 2.0}})
    assert config.rope["original_max_position_embeddings"] == 64


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [({"torch_dtype": "bfloat16"}, "bfloat16"), ({"dtype": "float16"}, "float16"), ({}, "float32")],
)
def test_the_saved_dtype_is_read_from_either_key(spelling, dtype):
    """`dtype` and version 4's `torch_dtype` are the same; neither means float32."""
    assert model_config(MINIMAL | spelling).dtype == dtype


def test_what_a_config_leaves_out_follows_from_the_rest():
    """Without key-value heads or head size, there are as many as query heads, of E / H."""
    config = model_config({k: v for k, v in MINIMAL.items() if k != "num_key_value_heads"})
    assert (config.num_kv_heads, config.head_dim) == (4, 12)


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], [], None])
def test_an_unknown_architecture_lists_the_supported_ones(architectures):
    """An architecture outside the table, or none at all, is refused with the table's names."""
    with pytest.raises(UnsupportedArchitectureError, match="supported: LlamaForCausalLM"):
        model_config(MINIMAL | {"architectures": architectures})


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_config_without_a_dimension_names_it(key):
    """A missing dimension is an error that names the key."""
    with pytest.raises(ModelError, match=f"config.json lacks '{key}'"):
        model_config({k: v for k, v in MINIMAL.items() if k != key})


def test_another_activation_is_refused():
    """An MLP that is not gated by silu is refused rather than computed wrongly."""
    with pytest.raises(ModelError, match="hidden_act 'gelu'"):
        model_config(MINIMAL | {"hidden_act": "gelu"})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_slices_cover_every_parameter_exactly_once(tied, bias):
    """Laid end to end, the slices of each parameter are exactly its rows."""
    flags = {"tie_word_embeddings": tied, "attention_bias": bias, "mlp_bias": bias}
    config = model_config(MINIMAL | flags)
    model = Decoder(config, dtype=torch.float32, device=CPU, max_model_len=8, group=Group())
    end = dict.fromkeys(dict(model.named_parameters()), 0)
    for where in sorted(weight_slices(config).values()):
        assert where.start == end[where.parameter]
        end[where.parameter] += where.num_rows
    assert end == {name: len(parameter) for name, parameter in model.named_parameters()}


def test_a_tied_head_is_the_embedding_itself():
    """Tying costs no second tensor."""
    config = model_config(MINIMAL | {"tie_word_embeddings": True})
    model = Decoder(config, dtype=torch.float32, device=CPU, max_model_len=8, group=Group())
    assert model.head is model.embed


def test_a_cache_per_layer_is_required():
    """A list of caches that does not fit the layers is an error, not a shorter model."""
    config = model_config(MINIMAL)
    model = Decoder(config, dtype=torch.float32, device=CPU, max_model_len=8, group=Group())
    caches = allocate_kv_cache(1, 2, BLOCK_SIZE, 2, 12, torch.float32, CPU)
    one = torch.tensor([1], dtype=torch.int32)
    batch = ForwardBatch(
        token_ids=torch.tensor([1]),
        positions=torch.tensor([0]),
        slots=torch.tensor([BLOCK_SIZE]),
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        kv_lens=one,
        block_tables=one[None],
        logits_idx=torch.tensor([0]),
    )
    with torch.inference_mode(), pytest.raises(ValueError, match="zip"):
        model(batch, caches)
