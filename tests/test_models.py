from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from minivllm.architectures import _ARCHITECTURES, LayerConfig, model_config, weight_slices
from minivllm.attention import ForwardBatch, allocate_kv_cache
from minivllm.dist import Group
from minivllm.errors import ModelError, UnsupportedArchitectureError, WeightsError
from minivllm.loader import load_model
from minivllm.models import Decoder

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


def make_oracle(architecture="LlamaForCausalLM", **changes):
    """A random transformers model whose logits are far apart, with norms and biases that matter."""
    settings = {key: value for key, value in MINIMAL.items() if key != "architectures"}
    settings |= {"pad_token_id": None, "attn_implementation": "eager"}  # other forms lack soft caps
    model = getattr(transformers, architecture)
    torch.manual_seed(0)
    oracle = model(model.config_class(**settings | changes)).eval().requires_grad_(False)
    offset = 1.0 if "Gemma" in architecture else 0.0
    for name, parameter in oracle.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5).sub_(offset)
        else:
            parameter.normal_(std=0.25)
    return oracle


def load(oracle, directory, *, max_model_len, v4=False):
    """Our model with the oracle's weights, through the files that the oracle saves."""
    oracle.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    if v4:
        rope = config.pop("rope_parameters")
        if "sliding_attention" in rope:
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
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
        difference = (logits - expected).abs().max()
        print(f"largest difference {difference:.1e}")
        assert difference < 1e-4


def choices(key, *values):
    """An axis along which a config may vary: one setting, its values."""
    return [{key: value} for value in values]


SHAPES = [
    [
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32},
    ],
    choices("tie_word_embeddings", False, True, True),
    choices("rms_norm_eps", 1e-5, 0.1),
]
BIASED = choices("attention_bias", False, True)
BIASED_MLP = choices("mlp_bias", False, True, False)
TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
QWEN_WINDOWS = [
    {},
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 7, "layer_types": TYPES},
]
GEMMA = [
    *SHAPES,
    BIASED,
    choices("num_hidden_layers", 4, 6),
    choices("query_pre_attn_scalar", 256, 64, 100),
    choices("final_logit_softcapping", 30.0, 6.0, None),
]
# What may vary in each architecture: from each axis one.
AXES = {
    "LlamaForCausalLM": [*SHAPES, BIASED, BIASED_MLP],
    "MistralForCausalLM": [*SHAPES, choices("sliding_window", None, 5, 16, 2)],
    "Qwen2ForCausalLM": [*SHAPES, QWEN_WINDOWS, choices("num_hidden_layers", 4)],
    "Qwen3ForCausalLM": [
        *SHAPES,
        QWEN_WINDOWS,
        BIASED,
        choices("num_hidden_layers", 4),
        choices("head_dim", 12, 32),
    ],
    "SmolLM3ForCausalLM": [
        *SHAPES,
        [
            {},
            {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5},
            {"no_rope_layers": [0, 1, 1, 0, 1]},
            {"use_sliding_window": True, "sliding_window": 5, "layer_types": TYPES},
        ],
        BIASED,
        BIASED_MLP,
        choices("num_hidden_layers", 4),
    ],
    "Phi3ForCausalLM": [
        *SHAPES,
        choices("sliding_window", None, 5),
        choices("partial_rotary_factor", 1.0, 0.5, 0.75),
    ],
    "Gemma2ForCausalLM": [
        *GEMMA,
        choices("attn_logit_softcapping", 2.0, None, 50.0),
        [{"sliding_window": 5}, {"sliding_window": 9}],
    ],
    "Gemma3ForCausalLM": [
        *GEMMA,
        [{"sliding_window": 5}, {"sliding_window": 9, "sliding_window_pattern": 3}],
        [
            {},
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                }
            },
        ],
    ],
    "Olmo2ForCausalLM": [*SHAPES, BIASED],
    "GraniteForCausalLM": [
        *SHAPES,
        BIASED,
        BIASED_MLP,
        choices("attention_multiplier", 0.3, 1.0),
        choices("embedding_multiplier", 3.0, 0.5, 1.0),
        choices("residual_multiplier", 0.4, 0.8),
        choices("logits_scaling", 2.0, 0.7, 1.0),
    ],
}
DRAWS = range(4)  # the longest axis, so that each choice is drawn at least once


def draw(architecture, number):
    """A combination: the `number`-th choice of each axis, going round."""
    changes = {}
    for axis in AXES[architecture]:
        changes |= axis[number % len(axis)]
    return changes


def test_every_architecture_is_compared():
    """No architecture in the table is missing from the comparisons here."""
    assert AXES.keys() == _ARCHITECTURES.keys()


@pytest.mark.parametrize("number", DRAWS)
@pytest.mark.parametrize("v4", [False, True], ids=["v5", "v4"])
@pytest.mark.parametrize("architecture", AXES)
def test_logits_equal_transformers(architecture, v4, number, tmp_path):
    """Any decoder gives transformers' logits, however the tokens are cut into steps."""
    oracle = make_oracle(architecture, **draw(architecture, number))
    assert_parity(oracle, load(oracle, tmp_path, max_model_len=64, v4=v4), [1, 30, 17, 23])


@pytest.mark.parametrize("architecture", AXES)
def test_any_missing_tensor_is_named(architecture, tmp_path):
    """Without one of a layer's tensors, norms and fused ones too, the error names it."""
    oracle = make_oracle(architecture)
    oracle.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    in_layer = [name for name in tensors if name.startswith("model.layers.1.")]
    assert len(in_layer) >= 6
    for name in in_layer:
        others = {key: tensor for key, tensor in tensors.items() if key != name}
        save_file(others, tmp_path / "model.safetensors")
        with pytest.raises(WeightsError, match=f"lacks 1 tensors, among them {name}$"):
            load_model(
                tmp_path,
                config,
                dtype=torch.float32,
                device=CPU,
                max_model_len=8,
                group=Group(),
            )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("architecture", AXES)
def test_logits_of_random_configs_equal_transformers(architecture, seed, tmp_path):
    """The same for settings combined at random."""
    rng = random.Random(seed)
    changes = {}
    for axis in AXES[architecture]:
        changes |= rng.choice(axis)
    oracle = make_oracle(architecture, **changes)
    model = load(oracle, tmp_path, max_model_len=64, v4=rng.random() < 0.5)
    assert_parity(oracle, model, [rng.randint(1, 60) for _ in range(5)])


# Stretches of the pairs that turn, three quarters of a head of 16.
STRETCHES = {
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [3.0 - 0.2 * i for i in range(6)],
}


@pytest.mark.parametrize("length", [15, 40])
@pytest.mark.parametrize("v4", [False, True], ids=["v5", "v4"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_phi3_with_longrope_on_a_part_of_the_head(v4, length, tmp_path):
    """Inside the trained context and beyond it, as the larger Phi models have it."""
    oracle = make_oracle(
        "Phi3ForCausalLM",
        hidden_size=64,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        partial_rotary_factor=0.75,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1000.0, **STRETCHES},
    )
    assert_parity(oracle, load(oracle, tmp_path, max_model_len=length, v4=v4), [length] * 3)


# Settings that have no part in inference, or none in the model: the host's, training's.
INERT = {
    "attention_dropout",
    "bos_token_id",
    "embd_pdrop",
    "eos_token_id",
    "initializer_range",
    "pad_token_id",
    "pretraining_tp",
    "resid_pdrop",
    "use_cache",
}
# With these, the settings that depend on them matter.
SWITCHES = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
OTHERWISE = {
    "hidden_act": "relu",
    "hidden_activation": "relu",
    "layer_types": [*TYPES, *TYPES[:3]],
    "no_rope_layers": [0] * 7,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    "use_bidirectional_attention": True,
    "attn_logit_softcapping": 7.0,
    "final_logit_softcapping": 7.0,
}


def settings_of(architecture):
    """The settings that transformers has for this architecture and not for all models, with their
    defaults."""
    config_class = getattr(transformers, architecture).config_class
    shared = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    fields = dataclasses.fields(config_class)
    return {field.name: field.default for field in fields if field.name not in shared}


def sparse(architecture, switches):
    """A config with dimensions and those switches that the architecture has."""
    known = settings_of(architecture)
    base = {key: value for key, value in MINIMAL.items() if key != "rms_norm_eps"}
    base |= {"architectures": [architecture], "num_hidden_layers": 7}
    return base | {key: switches[key] for key in switches if key in known}


@pytest.mark.parametrize("architecture", AXES)
def test_every_setting_is_obeyed_or_refused(architecture):
    """Another value of a setting gives another model or an error, but for those that have no part
    in inference."""
    base = sparse(architecture, SWITCHES)
    before = model_config(base)
    for key, default in settings_of(architecture).items():
        value = base.get(key, default)
        other = OTHERWISE.get(key, not value if isinstance(value, bool) else 2 * (value or 1))
        try:
            is_inert = model_config(base | {key: other}) == before
        except ModelError:
            is_inert = False
        assert is_inert == (key in INERT), f"{key} {value!r} -> {other!r}"


@pytest.mark.parametrize("switches", [{}, SWITCHES], ids=["without", "with"])
@pytest.mark.parametrize("architecture", AXES)
def test_what_a_config_leaves_out_is_what_transformers_adds(architecture, switches):
    """A config of dimensions alone means what it means when transformers has completed it."""
    config = sparse(architecture, switches) | {"partial_rotary_factor": 1.0}
    completed = getattr(transformers, architecture).config_class(**config).to_dict()
    assert model_config(config) == model_config(completed)


@pytest.mark.parametrize("older_name", ["su", "yarn"])
def test_phi3s_older_names_of_longrope(older_name):
    """Its first files named the type otherwise, and `yarn` there is no YaRN."""
    named = [
        {"rope_scaling": {"type": name, **STRETCHES}, "architectures": ["Phi3ForCausalLM"]}
        for name in (older_name, "longrope")
    ]
    assert model_config(MINIMAL | named[0]) == model_config(MINIMAL | named[1])


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("LlamaForCausalLM", {"sliding_window": 4}, "sliding_window 4"),
        ("LlamaForCausalLM", {"layer_types": TYPES[:2]}, "layer_types"),
        ("LlamaForCausalLM", {"is_causal": False}, "is_causal False"),
        ("LlamaForCausalLM", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ("MistralForCausalLM", {"layer_types": TYPES[:2]}, "layer_types"),
        ("Qwen2ForCausalLM", {"layer_types": TYPES[:2]}, "'sliding_attention'.*window of None"),
        ("Qwen3ForCausalLM", {"layer_types": TYPES}, "4 entries for 2 layers"),
        ("Qwen3ForCausalLM", {"layer_types": ["linear_attention"] * 2}, "'linear_attention'"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "1 entries for 2 layers"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, r"softcapping 50\.0"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_what_a_decoder_cannot_do_is_refused_by_name(architecture, changes, message):
    """A setting with which the result would be another one than transformers' is an error."""
    with pytest.raises(ModelError, match=message):
        model_config(MINIMAL | {"architectures": [architecture]} | changes)


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
        assert model_config(MINIMAL | spelling).layers == (LayerConfig(0, expected),) * 2


def test_the_trained_context_of_a_rope_defaults_to_the_models_own():
    """A config that leaves it out is read as transformers reads it."""
    config = model_config(MINIMAL | {"rope_scaling": {"type": "yarn", "factor": 2.0}})
    assert config.layers[0].rope["original_max_position_embeddings"] == 64


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


@pytest.mark.parametrize("number", DRAWS)
@pytest.mark.parametrize("architecture", AXES)
def test_the_slices_cover_every_parameter_exactly_once(architecture, number):
    """Laid end to end, the slices of each parameter are exactly its rows."""
    config = model_config(
        MINIMAL | {"architectures": [architecture]} | draw(architecture, number)
    )
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
