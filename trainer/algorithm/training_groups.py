"""From scored groups to what the loss sees: rewards with their penalties, masks, advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby

import torch

from services.core.errors import ConfigurationError
from services.core.imports import load_function
from services.protocol.groups import Experience, Group, by_episode
from services.protocol.rewards import FinishReason
from trainer.algorithm.advantages import ADVANTAGE_FUNCTIONS, AdvantageFunction, Outcomes, dr_grpo, overlong_penalty
from trainer.algorithm.methods import GROUP_ADVANTAGES, NORMALISED_ADVANTAGES, Credit, is_own_function
from trainer.algorithm.packing import TrainingGroup, TrainingSequence, Turn
from trainer.config import TrainerSettings

TokenNumbers = list[list[float]]
"""Numbers of a group's trained tokens, by completion."""


def training_group(
    group: Group, settings: TrainerSettings, *, weight: float = 1.0, is_replayed: bool = False
) -> TrainingGroup:
    """Return a group's scored completions as the loss sees them, before their advantages are known.

    Completions without a reward are left out. The overlong penalty is part of the reward. With MASK_TRUNCATED no token
    of a completion that was cut off is trained on, while its reward still counts in its group.

    Args:
        group: the group as generated, or as stored in the replay buffer.
        settings: OVERLONG_BUFFER, MAX_NEW_TOKENS and MASK_TRUNCATED.
        weight: importance weight of the group.
        is_replayed: the group comes from the replay buffer.
    """
    sequences = [
        TrainingSequence(
            completion_ids=e.completion_ids,
            behaviour_logprobs=e.logprobs,
            advantages=[0.0] * len(e.completion_ids) if e.advantages is None else e.advantages,
            loss_mask=_loss_mask(e, settings),
            reward=_reward(e, settings),
            has_own_advantages=e.advantages is not None,
            episode=e.episode,
            turns=None if e.turns is None else [Turn(**dict(turn)) for turn in e.turns],
            seat=e.seat,
        )
        for e in scored(group)
    ]
    return TrainingGroup(group.prompt_ids, sequences, group.group_id, weight, is_replayed)


def scored(group: Group) -> list[Experience]:
    """Return the experiences of a group that are trained on."""
    return [e for e in group.experiences if e.reward is not None and e.finish_reason is not FinishReason.ABORT]


def _reward(experience: Experience, settings: TrainerSettings) -> float:
    assert experience.reward is not None
    if not settings.overlong_buffer:
        return experience.reward
    length = torch.tensor([len(experience.completion_ids)])
    return experience.reward + overlong_penalty(length, settings.max_new_tokens, settings.overlong_buffer).item()


def _loss_mask(experience: Experience, settings: TrainerSettings) -> list[bool] | None:
    if settings.mask_truncated and experience.finish_reason is FinishReason.LENGTH:
        return [False] * len(experience.completion_ids)
    return experience.loss_mask


def has_signal(group: Group, settings: TrainerSettings) -> bool:
    """Return whether two episodes or turns that are compared differ in reward, or one has advantages of its own.

    Where advantages are not by group, every group with a trained token teaches.
    """
    prepared = training_group(group, settings)
    if settings.advantage not in GROUP_ADVANTAGES:
        return any(s.trained_tokens for s in prepared.sequences)
    if any(any(s.advantages) for s in prepared.sequences if s.has_own_advantages):
        return True
    rewards: dict[tuple[int, ...], set[float]] = {}
    for action in actions([prepared], settings.credit):
        rewards.setdefault(action.compared, set()).add(action.reward)
    return any(len(different) > 1 for different in rewards.values())


@dataclass(frozen=True)
class Action:
    """Tokens that get one advantage: an episode with all its sequences, or a turn with all its samples.

    Actions are compared with those that have an equal ``compared``: group, seat of a game (-1 where there is none), and
    number of the turn (0 for episodes). The reward is that which follows the action.
    """

    episode: int
    """The number of the episode in the step."""
    compared: tuple[int, ...]
    reward: float
    spans: list[tuple[TrainingSequence, int, int]]
    """Sequences with the first token and the end of the action's tokens."""

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that are trained on."""
        return sum(sum(flags(sequence)[start:end]) for sequence, start, end in self.spans)


def actions(groups: Sequence[TrainingGroup], credit: Credit) -> list[Action]:
    """Return the episodes of a step, or with ``Credit.TURN`` the turns of those that have rewards of turns.

    The reward of a turn is the sum of its own and all later rewards of the episode. Samples of one turn, which have
    equal rewards, are one action. The actions of an episode follow each other in the order of their numbers.
    """
    found = []
    episodes = [(number, sequences) for number, group in enumerate(groups) for sequences in by_episode(group.sequences)]
    for episode, (number, sequences) in enumerate(episodes):
        seat = -1 if sequences[0].seat is None else sequences[0].seat
        if credit is Credit.EPISODE or not all(s.turns for s in sequences):
            spans = [(s, 0, len(s.completion_ids)) for s in sequences]
            found.append(Action(episode, (number, seat, 0), sequences[0].reward, spans))
            continue
        turns: dict[int, Action] = {}
        for s in sequences:
            rewards = [*accumulate(turn.reward for turn in reversed(s.rewarded_turns))][::-1]
            for turn, reward in zip(s.rewarded_turns, rewards, strict=True):
                action = turns.setdefault(turn.number, Action(episode, (number, seat, turn.number), reward, []))
                action.spans.append((s, turn.start, turn.end))
        found += [action for _, action in sorted(turns.items())]
    return found


def with_advantages(
    groups: Sequence[TrainingGroup], settings: TrainerSettings, reference: Sequence[TokenNumbers] | None = None
) -> list[TrainingGroup]:
    """Return the groups of a step with their advantages, by the formula that ADVANTAGE names.

    The formula sees each episode once, with the length of all its sequences together; its advantage is that of each of
    their tokens. A completion is an episode of one sequence. The episodes of each seat of a game are a group to the
    formula: the rewards of two seats have different means, since one of them begins. With CREDIT=turn the formula sees
    each turn in the place of an episode, and the turns of one number in the place of a group; docs/algorithm.md has the
    derivation.

    Args:
        groups: all groups of the step, because some formulas take statistics over the batch.
        settings: ADVANTAGE, ADVANTAGE_EPS, CREDIT and KL_COEF.
        reference: log-probabilities of the reference for each group, for KL in the reward. An episode's reward is
            then less by KL_COEF times the sum over its trained tokens of log(pi_behaviour / pi_reference): k1, whose
            gradient by way of the reward is that of KL(theta || reference) (arXiv:2501.03262, eq. 3). A turn's reward
            has the terms of its own tokens and of the episode's later turns. From advantages that divide by a deviation
            of rewards, the KL less the mean of the group is subtracted afterwards.

    Raises:
        ConfigurationError: ADVANTAGE names a function that cannot be had, or that returns something else.
    """
    found = actions(groups, settings.credit)
    if not found:
        return list(groups)
    numbers = {compared: number for number, compared in enumerate(dict.fromkeys(a.compared for a in found))}
    outcomes = Outcomes(
        rewards=torch.tensor([action.reward for action in found], dtype=torch.float64),
        group_ids=torch.tensor([numbers[action.compared] for action in found]),
        lengths=torch.tensor([action.trained_tokens for action in found]),
        eps=settings.advantage_eps,
    )
    penalties = None if reference is None else settings.kl_coef * _kl_to_go(found, kl_terms(groups, reference))
    computed = _less_penalties(settings, outcomes, penalties)
    advantages = {id(s): [0.0] * len(s.completion_ids) for group in groups for s in group.sequences}
    for action, advantage in zip(found, computed.tolist(), strict=True):
        for s, start, end in action.spans:
            advantages[id(s)][start:end] = [advantage] * (end - start)
    return [
        replace(
            g, sequences=[s if s.has_own_advantages else replace(s, advantages=advantages[id(s)]) for s in g.sequences]
        )
        for g in groups
    ]


def _less_penalties(settings: TrainerSettings, outcomes: Outcomes, penalties: torch.Tensor | None) -> torch.Tensor:
    """Return the advantages by ADVANTAGE, with penalties [S] taken from the rewards, or else from the advantages."""
    function = advantage_function(settings)
    if penalties is None:
        return function(outcomes)
    if settings.advantage in NORMALISED_ADVANTAGES:
        return function(outcomes) - dr_grpo(replace(outcomes, rewards=penalties))
    return function(replace(outcomes, rewards=outcomes.rewards - penalties))


def _kl_to_go(found: Sequence[Action], terms: Mapping[int, Sequence[float]]) -> torch.Tensor:
    """Return the sum of the KL terms of each action's tokens and of those of its episode's later actions, float64."""
    to_go: list[float] = []
    for _, of_episode in groupby(found, lambda action: action.episode):
        own = [sum(sum(terms[id(s)][start:end]) for s, start, end in action.spans) for action in of_episode]
        to_go += [*accumulate(reversed(own))][::-1]
    return torch.tensor(to_go, dtype=torch.float64)


def flags(sequence: TrainingSequence) -> list[bool]:
    """Return which of a sequence's L tokens are trained on."""
    return [True] * len(sequence.completion_ids) if sequence.loss_mask is None else sequence.loss_mask


def spread(sequence: TrainingSequence, numbers: Sequence[float]) -> list[float]:
    """Return the numbers of a sequence's trained tokens at their places among its L tokens, with 0 between them."""
    own = iter(numbers)
    return [next(own) if is_trained else 0.0 for is_trained in flags(sequence)]


def kl_terms(groups: Sequence[TrainingGroup], reference: Sequence[TokenNumbers]) -> dict[int, list[float]]:
    """Return log(pi_behaviour / pi_reference) of each sequence's L tokens, 0 outside the loss mask, by its ``id``."""
    terms = {}
    for sequence, own in zip((s for group in groups for s in group.sequences), chain(*reference), strict=True):
        pairs = zip(sequence.trained(sequence.behaviour_logprobs), own, strict=True)
        terms[id(sequence)] = spread(sequence, [behaviour - logprob for behaviour, logprob in pairs])
    return terms


def advantage_function(settings: TrainerSettings) -> AdvantageFunction:
    """Return the function that ADVANTAGE names.

    Raises:
        ConfigurationError: it is a function of the user's own that cannot be had.
    """
    if not is_own_function(settings.advantage):
        return ADVANTAGE_FUNCTIONS[settings.advantage]
    function = load_function("ADVANTAGE", settings.advantage)

    def advantages(outcomes: Outcomes) -> torch.Tensor:
        result = function(outcomes)
        if not isinstance(result, torch.Tensor) or result.shape != outcomes.rewards.shape:
            raise ConfigurationError(
                f"ADVANTAGE={settings.advantage} must return a tensor with one number for each of "
                f"{len(outcomes.rewards)} completions or episodes"
            )
        return result

    return advantages
