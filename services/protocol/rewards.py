"""The types of the reward-server's requests and replies."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from services.protocol.base import Count, WireModel
from services.protocol.groups import Completion, FinishReason, RewardResult
from services.protocol.prompts import Prompt


class RewardItem(WireModel):
    """An answer to score; trainers give the last two fields, so that rewards for length count tokens."""

    prompt: str
    response: str
    ground_truth: str
    completion_tokens: Count | None = None
    finish_reason: FinishReason | None = None

    @classmethod
    def of(cls, prompt: Prompt, completion: Completion) -> Self:
        """Return the item that asks for the reward of a completion of a prompt."""
        return cls(
            prompt=prompt.prompt,
            response=completion.completion,
            ground_truth=prompt.ground_truth,
            completion_tokens=completion.completion_tokens,
            finish_reason=completion.finish_reason,
        )


class BatchRewardRequest(WireModel):
    """Body of POST /batch_reward."""

    items: list[RewardItem] = Field(max_length=65_536)


class BatchRewardReply(WireModel):
    """Reply of POST /batch_reward: one result an item, in order."""

    rewards: list[RewardResult]
