"""Flags of the command line, made from the fields of the config dataclasses.

    field ──> --its-name, --no-its-name          file.yaml ──> flags ─┐
    its docstring ──> help                       argv ────────────────┴─> what was chosen

There is one list of settings, the dataclasses', and one list of their defaults: a flag that was
not given leaves nothing behind. `--max_model_len` is `--max-model-len`, as in vLLM; flags are not
abbreviated, so that a new one breaks no script; an unknown one is answered with the nearest.

Invariant: what is on the command line goes before what is in a file.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from minivllm.config import ServerConfig
from minivllm.errors import ConfigError, RequestError
from minivllm.request import RepetitionDetection

# What only a program can give, or only shows in a program's results.
NOT_FLAGS = {"flat_logprobs", "logits_processors", "output_kind", "stream_interval"}
_VLLM_NAMES = {  # whose names do not tell the unit
    "shutdown_timeout_s": "--shutdown-timeout",
    "sse_keep_alive_interval_s": "--sse-keep-alive-interval",
}
_EXAMPLES = {
    "logit_bias": '{"1234": 5}',
    "default_chat_template_kwargs": '{"enable_thinking": false}',
    "override_generation_config": '{"temperature": 0.5}',
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}',
}


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, with underscores, and with the nearest name for a wrong one.

    `--config FILE`, where a command has it, stands for the flags in a YAML file.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | options)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """What was chosen, on the command line and in the file that it names.

        Raises: `ConfigError` for a file that is no list of flags; exits, as argparse does, for the
                rest
        """
        argv = [_dashed(word) for word in argv]
        args = self._parse(argv)
        file = getattr(args, "config", None)
        if file is None:
            return args
        given = set(vars(args))
        values = {key.replace("-", "_"): value for key, value in _read_yaml(file).items()}
        words = [word for key in values if key not in given for word in _flag(key, values[key])]
        return self._parse([argv[0], *words, *argv[1:]])  # after the command's name

    def _parse(self, argv: Sequence[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_args(argv)
        if unknown:
            self._innermost(args)._refuse(unknown)
        return args

    def _innermost(self, args: argparse.Namespace) -> Parser:
        """The parser of the command that was given, or of its own command, if it has some."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                command = action.choices[getattr(args, action.dest)]
                assert isinstance(command, Parser), "subparsers are of their parent's class"
                return command._innermost(args)
        return self

    def _refuse(self, unknown: list[str]) -> NoReturn:
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if not flags:
            self.error(f"unexpected: {' '.join(unknown)}")
        near = difflib.get_close_matches(flags[0], self._option_string_actions, n=1, cutoff=0.5)
        self.error(f"no flag {flags[0]}" + (f"; did you mean {near[0]}?" if near else ""))


def _dashed(word: str) -> str:
    """
    >>> _dashed("--max_model_len=a_b")
    '--max-model-len=a_b'
    """
    name, sign, value = word.partition("=")
    is_flag = re.fullmatch(r"--[a-z][a-z_-]*", name)
    return name.replace("_", "-") + sign + value if is_flag else word


def _read_yaml(file: Path) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError("config", str(file), f"must be a file in YAML ({error})") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError("config", str(file), "must map names of flags to values")
    return values


def _flag(key: str, value: Any) -> list[str]:
    """A line of a file as words of a command line.

    >>> _flag("api_key", ["a", "b"]), _flag("enable_admin", False), _flag("port", 80)
    (['--api-key=a', '--api-key=b'], ['--no-enable-admin'], ['--port=80'])
    """
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}={item}" for item in value]
    return [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"]


def add_fields(
    group: Any, cls: type, *, skip: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> None:
    """A flag per field of a config dataclass: --max-model-len, --no-enable-prefix-caching, ..."""
    docs = _field_docs(cls)
    for field in dataclasses.fields(cls):
        kind = str(field.type)
        if field.name in skip:
            continue
        default = (defaults or {}).get(field.name, field.default)
        shown = "" if default in (None, ()) else f" (default: {default})"
        options: dict[str, Any] = {
            "dest": field.name,
            "default": argparse.SUPPRESS,
            "help": (docs[field.name] + shown).replace("%", "%%"),
        }
        if kind == "bool" or kind.startswith("bool "):
            options["action"] = argparse.BooleanOptionalAction
        elif "Mapping" in kind:
            options |= {"type": _mapping, "metavar": _EXAMPLES[field.name]}
        elif "RepetitionDetection" in kind:
            options |= {"type": _repetition_detection, "metavar": '{"max_pattern_size": 8}'}
        else:
            one = "str" if "str" in kind else "float" if "float" in kind else "int"
            options |= _ONE[one]
            if "Sequence" in kind and cls is ServerConfig:  # as vLLM's are given: --api-key a b
                options |= {"action": "extend", "nargs": "+"}
            elif "Sequence" in kind:  # not nargs="+", which would take the prompts that follow
                options["action"] = "append"
        names = ["--" + field.name.replace("_", "-")]
        if field.name in _VLLM_NAMES:
            names.append(_VLLM_NAMES[field.name])
        group.add_argument(*names, **options)


def chosen(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The fields of a config dataclass that flags have set."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in vars(args).items() if name in names}


def _field_docs(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass, in one line."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef), "it is the source of a class"
    docs = {}
    for node, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            docs[node.target.id] = (
                " ".join(str(text.value).split()) if isinstance(text, ast.Constant) else ""
            )
    return docs


def _integer(text: str) -> int:
    """
    >>> _integer("4096"), _integer("2k"), _integer("4G")
    (4096, 2048, 4294967296)
    """
    match = re.fullmatch(r"([+-]?\d+)([kmgt]?)", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"must be an integer like 4096 or 4k, got {text!r}")
    scale: int = 1024 ** " kmgt".index(match[2] or " ")
    return int(match[1]) * scale


_ONE: dict[str, dict[str, Any]] = {
    "str": {"type": str, "metavar": "TEXT"},
    "float": {"type": float, "metavar": "X"},
    "int": {"type": _integer, "metavar": "N"},
}


def _mapping(text: str) -> dict[Any, Any]:
    """A JSON object; keys that are numbers become numbers, as token ids are."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not JSON ({error}), got {text}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return {int(key) if key.isdecimal() else key: item for key, item in value.items()}


def _repetition_detection(text: str) -> RepetitionDetection:
    values = _mapping(text)
    names = [field.name for field in dataclasses.fields(RepetitionDetection)]
    if not {"max_pattern_size"} <= set(values) <= set(names):
        rule = f"must have max_pattern_size and no other keys than {', '.join(names)}"
        raise argparse.ArgumentTypeError(f"{rule}, got {text}")
    try:
        return RepetitionDetection(**values)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
