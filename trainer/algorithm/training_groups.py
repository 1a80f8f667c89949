"""Scored groups in the form that the loss reads: rewards with their penalties, masks, advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby

import numpy as np
import torch
from numpy.typing import NDArray

from services.protocol.groups import Group, TokenSequence, Turn, by_episode
from services.protocol.rewards import FinishReason, RewardResult, RewardStatus
from trainer.algorithm.advantages import AdvantageFunction, Outcomes, dr_grpo
from trainer.algorithm.methods import Credit
from trainer.algorithm.packing import TrainingGroup

Array = NDArray[np.float64]
PerToken = Sequence[Array]
"""``values[completion][trained token]`` of a group."""


def scored(group: Group, *, needs_rewards: bool = True) -> list[TokenSequence]:
    """Return the sequences of a group that are trained on."""
    kept = (s for s in group.sequences if s.reward is not None or not needs_rewards)
    return [s for s in kept if s.finish_reason is not FinishReason.ABORT]


def reward_of(scored: TokenSequence | Turn) -> float:
    """Return the reward of a scored sequence, or of a turn that has one."""
    assert scored.reward is not None
    return scored.reward


def rewarded_turns(sequence: TokenSequence) -> list[Turn]:
    """Return the turns with their rewards; without turns, the whole sequence as one turn with the episode's reward."""
    return sequence.turns or [Turn(number=0, start=0, end=sequence.tokens, reward=reward_of(sequence))]


def by_source(
    groups: Sequence[TrainingGroup],
    compute: Callable[..., Sequence[TrainingGroup]],
    *per_token: Sequence[PerToken] | None,
) -> list[TrainingGroup]:
    """Return what ``compute`` makes of the groups of each source by themselves, in the order of ``groups``.

    So no mean or deviation over a batch is one of several sources, whose rewards have scales of their own.

    Args:
        groups: all groups of the step.
        compute: gets the groups of one source, and their part of each of ``per_token``; returns as many groups.
        per_token: numbers of all groups' tokens, one list a group, or None.
    """
    results: dict[int, TrainingGroup] = {}
    for source in dict.fromkeys(group.source for group in groups):
        places = [place for place, group in enumerate(groups) if group.source == source]
        parts = [None if numbers is None else [numbers[place] for place in places] for numbers in per_token]
        results |= zip(places, compute([groups[place] for place in places], *parts), strict=True)
    return [results[place] for place in range(len(groups))]


@dataclass(frozen=True)
class CreditUnit:
    """An episode with all its sequences, or a turn with all its samples: all its tokens share one advantage.

    Units are compared with those that have an equal ``compared``: group, seat of a game (-1 where there is none), and
    number of the turn (0 for episodes). The reward is that which follows the unit.
    """

    episode: int
    """The number of the episode in the step."""
    compared: tuple[int, ...]
    reward: float
    spans: list[tuple[TokenSequence, int, int]]
    """Sequences with the first token and the end of the unit's tokens."""

    @property
    def result(self) -> RewardResult:
        """The result of the episode's scoring."""
        return self.spans[0][0].scoring

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that are trained on."""
        return sum(int(np.count_nonzero(sequence.mask[start:end])) for sequence, start, end in self.spans)


def credit_units(groups: Sequence[TrainingGroup], credit: Credit) -> list[CreditUnit]:
    """Return the episodes of a step, or with ``Credit.TURN`` the turns of those that have rewards of turns.

    The reward of a turn is the sum of its own and all later rewards of the episode. Samples of one turn, which have
    equal rewards, are one unit. The units of an episode follow each other in the order of their numbers.
    """
    units = []
    episodes = [(number, sequences) for number, group in enumerate(groups) for sequences in by_episode(group.sequences)]
    for episode, (number, sequences) in enumerate(episodes):
        seat = -1 if sequences[0].seat is None else sequences[0].seat
        if credit is Credit.EPISODE or not all(s.turns for s in sequences):
            spans = [(s, 0, s.tokens) for s in sequences]
            units.append(CreditUnit(episode, (number, seat, 0), reward_of(sequences[0]), spans))
            continue
        turns: dict[int, CreditUnit] = {}
        for s in sequences:
            rewarded = rewarded_turns(s)
            rewards = [*accumulate(reward_of(turn) for turn in reversed(rewarded))][::-1]
            for turn, reward in zip(rewarded, rewards, strict=True):
                unit = turns.setdefault(turn.number, CreditUnit(episode, (number, seat, turn.number), reward, []))
                unit.spans.append((s, turn.start, turn.end))
        units += [unit for _, unit in sorted(turns.items())]
    return units


def components_of(units: Sequence[CreditUnit], over_limit_reward: float = 0.0) -> dict[str, list[float]]:
    """Return the components of the units' rewards by name, NaN where one does not apply.

    A reward without components is one component, ``reward``. An answer over a limit is wrong: each of its components is
    ``over_limit_reward`` or, if that is lower, the lowest among the units that it is compared with.
    """
    is_over = [unit.result.status is RewardStatus.OVER_LIMIT for unit in units]
    named = [
        {} if over else unit.result.components or {"reward": unit.reward}
        for unit, over in zip(units, is_over, strict=True)
    ]
    lowest: dict[tuple[int, ...], dict[str, float]] = {}
    for unit, components in zip(units, named, strict=True):
        there = lowest.setdefault(unit.compared, {})
        for name, value in components.items():
            if value is not None:
                there[name] = min(value, there.get(name, over_limit_reward))
    rows = [lowest[unit.compared] if over else row for unit, row, over in zip(units, named, is_over, strict=True)]
    names = sorted({name for row in rows for name in row})
    return {name: [math.nan if (x := row.get(name)) is None else x for row in rows] for name in names}


def with_advantages(
    groups: Sequence[TrainingGroup],
    function: AdvantageFunction,
    credit: Credit = Credit.EPISODE,
    *,
    eps: float = 1e-4,
    over_limit_reward: float = 0.0,
    reference: Sequence[PerToken] | None = None,
    kl_coef: float = 0.0,
    is_normalised: bool = False,
) -> list[TrainingGroup]:
    """Return the groups of a step with their advantages by a formula.

    The formula sees each episode once, with the length of all its sequences together; its advantage is that of each of
    their tokens. A completion is an episode of one sequence. The episodes of each seat of a game are a group to the
    formula: the rewards of two seats have different means, since one of them begins. With CREDIT=turn the formula sees
    each turn in the place of an episode, and the turns of one number in the place of a group; docs/algorithm.md has the
    derivation.

    Args:
        groups: all groups of the step, because some formulas take statistics over the batch.
        function: the formula.
        credit: what shares an advantage, episodes or turns.
        eps: see ``Outcomes``.
        over_limit_reward: see ``components_of``.
        reference: log-probabilities of the reference for each group, for KL in the reward; see ``_kl_to_go``.
        kl_coef: the weight of KL in the reward.
        is_normalised: the formula divides by a deviation of rewards; then the KL less the mean of the group is
            subtracted from the advantages.
    """
    units = credit_units(groups, credit)
    if not units:
        return list(groups)
    outcomes = _outcomes(units, [group.is_replayed for group in groups], eps, over_limit_reward)
    if reference is None:
        computed = function(outcomes)
    else:
        computed = _less_kl(function, outcomes, kl_coef * _kl_to_go(units, kl_terms(groups, reference)), is_normalised)
    advantages = {id(s): np.zeros(s.tokens) for group in groups for s in group.sequences}
    for unit, advantage in zip(units, computed.tolist(), strict=True):
        for s, start, end in unit.spans:
            advantages[id(s)][start:end] = advantage
    return [
        replace(group, sequences=[with_arrays(s, advantages=advantages[id(s)]) for s in group.sequences])
        for group in groups
    ]


def with_arrays(sequence: TokenSequence, advantages: Array, **arrays: Array) -> TokenSequence:
    """Return a sequence with advantages, unless it brings its own, and with further arrays by name."""
    brought = sequence.advantages
    further = {"arrays": {**sequence.arrays, **arrays}} if arrays else {}
    return sequence.model_copy(update={"advantages": advantages if brought is None else brought, **further})


def _less_kl(
    function: AdvantageFunction, outcomes: Outcomes, penalties: torch.Tensor, is_normalised: bool
) -> torch.Tensor:
    """Return the advantages of rewards less their penalties; see ``with_advantages``."""
    if is_normalised:
        return function(outcomes) - dr_grpo(replace(outcomes, rewards=penalties))
    return function(replace(outcomes, rewards=outcomes.rewards - penalties))


def _outcomes(
    units: Sequence[CreditUnit], are_replayed: Sequence[bool], eps: float, over_limit_reward: float
) -> Outcomes:
    numbers = {compared: number for number, compared in enumerate(dict.fromkeys(unit.compared for unit in units))}
    return Outcomes(
        rewards=torch.tensor([unit.reward for unit in units], dtype=torch.float64),
        group_ids=torch.tensor([numbers[unit.compared] for unit in units]),
        lengths=torch.tensor([unit.trained_tokens for unit in units]),
        eps=eps,
        components={
            name: torch.tensor(values, dtype=torch.float64)
            for name, values in components_of(units, over_limit_reward).items()
        },
        seats=tuple(unit.compared[1] for unit in units),
        are_replayed=tuple(are_replayed[unit.compared[0]] for unit in units),
    )


def _kl_to_go(units: Sequence[CreditUnit], terms: Mapping[int, Array]) -> torch.Tensor:
    """Return the KL of each unit, float64: the terms of its own tokens and of its episode's later units.

    A term is log(pi_behaviour / pi_reference) of a trained token: k1, whose gradient by way of the reward is that of
    KL(theta || reference) (arXiv:2501.03262, eq. 3).
    """
    to_go: list[float] = []
    for _, of_episode in groupby(units, lambda unit: unit.episode):
        kl = [sum(sum(terms[id(s)][start:end].tolist()) for s, start, end in unit.spans) for unit in of_episode]
        to_go += [*accumulate(reversed(kl))][::-1]
    return torch.tensor(to_go, dtype=torch.float64)


def scatter(sequence: TokenSequence, numbers: Array) -> Array:
    """Return the numbers of a sequence's trained tokens at their places among its L tokens, with 0 between them."""
    values = np.zeros(sequence.tokens)
    values[sequence.mask] = numbers
    return values


def kl_terms(groups: Sequence[TrainingGroup], reference: Sequence[PerToken]) -> dict[int, Array]:
    """Return log(pi_behaviour / pi_reference) of each sequence's L tokens, 0 outside the loss mask, by its ``id``."""
    sequences = [sequence for group in groups for sequence in group.sequences]
    return {
        id(s): scatter(s, s.trained(s.logprobs) - np.asarray(logprobs))
        for s, logprobs in zip(sequences, chain(*reference), strict=True)
    }
