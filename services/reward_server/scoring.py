"""Combines the parts of a reward: evaluated in this process where that is safe and fast, in workers otherwise."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from prometheus_client import Counter as Metric

from services.protocol.rewards import LARGEST_REWARD, FinishReason, RewardItem, RewardResult, RewardStatus
from services.reward_server.answers import Verdict, find_tagged, judge
from services.reward_server.pool import Evaluation, WorkerPool
from services.reward_server.settings import RewardSettings

SCORED = Metric("reward_answers", "Answers by how their scoring ended.", ["status"])

_SLICE = 128
"""Answers that are scored in one go before other requests get their turn."""
_KEPT_VERDICTS = 50_000
_SEARCHED_CHARACTERS = 4096
"""Characters at a response's end in which math-verify looks for an answer where none stands out."""
_MAX_EXTRACTED = 200
_MARKED = re.compile(r"####\s*\S|\\boxed\{")

T = TypeVar("T")
NeuralReward = Callable[[RewardItem], Awaitable[Evaluation]]


class Scorer:
    """The reward functions of the settings, with the pool and the model that some of them need."""

    def __init__(self, settings: RewardSettings, pool: WorkerPool, neural: NeuralReward | None = None) -> None:
        self._functions = settings.functions
        self._pool = pool
        self.neural = neural
        self._verdicts: OrderedDict[tuple[str, str], float] = OrderedDict()
        self.counts: Counter[str] = Counter()

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Return one result an item, in order. An item that fails or takes long does not affect the others."""
        parts = [self._evaluate(f.name, item) async for item in _in_turns(items) for f in self._functions]
        awaited = iter(await asyncio.gather(*(part for part in parts if not isinstance(part, Evaluation))))
        evaluations = [part if isinstance(part, Evaluation) else next(awaited) for part in parts]
        count = len(self._functions)
        starts = _in_turns(range(0, len(evaluations), count))
        scored = [self._combine(evaluations[start : start + count]) async for start in starts]
        for status, count in Counter(result.status.value for result in scored).items():
            SCORED.labels(status).inc(count)
            self.counts[status] += count
        return scored

    def _combine(self, parts: Sequence[Evaluation]) -> RewardResult:
        extracted = next((part.extracted for part in parts if part.extracted is not None), None)
        named = {f.name: part for f, part in zip(self._functions, parts, strict=True)}
        failed = {name: part for name, part in named.items() if part.status is not RewardStatus.SCORED}
        details: dict[str, Any] = {
            "components": {name: part.value for name, part in named.items()},
            "failed": {name: part.status for name, part in failed.items()},
            "extracted": None if extracted is None else extracted[:_MAX_EXTRACTED],
        }
        # A sum needs all of its parts.
        for name, part in failed.items():
            return RewardResult(reward=None, status=part.status, reason=f"{name}: {part.reason}", **details)
        if all(part.value is None for part in parts):
            reason = "no reward function applies to the row: each returned None; let one return a number"
            return RewardResult(reward=None, status=RewardStatus.ERROR, reason=reason, **details)
        total = 0.0
        for function, part in zip(self._functions, parts, strict=True):
            total += function.weight * (part.value or 0.0)
        if not abs(total) <= LARGEST_REWARD:
            reason = f"the weighted sum {total:g} is beyond {LARGEST_REWARD:g} in size; make the functions return less"
            return RewardResult(reward=None, status=RewardStatus.ERROR, reason=reason, **details)
        return RewardResult(reward=total, **details)

    def _evaluate(self, function: str, item: RewardItem) -> Evaluation | Awaitable[Evaluation]:
        match function:
            case "math":
                return self._math(item)
            case "exact_match":
                text = item.response.strip()
                return Evaluation(float(text == item.ground_truth.strip()), extracted=text or None)
            case "format":
                return Evaluation(float(_MARKED.search(item.response) is not None))
            case "reasoning_gym":
                answer = find_tagged(item.response, truncated=item.finish_reason is FinishReason.LENGTH)
                return Evaluation(0.0) if answer is None else self._ask(function, answer, item.ground_truth)
            case "reward_model":
                assert self.neural is not None
                return self.neural(item)
            case _:
                return self._pool.evaluate(function, item.model_dump(mode="json"))

    def _math(self, item: RewardItem) -> Evaluation | Awaitable[Evaluation]:
        truncated = item.finish_reason is FinishReason.LENGTH
        judgement = judge(item.response, item.ground_truth, truncated=truncated)
        if judgement.verdict is not Verdict.UNDECIDED:
            return Evaluation(float(judgement.verdict is Verdict.RIGHT), extracted=judgement.answer)
        text = judgement.answer if judgement.answer is not None else item.response[-_SEARCHED_CHARACTERS:].strip()
        value = self._verdicts.get((text, item.ground_truth))
        if value is not None:
            return Evaluation(value, extracted=judgement.answer)
        return self._verify(text, item.ground_truth, judgement.answer)

    async def _ask(self, function: str, answer: str, ground_truth: str) -> Evaluation:
        evaluation = await self._pool.evaluate(function, {"answer": answer, "ground_truth": ground_truth})
        return replace(evaluation, extracted=answer)

    async def _verify(self, text: str, ground_truth: str, answer: str | None) -> Evaluation:
        evaluation = await self._pool.evaluate("math", {"answer": text, "ground_truth": ground_truth})
        if evaluation.value is not None:
            # Completions of one prompt often agree. Only verdicts are kept, never a timeout.
            self._verdicts[text, ground_truth] = evaluation.value
            if len(self._verdicts) > _KEPT_VERDICTS:
                self._verdicts.popitem(last=False)
        return replace(evaluation, extracted=answer)


async def _in_turns(values: Iterable[T]) -> AsyncIterator[T]:
    """Yield ``values``; other requests get their turn after every _SLICE of them."""
    for number, value in enumerate(values, start=1):
        yield value
        if number % _SLICE == 0:
            await asyncio.sleep(0)
