"""Evaluation on held-out prompts: greedy pass@1, and avg@k and pass@k from samples."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

from services.accuracy import CORRECT, pass_at_k
from services.clients import DataClient, RewardClient
from services.protocol import Completion, Cursor, FinishReason, Prompt, RewardItem, Split
from services.rollout_client import RolloutClient, SamplingParams
from trainer.config import TrainerSettings
from trainer.experience import derive_seed
from trainer.generation import PromptGenerator

PROMPTS_A_REQUEST = 256
KEPT_SAMPLES = 8
"""Prompts of an evaluation whose greedy completions are kept for people to read."""


class Evaluator:
    """Evaluates what the rollout workers serve on the first EVAL_PROMPTS held-out prompts."""

    def __init__(
        self, settings: TrainerSettings, data: DataClient, rollouts: RolloutClient, rewards: RewardClient
    ) -> None:
        self.settings = settings
        self.data = data
        self.generator = PromptGenerator(rollouts)
        self.rewards = rewards
        self.samples: list[dict[str, Any]] = []
        """Greedy completions of the newest evaluation's first prompts, the same ones each time."""

    async def evaluate(self) -> dict[str, float]:
        """``accuracy`` (greedy pass@1), with EVAL_SAMPLES k also ``avg_at_k`` and ``pass_at_k``; and how it was
        measured.

        Prompts without a completion, and completions that cannot be scored, are left out and counted.

        Raises:
            DependencyLostError: a service was lost, or no prompt got a completion.
            ConfigurationError: the rollout workers refuse every prompt.
        """
        prompts = await self._prompts()
        greedy = SamplingParams(max_new_tokens=self.settings.max_new_tokens, temperature=0.0)
        scored = await self._scores(prompts, greedy, 1)
        metrics = {"eval_prompts": float(len(prompts)), "eval_left_out": float(sum(not s for s in scored))}
        rewards = [r for s in scored for r in s]
        if rewards:
            metrics["accuracy"] = statistics.fmean(r >= CORRECT for r in rewards)
            metrics["eval_reward"] = statistics.fmean(rewards)
        k = self.settings.eval_samples
        if k:
            sampling = SamplingParams(
                max_new_tokens=self.settings.max_new_tokens, temperature=self.settings.temperature
            )
            samples = [s for s in await self._scores(prompts, sampling, k) if s]
            metrics |= sample_metrics(samples, k)
        return metrics

    async def _prompts(self) -> list[Prompt]:
        prompts: list[Prompt] = []
        cursor = Cursor()
        while len(prompts) < self.settings.eval_prompts:
            wanted = min(self.settings.eval_prompts - len(prompts), PROMPTS_A_REQUEST)
            reply = await self.data.prompts(wanted, Split.TEST, cursor)
            fresh = [p for p in reply.prompts if p.epoch == 0]
            prompts += fresh
            cursor = reply.cursor
            if len(fresh) < wanted:
                break
        return prompts

    async def _scores(self, prompts: Sequence[Prompt], params: SamplingParams, n: int) -> list[list[float]]:
        """Rewards of ``n`` completions of each prompt, without those that cannot be scored."""
        seeds = [derive_seed(self.settings.seed, "evaluation", prompt.id) for prompt in prompts]
        completions = await asyncio.gather(
            *(self.generator.generate(prompt, params, n, seed) for prompt, seed in zip(prompts, seeds, strict=True))
        )
        if prompts and not any(completions):
            raise self.generator.all_failed()
        owners = [(i, c) for i, of_prompt in enumerate(completions) for c in of_prompt if _is_whole(c)]
        items = [
            RewardItem(
                prompt=prompts[i].prompt,
                response=c.completion,
                ground_truth=prompts[i].ground_truth,
                completion_tokens=len(c.completion_ids),
                finish_reason=c.finish_reason,
            )
            for i, c in owners
        ]
        scores: list[list[float]] = [[] for _ in prompts]
        results = await self.rewards.score(items)
        for (i, _), result in zip(owners, results, strict=True):
            if result.reward is not None:
                scores[i].append(result.reward)
        if params.temperature == 0:
            self.samples = [
                {
                    "prompt": prompts[i].prompt,
                    "ground_truth": prompts[i].ground_truth,
                    "completion": c.completion,
                    "reward": result.reward,
                    "finish_reason": c.finish_reason.value,
                }
                for (i, c), result in zip(owners, results, strict=True)
                if i < KEPT_SAMPLES
            ]
        return scores


def _is_whole(completion: Completion) -> bool:
    return completion.finish_reason is not FinishReason.ABORT


def sample_metrics(scores: Sequence[Sequence[float]], k: int) -> dict[str, float]:
    """avg@k and pass@k over prompts.

    Args:
        scores: rewards of each prompt's samples, ``k`` of them or fewer.
        k: samples asked for.
    """
    if not scores:
        return {}
    return {
        f"avg_at_{k}": statistics.fmean(statistics.fmean(r >= CORRECT for r in s) for s in scores),
        f"pass_at_{k}": statistics.fmean(
            pass_at_k(len(s), sum(r >= CORRECT for r in s), min(k, len(s))) for s in scores
        ),
    }
