"""Workers without a model, which check what they are told.

`FakeModel` keeps what a KV slot would depend on (a digest of the row's tokens up to that position)
in place of KV, and before it answers it checks that every slot a row attends over holds exactly
that, and that a row that starts hits no slot computed with older weights. So a block that was
freed, shared or hit wrongly is found in the step in which it would have changed an output. The next
token is a function of the digest: the same whatever the schedule, and whatever the weights.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable

from minivllm.batch import (
    LoadWeights,
    Order,
    Ready,
    RowLogprobs,
    SampleInputs,
    Sleep,
    StepPlan,
    StepResult,
    WakeUp,
    decode_host_message,
    decode_worker_message,
    encode,
)
from minivllm.channel import Calls
from minivllm.config import WorkerConfig
from minivllm.errors import WeightsError, WorkerError, to_wire

MASK = (1 << 61) - 1


def extend(digest: int, token: int) -> int:
    """The digest of a sequence with one token more."""
    return (digest * 1_000_003 + token + 1) & MASK


def next_token(digest: int, vocab_size: int) -> int:
    """What the fake model generates after a sequence with that digest."""
    return (digest * 2_654_435_761 >> 20) % vocab_size


def expected_output(prompt: list[int], num_tokens: int, vocab_size: int) -> list[int]:
    """The output of a prompt, computed without any engine."""
    digest = 0
    for token in prompt:
        digest = extend(digest, token)
    output = []
    for _ in range(num_tokens):
        output.append(next_token(digest, vocab_size))
        digest = extend(digest, output[-1])
    return output


class FakeModel:
    """Runs plans; raises AssertionError for a plan that real workers would compute wrongly."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        vocab_size: int = 997,
        fails: Callable[[list[int]], bool] = lambda tokens: False,
        stands: Callable[[int], bool] = lambda digest: digest % 7 > 2,
    ) -> None:
        """`fails`: whether the row with these tokens produces numbers that are not finite;
        `stands`: whether a draft that follows this digest is the token that will be sampled."""
        self.stands = stands
        self.kv: list[int | None] = [None] * (num_blocks * block_size)
        self.kv_epochs = [0] * (num_blocks * block_size)
        self.epoch = 0
        self.asleep = False
        self.block_size = block_size
        self.max_tokens = max_num_batched_tokens
        self.max_rows = max_num_seqs
        self.vocab_size = vocab_size
        self.fails = fails
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.num_computed: dict[int, int] = {}
        self.num_scored: dict[int, int] = {}
        self.inputs: dict[int, SampleInputs] = {}
        self.next_step = 0

    def step(self, plan: StepPlan) -> StepResult:
        assert not self.asleep, "a plan for a sleeping worker"
        assert plan.step == self.next_step, "a gap in the steps"
        self.next_step += 1
        num_drafts = plan.num_drafts or [0] * len(plan.rows)
        assert 0 < sum(plan.query_lens) + sum(num_drafts) <= self.max_tokens, "over budget"
        assert 0 < len(plan.rows) <= self.max_rows, "too many rows"
        assert len(set(plan.rows)) == len(plan.rows), "a row twice in a step"
        assert min(plan.query_lens) > 0, "a row without tokens"
        for new in plan.new_rows:
            self.tokens[new.row] = list(array("i", new.token_ids))
            self.tables[new.row] = []
            self.num_computed[new.row] = new.num_computed
            self.num_scored[new.row] = new.num_scored
            self.inputs[new.row] = new.inputs
        for row, blocks in plan.new_blocks:
            self.tables[row] += blocks
        for new in plan.new_rows:
            for position in range(new.num_computed):
                assert self.kv_epochs[self._slot(new.row, position)] == self.epoch, "a stale hit"
        lens = zip(plan.rows, plan.query_lens, strict=True)
        ends = {row: self.num_computed[row] + query_len for row, query_len in lens}
        for row, end in ends.items():
            self._store(row, end)
        tokens: list[list[int]] = []
        logprobs: list[list[RowLogprobs]] = []
        num_verified: list[int] = []
        prompt_logprobs: list[tuple[int, list[RowLogprobs]]] = []
        failed: dict[int, str] = {}
        for idx, (row, samples) in enumerate(zip(plan.rows, plan.samples, strict=True)):
            digest = self._attend(row, ends[row])
            self.num_computed[row] = ends[row]
            assert samples == (ends[row] == len(self.tokens[row])), "samples at the wrong place"
            if self.fails(self.tokens[row][: ends[row]]):
                failed[idx] = "not finite"
            prompt_logprobs += [(idx, scored)] if (scored := self._score(row, ends[row])) else []
            if samples:
                num_verified.append(self._verify(row, digest, num_drafts[idx]))
                tokens.append(self.tokens[row][ends[row] :])
                logprobs.append([x for t in tokens[-1] if (x := self._logprobs(t, row))])
        if not any(logprobs):
            logprobs = []
        return StepResult(
            plan.generation,
            plan.step,
            tokens,
            logprobs,
            prompt_logprobs,
            failed,
            0.0,
            num_verified if any(num_verified) else [],
        )

    def _verify(self, row: int, digest: int, num_drafts: int) -> int:
        """Sample; draft as often as allowed, some of it wrong, and keep what stands. KV of drafts
        that do not stand stays in the row's slots. Returns how many drafts there were."""
        tokens = self.tokens[row]
        num_drafts = max(0, min(num_drafts, self.inputs[row].max_len - len(tokens) - 1))
        tokens.append(next_token(digest, self.vocab_size))
        is_right = True
        for position in range(len(tokens) - 1, len(tokens) - 1 + num_drafts):
            draft = tokens[-1] if is_right and self.stands(digest) else -1
            is_right = is_right and draft >= 0
            digest = extend(digest, draft)
            self.kv[self._slot(row, position)] = digest
            self.kv_epochs[self._slot(row, position)] = self.epoch
            if is_right:
                self.num_computed[row] += 1
                tokens.append(next_token(digest, self.vocab_size))
        return num_drafts

    def _logprobs(self, token: int, row: int) -> RowLogprobs | None:
        count, listed = self.inputs[row].num_logprobs, self.inputs[row].logprob_token_ids
        if count < 0:
            return None
        return self._made_up(token, listed or range(token, token + count))

    def _made_up(self, token: int, others: Iterable[int]) -> RowLogprobs:
        ids = [token, *(other % self.vocab_size for other in others)]
        return RowLogprobs(ids, [-0.5 - (id - token) % self.vocab_size for id in ids], 1)

    def _score(self, row: int, end: int) -> list[RowLogprobs]:
        """The prompt tokens that the ones before `end` predict, from the first not yet scored."""
        inputs = self.inputs[row]
        if inputs.num_prompt_logprobs < 0:
            return []
        start, stop = self.num_scored[row], min(end + 1, inputs.prompt_len)
        self.num_scored[row] = max(start, stop)
        count = inputs.num_prompt_logprobs
        return [
            self._made_up(token, range(token, token + count))
            for token in self.tokens[row][start:stop]
        ]

    def carry_out(self, order: Order) -> None:
        if isinstance(order, LoadWeights):
            if order.path == "/missing":
                raise WeightsError("/missing lacks everything")
            self.epoch += 1
        elif isinstance(order, Sleep | WakeUp):
            self.asleep = isinstance(order, Sleep)
            self.kv = [None] * len(self.kv)

    def _slot(self, row: int, position: int) -> int:
        block = self.tables[row][position // self.block_size]
        assert block != 0, "the null block in a row's table"
        return block * self.block_size + position % self.block_size

    def _store(self, row: int, end: int) -> None:
        digest = 0
        for position, token in enumerate(self.tokens[row][:end]):
            digest = extend(digest, token)
            if position >= self.num_computed[row]:
                self.kv[self._slot(row, position)] = digest
                self.kv_epochs[self._slot(row, position)] = self.epoch

    def _attend(self, row: int, end: int) -> int:
        digest = 0
        for position, token in enumerate(self.tokens[row][:end]):
            digest = extend(digest, token)
            held = self.kv[self._slot(row, position)]
            assert held == digest, f"row {row} attends over foreign KV at position {position}"
        return digest


class FakeExecutor:
    """An executor over `FakeModel`: answers in order, a turn of the loop later."""

    def __init__(
        self, *, num_blocks: int = 1000, vocab_size: int = 49152, delay_s: float = 0.0
    ) -> None:
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.delay_s = delay_s
        self.kills: Callable[[StepPlan, FakeModel], bool] = lambda plan, model: False
        self.fails: Callable[[list[int]], bool] = lambda tokens: False
        self.generations: list[int] = []
        self.plans: list[StepPlan] = []
        self.orders: list[Order] = []
        self.max_in_flight = 0
        self._queue: asyncio.Queue[StepPlan | Order] = asyncio.Queue()
        self._calls = Calls()
        self._task: asyncio.Task[None] | None = None

    async def start(self, generation: int, config: WorkerConfig, deliver: Callable) -> Ready:
        await self.stop()
        self.generations.append(generation)
        self.model = FakeModel(
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            vocab_size=self.vocab_size,
            fails=self.fails,
        )
        self._queue = asyncio.Queue()
        self._task = asyncio.create_task(self._run(self._queue, deliver))
        return Ready(generation, self.num_blocks, self.vocab_size, {}, {})

    def send(self, plan: StepPlan) -> None:
        plan = decode_host_message(encode(plan))
        self.plans.append(plan)
        self._queue.put_nowait(plan)
        self.max_in_flight = max(self.max_in_flight, self._queue.qsize())

    async def call(self, order: Order) -> None:
        if self._task is None or self._task.done():
            raise WorkerError("there is no worker now")
        self.orders.append(order)
        done = self._calls.add()
        self._queue.put_nowait(order)
        await done

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
            self._calls.abandon()

    async def _run(self, queue: asyncio.Queue[StepPlan | Order], deliver: Callable) -> None:
        while True:
            plan = await queue.get()
            await asyncio.sleep(self.delay_s)
            if not isinstance(plan, StepPlan):
                try:
                    self.model.carry_out(plan)
                    self._calls.answer(None)
                except WeightsError as error:
                    self._calls.answer(to_wire(error))
                continue
            if self.kills(plan, self.model):
                self._calls.abandon()
                deliver(WorkerError("killed by the test"))
                return
            try:
                result = self.model.step(plan)
            except AssertionError as error:
                deliver(WorkerError(f"bad plan: {error}"))
                raise
            deliver(decode_worker_message(encode(result)))
