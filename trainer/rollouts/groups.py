"""Makes experience: a prompt becomes a group of scored completions."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections import Counter as Count
from collections import defaultdict
from collections.abc import Sequence

from prometheus_client import Counter

from services.clients.reward import RewardClient
from services.clients.rollout import RolloutClient, SamplingParams
from services.protocol import Completion, Experience, FinishReason, Group, Prompt, RewardItem, RewardResult
from trainer.config import TrainerSettings
from trainer.rollouts.generation import PromptGenerator

UNSCORABLE = Counter(
    "trainer_unscorable", "Completions left out because they could not be scored, by reason.", ["status"]
)

SCORING_TRIES = 2
HISTOGRAM_BARS = 20
REWARD_DIGITS = 6


class GroupMaker:
    """Turns prompts into groups with the rollout workers and the reward-server."""

    def __init__(self, settings: TrainerSettings, rollouts: RolloutClient, rewards: RewardClient) -> None:
        self.settings = settings
        self.generator = PromptGenerator(rollouts)
        self.rewards = rewards
        self.last_generated = 0.0
        """When the newest completions came (time.perf_counter): what a step waits after it, it waits for scores."""

    async def make(self, prompt: Prompt) -> Group | None:
        """Generates and scores G completions; None (counted) when no completion could be had.

        What could not be scored stays in the group with reward None, so that the record is whole; the loss leaves it
        out.
        """
        params = SamplingParams(max_new_tokens=self.settings.max_new_tokens, temperature=self.settings.temperature)
        seed = derive_seed(self.settings.seed, prompt.epoch, prompt.position)
        completions = await self.generator.generate(prompt, params, self.settings.group_size, seed)
        self.last_generated = time.perf_counter()
        if not completions:
            return None
        results = await self._score(prompt, completions)
        return Group(
            group_id=f"{self.settings.run_id}-{prompt.epoch}-{prompt.position}",
            prompt_id=prompt.id,
            prompt=prompt.prompt,
            ground_truth=prompt.ground_truth,
            prompt_ids=prompt.prompt_ids,
            epoch=prompt.epoch,
            position=prompt.position,
            experiences=[
                Experience(**dict(completion), result=result)
                for completion, result in zip(completions, results, strict=True)
            ],
        )

    async def _score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[RewardResult]:
        items = [RewardItem.of(prompt, completion) for completion in completions]
        results = await self.rewards.score(items)
        for _ in range(SCORING_TRIES - 1):
            unscored = [i for i, result in enumerate(results) if result.reward is None]
            if not unscored:
                break
            for i, result in zip(unscored, await self.rewards.score([items[i] for i in unscored]), strict=True):
                results[i] = result
        for result in results:
            if result.reward is None:
                UNSCORABLE.labels(result.status.value).inc()
        return results


def initial_priority(group: Group) -> float:
    """Mean |r - mean r| of the group: 0 exactly when nothing can be learnt from it."""
    rewards = [r for r in group.rewards if not math.isnan(r)]
    if len(set(rewards)) < 2:
        return 0.0
    mean = statistics.fmean(rewards)
    return statistics.fmean(abs(r - mean) for r in rewards)


def group_metrics(groups: Sequence[Group], policy_version: int) -> dict[str, float]:
    """What a batch of groups says of itself; means are over completions unless named otherwise."""
    experiences = [e for g in groups for e in g.experiences]
    rewards = [e.reward for e in experiences if e.reward is not None]
    lengths = [len(e.completion_ids) for e in experiences]
    staleness = [policy_version - g.policy_version for g in groups]
    metrics = {
        "groups": float(len(groups)),
        "completions": float(len(experiences)),
        "unscorable": float(len(experiences) - len(rewards)),
        "completion_tokens": float(sum(lengths)),
        "prompt_tokens": float(sum(len(g.prompt_ids) for g in groups)),
        "length_mean": statistics.fmean(lengths),
        "length_max": float(max(lengths)),
        "truncation_rate": statistics.fmean(e.finish_reason is FinishReason.LENGTH for e in experiences),
        "zero_variance_groups": float(sum(initial_priority(g) == 0 for g in groups)),
        "staleness_mean": statistics.fmean(staleness),
        "staleness_max": float(max(staleness)),
    }
    if rewards:
        metrics["reward_mean"] = statistics.fmean(rewards)
        metrics["reward_std"] = statistics.pstdev(rewards)
    return metrics | _reward_parts(experiences)


def _reward_parts(experiences: Sequence[Experience]) -> dict[str, float]:
    """Return the mean value of each reward function before its weight; nothing where there is only one function."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for experience in experiences:
        for name, value in experience.result.components.items():
            if value is not None:
                values[name].append(value)
    return {f"reward_part_{name}": statistics.fmean(found) for name, found in values.items()} if len(values) > 1 else {}


def reward_counts(groups: Sequence[Group]) -> list[tuple[float, int]]:
    """Return how many completions have each reward, as (reward, count) in ascending order.

    Rewards are rounded to REWARD_DIGITS digits, so that sums of the same parts are the same reward. More than
    HISTOGRAM_BARS different rewards are counted in that many intervals of equal width, each under its middle.
    """
    rewards = [_rounded(e.reward) for g in groups for e in g.experiences if e.reward is not None]
    if len(set(rewards)) > HISTOGRAM_BARS:
        low, width = min(rewards), (max(rewards) - min(rewards)) / HISTOGRAM_BARS
        places = (min(int((reward - low) / width), HISTOGRAM_BARS - 1) for reward in rewards)
        rewards = [_rounded(low + (place + 0.5) * width) for place in places]
    return sorted(Count(rewards).items())


def _rounded(reward: float) -> float:
    return float(f"{reward:.{REWARD_DIGITS}g}")


def derive_seed(*parts: int | str) -> int:
    """A 31-bit seed that depends on all parts, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
