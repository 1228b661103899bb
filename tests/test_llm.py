from __future__ import annotations

import dataclasses
import itertools
import json
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeExecutor, expected_output

from minivllm import LLM, RequestOutput, SamplingParams, errors

VOCAB = 49152
SMALL = {"kv_cache_memory_bytes": 32 << 20, "max_model_len": 256}
WAIT_S = 60.0  # long enough for any machine; only a failing test waits so long


def greedy(max_tokens: int = 8, **changes: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | changes
    )


def ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


# ---- with the model: one engine for all ---------------------------------------------------------


@pytest.fixture(scope="module")
def llm(embedded_dir: Path) -> Iterator[LLM]:
    with LLM(str(embedded_dir), **SMALL) as made:
        yield made


def generate(llm: LLM, prompts: Any, params: Any = None) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def test_one_prompt_gives_a_list_of_one(llm: LLM) -> None:
    """A single prompt, as text, ids or a dict, is completed as a list of one prompt is."""
    text = "The capital of France is"
    token_ids = llm.tokenizer.encode(text)
    outputs = [
        generate(llm, prompt, greedy(5))
        for prompt in (text, [text], {"prompt": text}, token_ids, [token_ids])
    ]
    assert [len(output) for output in outputs] == [1] * 5
    assert all(ids(output[0]) == ids(outputs[0][0]) for output in outputs)
    assert outputs[0][0].outputs[0].text.startswith(" Paris")
    assert [output[0].prompt for output in outputs] == [text] * 3 + [None] * 2
    assert all(output[0].prompt_token_ids == token_ids for output in outputs)


def test_prompts_and_params_belong_together(llm: LLM) -> None:
    """Outputs come in the order of the prompts, each made with the parameters at its place."""
    prompts = ["One two three", [5, 6, 7], {"prompt": "Water boils at"}, "Once upon a time"]
    lengths = [9, 1, 6, 3]  # so that they end in another order
    outputs = generate(llm, prompts, [greedy(length) for length in lengths])
    assert [len(ids(output)) for output in outputs] == lengths
    alone = [
        generate(llm, [prompt], greedy(n))[0] for prompt, n in zip(prompts, lengths, strict=True)
    ]
    assert [ids(output) for output in outputs] == [ids(output) for output in alone]
    assert [o.prompt for o in outputs] == ["One two three", None, "Water boils at", prompts[3]]
    assert all(output.finished for output in outputs)


def test_logprobs_have_the_shape_that_was_asked_for(llm: LLM) -> None:
    """One dict per token: the sampled token, the n likeliest with ranks from 1, texts, a sum."""
    plain, zero, three = (
        generate(llm, "Water boils at", greedy(6, logprobs=n))[0].outputs[0] for n in (None, 0, 3)
    )
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)
    assert plain.token_ids == zero.token_ids == three.token_ids
    assert zero.logprobs is not None
    assert three.logprobs is not None
    assert [list(entry) for entry in zero.logprobs] == [[token] for token in zero.token_ids]
    for token, entry, small in zip(three.token_ids, three.logprobs, zero.logprobs, strict=True):
        assert [value.rank for value in entry.values()] == [1, 2, 3]
        assert next(iter(entry)) == token, "greedy: the sampled token is the likeliest"
        falling = [value.logprob for value in entry.values()]
        assert falling == sorted(falling, reverse=True)
        assert sum(map(math.exp, falling)) <= 1 + 1e-6
        assert math.isclose(small[token].logprob, entry[token].logprob, abs_tol=1e-5)
        texts = {i: llm.tokenizer.token_text(i) for i in entry}
        assert {i: value.decoded_token for i, value in entry.items()} == texts
    total = sum(e[t].logprob for t, e in zip(three.token_ids, three.logprobs, strict=True))
    assert three.cumulative_logprob == total


def test_a_sampled_token_outside_the_likeliest_is_listed_too(llm: LLM) -> None:
    """A sampled token comes first with its own rank, beside the n likeliest."""
    params = SamplingParams(temperature=2, seed=1, max_tokens=20, ignore_eos=True, logprobs=2)
    answer = generate(llm, "Water", params)[0].outputs[0]
    assert answer.logprobs is not None
    far = 0
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        ranks = [value.rank for value in entry.values()]
        assert next(iter(entry)) == token
        assert sorted(r for r in ranks if r is not None)[:2] == [1, 2]
        assert len(entry) == (3 if entry[token].rank not in (1, 2) else 2)
        far += len(entry) == 3
    assert far > 0


async def test_inside_a_running_loop(llm: LLM) -> None:
    """A caller in a coroutine, as in a notebook's cell, is served like any other."""
    output = generate(llm, "The capital of France is", greedy(3))[0]
    assert len(ids(output)) == 3


def test_two_models_in_one_process(llm: LLM, embedded_dir: Path) -> None:
    """A second LLM serves beside the first, and its end does not touch the first."""
    prompts = ["Water boils at", "Once upon a time"]
    expected = [ids(output) for output in generate(llm, prompts, greedy())]
    with LLM(str(embedded_dir), **SMALL | {"block_size": 4}) as other:
        results: dict[str, list[list[int]]] = {}

        def call(name: str, one: LLM) -> None:
            results[name] = [ids(output) for output in generate(one, prompts, greedy())]

        threads = [threading.Thread(target=call, args=pair) for pair in (("a", llm), ("b", other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert results == {"a": expected, "b": expected}
    assert [ids(output) for output in generate(llm, prompts, greedy())] == expected


def test_progress_goes_to_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """The bar with its rates is on stderr, only when it is wanted; stdout is the caller's."""
    llm.generate(["Water", "Fire"], greedy(2))
    out, err = capsys.readouterr()
    assert out == ""
    assert "Prompts: 100%" in err
    assert "2/2" in err
    assert "out " in err
    generate(llm, ["Water"], greedy(2))
    assert capsys.readouterr() == ("", "")


HOUSE_RULES = """
import json, logging, signal, sys, threading

def handlers():
    names = ["", *sorted(n for n in logging.root.manager.loggerDict if n.startswith("minivllm"))]
    found = {name: [str(h) for h in logging.getLogger(name).handlers] for name in names}
    return {name: kept for name, kept in found.items() if kept}

def state():
    signals = {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()}
    return signals, handlers(), logging.root.level, logging.getLogger("minivllm").level

before = state()
from minivllm import LLM, SamplingParams
with LLM(sys.argv[1], kv_cache_memory_bytes=32 << 20, max_model_len=256) as llm:
    llm.generate("Water", SamplingParams(max_tokens=2), use_tqdm=False)
    during = state()
left = [thread.name for thread in threading.enumerate() if "minivllm" in thread.name]
print(json.dumps([before == during == state(), left]))
"""


def test_a_guest_in_the_process(embedded_dir: Path) -> None:
    """In a fresh interpreter: no signal handler, logging handler or level is changed by a model
    and its requests, nothing is printed, and no thread of ours is left after shutdown."""
    done = subprocess.run(
        [sys.executable, "-c", HOUSE_RULES, str(embedded_dir)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stderr == ""
    assert json.loads(done.stdout) == [True, []]


# ---- with a fake worker: what happens when -------------------------------------------------------


def fake_llm(model_dir: Path, executor: FakeExecutor, **config: Any) -> LLM:
    return LLM(str(model_dir), executor=executor, **config)


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "minivllm" in thread.name}


def nothing_is_left(llm: LLM) -> bool:
    scheduler = llm.engine.core.scheduler
    free = scheduler.blocks.num_free == scheduler.blocks.num_blocks - 1
    return scheduler.num_running == scheduler.num_waiting == 0 and free


def test_no_prompts_no_outputs(embedded_dir: Path) -> None:
    """An empty list is answered with an empty list."""
    with fake_llm(embedded_dir, FakeExecutor()) as llm:
        assert generate(llm, []) == generate(llm, [], greedy()) == generate(llm, [], []) == []


def test_default_params(embedded_dir: Path) -> None:
    """Without parameters each prompt gets those of `SamplingParams()`."""
    with fake_llm(embedded_dir, FakeExecutor()) as llm:
        outputs = generate(llm, [[5], [6]])
    assert [ids(o) for o in outputs] == [expected_output([i], 16, VOCAB) for i in (5, 6)]


@pytest.mark.parametrize("num_params", [0, 1, 3])
def test_as_many_params_as_prompts(embedded_dir: Path, num_params: int) -> None:
    """A list of parameters that does not match the prompts is refused before anything runs."""
    executor = FakeExecutor()
    with fake_llm(embedded_dir, executor) as llm:
        with pytest.raises(errors.ConfigError, match=rf"^sampling_params .*\(2\).*{num_params} of"):
            generate(llm, ["a", "b"], [greedy()] * num_params)
        assert executor.plans == []


def test_a_bad_prompt_costs_nobody_else_anything(embedded_dir: Path) -> None:
    """A call with a bad prompt raises; a call from another thread at that time gets all its
    tokens; nothing is left behind and the next call is served."""
    executor = FakeExecutor()
    bad_call_over, others_run = threading.Event(), threading.Event()

    def never(plan: Any, model: Any) -> bool:
        others_run.set()
        return False

    executor.kills = never
    executor.delay_s = 0.02  # the other call would take 8 s: time for the bad ones
    prompts = [[i] * 20 for i in range(1, 9)]
    results: list[RequestOutput] = []
    with fake_llm(embedded_dir, executor, max_model_len=2048) as llm:

        def call() -> None:
            results.extend(generate(llm, prompts, greedy(400)))
            assert bad_call_over.is_set()

        other = threading.Thread(target=call)
        other.start()
        assert others_run.wait(WAIT_S)
        for bad, error in (
            ("", errors.EmptyPromptError),
            ([1, 10**6], errors.TokenIdError),
            ([1] * 2048, errors.PromptTooLongError),
        ):
            with pytest.raises(error):
                generate(llm, [[7, 7], [8, 8], bad, [9, 9]], greedy(2000))
        bad_call_over.set()
        executor.delay_s = 0.0
        other.join(WAIT_S)
        assert [ids(o) for o in results] == [expected_output(p, 400, VOCAB) for p in prompts]
        assert ids(generate(llm, [3], greedy(4))[0]) == expected_output([3], 4, VOCAB)
        assert nothing_is_left(llm)


def test_ctrl_c_aborts_the_call_and_keeps_the_engine(embedded_dir: Path) -> None:
    """Ctrl-C in the middle of `generate` raises at once; its requests end and others can come."""
    executor = FakeExecutor()
    sent = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(plan: Any, model: Any) -> bool:
        waits = sys._current_frames()[main].f_code.co_name == "wait"
        if plan.step >= 5 and waits and not sent.is_set():
            sent.set()
            executor.delay_s = 0.01  # the requests alone would take 20 s from here
            signal.pthread_kill(main, signal.SIGINT)
        return False

    executor.kills = interrupt
    with fake_llm(embedded_dir, executor, max_model_len=2048) as llm:
        with pytest.raises(KeyboardInterrupt):
            generate(llm, [[i] * 40 for i in range(1, 5)], greedy(10**9))
        executor.delay_s = 0.0
        assert ids(generate(llm, [3], greedy(4))[0]) == expected_output([3], 4, VOCAB)
        assert nothing_is_left(llm)
        num_plans = len(executor.plans)
    assert num_plans < 1500, "the call went on after Ctrl-C"


def test_shutdown_ends_a_call_in_another_thread(embedded_dir: Path) -> None:
    """A call that runs while the LLM is shut down comes back, with its requests aborted."""
    executor = FakeExecutor()
    running = threading.Event()

    def never(plan: Any, model: Any) -> bool:
        running.set()
        return False

    executor.kills = never
    llm = fake_llm(embedded_dir, executor, max_model_len=2048)
    results: list[RequestOutput] = []
    caller = threading.Thread(
        target=lambda: results.extend(generate(llm, [[i] for i in range(9)], greedy(10**9))),
        daemon=True,
    )
    caller.start()
    assert running.wait(WAIT_S)
    llm.shutdown()
    caller.join(WAIT_S)
    assert [output.outputs[0].finish_reason for output in results] == ["abort"] * 9


def test_generate_after_shutdown_raises(embedded_dir: Path) -> None:
    """A closed LLM says so; shutting it down again does nothing."""
    threads = our_threads()
    llm = fake_llm(embedded_dir, FakeExecutor())
    assert our_threads() != threads
    llm.shutdown()
    llm.shutdown()
    assert our_threads() == threads
    with pytest.raises(errors.EngineClosedError):
        generate(llm, "Water")


def test_a_failed_start_leaves_nothing(embedded_dir: Path) -> None:
    """A bad setting or model raises its own error, and the loop's thread is gone."""
    threads = our_threads()
    with pytest.raises(errors.UnknownConfigKeyError, match="max_model_len"):
        LLM(str(embedded_dir), max_len=5)
    with pytest.raises(errors.ConfigError, match="max_model_len must be at most the model's"):
        LLM(str(embedded_dir), max_model_len="1000k")
    with pytest.raises(errors.ModelNotFoundError, match="no-such-dir"):
        LLM(str(embedded_dir / "no-such-dir"))
    assert our_threads() == threads


def test_the_seed_of_the_engine_decides_for_requests_without_one(embedded_dir: Path) -> None:
    """Requests draw their seeds from the engine's in their order: same seed, same draws."""
    drawn = []
    for seed in (1, 1, 2):
        executor = FakeExecutor()
        with fake_llm(embedded_dir, executor, seed=seed) as llm:
            generate(llm, [[1], [2], [3]], [greedy(2), greedy(2, seed=77), greedy(2, seed=-1)])
        rows = [row for plan in executor.plans for row in plan.new_rows]
        drawn.append([row.inputs.seed for row in rows])
    assert drawn[0] == drawn[1] != drawn[2]
    assert [seeds[1] for seeds in drawn] == [77] * 3
    assert len(set(drawn[0])) == 3


def test_outputs_are_values(embedded_dir: Path) -> None:
    """Two equal calls give equal outputs but for ids and times; none shares its lists."""
    with fake_llm(embedded_dir, FakeExecutor()) as llm:
        first, second = (generate(llm, [[4, 5]] * 2, greedy()) for _ in range(2))
    answers = [dataclasses.asdict(output.outputs[0]) for output in first + second]
    assert all(a == b for a, b in itertools.pairwise(answers))
    assert len({output.request_id for output in first + second}) == 4
    first[0].outputs[0].token_ids.clear()
    assert len(ids(first[1])) == 8
