"""Puts the parts of the reward together: in the process where that is safe and fast, in workers otherwise."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from prometheus_client import Counter as Metric

from services.protocol import FinishReason, RewardItem, RewardResult, RewardStatus
from services.reward_server.answers import Verdict, judge
from services.reward_server.functions import UnscorableError, exact_match, overlong
from services.reward_server.pool import Evaluation, WorkerPool
from services.reward_server.settings import RewardSettings, WeightedFunction

SCORED = Metric("reward_answers", "Answers by how their scoring ended.", ["status"])
DECIDED = Metric("reward_math_decided", "Answers that the math reward decided, by where.", ["where"])

# So many answers are scored in one go before other requests get their turn.
_SLICE = 128
_KEPT_VERDICTS = 50_000
_LOOKED_THROUGH = 4096
_MAX_EXTRACTED = 200

NeuralReward = Callable[[RewardItem], Awaitable[float]]


@dataclass(frozen=True)
class Part:
    """What one reward function said: a value or a reason for its absence, and the answer that it read."""

    evaluation: Evaluation
    extracted: str | None = None


class Scorer:
    """Scores answers by the functions of the settings."""

    def __init__(self, settings: RewardSettings, pool: WorkerPool, neural: NeuralReward | None = None) -> None:
        self._settings = settings
        self._functions = settings.functions
        self._pool = pool
        self._neural = neural
        self._verdicts: OrderedDict[tuple[str, str], float] = OrderedDict()
        self.counts: Counter[str] = Counter()

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """One result an item, in order. What one item takes or breaks does not reach the others."""
        results: list[RewardResult | Awaitable[RewardResult]] = []
        for number, item in enumerate(items):
            if number and number % _SLICE == 0:
                await asyncio.sleep(0)
            results.append(self._begin(item))
        waiting = [result for result in results if not isinstance(result, RewardResult)]
        ended = iter(await asyncio.gather(*waiting))
        scored = [result if isinstance(result, RewardResult) else next(ended) for result in results]
        for status, count in Counter(result.status.value for result in scored).items():
            SCORED.labels(status).inc(count)
            self.counts[status] += count
        return scored

    def _begin(self, item: RewardItem) -> RewardResult | Awaitable[RewardResult]:
        """The result, at once where no part has to be waited for."""
        parts = [self._part(function, item) for function in self._functions]
        ready = [part for part in parts if isinstance(part, Part)]
        if len(ready) == len(parts):
            return self._combine(ready)
        return self._finish(parts)

    async def _finish(self, parts: Sequence[Part | Awaitable[Part]]) -> RewardResult:
        waiting = [part for part in parts if not isinstance(part, Part)]
        ended = iter(await asyncio.gather(*waiting))
        return self._combine([part if isinstance(part, Part) else next(ended) for part in parts])

    def _combine(self, parts: Sequence[Part]) -> RewardResult:
        components = {f.name: part.evaluation.value for f, part in zip(self._functions, parts, strict=True)}
        extracted = next((part.extracted for part in parts if part.extracted is not None), None)
        if extracted is not None:
            extracted = extracted[:_MAX_EXTRACTED]
        total = 0.0
        for function, part in zip(self._functions, parts, strict=True):
            value = part.evaluation.value
            if value is None:
                # Without one part there is no sum; which one is missing, and why, is said.
                return RewardResult(
                    reward=None,
                    status=part.evaluation.status,
                    components=components,
                    extracted=extracted,
                    reason=f"{function.name}: {part.evaluation.reason}",
                )
            total += function.weight * value
        if not math.isfinite(total):
            return RewardResult(
                reward=None,
                status=RewardStatus.ERROR,
                components=components,
                extracted=extracted,
                reason="the weighted sum is too large for a number",
            )
        return RewardResult(reward=total, components=components, extracted=extracted)

    def _part(self, function: WeightedFunction, item: RewardItem) -> Part | Awaitable[Part]:
        try:
            match function.name:
                case "math":
                    return self._math(item)
                case "exact_match":
                    value = exact_match(item.response, item.ground_truth)
                    return Part(Evaluation(value), item.response.strip() or None)
                case "overlong":
                    assert self._settings.reward_overlong_max_tokens is not None
                    assert self._settings.reward_overlong_buffer_tokens is not None
                    return Part(
                        Evaluation(
                            overlong(
                                item.completion_tokens,
                                self._settings.reward_overlong_max_tokens,
                                self._settings.reward_overlong_buffer_tokens,
                            )
                        )
                    )
                case "reward_model":
                    return self._by_model(item)
                case name:
                    return self._by_worker(name, item)
        except UnscorableError as error:
            return Part(Evaluation(None, RewardStatus.ERROR, str(error)))

    def _math(self, item: RewardItem) -> Part | Awaitable[Part]:
        truncated = item.finish_reason is FinishReason.LENGTH
        judgement = judge(item.response, item.ground_truth, truncated=truncated)
        if judgement.verdict is not Verdict.UNDECIDED:
            DECIDED.labels("exact").inc()
            return Part(Evaluation(float(judgement.verdict is Verdict.RIGHT)), judgement.answer)
        # Where no answer stands out, math-verify looks for one towards the end.
        text = judgement.answer if judgement.answer is not None else item.response[-_LOOKED_THROUGH:].strip()
        known = self._verdicts.get((text, item.ground_truth))
        if known is not None:
            DECIDED.labels("known").inc()
            return Part(Evaluation(known), judgement.answer)
        return self._verify(text, item.ground_truth, judgement.answer)

    async def _verify(self, text: str, ground_truth: str, answer: str | None) -> Part:
        evaluation = await self._pool.evaluate("math", {"answer": text, "ground_truth": ground_truth})
        if evaluation.value is not None:
            DECIDED.labels("math_verify").inc()
            # Completions of one prompt often agree; only what was decided is kept, never a timeout.
            self._verdicts[text, ground_truth] = evaluation.value
            if len(self._verdicts) > _KEPT_VERDICTS:
                self._verdicts.popitem(last=False)
        return Part(evaluation, answer)

    async def _by_worker(self, name: str, item: RewardItem) -> Part:
        return Part(await self._pool.evaluate(name, item.model_dump(mode="json")))

    async def _by_model(self, item: RewardItem) -> Part:
        assert self._neural is not None
        try:
            return Part(Evaluation(await self._neural(item)))
        except UnscorableError as error:
            return Part(Evaluation(None, RewardStatus.ERROR, str(error)))
