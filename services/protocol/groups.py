"""Completions, experiences and groups: generated, scored, stored and trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from services.protocol.base import MAX_SEQUENCES, MAX_TOKENS, Count, Finite, TokenId, WireModel
from services.protocol.episodes import EpisodeFigures, Message
from services.protocol.rewards import FinishReason, RewardResult


class VersionSpan(WireModel):
    """A range of completion tokens, ``start`` to ``end`` (exclusive), that policy ``version`` sampled."""

    version: Count
    start: Count
    end: Count


class Completion(WireModel):
    """A completion as the engine returned it.

    ``completion_ids`` and ``logprobs`` have one entry a token, the end token included. ``logprobs`` are the behaviour
    policy's log-probabilities: of the temperature-scaled distribution, before any top-p or top-k cut. ``loss_mask`` is
    False at tokens that the policy did not sample, such as a tool's results: they are read, not trained on, and their
    log-probability means nothing. Without it the policy sampled every token.
    """

    completion: str = ""
    completion_ids: list[TokenId] = Field(max_length=MAX_TOKENS)
    logprobs: list[Finite] = Field(max_length=MAX_TOKENS)
    policy_versions: list[VersionSpan]
    finish_reason: FinishReason
    loss_mask: list[bool] | None = Field(default=None, max_length=MAX_TOKENS)

    @field_validator("logprobs")
    @classmethod
    def _logprobs_are_not_positive(cls, logprobs: list[float]) -> list[float]:
        # Engines in bfloat16 return log-probabilities slightly above zero.
        if logprobs and max(logprobs) > 1e-3:
            raise ValueError(f"logprobs must be <= 0, got {max(logprobs)}")
        return logprobs

    @model_validator(mode="after")
    def _one_entry_per_token(self) -> Self:
        n = len(self.completion_ids)
        if len(self.logprobs) != n:
            raise ValueError(f"{n} completion_ids but {len(self.logprobs)} logprobs: one logprob a token is needed")
        if self.loss_mask is not None and len(self.loss_mask) != n:
            raise ValueError(f"{n} completion_ids but {len(self.loss_mask)} entries of loss_mask: give one a token")
        position = 0
        for span in self.policy_versions:
            if span.start != position or span.end < span.start:
                raise ValueError(f"policy_versions must cover the completion without gaps, broken at token {position}")
            position = span.end
        if position != n:
            raise ValueError(f"policy_versions cover {position} of {n} tokens")
        return self

    @property
    def completion_tokens(self) -> int:
        """The number of sampled tokens."""
        return len(self.completion_ids)

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that the policy sampled, which are those of the loss."""
        return len(self.completion_ids) if self.loss_mask is None else sum(self.loss_mask)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled a token of this completion."""
        spans = self.policy_versions
        if self.loss_mask is not None:
            spans = [span for span in spans if any(self.loss_mask[span.start : span.end])] or spans
        return min(span.version for span in spans)


EMPTY = Completion(completion_ids=[], logprobs=[], policy_versions=[], finish_reason=FinishReason.ABORT)
"""The beginning of every completion."""


def joined(first: Completion, then: Completion) -> Completion:
    """Return a completion in one piece, given its first tokens and those that were sampled after them."""
    if not first.completion_ids:
        return then
    spans = list(first.policy_versions)
    offset = len(first.completion_ids)
    for span in then.policy_versions:
        start = offset + span.start
        if spans and spans[-1].version == span.version:
            start = spans.pop().start
        spans.append(VersionSpan(version=span.version, start=start, end=offset + span.end))
    return Completion(
        completion=first.completion + then.completion,
        completion_ids=[*first.completion_ids, *then.completion_ids],
        logprobs=[*first.logprobs, *then.logprobs],
        policy_versions=spans,
        finish_reason=then.finish_reason,
    )


class TurnReward(WireModel):
    """A turn of an episode: completion tokens ``start`` to ``end`` (exclusive), and the reward that follows them.

    ``number`` counts the model's turns in the episode from 0 on, in the order in which they were taken; several samples
    of one turn have the same number. ``reward`` is that of the turn and of those after it that other sequences have, up
    to this sequence's next turn. So the rewards of a sequence's turns from one on sum to what the episode earned from
    that turn on.
    """

    number: Count
    start: Count
    end: Count
    reward: Finite


class Experience(Completion):
    """A scored completion, or a sequence of an agent's episode.

    ``advantages`` has one number a token, for an experience that brings its own. ``episode`` is the number within the
    group of the episode that the sequence belongs to; all sequences of an episode have the same reward. An experience
    without it is an episode of one sequence. ``messages`` is the sequence's conversation, for people to read.
    ``seat`` is the seat of a game that the sequence played; rewards are compared with those of the same seat only.
    ``turns`` are the turns that are trained on in this sequence, in order, where the agent gave a reward for each.
    """

    result: RewardResult
    episode: Count | None = None
    seat: Count | None = None
    messages: list[Message] | None = None
    advantages: list[Finite] | None = Field(default=None, max_length=MAX_TOKENS)
    turns: list[TurnReward] | None = Field(default=None, max_length=MAX_SEQUENCES)

    @model_validator(mode="after")
    def _turns_follow_each_other(self) -> Self:
        place = 0
        for turn in self.turns or ():
            if not place <= turn.start < turn.end <= len(self.completion_ids):
                raise ValueError(f"turn {turn.number}, tokens {turn.start} to {turn.end}, overlaps another or the end")
            place = turn.end
        return self

    @model_validator(mode="after")
    def _one_advantage_per_token(self) -> Self:
        n = len(self.completion_ids)
        if self.advantages is not None and len(self.advantages) != n:
            raise ValueError(f"{n} completion_ids but {len(self.advantages)} advantages: give one a token or none")
        return self

    @property
    def reward(self) -> float | None:
        """The reward, or None where the completion could not be scored."""
        return self.result.reward


class HasEpisode(Protocol):
    """A sequence of an episode."""

    @property
    def episode(self) -> int | None:
        """The episode's number; None for a sequence that is an episode of its own."""


S = TypeVar("S", bound=HasEpisode)


def by_episode(sequences: Sequence[S]) -> list[list[S]]:
    """Return the sequences of a group by episode, in the order of each episode's first sequence."""
    episodes: dict[int, list[S]] = {}
    for place, sequence in enumerate(sequences):
        # Negative numbers are no episode's.
        number = -1 - place if sequence.episode is None else sequence.episode
        episodes.setdefault(number, []).append(sequence)
    return list(episodes.values())


class Group(WireModel):
    """A prompt with its G scored completions, or with the sequences of its G episodes.

    A group of episodes has their figures by number, where a trace was received, and ``episodes_failed``: by reason, how
    many of them have no reward, and also those of prompts that got no group since the maker's last group.
    ``failure_examples`` has for each reason what one of those episodes says.
    """

    group_id: str = Field(min_length=1, max_length=200)
    prompt_id: str = ""
    prompt: str
    ground_truth: str
    prompt_ids: list[TokenId] = Field(min_length=1, max_length=MAX_TOKENS)
    experiences: list[Experience] = Field(min_length=1, max_length=MAX_SEQUENCES)
    epoch: Count = 0
    position: Count = 0
    episode_figures: dict[Count, EpisodeFigures] | None = None
    episodes_failed: dict[str, Count] | None = None
    failure_examples: dict[str, str] | None = None

    @model_validator(mode="after")
    def _one_reward_per_episode(self) -> Self:
        for sequences in self.episodes:
            if len({e.reward for e in sequences}) > 1:
                raise ValueError(f"the sequences of episode {sequences[0].episode} have different rewards")
        return self

    @property
    def episodes(self) -> list[list[Experience]]:
        """The experiences by episode; a completion is an episode of one sequence."""
        return by_episode(self.experiences)

    @property
    def policy_version(self) -> int:
        """The oldest policy version that sampled any token of the group; staleness is counted from it."""
        return min(experience.oldest_version for experience in self.experiences)

    @property
    def rewards(self) -> list[float]:
        """One reward an episode, NaN where it could not be scored."""
        return [math.nan if first.reward is None else first.reward for first, *_ in self.episodes]
