"""The engine without its shell: a scheduler, a fake model, a clock that only steps move."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
from fakes import FakeModel, expected_output

from minivllm.batch import SampleInputs, StepPlan, StepResult
from minivllm.config import SchedulerConfig, SpeculativeConfig
from minivllm.request import Request, SamplingParams
from minivllm.scheduler import Scheduler

VOCAB = 997


def limits(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "block_size": 4,
        "max_model_len": 60,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "max_num_active_seqs": 8,
        "max_num_queued_reqs": None,
        "max_num_queued_tokens": None,
        "long_prefill_token_threshold": 0,
        "itl_target_ms": None,
        "scheduling_policy": "fcfs",
        "aging_s": None,
        "ttft_policy": "drop",
        "enable_prefix_caching": True,
    }
    if "max_num_seqs" in changes:
        values["max_num_active_seqs"] = changes["max_num_seqs"]
    return SchedulerConfig(**(values | changes))


def drafting(num_speculative_tokens: int) -> SpeculativeConfig:
    return SpeculativeConfig(method="ngram", num_speculative_tokens=num_speculative_tokens)


class Host:
    """A scheduler, a fake model and `depth` plans in flight; a step takes `step_s`."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        *,
        depth: int = 1,
        step_s: float = 0.0,
        **fake: Any,
    ) -> None:
        self.now_s = 0.0
        self.step_s = step_s
        self.scheduler = Scheduler(config, num_blocks, clock=lambda: self.now_s)
        self.config = config
        self.num_blocks = num_blocks
        self.depth = depth
        self.fake = fake
        self.number = 0
        self.ended: list[Request] = []
        self.results: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.new_model()

    def new_model(self) -> None:
        self.model = FakeModel(
            num_blocks=self.num_blocks,
            block_size=self.config.block_size,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=self.config.max_num_seqs,
            vocab_size=VOCAB,
            **self.fake,
        )

    def add(self, prompt: list[int], max_tokens: int = 5, **urgency: Any) -> Request:
        max_len = min(len(prompt) + max_tokens, self.config.max_model_len)
        request = Request(
            id=f"r{self.number}",
            group_id="g",
            number=self.number,
            prompt=None,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens),
            inputs=SampleInputs(seed=0, max_len=max_len),
            max_len=max_len,
            stop_ids=frozenset(),
            **urgency,
        )
        self.number += 1
        self.scheduler.add(request)
        return request

    def finish(self, request: Request, reason: str, stop_reason: str | None = None) -> None:
        self.scheduler.finish(request, reason, stop_reason)
        self.ended.append(request)

    def expire(self) -> None:
        for request, deadline in self.scheduler.overdue():
            self.finish(request, "abort", deadline)

    def fill(self) -> None:
        while len(self.scheduler.in_flight) < self.depth:
            plan = self.scheduler.plan()
            if plan is None:
                break
            self.plans.append(plan)
            result = self.model.step(plan)
            self.results.append(msgspec.structs.replace(result, seconds=self.step_s))
        assert self.results or not self.num_unfinished, "unfinished requests, and nothing to do"

    @property
    def num_unfinished(self) -> int:
        return self.scheduler.num_running + self.scheduler.num_waiting

    def turn(self) -> bool:
        """Plan, apply one result; False when there was nothing to do."""
        self.fill()
        if not self.results:
            return False
        self.now_s += self.step_s
        self.expire()
        for update in self.scheduler.complete(self.results.popleft()):
            if update.error is not None:
                self.finish(update.request, "error")
            elif len(update.request.tokens) >= update.request.max_len:
                self.finish(update.request, "length")
        return True

    def drain(self) -> None:
        while self.turn():
            pass

    def restart(self) -> None:
        self.results.clear()
        for request in self.scheduler.blame():
            self.finish(request, "error")
        self.new_model()
        self.scheduler.restart(self.num_blocks)

    def check_idle(self) -> None:
        blocks = self.scheduler.blocks
        blocks.check_integrity()
        assert blocks.num_free == self.num_blocks - 1
        assert self.num_unfinished == 0


def output_of(request: Request) -> list[int]:
    return request.tokens[request.prompt_len :].tolist()


def check_output(request: Request) -> None:
    prompt = request.tokens[: request.prompt_len].tolist()
    output = output_of(request)
    assert output == expected_output(prompt, len(output), VOCAB)
