"""The parts a decoder is made of: linears, RMS norms, rotary embedding, gated MLP.

Weights that multiply the same input are fused (q, k, v; gate, up), so a layer is four GEMMs:

    x ─ norm ─ qkv ─ rope ─ attention ─ o ─(+)─ norm ─ gate_up ─ act·mul ─ down ─(+)─

`rms_norm` and `split_qkv` have a torch twin, written for reading (`*_torch`), and a numba form for
float32 on a CPU: for one token the twins' cost is nearly all call overhead, paid in every layer.
act·mul is two calls and as fast in torch. On a CPU, `pack` lays the weights out for oneDNN.

Rotary embedding: at position p, each pair (x[i], x[i + C]) of a head turns by p * inv_freq[i].
cos and sin are tabulated once for every position below max_model_len. The types whose frequencies
depend on the length of a sequence are fixed by max_model_len, so that a cached key never depends
on how long its row has grown.

Invariants: parameters are made uninitialised and without gradients, and `loader` fills them;
norms and rotations compute in float32 whatever the dtype; a token's result depends on its own
input alone. Shape letters: `attention`, and C rotated pairs per head (D/2 unless partial).
Rotary: Su et al., arXiv 2104.09864. YaRN: Peng et al., 2309.00071. LongRoPE: Ding et al.,
2402.13753.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch  # before numba, which then shares torch's OpenMP runtime
import torch.nn.functional as F
from numba import njit, prange
from torch import nn

from minivllm.attention import (
    FASTMATH,
    ForwardBatch,
    LayerCache,
    on_numba,
    store_kv,
    store_kv_torch,
)
from minivllm.dist import Group
from minivllm.errors import ModelError

ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}

# Tokens in a step for which oneDNN chooses its blocks; a typical number of running requests.
_PACKED_FOR = 32
# Numbers to process from which a second thread repays its wake-up, about 3 us.
_PARALLEL_NUMEL = 1 << 17


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter whose values are still to be loaded."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias` for a plain or a packed weight.

    Shapes: x [T, in]; weight [out, in]; bias [out]; out [T, out]
    """
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def pack(weight: nn.Parameter) -> nn.Parameter:
    """A float32 weight on a CPU in oneDNN's blocked layout, which only `linear` can read; any other
    weight as it is.

    A blocked weight streams through the caches in order: on two AVX2 cores 1.8x the speed of the
    plain layout for 1 token, 2x for 8, 1.6x for 32. And it takes one path for every T, so a token's
    result has the same bits whatever else is in the step.
    """
    if weight.is_cpu and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR)
        return nn.Parameter(weight, requires_grad=False)
    return weight


class Linear(nn.Module):
    """`x @ weight.T + bias`; the output features of several projections may be stacked.

    Shapes: x [T, in]; weight [out, in]; bias [out]; out [T, out]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = empty_parameter(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every output feature that this rank holds."""
        return linear(x, self.weight, self.bias)


class RowLinear(Linear):
    """A linear that sums over the input features of every rank, then adds its bias once.

    Shapes: x [T, in]; weight [out, in]; bias [out]; out [T, out]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=dtype, device=device)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The whole sum, on every rank."""
        out = self.group.all_reduce(linear(x, self.weight))
        return out if self.bias is None else out + self.bias


class GatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))`.

    Shapes: x [T, E]; out [T, E]
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool,
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate_up = Linear(
            hidden_size, 2 * intermediate_size, bias=bias, dtype=dtype, device=device
        )
        self.down = RowLinear(
            intermediate_size, hidden_size, bias=bias, group=group, dtype=dtype, device=device
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One GEMM for gate and up, one for down."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


# ---------------------------------------------------------------------------------------- norm


class RMSNorm(nn.Module):
    """`rms_norm` with a weight of its own."""

    def __init__(
        self, size: int, *, eps: float, offset: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype, device=device)
        self.eps = eps
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each row of `x` normalised."""
        return rms_norm(x, self.weight, eps=self.eps, offset=self.offset)


class QKNorm(nn.Module):
    """q and k of a fused projection normalised; v as it is.

    A norm's size says over what: one head's features, or those of all heads together.

    Shapes: qkv [T, (H + 2K) * D]; out the same
    """

    def __init__(self, q_size: int, kv_size: int, q_norm: RMSNorm, k_norm: RMSNorm) -> None:
        super().__init__()
        self.sizes = [q_size, kv_size, kv_size]
        self.q_norm = q_norm
        self.k_norm = k_norm

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        """A new projection, ready for `split_qkv`."""
        q, k, v = qkv.split(self.sizes, dim=1)
        return torch.cat((_norm_parts(q, self.q_norm), _norm_parts(k, self.k_norm), v), dim=1)


def _norm_parts(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """Each row cut into parts of the norm's size, normalised one by one."""
    return norm(x.reshape(-1, len(norm.weight)).contiguous()).view(x.shape)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Each row divided by its root mean square, times `offset + weight`.

    Shapes: x [T, E] contiguous; weight [E]; out [T, E]
    """
    if not on_numba(x):
        return rms_norm_torch(x, weight, eps=eps, offset=offset)
    out = torch.empty_like(x)
    arrays = (x.numpy(), weight.numpy(), eps, offset, out.numpy())
    if x.numel() < _PARALLEL_NUMEL:
        _rms_norm_tokens(*arrays, 0, x.shape[0])
    else:
        _rms_norm_parallel(*arrays, torch.get_num_threads())
    return out


def rms_norm_torch(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """`rms_norm`, written for reading."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (normed * (offset + weight.float())).to(x.dtype)


# -------------------------------------------------------------------------------------- rotary


def split_qkv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fused projection as contiguous q, k and v, with q and k rotated.

    Shapes: qkv [T, (H + 2K) * D] contiguous; positions [T] int64; rope [max_model_len, 2, C];
            out q [T, H, D], k [T, K, D], v [T, K, D]
    Needs:  every position in [0, max_model_len)
    """
    if not on_numba(qkv):
        return split_qkv_torch(
            qkv, positions, rope, num_heads=num_heads, num_kv_heads=num_kv_heads
        )
    T = qkv.shape[0]
    D = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    q = qkv.new_empty(T, num_heads, D)
    k = qkv.new_empty(T, num_kv_heads, D)
    v = qkv.new_empty(T, num_kv_heads, D)
    arrays = tuple(x.numpy() for x in (qkv, positions, rope, q, k, v))
    if qkv.numel() < _PARALLEL_NUMEL:
        _split_qkv_tokens(*arrays, 0, T)
    else:
        _split_qkv_parallel(*arrays, torch.get_num_threads())
    return q, k, v


def split_qkv_torch(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`split_qkv`, written for reading."""
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    qk, v = heads.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    cos, sin = rope[positions].unsqueeze(2).unbind(1)  # each [T, 1, C]
    C = cos.shape[-1]
    a = qk[..., :C].float()
    b = qk[..., C : 2 * C].float()
    rest = qk[..., 2 * C :]  # empty unless the rotation is partial
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(qkv.dtype)
    q, k = torch.cat((turned, rest), dim=-1).split([num_heads, num_kv_heads], dim=1)
    return q.contiguous(), k.contiguous(), v.contiguous()


def rotate_and_store(
    qkv: torch.Tensor,
    batch: ForwardBatch,
    cache: LayerCache,
    rope: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """`split_qkv` and `store_kv`, which are one kernel on a GPU: q, rotated.

    Shapes: qkv [T, (H + 2K) * D] contiguous; rope [max_model_len, 2, C]; out [T, H, D]
    Needs:  every position in [0, max_model_len)
    """
    if qkv.is_cuda:
        from minivllm import attention_kernels

        return attention_kernels.rotate_and_store(
            qkv,
            batch.positions,
            rope,
            cache.k,
            cache.v,
            batch.slots,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )
    q, k, v = split_qkv(
        qkv, batch.positions, rope, num_heads=num_heads, num_kv_heads=num_kv_heads
    )
    store_kv(k, v, cache, batch.slots)
    return q


def rotate_and_store_torch(
    qkv: torch.Tensor,
    batch: ForwardBatch,
    cache: LayerCache,
    rope: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """`rotate_and_store`, written for reading."""
    q, k, v = split_qkv_torch(
        qkv, batch.positions, rope, num_heads=num_heads, num_kv_heads=num_kv_heads
    )
    store_kv_torch(k, v, cache, batch.slots)
    return q


def rope_table(inv_freq: torch.Tensor, scale: float, max_model_len: int) -> torch.Tensor:
    """cos and sin of every angle, times `scale`.

    Shapes: inv_freq [C] float32; out [max_model_len, 2, C] float32
    """
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), inv_freq)
    return torch.stack((angles.cos(), angles.sin()), dim=1) * scale


def rope_frequencies(
    params: Mapping[str, Any], *, head_dim: int, max_position_embeddings: int, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """The angle per position of each rotated pair, and a factor for cos and sin.

    `params` has `rope_theta`, `rope_type` and what that type needs, under Hugging Face's names.

    Shapes: out [C] float32
    Raises: `ModelError` for an unknown type or a parameter that its type lacks
    """
    rope_type = params["rope_type"]
    compute = _ROPE_TYPES.get(rope_type)
    if compute is None:
        known = ", ".join(sorted(_ROPE_TYPES))
        raise ModelError(f"rope_type {rope_type!r} is unknown; known types: {known}")
    lengths = {
        "max_position_embeddings": max_position_embeddings,
        "max_model_len": max_model_len,
    }
    try:
        return compute({**params, **lengths}, head_dim)
    except KeyError as error:
        raise ModelError(f"rope_type {rope_type!r} needs the parameter {error}") from None


def _rotary_dim(p: Mapping[str, Any], head_dim: int) -> int:
    return int(head_dim * p.get("partial_rotary_factor", 1.0))


def _inv_freq(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _default(p: Mapping[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    return _inv_freq(p["rope_theta"], _rotary_dim(p, head_dim)), 1.0


def _linear(p: Mapping[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    return _inv_freq(p["rope_theta"], _rotary_dim(p, head_dim)) / p["factor"], 1.0


def _proportional(p: Mapping[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    # The whole head is in pairs, but all except the leading share turn by the angle 0.
    inv_freq = _inv_freq(p["rope_theta"], head_dim)
    inv_freq[int(p.get("partial_rotary_factor", 1.0) * head_dim // 2) :] = 0.0
    return inv_freq / p.get("factor", 1.0), 1.0


def _dynamic(p: Mapping[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    dim = _rotary_dim(p, head_dim)
    trained = p["max_position_embeddings"]
    stretch = p["factor"] * max(p["max_model_len"], trained) / trained - (p["factor"] - 1)
    return _inv_freq(p["rope_theta"] * stretch ** (dim / (dim - 2)), dim), 1.0


def _yarn(p: Mapping[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    dim = _rotary_dim(p, head_dim)
    inv_freq = _inv_freq(p["rope_theta"], dim)
    trained = p["original_max_position_embeddings"]
    factor = p["factor"] or p["max_position_embeddings"] / trained

    def pair_with(num_turns: float) -> float:
        """Index, as a real number, of the pair that turns this often in the trained context."""
        return dim * math.log(trained / (num_turns * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))

    low = pair_with(p.get("beta_fast") or 32)
    high = pair_with(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # Pairs before `low` turn fast and stay as trained, those after `high` are slowed by `factor`.
    slowed = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    slowed = slowed.clamp(0, 1)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale = p.get("attention_factor")
    if scale is None and p.get("mscale") and p.get("mscale_all_dim"):
        scale = magnitude(p["mscale"]) / magnitude(p["mscale_all_dim"])
    elif scale is None:
        scale = magnitude(1.0)
    return slowed * inv_freq / factor + (1 - slowed) * inv_freq, scale


def _longrope(p: Mapping[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    trained = p["original_max_position_embeddings"]
    stretch = p["long_factor"] if p["max_model_len"] > trained else p["short_factor"]
    factor = p.get("factor") or p["max_position_embeddings"] / trained
    scale = p.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    inv_freq = _inv_freq(p["rope_theta"], _rotary_dim(p, head_dim))
    return inv_freq / torch.tensor(stretch, dtype=torch.float32), scale


def _llama3(p: Mapping[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    inv_freq = _inv_freq(p["rope_theta"], _rotary_dim(p, head_dim))
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    # Pairs with more than `high` turns in the trained context stay, those with fewer than `low`
    # are slowed by `factor`, the ones between are a blend.
    turns = p["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inv_freq / p["factor"] + kept * inv_freq, 1.0


_ROPE_TYPES = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}


# --------------------------------------------------------------------------------- numba forms


@njit(nogil=True, cache=True, fastmath=FASTMATH)
def _rms_norm_tokens(
    x: np.ndarray,
    weight: np.ndarray,
    eps: float,
    offset: float,
    out: np.ndarray,
    start: int,
    stop: int,
) -> None:
    E = x.shape[1]
    offset32 = np.float32(offset)
    for t in range(start, stop):
        square_sum = np.float32(0)
        for i in range(E):
            square_sum += x[t, i] * x[t, i]
        scale = np.float32(1 / math.sqrt(square_sum / E + eps))
        for i in range(E):
            out[t, i] = (offset32 + weight[i]) * (x[t, i] * scale)


@njit(nogil=True, cache=True, parallel=True)
def _rms_norm_parallel(
    x: np.ndarray,
    weight: np.ndarray,
    eps: float,
    offset: float,
    out: np.ndarray,
    num_threads: int,
) -> None:
    T = x.shape[0]
    for i in prange(num_threads):
        start, stop = T * i // num_threads, T * (i + 1) // num_threads
        _rms_norm_tokens(x, weight, eps, offset, out, start, stop)


@njit(nogil=True, cache=True, fastmath=FASTMATH)
def _split_qkv_tokens(
    qkv: np.ndarray,
    positions: np.ndarray,
    rope: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    start: int,
    stop: int,
) -> None:
    H, D = q.shape[1:]
    K = k.shape[1]
    C = rope.shape[2]
    for t in range(start, stop):
        cos = rope[positions[t], 0]
        sin = rope[positions[t], 1]
        for n in range(H + 2 * K):
            x = qkv[t, n * D : (n + 1) * D]
            if n < H:
                out = q[t, n]
            elif n < H + K:
                out = k[t, n - H]
            else:
                out = v[t, n - H - K]
            first_kept = 0  # v is copied as it is
            if n < H + K:
                first_kept = 2 * C
                for i in range(C):
                    out[i] = x[i] * cos[i] - x[i + C] * sin[i]
                    out[i + C] = x[i + C] * cos[i] + x[i] * sin[i]
            for i in range(first_kept, D):
                out[i] = x[i]


@njit(nogil=True, cache=True, parallel=True)
def _split_qkv_parallel(
    qkv: np.ndarray,
    positions: np.ndarray,
    rope: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    num_threads: int,
) -> None:
    T = qkv.shape[0]
    for i in prange(num_threads):
        start, stop = T * i // num_threads, T * (i + 1) // num_threads
        _split_qkv_tokens(qkv, positions, rope, q, k, v, start, stop)
