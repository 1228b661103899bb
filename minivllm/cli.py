"""The command line: `minivllm generate`, `minivllm replay`.

Flags are made from the fields of `EngineConfig` and `SamplingParams`, so there is one list of
settings; unless asked otherwise, decoding is greedy and ends after 64 tokens. Text goes to stdout
as it is generated when there is one prompt, whole outputs in order when there are several, JSON
lines with `--json`; everything else goes to stderr. An error of ours is one line and exit status 1,
never a traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from minivllm.channel import WORKER_ENV
from minivllm.config import EngineConfig
from minivllm.engine import AsyncEngine
from minivllm.errors import MinivllmError
from minivllm.llm import LLM
from minivllm.request import (
    CompletionOutput,
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
    except (MinivllmError, OSError) as error:  # OSError: a file that a flag names
        print(f"minivllm: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minivllm", description="LLM inference")
    parser.add_argument("--version", action="version", version=version("minivllm"))
    commands = parser.add_subparsers(dest="command", required=True)

    # resolve: --seed is a field of both groups; the one flag sets both
    generate = commands.add_parser("generate", help="complete prompts", conflict_handler="resolve")
    generate.add_argument("prompts", nargs="*", help="without any: lines of --file or stdin")
    generate.add_argument("--file", type=Path, help="a file with one prompt per line")
    generate.add_argument("--json", action="store_true", help="one JSON object per prompt")
    generate.add_argument("--verbose", action="store_true", help="log to stderr")
    _add_fields(generate.add_argument_group("sampling"), SamplingParams)
    _add_fields(generate.add_argument_group("engine"), EngineConfig)
    generate.set_defaults(run=_generate)

    replay = commands.add_parser("replay", help="run recorded plans again and compare the tokens")
    replay.add_argument("file", type=Path, help="written with --record")
    replay.add_argument("--verbose", action="store_true", help="log to stderr")
    replay.set_defaults(run=_replay)
    return parser


def _add_fields(group: Any, cls: type) -> None:
    """A flag per field of a config dataclass: --max-model-len, --no-enable-prefix-caching, ..."""
    for field in dataclasses.fields(cls):
        kind = str(field.type)
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        if field.name in _NOT_FLAGS:
            continue
        if kind == "bool" or kind.startswith("bool "):
            options["action"] = argparse.BooleanOptionalAction
        elif "Mapping" in kind:
            options |= {"type": _mapping, "metavar": "JSON"}
        elif "RepetitionDetection" in kind:
            options |= {"type": _repetition_detection, "metavar": "JSON"}
        elif "Sequence" in kind:
            options |= {"nargs": "+", "type": int if "int" in kind else str}
        elif "str" not in kind:
            options["type"] = float if "float" in kind else int
        group.add_argument("--" + field.name.replace("_", "-"), **options)


# What only a program can give, or only shows in a program's results.
_NOT_FLAGS = {"flat_logprobs", "logits_processors", "output_kind", "stream_interval"}


def _mapping(text: str) -> dict[Any, Any]:
    """A JSON object; keys that are numbers become numbers, as token ids are."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return {int(key) if key.isdecimal() else key: item for key, item in value.items()}


def _repetition_detection(text: str) -> RepetitionDetection:
    try:
        return RepetitionDetection(**_mapping(text))
    except TypeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _chosen(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in vars(args).items() if name in names}


def _generate(args: argparse.Namespace) -> int:
    prompts = args.prompts
    if not prompts:
        source = args.file.read_text() if args.file else sys.stdin.read()
        prompts = [line for line in source.splitlines() if line]
    defaults = {"temperature": 0.0, "max_tokens": 64}
    params = SamplingParams(**defaults | _chosen(args, SamplingParams))
    config = _chosen(args, EngineConfig)
    if len(prompts) == 1 and params.n == 1 and not args.json:
        config.setdefault("distributed_executor_backend", "inline")
        return asyncio.run(_stream(prompts[0], params, EngineConfig.from_kwargs(**config)))
    with LLM(**config) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    for output in outputs:
        for answer in output.outputs:
            shown = _as_dict(output, answer) if args.json else f"{output.prompt}{answer.text}\n"
            print(json.dumps(shown) if args.json else shown)
    return _status(outputs)


async def _stream(prompt: str, params: SamplingParams, config: EngineConfig) -> int:
    print(prompt, end="", flush=True)
    async with AsyncEngine(config) as engine:
        num_shown = 0
        async for output in engine.generate(prompt, params):
            text = output.outputs[0].text
            print(text[num_shown:], end="", flush=True)
            num_shown = len(text)
    print()
    return _status([output])


def _status(outputs: Sequence[RequestOutput]) -> int:
    """1 when a request failed; which, and why, goes to stderr."""
    errors = [a for output in outputs for a in output.outputs if a.finish_reason == "error"]
    for answer in errors:
        print(f"minivllm: a request failed: {answer.stop_reason}", file=sys.stderr)
    return 1 if errors else 0


def _as_dict(output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "index": answer.index,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
    }


def _replay(args: argparse.Namespace) -> int:
    from minivllm.worker import replay  # here, because it loads torch

    num_steps, num_different = replay(args.file)
    print(f"{num_steps} steps, {num_different} with other tokens than recorded")
    return 1 if num_different else 0
