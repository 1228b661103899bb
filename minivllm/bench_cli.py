"""`minivllm bench`: the flags of the benchmarks, and their reports.

    latency  throughput  startup     an engine of our own            `bench`
    serve                            any OpenAI server               `bench_serve`
    sweep                            settings under an objective     `bench_serve`
    ablation                         each mechanism, with and without  `ablation`

Flags and keys of results are vLLM's; `--input-tokens` and `--output-tokens` stand for
`--input-len` and `--output-len`. What is read goes to stdout, progress to stderr, JSON to the file
that `--output-json` or `--save-result` names, pictures to the directory of `--plot`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import uvloop
from tqdm import tqdm

from minivllm.config import EngineConfig
from minivllm.flags import Parser, add_fields, chosen
from minivllm.measures import read_goodput, report
from minivllm.workloads import Arrivals, Dataset, ServeOptions

# What vLLM's flags for the data set `random` are called beside ours.
_ALIASES = {
    "input_len": ["--input-tokens", "--random-input-len"],
    "output_len": ["--output-tokens", "--random-output-len", "--sharegpt-output-len"],
}

EXPERIMENTS = ("batching", "memory", "chunks", "prefix", "batch")


def add_bench(parser: Parser) -> None:
    """Give a parser the benchmarks for commands."""
    kinds = parser.add_subparsers(dest="bench", prog="minivllm bench", required=True)
    _add_latency(_kind(kinds, "latency", "seconds that one batch takes", _latency))
    _add_throughput(_kind(kinds, "throughput", "tokens per second of many prompts", _throughput))
    _add_serve(_kind(kinds, "serve", "latencies of an OpenAI server under a load", _serve))
    _add_startup(_kind(kinds, "startup", "seconds of a start, cold and warm", _startup))
    _add_sweep(_kind(kinds, "sweep", "the settings that serve the most", _sweep))
    _add_ablation(_kind(kinds, "ablation", "what each mechanism is worth", _ablation))


def _kind(kinds: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]) -> Parser:
    usage = f"minivllm bench {name} [flags]"
    parser: Parser = kinds.add_parser(name, help=text, description=text, usage=usage)
    parser.add_argument("--verbose", action="store_true", help="log to stderr")
    parser.set_defaults(run=run)
    return parser


def _count(parser: Any, flag: str, default: int | None, text: str, *more: str) -> None:
    parser.add_argument(flag, *more, type=int, default=default, metavar="N", help=text)


def _outputs(parser: Parser, *, plot: bool = True) -> None:
    parser.add_argument("--output-json", type=_new_file, metavar="FILE", help="for the figures")
    if plot:
        parser.add_argument("--plot", type=Path, metavar="DIR", help="for pictures")


def _new_file(text: str) -> Path:
    """A file that can be written when the figures are there: told now, not after the run."""
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be in a directory that exists, got {text!r}")
    return Path(text)


def _engine(parser: Parser) -> None:
    group = parser.add_argument_group("engine", "the prefix cache is off unless asked for")
    add_fields(group, EngineConfig)


def _dataset(parser: Parser, skip: Collection[str] = ()) -> None:
    group = parser.add_argument_group("data set")
    add_fields(group, Dataset, skip={*skip, *_ALIASES})
    for name, aliases in _ALIASES.items():
        text = "tokens of a prompt" if name == "input_len" else "tokens to generate"
        flag = "--" + name.replace("_", "-")
        group.add_argument(
            flag, *aliases, dest=name, type=int, metavar="N", help=text, default=argparse.SUPPRESS
        )


def _add_latency(parser: Parser) -> None:
    _count(parser, "--input-len", 32, "tokens of a prompt", "--input-tokens")
    _count(parser, "--output-len", 128, "tokens to generate", "--output-tokens")
    _count(parser, "--batch-size", 8, "prompts at once")
    _count(parser, "--n", 1, "samples of each prompt")
    _count(parser, "--num-iters-warmup", 10, "runs before the timed ones")
    _count(parser, "--num-iters", 30, "timed runs")
    parser.add_argument("--profile", metavar="DIR", help="for a trace of the timed runs")
    _outputs(parser)
    _engine(parser)


def _add_throughput(parser: Parser) -> None:
    _count(parser, "--n", 1, "samples of each prompt")
    parser.add_argument("--async-engine", action="store_true", help="use AsyncEngine, not LLM")
    parser.add_argument(
        "--backend", choices=["minivllm", "vllm"], default="minivllm", help="both name this engine"
    )
    _outputs(parser)
    _dataset(parser)
    _engine(parser)


def _add_serve(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", metavar="URL", help="in place of host and port")
    group.add_argument("--host", default="127.0.0.1", metavar="TEXT")
    group.add_argument("--port", type=int, default=8000, metavar="N")
    group.add_argument(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY"),
        metavar="TEXT",
        help="the server's key (default: the environment's OPENAI_API_KEY)",
    )
    add_fields(parser.add_argument_group("load"), ServeOptions)
    add_fields(parser.add_argument_group("arrivals"), Arrivals)
    _goodput(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of work and arrivals")
    parser.add_argument("--disable-tqdm", action="store_true", help="show no progress")
    parser.add_argument("--save-result", action="store_true", help="write a file of JSON")
    parser.add_argument("--result-dir", type=Path, default=Path(), metavar="DIR")
    parser.add_argument("--result-filename", metavar="TEXT", help="one is made if not given")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="for pictures")
    _dataset(parser)


def _add_startup(parser: Parser) -> None:
    _count(parser, "--num-iters-cold", 3, "starts that compile every kernel")
    _count(parser, "--num-iters-warmup", 1, "starts before the warm ones")
    _count(parser, "--num-iters-warm", 3, "starts that find compiled kernels")
    _outputs(parser, plot=False)
    add_fields(parser.add_argument_group("engine"), EngineConfig)


def _add_sweep(parser: Parser) -> None:
    parser.add_argument(
        "--param",
        action="append",
        required=True,
        metavar="NAME=A,B",
        help="a setting of the engine and its values; given again, every combination is tried",
    )
    _goodput(parser)
    parser.add_argument(
        "--slo-share", type=float, default=0.9, metavar="X", help="of answers that must be good"
    )
    parser.add_argument(
        "--start-rate", type=float, default=1.0, metavar="X", help="requests per second to try"
    )
    _count(parser, "--num-halvings", 2, "of the gap between a good rate and a bad one")
    _outputs(parser)
    _dataset(parser)
    _engine(parser)


def _add_ablation(parser: Parser) -> None:
    parser.add_argument(
        "--only",
        action="append",
        choices=EXPERIMENTS,
        default=[],
        help="one experiment; given again, several (default: all)",
    )
    _outputs(parser)
    _engine(parser)


def _goodput(parser: Parser) -> None:
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="objectives of a good answer: ttft:500 tpot:50 e2el:5000",
    )


# ---- runs ------------------------------------------------------------------------------------


def _latency(args: argparse.Namespace) -> int:
    from minivllm.bench import latency

    names = ("input_len", "output_len", "batch_size", "n", "num_iters_warmup", "num_iters")
    result, steps = latency(
        _config(args),
        **{name: getattr(args, name) for name in names},
        profile=args.profile,
        seed=getattr(args, "seed", 0),
        quiet=not sys.stderr.isatty(),
    )
    print(f"Avg latency: {result['avg_latency']:.4f} seconds")
    for percentile, seconds in result["percentiles"].items():
        print(f"{percentile}% percentile latency: {seconds:.4f} seconds")
    print(f"Output: {result['output_tokens_per_second']:.1f} tokens/s")
    return _end_offline(args, result, steps)


def _throughput(args: argparse.Namespace) -> int:
    from minivllm.bench import throughput
    from minivllm.bench_serve import Load

    dataset = Dataset(**chosen(args, Dataset))
    config = _config(args)
    load = Load(dataset, ServeOptions(tokenizer=config.model), seed=config.seed)
    result, steps = throughput(
        config, load.works, n=args.n, use_async=args.async_engine, quiet=not sys.stderr.isatty()
    )
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s,"
        f" {result['tokens_per_second']:.2f} total tokens/s,"
        f" {result['output_tokens_per_second']:.2f} output tokens/s"
    )
    return _end_offline(args, result, steps)


def _end_offline(args: argparse.Namespace, result: dict[str, Any], steps: list[Any]) -> int:
    from minivllm.roofline import show

    print(show(result["roofline"]))
    _write(args.output_json, result)
    if args.plot is not None:
        from minivllm.plots import timeline

        _told(timeline(steps, args.plot / "steps.png"))
    return 0


def _serve(args: argparse.Namespace) -> int:
    from minivllm.bench_serve import Load, save  # here, because FastAPI takes a while
    from minivllm.client import connect

    goodput_ms = read_goodput(args.goodput)
    arrivals = Arrivals(**chosen(args, Arrivals))
    load = Load(
        Dataset(**chosen(args, Dataset)),
        ServeOptions(**chosen(args, ServeOptions)),
        seed=args.seed,
    )
    url = args.base_url or f"http://{args.host}:{args.port}"

    async def run() -> Any:
        async with connect(url=url, api_key=args.api_key) as client:
            return await load.send(
                client,
                arrivals,
                goodput_ms=goodput_ms,
                quiet=args.disable_tqdm or not sys.stderr.isatty(),
            )

    result, answers = uvloop.run(run())
    print(report(result))
    for error in sorted({answer.error for answer in answers if answer.error})[:10]:
        print(f"minivllm: a request failed: {error}", file=sys.stderr)
    if args.save_result:
        _told(save(result, answers, args.result_dir, args.result_filename))
    if args.plot is not None:
        from minivllm.plots import requests

        _told(requests(answers, args.plot / "requests.png"))
    return 1 if result["failed"] else 0


def _startup(args: argparse.Namespace) -> int:
    from minivllm.bench import startup

    names = ("num_iters_cold", "num_iters_warmup", "num_iters_warm")
    result = startup(
        chosen(args, EngineConfig),
        **{name: getattr(args, name) for name in names},
        quiet=not sys.stderr.isatty(),
    )
    for name in ("cold", "warm"):
        phases = result[f"{name}_phase_s"].items()
        parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases)
        print(f"Avg {name} startup: {result[f'avg_{name}_startup_time']:.2f} seconds ({parts})")
    _write(args.output_json, result)
    return 0


def _sweep(args: argparse.Namespace) -> int:
    from minivllm.bench_serve import Load, read_grid, sweep

    config = _config(args)
    options = ServeOptions(tokenizer=config.model, ignore_eos=True, percentile_metrics="ttft,tpot")
    settings = {"enable_prefix_caching": False} | chosen(args, EngineConfig)
    work = sweep(
        settings,
        read_grid(args.param),
        Load(Dataset(**chosen(args, Dataset)), options, seed=config.seed),
        goodput_ms=read_goodput(args.goodput),
        slo_share=args.slo_share,
        start_rate=args.start_rate,
        num_halvings=args.num_halvings,
        quiet=not sys.stderr.isatty(),
    )
    result = uvloop.run(work)
    for one in result["found"]:
        best = one["best"]
        name = ", ".join(f"{key}={value}" for key, value in one["settings"].items())
        if best is None:
            print(f"{name}: no rate that was tried keeps the objectives")
            continue
        print(
            f"{name}: {best['request_rate']:g} requests/s, {best['output_throughput']:.1f} output"
            f" tokens/s, p99 TTFT {best['p99_ttft_ms']:.0f} ms, p99 TPOT"
            f" {best['p99_tpot_ms']:.1f} ms, {best['slo_share']:.0%} good"
        )
    _write(args.output_json, result)
    if args.plot is not None:
        from minivllm.plots import load_curves, pareto

        _told(load_curves(result, args.plot / "load.png"))
        _told(pareto(result["found"], args.plot / "pareto.png"))
    return 0


def _ablation(args: argparse.Namespace) -> int:
    from minivllm.ablation import run
    from minivllm.bench import machine_of

    config = _config(args)
    tables = {}
    names = args.only or EXPERIMENTS
    for name in tqdm(names, desc="Experiments", disable=not sys.stderr.isatty()):
        table = uvloop.run(run(name, config, machine_of))
        print(table.show(), end="\n\n", flush=True)
        tables[name] = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        if args.plot is not None:
            _told(table.draw(args.plot / f"{name}.png"))
    _write(args.output_json, tables)
    return 0


def _config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(**{"enable_prefix_caching": False} | chosen(args, EngineConfig))


def _write(file: Path | None, result: Any) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n")


def _told(file: Path) -> None:
    print(f"{file} was written", file=sys.stderr)
