"""Evaluates one model: every prompt greedily and as often as asked for, scored, and kept as it comes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from evaluation.samples import Kind, Sample, SampleStore
from evaluation.servers import ServerPool, refusal
from evaluation.workflows import AgentFailedError, Score, ScoringLostError, Workflow
from services.clients.reward import RewardClient
from services.core.errors import ConfigurationError, DependencyLostError
from services.http.client import RequestRefusedError
from services.protocol import Prompt, RewardItem, RewardResult, RewardStatus

WINDOW = 4096
"""Pieces of work begun at once; how many are at the servers is the pool's business."""
PASSING = frozenset({RewardStatus.OVERLOADED, RewardStatus.ERROR})
"""What may be scored at another time."""
SCORE_TRIES = 3
SCORE_PAUSE_SECONDS = 1.0
HOPELESS = 20
"""So many failures, and nothing else, are a sign that nothing will succeed."""


@dataclass(frozen=True)
class Work:
    """Samples that are missing of a prompt."""

    prompt: Prompt
    kind: Kind
    indices: tuple[int, ...]


@dataclass
class Progress:
    """Where an evaluation stands."""

    total: int = 0
    done: int = 0
    """Samples, those of an earlier life included."""
    fresh: int = 0
    tokens: int = 0
    """Completion tokens of the fresh ones."""
    greedy: int = 0
    correct: int = 0
    """Of the greedy ones."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Samples that could not be had, by reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """What was said of the first, by reason."""
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started


class Scorer:
    """The reward-server, with patience: it is asked again while it is away or overloaded."""

    def __init__(self, client: RewardClient, lost_seconds: float) -> None:
        self._client = client
        self._lost_seconds = lost_seconds

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """One result an item; those that stay without a reward say why.

        Raises:
            ScoringLostError: the reward-server does not answer for long.
        """
        results = await self._ask(items)
        for _ in range(SCORE_TRIES - 1):
            again = [i for i, result in enumerate(results) if result.status in PASSING]
            if not again:
                break
            await asyncio.sleep(SCORE_PAUSE_SECONDS)
            for i, result in zip(again, await self._ask([items[i] for i in again]), strict=True):
                results[i] = result
        return results

    async def _ask(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        end = time.monotonic() + self._lost_seconds
        while True:
            try:
                return await self._client.score(items)
            except DependencyLostError as error:
                if time.monotonic() > end:
                    raise ScoringLostError(str(error)) from error
                await asyncio.sleep(SCORE_PAUSE_SECONDS)


class Evaluation:
    """What is left of one model's evaluation, and its doing."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        workflow: Workflow,
        pool: ServerPool,
        score: Score,
        store: SampleStore,
    ) -> None:
        self.progress = Progress(total=len(prompts) * (1 + samples))
        self._prompts = prompts
        self._samples = samples
        self._workflow = workflow
        self._pool = pool
        self._score = score
        self._store = store

    async def run(self, watch: Callable[[Progress], None] = lambda _: None) -> None:
        """Makes what is missing; ``watch`` is told of every step.

        Raises:
            DependencyLostError: no server answers for long. What is done is kept.
            ScoringLostError: the reward-server does not.
            ConfigurationError: every single prompt or episode fails.
        """
        wanted = {key for prompt in self._prompts for key in self._keys(prompt)}
        there = [sample for key, sample in self._store.samples.items() if key in wanted]
        self._count(there)
        watch(self.progress)
        await self._score_again([sample for sample in there if sample.is_correct is None])
        window = asyncio.Semaphore(WINDOW)

        async def do(work: Work) -> None:
            try:
                await self._do(work)
                watch(self.progress)
            finally:
                window.release()

        try:
            async with asyncio.TaskGroup() as group:
                for work in self._missing():
                    await window.acquire()
                    group.create_task(do(work))
        except BaseExceptionGroup as errors:
            # All fail of the same: the first tells.
            raise errors.exceptions[0] from None

    def _keys(self, prompt: Prompt) -> list[tuple[str, Kind, int]]:
        return [(prompt.id, Kind.GREEDY, 0), *((prompt.id, Kind.SAMPLED, i) for i in range(self._samples))]

    def _missing(self) -> Iterator[Work]:
        for prompt in self._prompts:
            for kind in Kind:
                indices = [key[2] for key in self._keys(prompt) if key[1] is kind and key not in self._store.samples]
                if not indices:
                    continue
                pieces = [(i,) for i in indices] if self._workflow.one_by_one else [tuple(indices)]
                for piece in pieces:
                    yield Work(prompt, kind, piece)

    async def _do(self, work: Work) -> None:
        try:
            samples = await self._pool.run(
                lambda server: self._workflow.sample(server, work.prompt, work.kind, work.indices)
            )
        except RequestRefusedError as error:
            self._leave_out(work, "refused", refusal(error))
            return
        except AgentFailedError as error:
            self._leave_out(work, "agent failed", str(error))
            return
        except DependencyLostError as error:
            if not self._pool.alive:
                raise
            self._leave_out(work, "lost", str(error))
            return
        if missing := len(work.indices) - len(samples):
            self._leave_out(work, "missing", "the server gave fewer completions than asked for", missing)
        scored = await self._scored(samples)
        self._store.add(scored)
        self._count(scored, fresh=True)

    async def _scored(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples, those scored that were not."""
        waiting = [sample for sample in samples if sample.result is None]
        items = [
            RewardItem(
                prompt=sample.prompt,
                response=sample.completion,
                ground_truth=sample.ground_truth,
                completion_tokens=sample.completion_tokens,
                finish_reason=sample.finish_reason,
            )
            for sample in waiting
        ]
        try:
            results = iter(await self._score(items) if items else [])
        except ScoringLostError:
            # The next life scores them.
            self._store.add(samples)
            raise
        return [s if s.result is not None else s.model_copy(update={"result": next(results)}) for s in samples]

    async def _score_again(self, samples: Sequence[Sample]) -> None:
        """Scores what an earlier life could not."""
        bare = [s.model_copy(update={"result": None}) for s in samples if s.messages is None]
        scored = await self._scored(bare)
        self._store.add(scored)
        self._count(scored, again=True)

    def _count(self, samples: Sequence[Sample], *, fresh: bool = False, again: bool = False) -> None:
        progress = self.progress
        if not again:
            progress.done += len(samples)
        if fresh:
            progress.fresh += len(samples)
            progress.tokens += sum(sample.completion_tokens for sample in samples)
        judged = [s.is_correct for s in samples if s.kind is Kind.GREEDY and s.is_correct is not None]
        progress.greedy += len(judged)
        progress.correct += sum(judged)

    def _leave_out(self, work: Work, reason: str, detail: str, count: int | None = None) -> None:
        left_out = self.progress.left_out
        left_out[reason] += len(work.indices) if count is None else count
        self.progress.examples.setdefault(reason, f"{work.prompt.id}: {detail}")
        if not self.progress.done and sum(left_out.values()) >= min(HOPELESS, self.progress.total):
            raise ConfigurationError(
                f"nothing succeeds: {sum(left_out.values())} samples {dict(left_out)}; {work.prompt.id}: {detail}"
            )
