"""One decoder, whatever its architecture: the forward pass.

    token ids ─> embed ─> L layers ─> norm ─> hidden ─> head ─> logits

The data flow, where a norm or a scale that a model lacks does nothing:

    x = embed(token_ids) * scale
    L times:  x = x + norm(attention(norm(x))) * scale;  x = x + norm(mlp(norm(x))) * scale
    hidden = norm(x);  logits = cap(head(hidden * scale))

Invariants: the forward takes each tensor as an argument, keeps no state between steps, and asks
neither how many ranks there are nor which architecture this is; a tied head is the embedding tensor
itself, until it is packed. Which model has which switches: `architectures`. The parts: `layers`.
Shape letters: `attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.architectures import NORMS, ModelConfig, qk_norm_sizes
from minivllm.attention import ForwardBatch, LayerCache, paged_attention
from minivllm.dist import Group
from minivllm.layers import (
    GatedMLP,
    Linear,
    QKNorm,
    RMSNorm,
    RowLinear,
    empty_parameter,
    linear,
    pack,
    rope_frequencies,
    rope_table,
    rotate_and_store,
)


def _norm_maker(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> Callable[[int], RMSNorm]:
    return partial(
        RMSNorm, eps=config.rms_norm_eps, offset=config.norm_offset, dtype=dtype, device=device
    )


class Attention(nn.Module):
    """Grouped-query attention over the paged cache, between its two projections.

    Shapes: x [T, E]; rope [max_model_len, 2, C]; out [T, E]
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        window: int,
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.scale = config.attention_scale
        self.soft_cap = config.attention_soft_cap
        self.window = window
        E = config.hidden_size
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        placed = {"dtype": dtype, "device": device}
        self.qkv = Linear(E, q_size + 2 * kv_size, bias=config.qkv_bias, **placed)
        norms = [_norm_maker(config, **placed)(size) for size in qk_norm_sizes(config)]
        self.qk_norm = QKNorm(q_size, kv_size, *norms) if norms else _unchanged
        self.o = RowLinear(q_size, E, bias=config.o_bias, group=group, **placed)

    def forward(
        self, x: torch.Tensor, batch: ForwardBatch, cache: LayerCache, rope: torch.Tensor
    ) -> torch.Tensor:
        """Store this step's keys and values, then attend over each row's blocks."""
        q = rotate_and_store(
            self.qk_norm(self.qkv(x)),
            batch,
            cache,
            rope,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
        )
        attended = paged_attention(
            q, cache, batch, scale=self.scale, window=self.window, soft_cap=self.soft_cap
        )
        return self.o(attended.flatten(1))


class DecoderLayer(nn.Module):
    """One attention and one MLP, each with the norms that the model has and a residual.

    Shapes: x [T, E]; rope [max_model_len, 2, C]; out [T, E]
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        window: int,
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        E = config.hidden_size
        placed = {"dtype": dtype, "device": device}
        self.attention = Attention(config, window=window, group=group, **placed)
        self.mlp = GatedMLP(
            E,
            config.intermediate_size,
            activation=config.activation,
            bias=config.mlp_bias,
            group=group,
            **placed,
        )
        make_norm = _norm_maker(config, **placed)
        norms = {name: make_norm(E) for name in NORMS[config.norms].values()}
        self.attention_norm = norms.get("attention_norm", _unchanged)
        self.attention_out_norm = norms.get("attention_out_norm", _unchanged)
        self.mlp_norm = norms.get("mlp_norm", _unchanged)
        self.mlp_out_norm = norms.get("mlp_out_norm", _unchanged)
        self.residual_scale = config.residual_scale

    def forward(
        self, x: torch.Tensor, batch: ForwardBatch, cache: LayerCache, rope: torch.Tensor
    ) -> torch.Tensor:
        """Two residual steps."""
        out = self.attention(self.attention_norm(x), batch, cache, rope)
        x = torch.add(x, self.attention_out_norm(out), alpha=self.residual_scale)
        out = self.mlp(self.mlp_norm(x))
        return torch.add(x, self.mlp_out_norm(out), alpha=self.residual_scale)


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    """In place of a norm that a model lacks."""
    return x


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
            DecoderLayer(config, window=layer.window, group=group, **placed)
            for layer in config.layers
        )
        self.norm = _norm_maker(config, **placed)(E)
        self.head = self.embed if config.tie_word_embeddings else empty_parameter(V, E, **placed)
        self.ropes = [table.to(device) for table in _rope_tables(config, max_model_len)]
        # Rounded as the weights are: Gemma was trained with sqrt(E) in bfloat16.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> torch.Tensor:
        """The last hidden state of every token of the step.

        Shapes: out [T, E], after the final norm
        Needs:  every position below max_model_len; one cache per layer
        """
        x = F.embedding(batch.token_ids, self.embed) * self.embedding_scale
        for layer, cache, rope in zip(self.layers, caches, self.ropes, strict=True):
            x = layer(x, batch, cache, rope)
        return self.norm(x)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary.

        Shapes: hidden [S, E]; out [S, V] float32
        """
        logits = linear(hidden * self.config.logit_scale, self.head).float()
        cap = self.config.logit_soft_cap
        return cap * torch.tanh(logits / cap) if cap else logits

    def drop(self) -> None:
        """Let go of the weights; nothing can be computed any more."""
        for module in self.modules():
            for name, _ in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.empty(0), requires_grad=False))

    @property
    def is_dropped(self) -> bool:
        """Whether `drop` was called."""
        return self.embed.numel() == 0

    def pack(self) -> None:
        """Lay the filled weights out for speed (`layers.pack`), one at a time, so that it takes the
        memory of one more. A tied head gets a layout of its own: the embedding is read by rows."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.weight = pack(module.weight)
        self.head = pack(self.head)


def _rope_tables(config: ModelConfig, max_model_len: int) -> list[torch.Tensor]:
    """Each layer's table; layers with the same parameters share one. No rotation: no pairs.

    Shapes: out L of [max_model_len, 2, C] float32
    """
    kinds: list[Mapping[str, Any] | None] = []
    tables: list[torch.Tensor] = []
    for layer in config.layers:
        if layer.rope in kinds:
            continue
        inv_freq, scale = torch.empty(0), 1.0
        if layer.rope is not None:
            inv_freq, scale = rope_frequencies(
                layer.rope,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                max_model_len=max_model_len,
            )
        kinds.append(layer.rope)
        tables.append(rope_table(inv_freq, scale, max_model_len))
    return [tables[kinds.index(layer.rope)] for layer in config.layers]
