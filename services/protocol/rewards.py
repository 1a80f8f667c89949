"""What crosses the wire to and from the reward-server."""

from __future__ import annotations

from typing import Protocol, Self

from pydantic import Field

from services.protocol.base import Count, WireModel
from services.protocol.groups import FinishReason, RewardResult


class _Asked(Protocol):
    """A question, such as a ``Prompt``."""

    @property
    def prompt(self) -> str: ...

    @property
    def ground_truth(self) -> str: ...


class _Answered(Protocol):
    """A generated answer, such as a ``Completion``."""

    @property
    def completion(self) -> str: ...

    @property
    def completion_tokens(self) -> int: ...

    @property
    def finish_reason(self) -> FinishReason: ...


class RewardItem(WireModel):
    """One answer to score. The last two are known to trainers and let length-dependent rewards work in tokens."""

    prompt: str
    response: str
    ground_truth: str
    completion_tokens: Count | None = None
    finish_reason: FinishReason | None = None

    @classmethod
    def of(cls, asked: _Asked, answered: _Answered) -> Self:
        """Make the item that asks for the reward of an answer to a question."""
        return cls(
            prompt=asked.prompt,
            response=answered.completion,
            ground_truth=asked.ground_truth,
            completion_tokens=answered.completion_tokens,
            finish_reason=answered.finish_reason,
        )


class BatchRewardRequest(WireModel):
    """Body of POST /batch_reward."""

    items: list[RewardItem] = Field(max_length=65_536)


class BatchRewardReply(WireModel):
    """Reply of POST /batch_reward: one result an item, in order."""

    rewards: list[RewardResult]
