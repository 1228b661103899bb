"""One decoder, described by data, and the table of architectures that it can be.

    config.json ── model_config ──> ModelConfig ── Decoder ──> parameters, uninitialised
                                        └── weight_slices ──> where each tensor of a file belongs

An architecture is a row of `_ARCHITECTURES`: how to read its config, and the names of its weights.
A new one is a few lines as long as its data flow is this:

    x = embed(token_ids)
    L times:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    hidden = norm(x);  logits = head(hidden)

Fused weights stack their parts by rows: qkv = q | k | v, gate_up = gate | up. A tied head is the
embedding tensor itself.

Invariants: the slices of `weight_slices` cover every parameter's rows exactly once; the forward
takes each tensor as an argument, keeps no state between steps and does not ask how many ranks
there are. Rotary types and layers: `layers`. Reading the files: `loader`. Shape letters:
`attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.attention import ForwardBatch, LayerCache, paged_attention, store_kv
from minivllm.dist import Group
from minivllm.errors import ModelError, UnsupportedArchitectureError
from minivllm.layers import (
    GatedMLP,
    Linear,
    RMSNorm,
    RowLinear,
    empty_parameter,
    linear,
    pack,
    rope_frequencies,
    rope_table,
    split_qkv,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's dimensions and switches, whatever its family calls them."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    """`rope_type`, `rope_theta` and what the type needs; see `layers.rope_frequencies`."""
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    """The name of the torch dtype that the weights were saved in."""


class WeightSlice(NamedTuple):
    """The rows `start : start + num_rows` of a parameter of `Decoder`."""

    parameter: str
    start: int
    num_rows: int


class _Architecture(NamedTuple):
    config: Callable[[Mapping[str, Any]], ModelConfig]
    slices: Callable[[ModelConfig], dict[str, WeightSlice]]


def model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """What `config.json` says, in either of transformers' spellings (v4 and v5).

    Raises: `UnsupportedArchitectureError` for an architecture that is not in the table;
            `ModelError` for a key that is missing or a value that the decoder cannot have
    """
    architecture = _architecture((hf_config.get("architectures") or ["none"])[0])
    try:
        return architecture.config(hf_config)
    except KeyError as error:
        raise ModelError(f"config.json lacks {error}") from None


def weight_slices(config: ModelConfig) -> dict[str, WeightSlice]:
    """Where each tensor of a checkpoint belongs, by the tensor's name in the files."""
    return _architecture(config.architecture).slices(config)


class Attention(nn.Module):
    """Grouped-query attention over the paged cache, between its two projections.

    Shapes: x [T, E]; rope [max_model_len, 2, C]; out [T, E]
    """

    def __init__(
        self, config: ModelConfig, *, group: Group, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.scale = config.head_dim**-0.5
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        common = {"bias": config.attention_bias, "dtype": dtype, "device": device}
        self.qkv = Linear(config.hidden_size, q_size + 2 * kv_size, **common)
        self.o = RowLinear(q_size, config.hidden_size, group=group, **common)

    def forward(
        self, x: torch.Tensor, batch: ForwardBatch, cache: LayerCache, rope: torch.Tensor
    ) -> torch.Tensor:
        """Store this step's keys and values, then attend over each row's blocks."""
        q, k, v = split_qkv(
            self.qkv(x),
            batch.positions,
            rope,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
        )
        store_kv(k, v, cache, batch.slots)
        return self.o(paged_attention(q, cache, batch, scale=self.scale).flatten(1))


class DecoderLayer(nn.Module):
    """One attention and one MLP, each normalised before and added to the residual after.

    Shapes: x [T, E]; rope [max_model_len, 2, C]; out [T, E]
    """

    def __init__(
        self, config: ModelConfig, *, group: Group, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        E = config.hidden_size
        placed = {"dtype": dtype, "device": device}
        self.attention_norm = RMSNorm(E, eps=config.rms_norm_eps, **placed)
        self.attention = Attention(config, group=group, **placed)
        self.mlp_norm = RMSNorm(E, eps=config.rms_norm_eps, **placed)
        self.mlp = GatedMLP(
            E, config.intermediate_size, bias=config.mlp_bias, group=group, **placed
        )

    def forward(
        self, x: torch.Tensor, batch: ForwardBatch, cache: LayerCache, rope: torch.Tensor
    ) -> torch.Tensor:
        """Two residual steps."""
        x = x + self.attention(self.attention_norm(x), batch, cache, rope)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A whole decoder, its parameters uninitialised until `loader` fills them.

    Called under `torch.inference_mode`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        group: Group,
    ) -> None:
        super().__init__()
        self.config = config
        V, E = config.vocab_size, config.hidden_size
        placed = {"dtype": dtype, "device": device}
        self.embed = empty_parameter(V, E, **placed)
        self.layers = nn.ModuleList(
            DecoderLayer(config, group=group, **placed) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(E, eps=config.rms_norm_eps, **placed)
        self.head = self.embed if config.tie_word_embeddings else empty_parameter(V, E, **placed)
        inv_freq, scale = rope_frequencies(
            config.rope,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            max_model_len=max_model_len,
        )
        self.register_buffer("rope", rope_table(inv_freq, scale, max_model_len).to(device))

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> torch.Tensor:
        """The last hidden state of every token of the step.

        Shapes: out [T, E], after the final norm
        Needs:  every position below max_model_len; one cache per layer
        """
        x = F.embedding(batch.token_ids, self.embed)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, batch, cache, self.rope)
        return self.norm(x)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary.

        Shapes: hidden [S, E]; out [S, V] float32
        """
        return linear(hidden, self.head).float()

    def pack(self) -> None:
        """Lay the filled weights out for speed (`layers.pack`), one at a time, so that it takes the
        memory of one more. A tied head gets a layout of its own: the embedding is read by rows."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.weight = pack(module.weight)
        self.head = pack(self.head)


# ------------------------------------------------------------------------------- architectures


def _llama_config(hf: Mapping[str, Any]) -> ModelConfig:
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act {activation!r} is not supported; supported: 'silu'")
    num_heads = hf["num_attention_heads"]
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=hf.get("num_key_value_heads") or num_heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // num_heads,
        vocab_size=hf["vocab_size"],
        max_position_embeddings=hf.get("max_position_embeddings", 2048),
        rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
        rope=_rope_params(hf),
        tie_word_embeddings=hf.get("tie_word_embeddings", False),
        attention_bias=hf.get("attention_bias", False),
        mlp_bias=hf.get("mlp_bias", False),
        dtype=hf.get("dtype") or hf.get("torch_dtype") or "float32",
    )


def _rope_params(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Version 5 keeps all of it in `rope_parameters`; version 4 spreads it over three keys."""
    params = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    older_name = params.pop("type", "default")
    params.setdefault("rope_type", older_name)
    params.setdefault("rope_theta", hf.get("rope_theta") or 10000.0)
    trained = hf.get("original_max_position_embeddings")
    if trained is not None:  # the top level wins, as in transformers
        params["original_max_position_embeddings"] = trained
    elif "max_position_embeddings" in hf:
        params.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
    if hf.get("partial_rotary_factor") is not None:
        params.setdefault("partial_rotary_factor", hf["partial_rotary_factor"])
    return params


def _llama_slices(config: ModelConfig) -> dict[str, WeightSlice]:
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    E = config.hidden_size
    inner_size = config.intermediate_size
    slices = {
        "model.embed_tokens.weight": WeightSlice("embed", 0, config.vocab_size),
        "model.norm.weight": WeightSlice("norm.weight", 0, E),
    }
    if not config.tie_word_embeddings:
        slices["lm_head.weight"] = WeightSlice("head", 0, config.vocab_size)
    # Name in the file, name in the decoder, the rows it starts at and has, whether it has a bias.
    parts = [
        ("input_layernorm", "attention_norm", 0, E, False),
        ("self_attn.q_proj", "attention.qkv", 0, q_size, config.attention_bias),
        ("self_attn.k_proj", "attention.qkv", q_size, kv_size, config.attention_bias),
        ("self_attn.v_proj", "attention.qkv", q_size + kv_size, kv_size, config.attention_bias),
        ("self_attn.o_proj", "attention.o", 0, E, config.attention_bias),
        ("post_attention_layernorm", "mlp_norm", 0, E, False),
        ("mlp.gate_proj", "mlp.gate_up", 0, inner_size, config.mlp_bias),
        ("mlp.up_proj", "mlp.gate_up", inner_size, inner_size, config.mlp_bias),
        ("mlp.down_proj", "mlp.down", 0, E, config.mlp_bias),
    ]
    for i in range(config.num_layers):
        for theirs, ours, start, num_rows, has_bias in parts:
            for kind in ("weight", "bias") if has_bias else ("weight",):
                slices[f"model.layers.{i}.{theirs}.{kind}"] = WeightSlice(
                    f"layers.{i}.{ours}.{kind}", start, num_rows
                )
    return slices


_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(_llama_config, _llama_slices),
}


def _architecture(name: str) -> _Architecture:
    if name not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise UnsupportedArchitectureError(
            f"architecture {name!r} is not supported; supported: {supported}"
        )
    return _ARCHITECTURES[name]
