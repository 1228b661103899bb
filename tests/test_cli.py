from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from minivllm import cli, flags
from minivllm.config import EngineConfig, ServerConfig
from minivllm.request import SamplingParams

PROMPT = "The capital of France is"
SMALL = ["--kv-cache-memory-bytes", str(32 << 20), "--max-model-len", "256"]


def run(
    capsys: pytest.CaptureFixture[str], *argv: str, model: Path | None = None
) -> tuple[int, str, str]:
    """The exit status of a command run in this process, and what it wrote to stdout and stderr."""
    capsys.readouterr()
    settings = [*SMALL, "--model", str(model)] if model else []
    try:
        status = cli.main([*argv, *settings])
    except SystemExit as done:  # argparse
        status = int(done.code or 0)
    return status, *capsys.readouterr()


def in_a_process(
    argv: Sequence[str], text: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "minivllm", *argv],
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_one_prompt_is_streamed(
    embedded_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is shown and its completion follows piece by piece, as whole text in the end."""
    writes: list[str] = []
    stdout_write = sys.stdout.write
    monkeypatch.setattr(sys.stdout, "write", lambda s: writes.append(s) or stdout_write(s))
    status, out, err = run(capsys, "generate", PROMPT, "--max-tokens", "8", model=embedded_dir)
    assert (status, err) == (0, "")
    assert out == f"{PROMPT} Paris.\n\nThe answer is:\n", "greedy unless told otherwise"
    pieces = [piece for piece in writes if piece]
    assert pieces[0] == PROMPT
    assert len(pieces) >= 6, "a piece per token, nearly"
    assert "".join(pieces) == out


def test_json_file_and_flags(
    embedded_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json each line of the file is one object, in order, made with the flags' values."""
    file = tmp_path / "prompts.txt"
    prompts = [PROMPT, "Water boils at", "Käse und"]
    file.write_text("\n\n".join(prompts) + "\n")
    flags = ["--max-tokens", "6", "--ignore-eos", "--temperature", "1.5", "--seed", "3"]
    again = [*flags, "--block-size", "4", "--no-enable-prefix-caching", "--max-num-seqs", "1"]
    results = []
    for more in (flags, again):
        argv = ("generate", "--json", "--file", str(file), *more)
        status, out, err = run(capsys, *argv, model=embedded_dir)
        assert (status, err) == (0, "")
        results.append([json.loads(line) for line in out.splitlines()])
    assert results[0] == results[1], "a seed gives the same text however it is run"
    assert [one["prompt"] for one in results[0]] == prompts
    for one in results[0]:
        assert len(one["token_ids"]) == 6
        assert one["text"]
        assert (one["finish_reason"], one["stop_reason"]) == ("length", None)
        assert one["num_prompt_tokens"] >= 2
        assert one["num_cached_tokens"] == 0


def test_prompts_from_stdin(
    embedded_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without prompts the lines of stdin are completed; several are printed whole and in order,
    and a stop string ends them."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n\n{PROMPT}\n"))
    flags = ["--max-tokens", "8", "--stop", "."]
    status, out, err = run(capsys, "generate", *flags, model=embedded_dir)
    assert (status, out, err) == (0, f"{PROMPT} Paris\n\n" * 2, "")


def test_a_recording_is_replayed(
    embedded_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`replay` runs a recording's steps again and finds no other tokens; in a recording that was
    changed it finds them, and its exit status says so."""
    file = tmp_path / "steps.bin"
    flags = ["--max-tokens", "5", "--ignore-eos", "--record", str(file)]
    assert run(capsys, "generate", PROMPT, *flags, model=embedded_dir)[0] == 0
    expected = "5 steps, 0 with other tokens than recorded\n"
    assert run(capsys, "replay", str(file)) == (0, expected, "")
    file.write_bytes(with_other_token(file.read_bytes()))
    expected = "5 steps, 1 with other tokens than recorded\n"
    assert run(capsys, "replay", str(file)) == (1, expected, "")


def with_other_token(recording: bytes) -> bytes:
    """A recording in which the last step's token is another one."""
    from minivllm.batch import StepResult, decode_record
    from minivllm.channel import FrameReader, frame

    messages = [decode_record(payload) for payload in FrameReader().feed(recording)]
    result = messages[-1]
    assert isinstance(result, StepResult)
    messages[-1] = StepResult(result.generation, result.step, [[0]], [], [], {}, 0.0)
    return b"".join(map(frame, messages))


@pytest.mark.parametrize(
    ("flag", "value", "status", "parts"),
    [
        ("--max-tokens", "0", 1, ["RequestError", "max_tokens", "got 0"]),
        ("--max-tokens", "x", 2, ["--max-tokens", "'x'"]),
        ("--temperature", "2.5", 1, ["RequestError", "temperature", "between 0 and 2", "got 2.5"]),
        ("--temperature", "nan", 1, ["temperature", "got nan"]),
        ("--temperature", "hot", 2, ["--temperature", "'hot'"]),
        ("--top-p", "0", 1, ["top_p", "(0, 1]", "got 0.0"]),
        ("--top-k", "-5", 1, ["top_k", "got -5"]),
        ("--stop-token-ids", "-1", 1, ["stop_token_ids", "got -1"]),
        ("--seed", "-3", 1, ["seed", "got -3"]),
        ("--stop", "", 1, ["stop", "got ['']"]),
        ("--block-size", "0", 1, ["ConfigError", "block_size", "got 0"]),
        ("--block-size", "1.5", 2, ["--block-size", "'1.5'"]),
        ("--max-model-len", "32q", 1, ["max_model_len", "got '32q'"]),
        ("--max-model-len", "100k", 1, ["max_model_len", "model's", "got '100k'"]),
        ("--dtype", "float8", 1, ["dtype", "float32", "got 'float8'"]),
        ("--distributed-executor-backend", "ray", 1, ["distributed_executor_backend", "'ray'"]),
        ("--worker-lease-s", "inf", 1, ["worker_lease_s", "got inf"]),
        ("--model", "/no/such/dir", 1, ["ModelNotFoundError", "/no/such/dir"]),
        ("--max-token", "3", 2, ["no flag --max-token; did you mean --max-tokens?"]),
        ("--max_token=3", "4", 2, ["no flag --max-token; did you mean --max-tokens?"]),
        ("--zzz", "5", 2, ["no flag --zzz"]),
        ("--config", "/no/such/file", 1, ["FileNotFoundError", "/no/such/file"]),
        ("--file", "/no/such/file", 1, ["FileNotFoundError", "/no/such/file"]),
        ("--record", "/no/such/dir/file", 1, ["FileNotFoundError", "/no/such/dir/file"]),
    ],
)
def test_a_bad_value_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, status: int, parts: list[str]
) -> None:
    """A value that cannot work ends the command with a line that names it, and no traceback."""
    prompts = [] if flag == "--file" else ["one", "two"]
    done, out, err = run(capsys, "generate", *prompts, flag, value)
    assert (done, out) == (status, "")
    line = err.splitlines()[-1]
    assert line.startswith("minivllm")
    for part in parts:
        assert part in line
    assert "Traceback" not in err
    if status == 1:
        assert len(err.splitlines()) == 1


def test_an_empty_prompt_is_told_in_a_line(
    embedded_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong with a prompt is an error of the command, alone or among good ones."""
    for prompts in ([""], ["Water", ""]):
        status, _, err = run(capsys, "generate", *prompts, model=embedded_dir)
        assert status == 1
        assert err.startswith("minivllm: EmptyPromptError: prompt must have at least one token")
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", ["missing.bin", "a directory"])
def test_a_recording_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """`replay` of no file, or of what is none, is told in a line that names it."""
    (tmp_path / "a directory").mkdir()
    status, out, err = run(capsys, "replay", str(tmp_path / name))
    assert (status, out) == (1, "")
    assert name in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "kinds", "absent"),
    [
        ("generate", [SamplingParams, EngineConfig], flags.NOT_FLAGS | cli._NOT_FOR_GENERATE),
        ("serve", [ServerConfig, EngineConfig], set()),
        ("run-batch", [EngineConfig], set()),
    ],
)
def test_help_lists_a_flag_for_every_setting(
    capsys: pytest.CaptureFixture[str], command: str, kinds: list[type], absent: set[str]
) -> None:
    """Every field of a command's dataclasses is a flag, a yes-or-no one also with --no-."""
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    for field in (field for kind in kinds for field in dataclasses.fields(kind)):
        if field.name in absent:
            continue
        flag = "--" + field.name.replace("_", "-")
        assert f"{flag} " in out or f"{flag}," in out or f"{flag}]" in out
        if str(field.type).startswith("bool"):
            assert f"--no-{flag[2:]}" in out


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` and `--version` answer, and a command has to be named."""
    status, out, _ = run(capsys, "--help")
    assert status == 0
    for command in ("serve", "generate", "chat", "complete", "run-batch", "replay", "collect-env"):
        assert f"\n    {command} " in out
    assert run(capsys, "--version") == (0, version("minivllm") + "\n", "")
    assert run(capsys)[0] == 2


def test_every_flag_reaches_its_setting() -> None:
    """A value given as a flag arrives in the dataclass as the type of its field."""
    line = (
        "generate --temperature 0.5 --top-k 7 --stop a --stop b --stop-token-ids 3"
        " --stop-token-ids 4 --no-ignore-eos --logprobs 2 --seed 9 --model m --max_model_len 2k"
        " --no-async-scheduling --kv-cache-memory-bytes 2G --worker_lease_s=2 p q"
    )
    args = cli._parser().read(line.split())
    assert args.prompts == ["p", "q"]
    assert SamplingParams(**flags.chosen(args, SamplingParams)) == SamplingParams(
        temperature=0.5, top_k=7, stop=["a", "b"], stop_token_ids=[3, 4], logprobs=2, seed=9
    )
    assert EngineConfig(**flags.chosen(args, EngineConfig)) == EngineConfig(
        model="m",
        max_model_len="2k",
        async_scheduling=False,
        kv_cache_memory_bytes=2 << 30,
        worker_lease_s=2.0,
        seed=9,
    )


def test_a_file_of_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--config stands for the flags in a YAML file, with dashes or underscores; what is on the
    command line goes before it; a wrong name or value in it is told like that of a flag."""
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: a\nmax_model_len: 2k\nport: 1\napi-key: [x, y]\nenable-admin: true\n"
        "enable_prefix_caching: false\noverride-generation-config: {temperature: 0.5}\n"
        "shutdown-timeout: 3\n"
    )
    words = ["serve", "b", "--config", str(file), "--port", "2", "--admin-api-key", "z"]
    args = cli._parser().read(words)
    assert EngineConfig(**flags.chosen(args, EngineConfig)) == EngineConfig(
        model="b",
        max_model_len="2k",
        enable_prefix_caching=False,
        override_generation_config={"temperature": 0.5},
    )
    assert ServerConfig(**flags.chosen(args, ServerConfig)) == ServerConfig(
        port=2, api_key=["x", "y"], enable_admin=True, admin_api_key="z", shutdown_timeout_s=3.0
    )
    for text, part in (
        ("prot: 3", "no flag --prot; did you mean --port?"),
        ("port: x", "--port"),
        ("- port", "must map names of flags to values"),
        ("{", "must be a file in YAML"),
    ):
        file.write_text(text)
        status, out, err = run(capsys, "serve", "--config", str(file))
        assert (status > 0, out) == (True, "")
        assert part in err


def test_vllm_ways_to_give_flags() -> None:
    """Lists after one flag, the model as a word and vLLM's names without a unit are understood."""
    line = "serve m --served-model-name a b --shutdown-timeout 4 --sse-keep-alive-interval 5"
    args = cli._parser().read(line.split())
    assert flags.chosen(args, EngineConfig) == {"model": "m"}
    assert flags.chosen(args, ServerConfig) == {
        "served_model_name": ["a", "b"],
        "shutdown_timeout_s": 4.0,
        "sse_keep_alive_interval_s": 5.0,
    }


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["serve", "--port", "70000"], "port must be less than 65536, got 70000"),
        (["serve", "--block-size", "0"], "block_size must be"),
        (["serve", "--enable-admin"], "admin_api_key must be set"),
        (["chat", "--url", "http://x", "--model", "m"], "model must be left out where url"),
        (["chat", "--temperature", "9", "-q", "x"], "temperature must be between 0 and 2"),
        (["chat", "--url", "http://127.0.0.1:9", "-q", "x"], "http://127.0.0.1:9 does not answer"),
        (
            ["run-batch", "-i", "/no/such", "-o", "/no/such", "--url", "http://127.0.0.1:9"],
            "No such file or directory: '/no/such'",
        ),
        (
            ["run-batch", "-i", "x", "-o", "x", "--max-concurrency", "0"],
            "max_concurrency must be at least 1, got 0",
        ),
    ],
)
def test_a_command_that_cannot_start_says_why(
    capsys: pytest.CaptureFixture[str], argv: list[str], part: str
) -> None:
    """What is wrong is told in one line before a model is loaded."""
    status, out, err = run(capsys, *argv)
    assert (status, out, len(err.splitlines())) == (1, "", 1)
    assert part in err


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM_API_KEY is the server's key where --api-key does not name others."""
    served = []

    async def serve(engine: EngineConfig, server: ServerConfig) -> int:
        served.append(list(server.api_key))
        return 0

    monkeypatch.setattr("minivllm.server.serve", serve)
    monkeypatch.setenv("VLLM_API_KEY", "from-env")
    assert cli.main(["serve"]) == cli.main(["serve", "--api-key", "a", "b"]) == 0
    assert served == [["from-env"], ["a", "b"]]


def test_collect_env(capsys: pytest.CaptureFixture[str]) -> None:
    """The versions, the system and what it has are told a line each."""
    status, out, err = run(capsys, "collect-env")
    assert (status, err) == (0, "")
    names = {line.partition(": ")[0] for line in out.splitlines()}
    assert {"minivllm", "python", "system", "CPU", "memory", "GPUs", "package torch"} <= names


def test_as_a_process(embedded_dir: Path) -> None:
    """`python -m minivllm`, with a worker process and a log: text on stdout, the log on stderr."""
    flags = ["--distributed-executor-backend", "mp", "--verbose", "--max-tokens", "3", *SMALL]
    done = in_a_process(["generate", "--model", str(embedded_dir), *flags], text=PROMPT)
    assert done.returncode == 0
    assert done.stdout.startswith(PROMPT + " Paris")
    assert "worker ready (generation 0)" in done.stderr
    assert "request request-0: length" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_as_a_process() -> None:
    """The exit status and the line of an error are those of the process too."""
    done = in_a_process(["generate", "x", "--max-num-seqs", "0"])
    expected = "minivllm: ConfigError: max_num_seqs must be an integer of at least 1, got 0\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)
