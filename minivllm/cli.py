"""The command line: `minivllm generate`, `minivllm replay`.

Flags and their help are made from the fields of `EngineConfig` and `SamplingParams`, so there is
one list of settings; unless asked otherwise, decoding is greedy and ends after 64 tokens. Text goes
to stdout as it is generated when there is one prompt, whole outputs in order when there are
several, JSON lines with `--json`; everything else goes to stderr. An error of ours is one line and
exit status 1, never a traceback.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import dataclasses
import inspect
import json
import logging
import os
import sys
from collections.abc import Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from minivllm.channel import WORKER_ENV
from minivllm.config import EngineConfig
from minivllm.engine import AsyncEngine
from minivllm.errors import ConfigError, MinivllmError, RequestError
from minivllm.llm import LLM
from minivllm.request import (
    CompletionOutput,
    Logprobs,
    RepetitionDetection,
    RequestOutput,
    SamplingParams,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    for name, value in WORKER_ENV.items():
        os.environ.setdefault(name, value)  # torch, which reads it, is not loaded yet
    try:
        status: int = args.run(args)
        return status
    except BrokenPipeError:  # whoever read the output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 141
    except (MinivllmError, OSError) as error:  # OSError: a file that a flag names
        print(f"minivllm: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)  # ends the line that shows ^C
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minivllm", description="LLM inference")
    parser.add_argument("--version", action="version", version=version("minivllm"))
    commands = parser.add_subparsers(dest="command", required=True)

    generate = commands.add_parser(
        "generate",
        help="complete prompts",
        usage="minivllm generate [flags] [prompts ...]",  # all flags are a page
        epilog="A flag that takes a list is given once for each of its values.",
    )
    generate.add_argument("prompts", nargs="*", help="without any: lines of --file or stdin")
    generate.add_argument("--file", type=Path, help="a file with one prompt per line")
    generate.add_argument("--json", action="store_true", help="one JSON object per prompt")
    generate.add_argument("--verbose", action="store_true", help="log to stderr")
    _add_fields(generate.add_argument_group("sampling"), SamplingParams)
    # --seed is a field of both; the one flag sets both
    _add_fields(generate.add_argument_group("engine"), EngineConfig, skip={"seed"})
    generate.set_defaults(run=_generate)

    replay = commands.add_parser("replay", help="run recorded plans again and compare the tokens")
    replay.add_argument("file", type=Path, help="written with --record")
    replay.add_argument("--verbose", action="store_true", help="log to stderr")
    replay.set_defaults(run=_replay)
    return parser


def _add_fields(group: Any, cls: type, skip: Collection[str] = ()) -> None:
    """A flag per field of a config dataclass: --max-model-len, --no-enable-prefix-caching, ..."""
    docs = _field_docs(cls)
    for field in dataclasses.fields(cls):
        kind = str(field.type)
        if field.name in _NOT_FLAGS or field.name in skip:
            continue
        default = _DEFAULTS.get(field.name, field.default)
        shown = "" if default is None else f" (default: {default})"
        options: dict[str, Any] = {
            "dest": field.name,
            "default": argparse.SUPPRESS,
            "help": (docs[field.name] + shown).replace("%", "%%"),
        }
        if kind == "bool" or kind.startswith("bool "):
            options["action"] = argparse.BooleanOptionalAction
        elif "Mapping" in kind:
            options |= {"type": _mapping, "metavar": '{"1234": 5}'}
        elif "RepetitionDetection" in kind:
            options |= {"type": _repetition_detection, "metavar": '{"max_pattern_size": 8}'}
        else:
            one = str if "str" in kind else float if "float" in kind else int
            options |= {"type": one, "metavar": {str: "TEXT", float: "X", int: "N"}[one]}
            if "Sequence" in kind:  # not nargs="+", which would take the prompts that follow
                options["action"] = "append"
        group.add_argument("--" + field.name.replace("_", "-"), **options)


# What only a program can give, or only shows in a program's results; and the defaults of requests
# without parameters, which requests made here are not.
_NOT_FLAGS = {
    "flat_logprobs",
    "logits_processors",
    "output_kind",
    "stream_interval",
    "generation_config",
    "override_generation_config",
}
_DEFAULTS = {"temperature": 0.0, "max_tokens": 64}  # in place of those of `SamplingParams`


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


def _chosen(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in vars(args).items() if name in names}


def _generate(args: argparse.Namespace) -> int:
    params = SamplingParams(**_DEFAULTS | _chosen(args, SamplingParams))
    config = _chosen(args, EngineConfig)
    EngineConfig(**config)  # what is wrong is told before stdin is read
    prompts = args.prompts
    if prompts and args.file:
        raise ConfigError("file", str(args.file), "must be left out where prompts are given")
    if not prompts:
        prompts = [line for line in _read(args.file).splitlines() if line]
    if not prompts:
        raise ConfigError("prompts", prompts, "must be given, or lines of --file or stdin")
    if len(prompts) == 1 and params.n == 1 and not args.json:
        config.setdefault("distributed_executor_backend", "inline")
        return asyncio.run(_stream(prompts[0], params, EngineConfig(**config)))
    with LLM(**config) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    for output in outputs:
        for answer in output.outputs:
            shown = _as_dict(output, answer) if args.json else f"{output.prompt}{answer.text}\n"
            print(json.dumps(shown) if args.json else shown)
    return _status(outputs)


def _read(file: Path | None) -> str:
    if file is None and sys.stdin.isatty():
        print("minivllm: prompts, one per line, until Ctrl-D:", file=sys.stderr)
    try:
        return file.read_text(encoding="utf-8") if file else sys.stdin.read()
    except UnicodeDecodeError as error:
        name = str(file) if file else "stdin"
        raise ConfigError("file", name, f"must be text in UTF-8 ({error.reason})") from error


async def _stream(prompt: str, params: SamplingParams, config: EngineConfig) -> int:
    async with AsyncEngine(config) as engine:
        num_shown = -1
        async for output in engine.generate(prompt, params):
            if num_shown < 0:  # not before, so that an error has a line to itself
                print(prompt, end="", flush=True)
                num_shown = 0
            text = output.outputs[0].text
            print(text[num_shown:], end="", flush=True)
            num_shown = len(text)
    print()
    return _status([output])


def _status(outputs: Sequence[RequestOutput]) -> int:
    """1 when a request failed or missed its deadline; which, and why, goes to stderr."""
    what = {"error": "a request failed", "abort": "a request was ended before its time"}
    answers = [answer for output in outputs for answer in output.outputs]
    failed = [answer for answer in answers if answer.finish_reason in what]
    for answer in failed:
        line = f"{what[str(answer.finish_reason)]}: {answer.stop_reason}"
        print(f"minivllm: {line}", file=sys.stderr)
    return 1 if failed else 0


def _as_dict(output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "prompt": output.prompt,
        "index": answer.index,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
    }
    if answer.logprobs is not None:
        shown["cumulative_logprob"] = answer.cumulative_logprob
        shown["logprobs"] = _as_dicts(answer.logprobs)
    if output.prompt_logprobs is not None:
        shown["prompt_logprobs"] = _as_dicts(output.prompt_logprobs)
    return shown


def _as_dicts(logprobs: Logprobs) -> list[Any]:
    """Per position, what is known of each token by its id; None where nothing is."""
    return [
        entry and {token_id: one._asdict() for token_id, one in entry.items()}
        for entry in logprobs
    ]


def _replay(args: argparse.Namespace) -> int:
    from minivllm.worker import replay  # here, because it loads torch

    num_steps, num_different = replay(args.file)
    print(f"{num_steps} steps, {num_different} with other tokens than recorded")
    return 1 if num_different else 0
