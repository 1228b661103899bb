"""What a decoder can be, as data: architectures, what their configs mean, which weight is which.

    config.json ── model_config ──> ModelConfig ──> `models.Decoder`
                                        └── weight_slices ──> where each tensor of a file belongs

An architecture is a row of `_ARCHITECTURES`: how its config is read, and what transformers takes
for keys that it leaves out. A new one is a few lines, as long as its data flow is the one in the
header of `models`. Fused weights stack their parts by rows: qkv = q | k | v, gate_up = gate | up.

Invariants: the slices of `weight_slices` cover every parameter's rows exactly once; a setting that
would change the result is obeyed or refused, never ignored. The forward: `models`. Rotary types and
activations: `layers`. Reading the files: `loader`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from minivllm.errors import ModelError, UnsupportedArchitectureError
from minivllm.layers import ACTIVATIONS


class LayerConfig(NamedTuple):
    """In what one layer differs from the next."""

    window: int
    """How many positions a query sees, its own included; 0: all before it."""
    rope: Mapping[str, Any] | None
    """`rope_type`, `rope_theta` and what the type needs (`layers.rope_frequencies`); None: q and k
    are not rotated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's dimensions and switches, whatever its family calls them."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    dtype: str
    """The name of the torch dtype that the weights were saved in."""
    tie_word_embeddings: bool
    is_fused_in_files: bool = False
    """Whether a file holds qkv and gate_up as one tensor each."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str
    """A name in `layers.ACTIVATIONS`."""
    norms: str = "before"
    """Where a layer norms: `before`, `after` or `around` attention and MLP; see `NORMS`."""
    rms_norm_eps: float
    norm_offset: float = 0.0
    """Added to the weight of every norm."""
    qk_norm: str | None = None
    """q and k are normalised `per_head`, or over all heads as a `whole`; None: not."""
    attention_scale: float
    attention_soft_cap: float = 0.0
    """Scores s become cap * tanh(s / cap); 0: no cap. So with the logits, below."""
    logit_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Multiplies what attention and MLP add to the residual."""
    logit_scale: float = 1.0

    @property
    def num_layers(self) -> int:
        """Attentions, each with a cache of its own."""
        return len(self.layers)


# What the files call a layer's norms, and their names in `DecoderLayer`.
NORMS = {
    "before": {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "mlp_norm",
    },
    "after": {
        "post_attention_layernorm": "attention_out_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
    },
    "around": {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_out_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
    },
}


class WeightSlice(NamedTuple):
    """The rows `start : start + num_rows` of a parameter of `Decoder`."""

    parameter: str
    start: int
    num_rows: int


def model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """What `config.json` says, in either of transformers' spellings (v4 and v5).

    Raises: `UnsupportedArchitectureError` for an architecture that is not in the table;
            `ModelError` for a key that is missing or a value that the decoder cannot have
    """
    name = (hf_config.get("architectures") or ["none"])[0]
    if name not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise UnsupportedArchitectureError(
            f"architecture {name!r} is not supported; supported: {supported}"
        )
    architecture = _ARCHITECTURES[name]
    try:
        return architecture.read({**architecture.defaults, **hf_config})
    except KeyError as error:
        raise ModelError(f"config.json lacks {error}") from None


def weight_slices(config: ModelConfig) -> dict[str, WeightSlice]:
    """Where each tensor of a checkpoint belongs, by the tensor's name in the files."""
    E = config.hidden_size
    slices = {
        "model.embed_tokens.weight": WeightSlice("embed", 0, config.vocab_size),
        "model.norm.weight": WeightSlice("norm.weight", 0, E),
    }
    if not config.tie_word_embeddings:
        slices["lm_head.weight"] = WeightSlice("head", 0, config.vocab_size)
    for i in range(config.num_layers):
        for ours, has_bias, parts in _layer_parts(config):
            start = 0
            for theirs, num_rows in parts:
                for kind in ("weight", "bias") if has_bias else ("weight",):
                    slices[f"model.layers.{i}.{theirs}.{kind}"] = WeightSlice(
                        f"layers.{i}.{ours}.{kind}", start, num_rows
                    )
                start += num_rows
    return slices


def _layer_parts(config: ModelConfig) -> list[tuple[str, bool, list[tuple[str, int]]]]:
    """A layer's name for each parameter, whether it has a bias, and its parts from top to bottom:
    their name in the files and their rows."""
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    E, inner_size = config.hidden_size, config.intermediate_size
    qkv = [("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)]
    gate_up = [("gate_proj", inner_size), ("up_proj", inner_size)]
    if config.is_fused_in_files:
        qkv = [("qkv_proj", q_size + 2 * kv_size)]
        gate_up = [("gate_up_proj", 2 * inner_size)]
    parts = [
        ("attention.qkv", config.qkv_bias, [(f"self_attn.{name}", n) for name, n in qkv]),
        ("attention.o", config.o_bias, [("self_attn.o_proj", E)]),
        ("mlp.gate_up", config.mlp_bias, [(f"mlp.{name}", n) for name, n in gate_up]),
        ("mlp.down", config.mlp_bias, [("mlp.down_proj", E)]),
    ]
    parts += [(ours, False, [(theirs, E)]) for theirs, ours in NORMS[config.norms].items()]
    for name, size in zip(("q_norm", "k_norm"), qk_norm_sizes(config), strict=False):
        parts.append((f"attention.qk_norm.{name}", False, [(f"self_attn.{name}", size)]))
    return parts


def qk_norm_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Over how many features q and k are normalised; empty when they are not."""
    D = config.head_dim
    whole = (config.num_heads * D, config.num_kv_heads * D)
    return {None: (), "per_head": (D, D), "whole": whole}[config.qk_norm]


# ---- how each config is read ----

# Any architecture's config may set these, and each changes the result.
_REFUSED = (
    "attention_chunk_size",
    "per_layer_config",
    "quantization_config",
    "use_bidirectional_attention",
)


class _Architecture(NamedTuple):
    read: Callable[[Mapping[str, Any]], ModelConfig]
    defaults: Mapping[str, Any]
    """What transformers takes for keys that config.json leaves out, where that is not Llama's."""


def _decoder(
    hf: Mapping[str, Any], *, activation_key: str = "hidden_act", **own: Any
) -> ModelConfig:
    """What all architectures share, and what is this one's own."""
    _refuse(hf, *_REFUSED)
    if hf.get("is_causal") is False:
        raise ModelError("is_causal False is not supported")
    activation = hf.get(activation_key, "silu")
    if activation not in ACTIVATIONS:
        supported = ", ".join(map(repr, ACTIVATIONS))
        raise ModelError(
            f"{activation_key} {activation!r} is not supported; supported: {supported}"
        )
    num_heads = hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or hf["hidden_size"] // num_heads
    shared = {
        "hidden_size": hf["hidden_size"],
        "intermediate_size": hf["intermediate_size"],
        "num_heads": num_heads,
        "num_kv_heads": hf.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "vocab_size": hf["vocab_size"],
        "max_position_embeddings": hf["max_position_embeddings"],
        "dtype": hf.get("dtype") or hf.get("torch_dtype") or "float32",
        "tie_word_embeddings": hf.get("tie_word_embeddings", False),
        "activation": activation,
        "rms_norm_eps": hf.get("rms_norm_eps", 1e-6),
        "attention_scale": head_dim**-0.5,
    }
    return ModelConfig(**shared | own)


def _llama(hf: Mapping[str, Any]) -> ModelConfig:
    return _decoder(
        hf, layers=_full(hf), **_attention_bias(hf), mlp_bias=hf.get("mlp_bias", False)
    )


def _mistral(hf: Mapping[str, Any]) -> ModelConfig:
    return _decoder(hf, layers=_alike(hf, hf["sliding_window"]))


def _qwen2(hf: Mapping[str, Any]) -> ModelConfig:
    return _decoder(hf, layers=_qwen_layers(hf), qkv_bias=True)


def _qwen3(hf: Mapping[str, Any]) -> ModelConfig:
    return _decoder(hf, layers=_qwen_layers(hf), **_attention_bias(hf), qk_norm="per_head")


def _qwen_layers(hf: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    return _mixed(hf, window, lambda i: window is not None and i >= hf["max_window_layers"])


def _smollm3(hf: Mapping[str, Any]) -> ModelConfig:
    num_layers, interval = hf["num_hidden_layers"], hf["no_rope_layer_interval"]
    has_rope = hf.get("no_rope_layers")  # despite its name, its ones are the layers with rope
    if has_rope is None:
        has_rope = [(i + 1) % interval != 0 for i in range(num_layers)]
    if len(has_rope) < num_layers:
        raise ModelError(f"no_rope_layers has {len(has_rope)} entries for {num_layers} layers")
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    layers = _mixed(hf, window, lambda i: window is not None and not has_rope[i])
    return _decoder(
        hf,
        layers=tuple(
            layer if is_rotated else layer._replace(rope=None)
            for layer, is_rotated in zip(layers, has_rope, strict=False)
        ),
        **_attention_bias(hf),
        mlp_bias=hf.get("mlp_bias", False),
    )


def _phi3(hf: Mapping[str, Any]) -> ModelConfig:
    rope = _rope(hf, can_be_partial=True)
    if rope["rope_type"] in ("su", "yarn"):  # its names before there was the name
        rope["rope_type"] = "longrope"
    return _decoder(hf, layers=_alike(hf, hf["sliding_window"], rope), is_fused_in_files=True)


def _gemma2(hf: Mapping[str, Any]) -> ModelConfig:
    return _decoder(
        hf,
        layers=_mixed(hf, hf["sliding_window"], lambda i: i % 2 == 0),
        **_gemma(hf),
        attention_soft_cap=hf["attn_logit_softcapping"] or 0.0,
    )


def _gemma3(hf: Mapping[str, Any]) -> ModelConfig:
    _refuse(hf, "attn_logit_softcapping")  # transformers reads it and does not apply it
    period = hf["sliding_window_pattern"]
    local = {"rope_theta": hf["rope_local_base_freq"], "rope_scaling": None}
    local_rope = _rope({**hf, **local}, "sliding_attention")
    layers = _mixed(hf, hf["sliding_window"], lambda i: (i + 1) % period != 0)
    return _decoder(
        hf,
        layers=tuple(
            layer._replace(rope=local_rope) if layer.window else layer for layer in layers
        ),
        **_gemma(hf),
        qk_norm="per_head",
    )


def _gemma(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_attention_bias(hf),
        "activation_key": "hidden_activation",
        "norms": "around",
        "norm_offset": 1.0,
        "attention_scale": hf["query_pre_attn_scalar"] ** -0.5,
        "logit_soft_cap": hf["final_logit_softcapping"] or 0.0,
        "embedding_scale": hf["hidden_size"] ** 0.5,
    }


def _olmo2(hf: Mapping[str, Any]) -> ModelConfig:
    return _decoder(hf, layers=_full(hf), **_attention_bias(hf), norms="after", qk_norm="whole")


def _granite(hf: Mapping[str, Any]) -> ModelConfig:
    return _decoder(
        hf,
        layers=_full(hf),
        **_attention_bias(hf),
        mlp_bias=hf.get("mlp_bias", False),
        attention_scale=hf["attention_multiplier"],
        embedding_scale=hf["embedding_multiplier"],
        residual_scale=hf["residual_multiplier"],
        logit_scale=1 / hf["logits_scaling"],
    )


def _refuse(hf: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if hf.get(key):
            raise ModelError(f"{key} {hf[key]!r:.200} is not supported")


def _attention_bias(hf: Mapping[str, Any]) -> dict[str, bool]:
    return dict.fromkeys(("qkv_bias", "o_bias"), hf.get("attention_bias", False))


def _full(hf: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    """Layers that see everything."""
    _refuse(hf, "sliding_window")
    return _alike(hf, None)


def _alike(
    hf: Mapping[str, Any], window: int | None, rope: Mapping[str, Any] | None = None
) -> tuple[LayerConfig, ...]:
    """Layers that do not differ."""
    _refuse(hf, "layer_types")
    return (LayerConfig(window or 0, rope or _rope(hf)),) * hf["num_hidden_layers"]


def _mixed(
    hf: Mapping[str, Any], window: int | None, is_sliding: Callable[[int], bool]
) -> tuple[LayerConfig, ...]:
    """Layers of the types that the config lists, or, where it lists none, as `is_sliding` says."""
    windows = {"full_attention": 0, "sliding_attention": window}
    num_layers = hf["num_hidden_layers"]
    names: Sequence[str] = hf.get("layer_types") or [
        "sliding_attention" if is_sliding(i) else "full_attention" for i in range(num_layers)
    ]
    if len(names) != num_layers:
        raise ModelError(f"layer_types has {len(names)} entries for {num_layers} layers")
    for name in names:
        if windows.get(name) is None:
            raise ModelError(f"layer_types {name!r} is not supported with a window of {window}")
    ropes = {name: _rope(hf, name) for name in windows}
    return tuple(LayerConfig(windows[name], ropes[name]) for name in names)


def _rope(
    hf: Mapping[str, Any], layer_type: str = "full_attention", *, can_be_partial: bool = False
) -> dict[str, Any]:
    """Version 5 keeps all of it in `rope_parameters`, by layer type where types differ; version 4
    spreads it over three keys."""
    params = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    params = dict(params.get(layer_type, params) or {})
    older_name = params.pop("type", "default")
    params.setdefault("rope_type", older_name)
    params.setdefault("rope_theta", hf.get("rope_theta") or 10000.0)
    trained = hf.get("original_max_position_embeddings")
    if trained is not None:  # the top level wins, as in transformers
        params["original_max_position_embeddings"] = trained
    else:
        params.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
    if hf.get("partial_rotary_factor") is not None:
        params.setdefault("partial_rotary_factor", hf["partial_rotary_factor"])
    share = params.get("partial_rotary_factor", 1.0)
    if share != 1.0 and not (can_be_partial or params["rope_type"] == "proportional"):
        raise ModelError(f"partial_rotary_factor {share} is not supported")
    return params


_QWEN_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(_llama, {}),
    "MistralForCausalLM": _Architecture(_mistral, {"sliding_window": 4096}),
    "Qwen2ForCausalLM": _Architecture(_qwen2, _QWEN_DEFAULTS),
    "Qwen3ForCausalLM": _Architecture(_qwen3, {**_QWEN_DEFAULTS, "head_dim": 128}),
    "SmolLM3ForCausalLM": _Architecture(
        _smollm3,
        {
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
            "sliding_window": None,
        },
    ),
    "Phi3ForCausalLM": _Architecture(
        _phi3,
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "sliding_window": None},
    ),
    "Gemma2ForCausalLM": _Architecture(
        _gemma2,
        {**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": _Architecture(
        _gemma3,
        {
            **_GEMMA_DEFAULTS,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
    ),
    "Olmo2ForCausalLM": _Architecture(_olmo2, {"rms_norm_eps": 1e-5}),
    "GraniteForCausalLM": _Architecture(
        _granite,
        {
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
}
