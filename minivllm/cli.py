"""The command line: serve, generate, chat, complete, run-batch, bench, replay, collect-env.

Flags are made from the fields of the config dataclasses (`flags`). `generate` decodes greedily and
ends after 64 tokens unless asked otherwise; what goes through a server, embedded or not, takes the
model's own defaults. Text goes to stdout as it is generated when there is one prompt, whole outputs
in order when there are several, JSON lines with `--json`; everything else goes to stderr. An error
of ours is one line and exit status 1, never a traceback.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from minivllm.bench_cli import add_bench
from minivllm.channel import WORKER_ENV
from minivllm.config import EngineConfig, ServerConfig
from minivllm.engine import AsyncEngine
from minivllm.errors import ConfigError, MinivllmError
from minivllm.flags import NOT_FLAGS, Parser, add_fields, chosen
from minivllm.llm import LLM
from minivllm.protocol import ChatRequest, CompletionRequest
from minivllm.request import CompletionOutput, Logprobs, RequestOutput, SamplingParams

_DEFAULTS = {"temperature": 0.0, "max_tokens": 64}  # of `generate`, in place of the dataclass's
# These are for requests without parameters, which those of `generate` are not.
_NOT_FOR_GENERATE = {"generation_config", "override_generation_config"}
# What a terminal cannot show.
_NOT_FOR_CONSOLE = {"n", "logprobs", "prompt_logprobs", "logprob_token_ids"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        args = _parser().read(sys.argv[1:] if argv is None else argv)
        logging.basicConfig(
            level=logging.INFO if args.verbose else logging.WARNING,
            format="%(asctime)s %(name)s %(levelname)s %(message)s",
            stream=sys.stderr,
        )
        for name, value in WORKER_ENV.items():
            os.environ.setdefault(name, value)  # torch, which reads it, is not loaded yet
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


# ---- flags -----------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(prog="minivllm", description="LLM inference")
    parser.add_argument("--version", action="version", version=version("minivllm"))
    commands = parser.add_subparsers(dest="command", required=True)
    _add_serve(commands)
    _add_generate(commands)
    _add_console(commands, "chat", "talk with a model, of a server or embedded")
    _add_console(commands, "complete", "complete line by line, with a server or embedded")
    _add_run_batch(commands)
    add_bench(_command(commands, "bench", "measure: latency, throughput, serve, ...", "kind"))
    replay = _command(commands, "replay", "run recorded plans again and compare the tokens")
    replay.add_argument("file", type=Path, help="written with --record")
    replay.set_defaults(run=_replay)
    collect_env = _command(commands, "collect-env", "what a report of a fault should tell")
    collect_env.set_defaults(run=_collect_env)
    return parser


def _command(commands: Any, name: str, text: str, words: str = "") -> Parser:
    usage = f"minivllm {name} [flags] {words}".rstrip()  # all flags are a page
    parser: Parser = commands.add_parser(name, help=text, description=text, usage=usage)
    if name != "serve":  # which always does
        parser.add_argument("--verbose", action="store_true", help="log to stderr")
    return parser


def _add_config(parser: Parser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        default=argparse.SUPPRESS,
        help="a file in YAML of flags and their values; flags given here go before it",
    )


def _add_serve(commands: Any) -> None:
    parser = _command(commands, "serve", "serve OpenAI's API over HTTP", "[model]")
    parser.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS, help="the same as --model"
    )
    _add_config(parser)
    add_fields(parser.add_argument_group("server"), ServerConfig)
    add_fields(parser.add_argument_group("engine"), EngineConfig)
    parser.epilog = "Without --api-key, the environment's VLLM_API_KEY is the key, if there is one."
    parser.set_defaults(run=_serve, verbose=True)


def _add_generate(commands: Any) -> None:
    parser = _command(commands, "generate", "complete prompts", "[prompts ...]")
    parser.epilog = "A flag that takes a list is given once for each of its values."
    parser.add_argument("prompts", nargs="*", help="without any: lines of --file or stdin")
    parser.add_argument("--file", type=Path, help="a file with one prompt per line")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt")
    _add_config(parser)
    sampling = parser.add_argument_group("sampling")
    add_fields(sampling, SamplingParams, skip=NOT_FLAGS, defaults=_DEFAULTS)
    # --seed is a field of both; the one flag sets both
    engine = parser.add_argument_group("engine")
    add_fields(engine, EngineConfig, skip={"seed"} | _NOT_FOR_GENERATE)
    parser.set_defaults(run=_generate)


def _add_client(parser: Parser) -> None:
    group = parser.add_argument_group("server", "without --url, the model runs in here")
    group.add_argument("--url", help="of a server, like http://localhost:8000/v1")
    group.add_argument(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY"),
        help="the server's key (default: the environment's OPENAI_API_KEY)",
    )


def _add_console(commands: Any, name: str, text: str) -> None:
    parser = _command(commands, name, text)
    parser.add_argument("-q", "--quick", metavar="TEXT", help="the only line; then the end")
    if name == "chat":
        parser.add_argument("--system-prompt", metavar="TEXT", help="what the model is told first")
    parser.add_argument("--model-name", metavar="TEXT", help="of the server's, not its first")
    _add_config(parser)
    _add_client(parser)
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    shared = set(ChatRequest.__struct_fields__) & set(CompletionRequest.__struct_fields__)
    skip = fields - shared | NOT_FLAGS | _NOT_FOR_CONSOLE
    sampling = parser.add_argument_group("sampling", "without a flag, as the model has it")
    add_fields(sampling, SamplingParams, skip=skip, defaults=dict.fromkeys(fields))
    add_fields(parser.add_argument_group("engine"), EngineConfig, skip={"seed"})
    parser.set_defaults(run=_console)


def _add_run_batch(commands: Any) -> None:
    parser = _command(commands, "run-batch", "answer a file of requests, in OpenAI's format")
    parser.epilog = "A run that was stopped goes on where it was when it is started again."
    parser.add_argument("-i", "--input-file", type=Path, required=True, help="requests, JSONL")
    parser.add_argument(
        "-o", "--output-file", type=Path, required=True, help="answers, JSONL; added to"
    )
    parser.add_argument(
        "--max-concurrency", type=int, default=256, metavar="N", help="most requests at once"
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="TEXT",
        help="what requests call the embedded model, if not by its own name",
    )
    _add_config(parser)
    _add_client(parser)
    add_fields(parser.add_argument_group("engine"), EngineConfig)
    parser.set_defaults(run=_run_batch)


# ---- commands --------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    from minivllm.server import serve  # here, because FastAPI takes longer than other commands run

    server = chosen(args, ServerConfig)
    key = os.environ.get("VLLM_API_KEY")
    if key:
        server.setdefault("api_key", [key])
    return uvloop.run(serve(EngineConfig(**chosen(args, EngineConfig)), ServerConfig(**server)))


def _server_options(args: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """What `connect` is given: a server's address, or an engine's config."""
    if args.url is None:
        return {"config": EngineConfig(**config)}
    for name, value in config.items():
        raise ConfigError(name, value, "must be left out where url is given")
    return {"url": args.url, "api_key": args.api_key}


def _console(args: argparse.Namespace) -> int:
    from minivllm.client import connect  # here, as the server above
    from minivllm.console import chat, complete

    fields = chosen(args, SamplingParams)
    SamplingParams(**fields)  # what is wrong is told before anything is loaded
    config = chosen(args, EngineConfig)
    config.pop("seed", None)  # the requests'
    connection = connect(**_server_options(args, config))
    body = msgspec.to_builtins(fields, str_keys=True)
    if args.model_name is not None:
        body["model"] = args.model_name
    if args.command == "complete":
        return complete(connection, body, quick=args.quick)
    return chat(connection, body, system=args.system_prompt, quick=args.quick)


def _run_batch(args: argparse.Namespace) -> int:
    from minivllm.batch_files import run_batch  # here, as the server above
    from minivllm.client import connect

    if args.max_concurrency < 1:
        raise ConfigError("max_concurrency", args.max_concurrency, "must be at least 1")
    options = _server_options(args, chosen(args, EngineConfig))
    if args.served_model_name:
        if args.url is not None:
            rule = "must be left out where url is given"
            raise ConfigError("served_model_name", args.served_model_name, rule)
        options["server_config"] = ServerConfig(served_model_name=args.served_model_name)

    async def run() -> int:
        async with connect(**options) as client:
            counts = await run_batch(
                client,
                args.input_file,
                args.output_file,
                max_concurrency=args.max_concurrency,
                quiet=not sys.stderr.isatty(),
            )
        print(
            f"{counts.num_done} answered, {counts.num_failed} of them with an error,"
            f" {counts.num_done_before} had been before",
            file=sys.stderr,
        )
        return 1 if counts.num_failed else 0

    return uvloop.run(run())


def _generate(args: argparse.Namespace) -> int:
    params = SamplingParams(**_DEFAULTS | chosen(args, SamplingParams))
    config = chosen(args, EngineConfig)
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
        return uvloop.run(_stream(prompts[0], params, EngineConfig(**config)))
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


def _collect_env(args: argparse.Namespace) -> int:  # noqa: ARG001
    import torch  # here, because it takes seconds

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "minivllm": version("minivllm"),
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "CPU": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores to use",
        "memory": f"{memory_bytes / 2**30:.1f} GiB",
        "threads of torch": torch.get_num_threads(),
        "CUDA of torch": torch.version.cuda or "none",
        "GPUs": _gpus() or "none",
    }
    facts |= {f"package {name}": found for name, found in _packages().items()}
    names = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
    facts |= {f"environment {name}": os.environ[name] for name in names if name in os.environ}
    for name, value in facts.items():
        print(f"{name}: {value}")
    return 0


def _cpu_name() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return "; ".join((done.stdout or done.stderr).splitlines())


def _packages() -> dict[str, str]:
    """The versions of what we depend on."""
    found = {}
    for requirement in requires("minivllm") or []:
        match = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert match is not None, "a requirement begins with a name"
        try:
            found[match[0]] = version(match[0])
        except PackageNotFoundError:  # one of an extra, or of another system
            found[match[0]] = "none"
    return found
