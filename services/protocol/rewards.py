"""Rewards: results of scoring, and the requests and replies of the reward-server."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

from services.protocol.base import Count, Finite, WireModel
from services.protocol.prompts import Prompt


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
    Nobody asked for the score of an ``unasked`` one, because the run learns from a teacher alone.
    """

    SCORED = "scored"
    OVER_LIMIT = "over_limit"
    TIMEOUT = "timeout"
    ERROR = "error"
    OVERLOADED = "overloaded"
    UNASKED = "unasked"


class RewardResult(WireModel):
    """The verifier's result for one answer; ``reward`` is None unless ``status`` is ``scored``.

    An answer over a limit gets a reward from the trainer, which knows the rewards of its group.

    ``components`` has the value of each reward function by name: None if it does not apply to the row, or failed.
    ``failed`` has the status of those that failed, by name, so that the two differ. ``decided_by`` names the component
    that says whether the answer is right: "" if none does, None if the reward itself does. ``extracted`` is the answer
    that was read from the response. ``reason`` says why the answer could not be scored, or how it was judged.
    """

    reward: Finite | None
    status: RewardStatus = RewardStatus.SCORED
    components: dict[str, Finite | None] = Field(default_factory=dict)
    decided_by: str | None = Field(default=None, exclude_if=lambda name: name is None)
    failed: dict[str, RewardStatus] = Field(default_factory=dict, exclude_if=lambda failed: not failed)
    extracted: str | None = None
    reason: str | None = None

    @model_validator(mode="after")
    def _reward_matches_status(self) -> Self:
        is_scored = self.status is RewardStatus.SCORED
        if is_scored if self.reward is None else not (is_scored or self.status is RewardStatus.OVER_LIMIT):
            raise ValueError(f"reward {self.reward} does not fit status {self.status.value}")
        return self


UNASKED = RewardResult(reward=None, status=RewardStatus.UNASKED)
"""The result of an answer that nobody scores."""


class RewardItem(WireModel):
    """An answer to score; trainers give tokens and finish reason, so that rewards for length count tokens.

    ``row`` is the JSON text of the dataset's row that the prompt was made of; None without one. In a
    ``BatchRewardRequest`` it is the key of that text in ``rows``. The REWARD_FN of ``source`` scores it.
    """

    prompt: str
    response: str
    ground_truth: str
    completion_tokens: Count | None = None
    finish_reason: FinishReason | None = None
    row: str | None = Field(default=None, exclude_if=lambda row: row is None)
    source: str = Field(default="", exclude_if=lambda source: not source)

    @classmethod
    def of(cls, prompt: Prompt, response: str, **counts: Any) -> Self:
        """Return the item of an answer to ``prompt``; ``counts`` are its tokens and its finish reason."""
        return cls(
            prompt=prompt.prompt,
            response=response,
            ground_truth=prompt.ground_truth,
            row=prompt.row_text,
            source=prompt.source,
            **counts,
        )


ARGUMENTS = tuple(name for name in RewardItem.model_fields if name != "source")
"""The fields of an item that reward functions get by name. ``source`` is a usual name of a column."""


class BatchRewardRequest(WireModel):
    """Body of POST /batch_reward. ``rows`` has each row's JSON text once, by any key; items name their row by key.

    With ``is_group`` the items are all answers to one prompt, and get the rewards that are relative to the group, too.
    ``own_rewards``, one an item of a group, are those that an agent gave; the relative rewards are added to them.
    """

    items: list[RewardItem] = Field(max_length=65_536)
    rows: dict[str, str] = Field(default_factory=dict, exclude_if=lambda rows: not rows)
    is_group: bool = Field(default=False, exclude_if=lambda value: not value)
    own_rewards: list[Finite] | None = Field(default=None, exclude_if=lambda value: value is None)

    @classmethod
    def of(cls, items: Sequence[RewardItem], **fields: Any) -> Self:
        """Return the request for items that have the texts of their rows; ``fields`` are its others."""
        keys = {text: str(number) for number, text in enumerate(dict.fromkeys(i.row for i in items if i.row))}
        if not keys:
            return cls(items=list(items), **fields)
        named = [item.model_copy(update={"row": keys[item.row]}) if item.row else item for item in items]
        return cls(items=named, rows={key: text for text, key in keys.items()}, **fields)

    @model_validator(mode="after")
    def _rows_are_there(self) -> Self:
        if unknown := {item.row for item in self.items if item.row is not None} - self.rows.keys():
            raise ValueError(f"an item names row {min(unknown)!r}, which `rows` lacks; give its JSON text there")
        return self

    @model_validator(mode="after")
    def _is_one_group(self) -> Self:
        if self.is_group and len({(item.source, item.prompt) for item in self.items}) > 1:
            raise ValueError("a group has the answers to one prompt of one source; send one request a prompt")
        if self.own_rewards is not None and (not self.is_group or len(self.own_rewards) != len(self.items)):
            raise ValueError("own_rewards are one an item of a group; set is_group")
        return self

    @property
    def whole_items(self) -> list[RewardItem]:
        """The items with the texts of their rows."""
        if not self.rows:
            return self.items
        return [
            item if item.row is None else item.model_copy(update={"row": self.rows[item.row]}) for item in self.items
        ]


class BatchRewardReply(WireModel):
    """Reply of POST /batch_reward: one result an item, in order."""

    rewards: list[RewardResult]


class RewardStats(BaseModel):
    """The fields of the reward-server's GET /stats that clients read."""

    relative: list[str] = Field(default_factory=list)
    """The sources with a part of the reward that compares the answers of a group; "" without sources."""
    judge: dict[str, float] | None = None
    """Figures of the judge; None without one."""
