"""Rewards: results of scoring, and the types of the reward-server's requests and replies."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from services.protocol.base import Count, Finite, WireModel


class FinishReason(StrEnum):
    """The reason why a completion ended: an end token, the length limit, or an abort (its tokens are partial)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


LARGEST_REWARD = 1e30
"""The largest size of a reward. Squares of larger ones may overflow; then their group gives nothing to learn from."""


class RewardStatus(StrEnum):
    """The outcome of scoring an answer: it was scored, it exceeds a limit itself, or a service or an agent failed.

    An answer ``over_limit`` is wrong, in training as in an evaluation: it took more processor time or memory of the
    verifier, or more turns, tokens or time of an episode, than is allowed. The others, ``timeout`` (a verifier's time
    by the clock, which a busy machine takes as well), ``error`` and ``overloaded``, say nothing about the answer.
    """

    SCORED = "scored"
    OVER_LIMIT = "over_limit"
    TIMEOUT = "timeout"
    ERROR = "error"
    OVERLOADED = "overloaded"

    @classmethod
    def _missing_(cls, value: object) -> RewardStatus | None:
        # The name in records of earlier versions.
        return cls.OVER_LIMIT if value == "memory" else None


class RewardResult(WireModel):
    """The verifier's result for one answer; ``reward`` is None unless ``status`` is ``scored``.

    An answer over a limit gets a reward from the trainer, which knows the rewards of its group.

    ``components`` has the value of each reward function by name. ``extracted`` is the answer that was read from the
    response. ``reason`` says why the answer could not be scored, or how it was judged.
    """

    reward: Finite | None
    status: RewardStatus = RewardStatus.SCORED
    components: dict[str, Finite | None] = Field(default_factory=dict)
    extracted: str | None = None
    reason: str | None = None

    @model_validator(mode="after")
    def _reward_matches_status(self) -> Self:
        is_scored = self.status is RewardStatus.SCORED
        if is_scored if self.reward is None else not (is_scored or self.status is RewardStatus.OVER_LIMIT):
            raise ValueError(f"reward {self.reward} does not fit status {self.status.value}")
        return self


class RewardItem(WireModel):
    """An answer to score; trainers give the last two fields, so that rewards for length count tokens."""

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
