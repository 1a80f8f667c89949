"""What crosses the wire to and from the reward-server."""

from __future__ import annotations

from pydantic import Field

from services.protocol.base import Count, WireModel
from services.protocol.groups import FinishReason, RewardResult


class RewardItem(WireModel):
    """One answer to score. The last two are known to trainers and let length-dependent rewards work in tokens."""

    prompt: str
    response: str
    ground_truth: str
    completion_tokens: Count | None = None
    finish_reason: FinishReason | None = None


class BatchRewardRequest(WireModel):
    """Body of POST /batch_reward."""

    items: list[RewardItem] = Field(max_length=65_536)


class BatchRewardReply(WireModel):
    """Reply of POST /batch_reward: one result an item, in order."""

    rewards: list[RewardResult]
