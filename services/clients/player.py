"""The player of prompts: it asks a model for answers, and the reward-server for their scores.

Training, evaluations inside a run and ``grpo evaluate`` play prompts by this module, so that the same seed, weights and
prompt give the same tokens and the same reward everywhere. Agents' episodes are in ``agent_episodes.py``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from services.clients.rollout import SamplingParams
from services.protocol.base import derive_seed
from services.protocol.groups import TokenSequence
from services.protocol.prompts import Prompt
from services.protocol.rewards import RewardItem, RewardResult

Score = Callable[[Sequence[RewardItem]], Awaitable[list[RewardResult]]]


class Engines(Protocol):
    """The servers of a model: rollout workers, or any other server of completions."""

    async def complete(self, prompt: Prompt, params: SamplingParams, n: int, seed: int) -> list[TokenSequence]:
        """Return at most ``n`` completions of a prompt, and at least one.

        Raises:
            RequestRefusedError: the engine refuses the prompt.
            DependencyLostError: no engine gave a completion in time.
        """


async def scored(score: Score, prompt: Prompt, completions: Sequence[TokenSequence]) -> list[TokenSequence]:
    """Return completions of a prompt with their results, in order."""
    items = [
        RewardItem.of(prompt, one.completion, completion_tokens=one.tokens, finish_reason=one.finish_reason)
        for one in completions
    ]
    results = await score(items)
    return [one.model_copy(update={"result": result}) for one, result in zip(completions, results, strict=True)]


def evaluation_seed(seed: int, prompt: Prompt, first: int = 0) -> int:
    """Return the seed of an evaluation's answers to a prompt from number ``first`` on: the same on every machine."""
    of_prompt = derive_seed(seed, "evaluation", prompt.id)
    return derive_seed(of_prompt, first) if first else of_prompt
