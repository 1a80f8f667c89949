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
from services.reward_server.answers import behind_thoughts, find_tagged, judge
from services.reward_server.judging import Judge
from services.reward_server.pool import Evaluation, WorkerPool
from services.reward_server.rubric import find_rubric
from services.reward_server.settings import RELATIVE, RewardSettings, WeightedFunction

SCORED = Metric("reward_answers", "Answers by how their scoring ended.", ["status"])

_SLICE = 128
"""Answers that are scored in one go before other requests get their turn."""
_KEPT_VERDICTS = 50_000
_SEARCHED_CHARACTERS = 4096
"""Characters at a response's end in which math-verify looks for an answer where none stands out."""
_MAX_EXTRACTED = 200
_NOTHING_APPLIES = "no reward function applies to the row: each returned None; let one return a number"
_NO_GROUP = (
    "judge_group compares the answers of a group, and an answer alone has none: add a function that scores it alone, "
    "such as math=1"
)
_MARKED = re.compile(r"####\s*\S|\\boxed\{")

T = TypeVar("T")
Part = tuple[WeightedFunction, Evaluation]
_OWN = WeightedFunction("agent", 1.0)
"""Stands for the functions that score an answer alone, where an agent gave its episode a reward of its own."""
Functions = dict[str, Callable[[RewardItem], Awaitable[Evaluation]]]
"""Functions that score an answer alone by something that all sources share, by their names."""


class Scorer:
    """The reward functions of the settings, with the pools, the model and the judge that some of them need."""

    def __init__(
        self, settings: RewardSettings, pool: WorkerPool, judge: Judge | None = None, shared: Functions | None = None
    ) -> None:
        """Read the rubric of the judge, if a function needs one.

        Raises:
            ConfigurationError: the rubric is not one.
        """
        self._rubric = find_rubric(settings)
        self._alone = [function for function in settings.functions if function.name not in RELATIVE]
        self._relative = [function for function in settings.functions if function.name in RELATIVE]
        self._deciders = settings.deciders
        self._pool, self._judge, self._shared = pool, judge, {} if shared is None else shared
        self._verdicts: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        self.counts: Counter[str] = Counter()

    async def score(
        self, items: Sequence[RewardItem], *, is_group: bool = False, own_rewards: Sequence[float] | None = None
    ) -> list[RewardResult]:
        """Return one result an item, in order. An item that fails or takes long does not affect the others.

        Args:
            items: the answers.
            is_group: they are all answers to one prompt, which the relative functions compare.
            own_rewards: those of agents, in place of the functions that score an answer alone.
        """
        if own_rewards is None:
            alone, relative = await asyncio.gather(self._score_alone(items), self._compare(items, is_group))
        else:
            alone, relative = [[(_OWN, Evaluation(own))] for own in own_rewards], await self._compare(items, is_group)
        together = zip(alone, relative, strict=True)
        scored = [self._combine([*parts, *compared]) async for parts, compared in _in_turns(together)]
        for status, count in Counter(result.status.value for result in scored).items():
            SCORED.labels(status).inc(count)
            self.counts[status] += count
        return scored

    async def _score_alone(self, items: Sequence[RewardItem]) -> list[list[Part]]:
        """Return the values of the functions that score an answer alone, for each item."""
        parts = [self._evaluate(f.name, item) async for item in _in_turns(items) for f in self._alone]
        awaited = iter(await asyncio.gather(*(part for part in parts if not isinstance(part, Evaluation))))
        evaluations = iter([part if isinstance(part, Evaluation) else next(awaited) for part in parts])
        return [[(f, next(evaluations)) for f in self._alone] async for _ in _in_turns(items)]

    async def _compare(self, items: Sequence[RewardItem], is_group: bool) -> list[list[Part]]:
        """Return the values of the functions that compare the answers of a group, for each item."""
        if not self._relative or not items:
            return [[] for _ in items]
        [function] = self._relative
        if not is_group:
            return [[(function, Evaluation(None, reason=_NO_GROUP))] for _ in items]
        assert self._judge is not None
        return [[(function, evaluation)] for evaluation in await self._judge.compare(items, self._rubric)]

    def _combine(self, parts: Sequence[Part]) -> RewardResult:
        extracted = next((part.extracted for _, part in parts if part.extracted is not None), None)
        failed = {f.name: part for f, part in parts if part.status is not RewardStatus.SCORED}
        values = {f.name: part.value for f, part in parts}
        deciders = [_OWN.name] if _OWN.name in values else self._deciders
        details: dict[str, Any] = {
            "components": values,
            "decided_by": next((name for name in deciders if values[name] is not None), "".join(deciders[:1])),
            "failed": {name: part.status for name, part in failed.items()},
            "extracted": None if extracted is None else extracted[:_MAX_EXTRACTED],
        }
        # A sum needs all of its parts.
        for name, part in failed.items():
            return RewardResult(reward=None, status=part.status, reason=f"{name}: {part.reason}", **details)
        if all(part.value is None for _, part in parts):
            reason = next((part.reason for _, part in parts if part.reason), _NOTHING_APPLIES)
            return RewardResult(reward=None, status=RewardStatus.ERROR, reason=reason, **details)
        total = 0.0
        for function, part in parts:
            total += function.weight * (part.value or 0.0)
        if not abs(total) <= LARGEST_REWARD:
            reason = f"the weighted sum {total:g} is beyond {LARGEST_REWARD:g} in size; make the functions return less"
            return RewardResult(reward=None, status=RewardStatus.ERROR, reason=reason, **details)
        reasons = [f"{f.name}: {part.reason}" for f, part in parts if part.reason and part.value is not None]
        return RewardResult(reward=total, reason="; ".join(reasons) if reasons else None, **details)

    def _evaluate(self, function: str, item: RewardItem) -> Evaluation | Awaitable[Evaluation]:
        match function:
            case "math":
                return self._math(item)
            case "exact_match":
                text = item.response.strip()
                return Evaluation(float(text == item.ground_truth.strip()), extracted=text or None)
            case "format":
                return Evaluation(float(_MARKED.search(behind_thoughts(item.response)) is not None))
            case "reasoning_gym":
                answer = find_tagged(item.response, truncated=item.finish_reason is FinishReason.LENGTH)
                return Evaluation(0.0) if answer is None else self._ask(function, answer, item.ground_truth, answer)
            case "judge":
                assert self._judge is not None
                assert self._rubric is not None
                return self._judge.score(item, self._rubric)
            case _ if function in self._shared:
                return self._shared[function](item)
            case _:
                return self._pool.evaluate(function, item.model_dump(mode="json", exclude={"source"}))

    def _math(self, item: RewardItem) -> Evaluation | Awaitable[Evaluation]:
        truncated = item.finish_reason is FinishReason.LENGTH
        response = behind_thoughts(item.response)
        judgement = judge(response, item.ground_truth, truncated=truncated)
        if judgement.is_right is not None:
            return Evaluation(float(judgement.is_right), extracted=judgement.answer)
        text = response[-_SEARCHED_CHARACTERS:].strip() if judgement.answer is None else judgement.answer
        return self._ask("math", text, item.ground_truth, judgement.answer)

    async def _ask(self, function: str, text: str, ground_truth: str, answer: str | None) -> Evaluation:
        """Return what a worker finds of a text, in which ``answer`` stood out if it is not None."""
        # Completions of one prompt often agree. Only verdicts are kept, never a timeout.
        if (kept := self._verdicts.get((function, text, ground_truth))) is not None:
            return Evaluation(kept, extracted=answer)
        evaluation = await self._pool.evaluate(function, {"answer": text, "ground_truth": ground_truth})
        if evaluation.value is not None:
            self._verdicts[function, text, ground_truth] = evaluation.value
            if len(self._verdicts) > _KEPT_VERDICTS:
                self._verdicts.popitem(last=False)
        return replace(evaluation, extracted=answer)


async def _in_turns(values: Iterable[T]) -> AsyncIterator[T]:
    """Yield ``values``; other requests get their turn after every _SLICE of them."""
    for number, value in enumerate(values, start=1):
        yield value
        if number % _SLICE == 0:
            await asyncio.sleep(0)
