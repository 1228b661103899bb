"""Fills a decoder with the weights of a safetensors checkpoint, or with random ones.

    model.safetensors                   one file, or
    model.safetensors.index.json ──> model-00001-of-00002.safetensors, ...

Files are mapped into memory and copied tensor by tensor into the (fused) parameters, converted to
the wanted dtype on the way, so loading needs the model's own memory and no second copy.

Invariants: a decoder is returned only when every slice of every parameter has been filled exactly
once by a tensor of exactly its shape; whatever does not fit is an error that names the tensor or
the file. Tolerated because checkpoints contain them and they carry nothing: `rotary_emb.inv_freq`,
and a `lm_head.weight` beside a tied embedding.

Which tensor belongs where: `architectures.weight_slices`. Finding and converting: `checkpoint`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from minivllm.architectures import WeightSlice, model_config, weight_slices
from minivllm.dist import Group
from minivllm.errors import CorruptFileError, WeightsError
from minivllm.models import Decoder


def load_model(
    path: Path | None,
    hf_config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int,
    group: Group,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> Decoder:
    """The decoder that `hf_config` describes, with the weights in the directory `path`, or with
    `tensors` by their names in such files.

    Raises: `UnsupportedArchitectureError` or `ModelError` for the config; `WeightsError` for a
            missing, unexpected, repeated or misshaped tensor, or an absent file;
            `CorruptFileError` for a damaged file
    """
    config = model_config(hf_config)
    if tensors is not None:
        named: Iterable[_Named] = (_Named("tensors", *item) for item in tensors.items())
    else:
        assert path is not None, "weights come from a directory or as tensors"
        named = _read_all(_weight_files(path))
    model = Decoder(
        config,
        dtype=dtype,
        device=torch.device(device),
        max_model_len=max_model_len,
        group=group,
    )
    parameters = dict(model.named_parameters())
    unfilled = weight_slices(config)
    filled: set[str] = set()
    for source, name, tensor in named:
        if name in filled:
            raise WeightsError(f"{source}: {name} was already in an earlier file")
        if name in unfilled:
            _fill(parameters, unfilled.pop(name), name, tensor)
            filled.add(name)
        elif not _carries_nothing(name):
            raise WeightsError(f"{source}: {name} is unexpected")
    if unfilled:
        names = ", ".join(list(unfilled)[:5])
        raise WeightsError(
            f"{path or 'tensors'} lacks {len(unfilled)} tensors, among them {names}"
        )
    return model


def dummy_model(
    hf_config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int,
    group: Group,
) -> Decoder:
    """The decoder that `hf_config` describes with random weights, the same every time on the same
    device: for measuring. They are scaled so that activations neither grow nor vanish.

    Raises: `UnsupportedArchitectureError` or `ModelError` for the config
    """
    placed = {"dtype": dtype, "device": torch.device(device)}
    model = Decoder(model_config(hf_config), max_model_len=max_model_len, group=group, **placed)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
        else:  # a norm's weight or a bias
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


class _Named(NamedTuple):
    source: str
    name: str
    tensor: torch.Tensor


def _read_all(files: list[Path]) -> Iterator[_Named]:
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    yield _Named(str(file), name, tensors.get_tensor(name))
        except SafetensorError as error:
            raise CorruptFileError(f"{file} is damaged: {error}") from error


def _carries_nothing(name: str) -> bool:
    # An untied head has a slice of its own, so a head without one is a copy of the embedding.
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def _fill(
    parameters: Mapping[str, torch.Tensor], where: WeightSlice, name: str, tensor: torch.Tensor
) -> None:
    rows = parameters[where.parameter][where.start : where.start + where.num_rows]
    if tensor.shape != rows.shape:
        raise WeightsError(
            f"{name} has the shape {list(tensor.shape)}, the config makes it {list(rows.shape)}"
        )
    if not tensor.is_floating_point():
        raise WeightsError(f"{name} holds {tensor.dtype}, not floating-point numbers")
    rows.copy_(tensor)


def _weight_files(path: Path) -> list[Path]:
    """The checkpoint's files in a fixed order; all of them exist.

    Raises: `WeightsError` for an absent file; `CorruptFileError` for an index that is no index
    """
    single = path / "model.safetensors"
    if single.is_file():
        return [single]
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        raise WeightsError(f"{path} has neither {single.name} nor {index.name}")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFileError(f"{index} is damaged: {error!r}") from error
    for name in names:
        if not (path / name).is_file():
            raise WeightsError(f"{index} names {name}, which does not exist")
    return [path / name for name in names]
