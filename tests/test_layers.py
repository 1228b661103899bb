from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from minivllm.dist import Group
from minivllm.errors import ModelError
from minivllm.layers import (
    ACTIVATIONS,
    GatedMLP,
    QKNorm,
    RMSNorm,
    RowLinear,
    linear,
    pack,
    rms_norm,
    rms_norm_torch,
    rope_frequencies,
    rope_table,
    split_qkv,
    split_qkv_torch,
)

CPU = torch.device("cpu")
# One token, a serial step, and one long enough for the parallel form.
TOKEN_COUNTS = [0, 1, 7, 400]


@pytest.mark.parametrize("num_tokens", TOKEN_COUNTS)
@pytest.mark.parametrize("size", [8, 576])
def test_rms_norm_equals_transformers(num_tokens, size):
    """Both forms of rms_norm give what transformers' module gives."""
    torch.manual_seed(0)
    x = torch.randn(num_tokens, size) * 5
    oracle = LlamaRMSNorm(size, eps=1e-5).requires_grad_(False)
    oracle.weight.copy_(torch.randn(size))
    for form in (rms_norm, rms_norm_torch):
        torch.testing.assert_close(
            form(x, oracle.weight, eps=1e-5), oracle(x), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("num_tokens", TOKEN_COUNTS)
def test_rms_norm_adds_its_offset_to_the_weight(num_tokens):
    """Both forms with the offset 1 give what transformers' norm of that kind gives."""
    torch.manual_seed(0)
    x = torch.randn(num_tokens, 576) * 5
    oracle = Gemma3RMSNorm(576, eps=1e-5).requires_grad_(False)
    oracle.weight.copy_(torch.randn(576))
    for form in (rms_norm, rms_norm_torch):
        got = form(x, oracle.weight, eps=1e-5, offset=1.0)
        torch.testing.assert_close(got, oracle(x), rtol=1e-5, atol=1e-5)


def test_an_offset_is_added_in_float32():
    """In bfloat16 a norm with an offset has the bits of transformers', which adds in float32."""
    torch.manual_seed(0)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    oracle = Gemma3RMSNorm(64, eps=1e-5).requires_grad_(False).bfloat16()
    oracle.weight.copy_(torch.randn(64) / 8)
    assert torch.equal(rms_norm(x, oracle.weight, eps=1e-5, offset=1.0), oracle(x))


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("is_per_head", [True, False])
def test_qk_norm_leaves_v_alone(num_tokens, is_per_head):
    """q and k are normalised each with its own weight, per head or over all heads; v is not."""
    H, K, D = 6, 2, 8
    torch.manual_seed(0)
    parts = [torch.randn(num_tokens, n * D) for n in (H, K, K)]
    norms = []
    for num_heads in (H, K):
        size = D if is_per_head else num_heads * D
        norm = RMSNorm(size, eps=1e-5, offset=0.0, dtype=torch.float32, device=CPU)
        norm.weight.copy_(torch.randn(size))
        norms.append(norm)
    got = QKNorm(H * D, K * D, *norms)(torch.cat(parts, dim=1))
    expected = [
        rms_norm_torch(part.unflatten(1, (-1, len(norm.weight))), norm.weight, eps=1e-5).flatten(1)
        for part, norm in zip(parts, norms, strict=False)
    ]
    torch.testing.assert_close(got, torch.cat((*expected, parts[2]), dim=1))


def test_a_rotation_of_no_pairs_copies_q_and_k():
    """With an empty table both forms split the projection and turn nothing."""
    qkv = torch.randn(5, 4 * 16)
    table = rope_table(torch.empty(0), 1.0, 5)
    for form in (split_qkv, split_qkv_torch):
        got = form(qkv, torch.arange(5), table, num_heads=2, num_kv_heads=1)
        assert torch.equal(torch.cat([x.flatten(1) for x in got], dim=1), qkv)


@pytest.mark.parametrize("bias", [None, torch.arange(40.0)])
def test_a_packed_weight_multiplies_like_a_plain_one(bias):
    """`pack` changes how a weight is laid out and not what `linear` computes with it."""
    x, weight = torch.randn(0, 72), torch.randn(40, 72)
    packed = pack(weight)
    assert packed.is_mkldnn
    assert linear(x, packed, bias).shape == (0, 40)
    for num_tokens in (1, 3, 65):
        x = torch.randn(num_tokens, 72)
        torch.testing.assert_close(linear(x, packed, bias), F.linear(x, weight, bias))


def test_a_packed_weight_gives_a_token_the_same_bits_in_any_step():
    """A token's result with a packed weight does not depend on the number of tokens beside it."""
    packed = pack(torch.randn(960, 576))
    x = torch.randn(300, 576)
    whole = linear(x, packed)
    for num_tokens in (1, 2, 5, 32, 33, 100):
        assert torch.equal(linear(x[:num_tokens], packed), whole[:num_tokens])


def test_half_precision_weights_stay_as_they_are():
    """Only float32 weights have a packed layout."""
    weight = torch.randn(8, 8, dtype=torch.bfloat16)
    assert pack(weight).data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_keeps_a_half_dtype_and_computes_in_float32(dtype):
    """A half-precision input whose squares overflow is normalised and keeps its dtype."""
    x = torch.full((2, 64), 3e4, dtype=dtype)
    out = rms_norm(x, torch.ones(64, dtype=dtype), eps=1e-5)
    assert out.dtype == dtype
    torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize("num_tokens", [3, 400])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_leaves_the_others_bit_identical(num_tokens, bad):
    """A NaN or infinity in one token reaches that token's norm, q, k and v, and no other's."""
    torch.manual_seed(0)
    x = torch.randn(num_tokens, 15 * 64)
    positions = torch.arange(num_tokens)
    rope = rope_table(torch.rand(32), 1.0, num_tokens)
    spoiled = x.clone()
    spoiled[1] = bad
    others = torch.arange(num_tokens) != 1
    weight = torch.ones(x.shape[1])
    pairs = [(rms_norm(x, weight, eps=1e-5), rms_norm(spoiled, weight, eps=1e-5))]
    split = {"num_heads": 9, "num_kv_heads": 3}
    pairs += zip(
        split_qkv(x, positions, rope, **split),
        split_qkv(spoiled, positions, rope, **split),
        strict=True,
    )
    for clean, dirty in pairs:
        assert torch.equal(clean[others], dirty[others])
        assert not dirty[1].isfinite().all()


@pytest.mark.parametrize("num_tokens", TOKEN_COUNTS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (8, 1)])
def test_split_qkv_equals_transformers(num_tokens, num_heads, num_kv_heads):
    """Both forms split the projection and rotate q and k as transformers does."""
    torch.manual_seed(0)
    D = 32
    parts = [torch.randn(num_tokens, n, D) for n in (num_heads, num_kv_heads, num_kv_heads)]
    positions = torch.randint(0, 500, (num_tokens,))
    rope = rope_table(torch.rand(D // 2), 1.25, 500)
    cos, sin = (torch.cat((x, x), dim=-1) for x in rope[positions].unbind(1))
    expected = (*apply_rotary_pos_emb(*parts[:2], cos, sin), parts[2])
    qkv = torch.cat([x.flatten(1) for x in parts], dim=1)
    for form in (split_qkv, split_qkv_torch):
        got = form(qkv, positions, rope, num_heads=num_heads, num_kv_heads=num_kv_heads)
        for x, y in zip(got, expected, strict=True):
            assert x.is_contiguous()
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_a_partial_rotation_keeps_the_rest_of_the_head():
    """With fewer pairs than D/2, both forms turn the head's start and copy what lies behind."""
    torch.manual_seed(0)
    qkv = torch.randn(5, 3 * 16)
    positions = torch.arange(5)
    rope = rope_table(torch.rand(3), 1.0, 5)
    split = {"num_heads": 1, "num_kv_heads": 1}
    got = split_qkv(qkv, positions, rope, **split)
    for x, y in zip(got, split_qkv_torch(qkv, positions, rope, **split), strict=True):
        torch.testing.assert_close(x, y)
    assert torch.equal(got[0][:, 0, 6:], qkv[:, 6:16])
    assert not torch.equal(got[0][1:, 0, :6], qkv[1:, :6])


def test_split_qkv_keeps_a_half_dtype():
    """bfloat16 goes in and comes out, within its own rounding of the float32 result."""
    torch.manual_seed(0)
    qkv = torch.randn(5, 4 * 16)
    rope = rope_table(torch.rand(8), 1.0, 5)
    split = {"num_heads": 2, "num_kv_heads": 1}
    got = split_qkv(qkv.bfloat16(), torch.arange(5), rope, **split)
    for x, y in zip(got, split_qkv(qkv, torch.arange(5), rope, **split), strict=True):
        assert x.dtype == torch.bfloat16
        torch.testing.assert_close(x.float(), y, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_mlp_is_down_of_activated_gate_times_up(activation):
    """The fused MLP equals the formula written out in float64."""
    torch.manual_seed(0)
    mlp = GatedMLP(
        16, 24, activation=activation, bias=True, group=Group(), dtype=torch.float32, device=CPU
    )
    for parameter in mlp.parameters():
        parameter.copy_(torch.randn_like(parameter))
    x = torch.randn(5, 16)
    fused = x.double() @ mlp.gate_up.weight.double().T + mlp.gate_up.bias.double()
    middle = ACT2FN[activation](fused[:, :24]) * fused[:, 24:]
    expected = middle @ mlp.down.weight.double().T + mlp.down.bias.double()
    torch.testing.assert_close(mlp(x).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_row_split_linear_sums_over_ranks_and_adds_its_bias_once():
    """Given a group whose reduction doubles, as two equal ranks would, only the product doubles."""

    class Doubling(Group):
        def all_reduce(self, x):
            return x + x

    linear = RowLinear(3, 2, bias=True, group=Doubling(), dtype=torch.float32, device=CPU)
    linear.weight.fill_(1.0)
    linear.bias.fill_(10.0)
    assert linear(torch.ones(1, 3)).tolist() == [[16.0, 16.0]]


LENGTHS = {"original_max_position_embeddings": 64}
STRETCHES = {
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [2.0 + 0.5 * i for i in range(16)],
}
ROPES = {
    "linear": {"factor": 4.0},
    "proportional": {"factor": 2.0},
    "proportional-partial": {"partial_rotary_factor": 0.25},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, **LENGTHS},
    "yarn-exact": {"factor": 4.0, "truncate": False, "beta_fast": 20, "beta_slow": 2, **LENGTHS},
    "yarn-mscale": {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3, **LENGTHS},
    "yarn-scaled": {"factor": 4.0, "attention_factor": 0.5, **LENGTHS},
    "yarn-implied": {"factor": None, **LENGTHS},
    "yarn-degenerate": {"factor": 4.0, "original_max_position_embeddings": 3},
    "yarn-partial": {"factor": 4.0, "partial_rotary_factor": 0.5, **LENGTHS},
    "longrope": {**STRETCHES, **LENGTHS},
    "longrope-factor": {"factor": 8.0, **STRETCHES, **LENGTHS},
    "longrope-scaled": {"attention_factor": 1.5, **STRETCHES, **LENGTHS},
    "longrope-shrunk": {"factor": 0.5, **STRETCHES, **LENGTHS},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LENGTHS},
    "llama3-wide": {"factor": 32.0, "low_freq_factor": 0.5, "high_freq_factor": 9.0, **LENGTHS},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("max_model_len", [32, 64, 65, 256, 1000])
@pytest.mark.parametrize("name", ROPES)
def test_rope_frequencies_equal_transformers(name, max_model_len):
    """Every rope type gives transformers' frequencies and scaling for that context length."""
    rope_type = name.partition("-")[0]
    params = {"rope_type": rope_type, "rope_theta": 5000.0, **ROPES[name]}
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=256,
        rope_parameters=dict(params),
    )
    expected, expected_scale = ROPE_INIT_FUNCTIONS[rope_type](config, CPU, seq_len=max_model_len)
    inv_freq, scale = rope_frequencies(
        params, head_dim=32, max_position_embeddings=256, max_model_len=max_model_len
    )
    torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0.0)
    assert scale == pytest.approx(expected_scale, rel=1e-9)


def test_every_rope_type_of_transformers_is_covered():
    """No type in transformers' table is missing from the comparison above."""
    assert {name.partition("-")[0] for name in ROPES} == set(ROPE_INIT_FUNCTIONS)


def test_default_rope_is_the_formula():
    """Pair i turns by theta ** (-2i / D) per position, unscaled."""
    inv_freq, scale = rope_frequencies(
        {"rope_type": "default", "rope_theta": 100.0},
        head_dim=4,
        max_position_embeddings=8,
        max_model_len=8,
    )
    torch.testing.assert_close(inv_freq, torch.tensor([1.0, 0.1]))
    assert scale == 1.0


def test_an_unknown_rope_type_names_the_known_ones():
    """A type that is not in the table is an error that lists the table."""
    with pytest.raises(ModelError, match="'spiral' is unknown; known types: default, dynamic"):
        rope_frequencies(
            {"rope_type": "spiral", "rope_theta": 1e4},
            head_dim=8,
            max_position_embeddings=8,
            max_model_len=8,
        )


def test_a_rope_type_without_its_parameter_names_the_parameter():
    """A missing parameter is an error that names it and the type."""
    with pytest.raises(ModelError, match="'linear' needs the parameter 'factor'"):
        rope_frequencies(
            {"rope_type": "linear", "rope_theta": 1e4},
            head_dim=8,
            max_position_embeddings=8,
            max_model_len=8,
        )
