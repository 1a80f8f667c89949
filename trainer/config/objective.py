"""The objective of a run: the algorithm's functions, or the user's, with the values of the settings.

Unlike the rest of the package it needs torch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from services.core.errors import ConfigurationError
from services.core.imports import load_function
from services.core.settings import Method
from services.protocol.groups import Group
from services.protocol.rewards import FinishReason
from trainer.algorithm import gae, training_groups
from trainer.algorithm.advantages import (
    ADVANTAGE_FUNCTIONS,
    AdvantageFunction,
    Outcomes,
    UnfitRewardsError,
    gdpo,
    overlong_penalty,
    rae,
)
from trainer.algorithm.loss import CrossEntropy, PolicyLoss
from trainer.algorithm.methods import GROUP_ADVANTAGES, LOSS_OPTIONS, NORMALISED_ADVANTAGES, Credit, is_own_function
from trainer.algorithm.packing import TrainingGroup
from trainer.algorithm.policy_losses import LOSS_FUNCTIONS, LossFunction, LossTokens, TokenLosses
from trainer.algorithm.teachers import mean_absolute_gap, with_baselines
from trainer.algorithm.training_groups import PerToken, components_of, credit_units, reward_of, scored
from trainer.config.settings import TrainerSettings


class Objective:
    """The objective of a run: the form of its groups for the loss, and their advantages."""

    def __init__(
        self, settings: TrainerSettings, role_baselines: Mapping[str, Mapping[int, float]] | None = None
    ) -> None:
        """Choose the advantages.

        Args:
            settings: of the run.
            role_baselines: those of the run so far, with ADVANTAGE=rae.

        Raises:
            ConfigurationError: ADVANTAGE names a function of the user's that cannot be loaded.
        """
        self.settings = settings
        self._teachers = settings.teachers
        has_formula = not settings.has_critic and settings.advantage != "rae"
        self._advantages = advantage_function(settings) if has_formula else None
        self._longest = {source: of.max_new_tokens for source, of in settings.by_source().items()}
        """MAX_NEW_TOKENS by source."""
        self.role_baselines = {source: dict(by_seat) for source, by_seat in (role_baselines or {}).items()}
        """The baselines of ADVANTAGE=rae by source and seat, after the groups of the newest ``with_advantages``."""

    def training_group(self, group: Group, *, weight: float = 1.0, is_replayed: bool = False) -> TrainingGroup:
        """Return a group's scored completions as the loss sees them, before their advantages are known.

        Completions without a reward are left out, unless none is needed. MASK_TRUNCATED trains on no token of a
        completion that was cut off, whose reward still counts in its group. The penalty of OVERLONG_BUFFER is part of
        the reward.

        Args:
            group: the group as generated, or as stored in the replay buffer.
            weight: importance weight of the group.
            is_replayed: the group comes from the replay buffer.
        """
        settings, prompt, sequences = self.settings, group.prompt, []
        for sequence in scored(group, needs_rewards=settings.learns_from_rewards):
            changes: dict[str, Any] = {}
            if settings.mask_truncated and sequence.finish_reason is FinishReason.LENGTH:
                changes["loss_mask"] = np.zeros(sequence.tokens, bool)
            if buffer := settings.overlong_buffer:
                longest = self._longest[prompt.source]
                reward = reward_of(sequence) + overlong_penalty(torch.tensor([sequence.tokens]), longest, buffer).item()
                changes["result"] = sequence.scoring.model_copy(update={"reward": reward})
            sequences.append(sequence.model_copy(update=changes) if changes else sequence)
        place = (prompt.source, prompt.epoch, prompt.position)
        return TrainingGroup(group.prompt_ids, sequences, group.group_id, weight, is_replayed, *place)

    def has_signal(self, group: TrainingGroup) -> bool:
        """Return whether a group teaches anything: by its teacher, or by ADVANTAGE and CREDIT.

        Advantages that compare with the rest of the group teach if two episodes or turns that are compared differ in
        reward, or one has advantages of its own. With ADVANTAGE=gdpo rewards differ if a component with a weight does,
        although their sums may be equal. Other advantages teach by any trained token.
        """
        settings = self.settings
        if self._teachers[group.source] or settings.advantage not in GROUP_ADVANTAGES:
            return group.trained_tokens > 0
        if any(s.advantages is not None and s.advantages.any() for s in group.sequences):
            return True
        units, weights = credit_units([group], settings.credit), settings.component_weights
        parts = {"": [unit.reward for unit in units]}
        if settings.advantage == "gdpo":
            parts = components_of(units, settings.over_limit_reward)
            parts = {name: values for name, values in parts.items() if weights is None or weights.get(name)}
        compared: dict[tuple[str, tuple[int, ...]], set[float]] = {}
        for name, values in parts.items():
            for unit, value in zip(units, values, strict=True):
                compared.setdefault((name, unit.compared), set()).update(() if math.isnan(value) else (value,))
        return any(len(different) > 1 for different in compared.values())

    def priority(self, group: TrainingGroup) -> float:
        """Return a group's priority in the replay buffer: how strongly rewards and the teacher pull at its tokens."""
        pull = self.settings.reward_weight * group.mean_absolute_advantage
        return pull + self.settings.teacher_coef * mean_absolute_gap(group)

    def with_advantages(
        self,
        groups: Sequence[TrainingGroup],
        reference: Sequence[PerToken] | None = None,
        values: Sequence[PerToken] | None = None,
    ) -> list[TrainingGroup]:
        """Return the groups of a step with their advantages, by the formula that ADVANTAGE names, source by source.

        With a teacher they also have the baselines of their distances from it; see ``with_baselines``.

        Args:
            groups: all groups of the step.
            reference: the reference's log-probabilities of the trained tokens, for KL in the reward.
            values: the critic's values before the trained tokens, with ADVANTAGE=gae.

        Raises:
            ConfigurationError: the user's function returns something else, or the rewards do not fit the formula.

        With REWARD_WEIGHT=0 and METHOD=sft the groups have none.
        """
        computed = training_groups.by_source(groups, self._of_source, reference, values)
        return training_groups.by_source(computed, with_baselines) if any(self._teachers.values()) else computed

    def _of_source(
        self, groups: Sequence[TrainingGroup], reference: Sequence[PerToken] | None, values: Sequence[PerToken] | None
    ) -> list[TrainingGroup]:
        settings = self.settings
        if not settings.learns_from_rewards:
            return list(groups)
        if settings.has_critic:
            assert values is not None, "ADVANTAGE=gae needs the critic's values"
            return gae.with_critic_targets(
                groups,
                values,
                gamma=settings.gamma,
                lam=settings.gae_lambda,
                is_per_turn=settings.credit is Credit.TURN,
                reference=reference,
                kl_coef=settings.kl_coef,
            )
        # A baseline that moves with each completion needs an order that does not depend on when groups arrived.
        places = [(group.is_replayed, group.epoch, group.position) for group in groups]
        order = sorted(range(len(groups)), key=places.__getitem__)
        if settings.advantage != "rae" or order == [*range(len(groups))]:
            return self._by_formula(groups, reference)
        sorted_reference = None if reference is None else [reference[n] for n in order]
        computed = dict(zip(order, self._by_formula([groups[n] for n in order], sorted_reference), strict=True))
        return [computed[n] for n in range(len(groups))]

    def _by_formula(self, groups: Sequence[TrainingGroup], reference: Sequence[PerToken] | None) -> list[TrainingGroup]:
        """Return the groups of one source with the advantages of a formula without a critic."""
        settings = self.settings
        try:
            return training_groups.with_advantages(
                groups,
                self._formula(groups[0].source),
                settings.credit,
                eps=settings.advantage_eps,
                over_limit_reward=settings.over_limit_reward,
                reference=reference,
                kl_coef=settings.kl_coef,
                is_normalised=settings.advantage in NORMALISED_ADVANTAGES,
            )
        except UnfitRewardsError as error:
            raise ConfigurationError(
                f"ADVANTAGE={settings.advantage} cannot be computed: {error}; change the rewards (REWARD_FN), or "
                "choose another ADVANTAGE"
            ) from error

    def _formula(self, source: str) -> AdvantageFunction:
        """Return the formula of a source's advantages, with the settings and the state that it has."""
        if self._advantages is None:
            return partial(self._by_role, source)
        weights = self.settings.component_weights
        return self._advantages if weights is None else partial(self._by_component, weights)

    def _by_role(self, source: str, outcomes: Outcomes) -> torch.Tensor:
        advantages, self.role_baselines[source] = rae(outcomes, self.role_baselines.get(source, {}))
        return advantages

    def _by_component(self, weights: Mapping[str, float], outcomes: Outcomes) -> torch.Tensor:
        if len(self.settings.by_source()) > 1:  # each of which may have other reward functions
            weights = {name: weight for name, weight in weights.items() if name in outcomes.components}
        return gdpo(outcomes, weights)

    @property
    def metrics(self) -> dict[str, float]:
        """The baselines of ADVANTAGE=rae by metric name."""
        named = {}
        for source, by_seat in self.role_baselines.items():
            for seat, baseline in by_seat.items():
                role = [part for part in (source, f"seat_{seat}" if seat >= 0 else "") if part]
                named[f"role_baseline_{'_'.join(role) or 'all'}"] = baseline
        return named


def step_loss(settings: TrainerSettings) -> PolicyLoss | CrossEntropy:
    """Return the loss of a step's micro-batches.

    Raises:
        ConfigurationError: LOSS names a function that cannot be loaded, or that lacks an option that is set.
    """
    if settings.method is Method.SFT:
        return CrossEntropy()
    return PolicyLoss(
        _loss_function(settings),
        settings.importance_correction,
        settings.loss_aggregation,
        settings.longest_answer,
        importance_cap=settings.loss_importance_cap,
        truncates_alone=settings.loss_method.truncates and settings.updates_per_step == 1,
        may_clip_at_once=settings.loss_method.bounds_behaviour or is_own_function(settings.loss),
        off_policy_max_kl=settings.off_policy_max_kl,
        entropy_coef=settings.entropy_coef,
        kl_coef=settings.kl_coef,
        value_coef=settings.value_coef,
        value_clip=settings.value_clip,
        reward_weight=settings.reward_weight,
        teacher_coef=settings.teacher_coef if any(settings.teachers.values()) else 0.0,
    )


def _loss_function(settings: TrainerSettings) -> LossFunction:
    """Return the function that LOSS names, with the options that are set."""
    options = {name: value for name in LOSS_OPTIONS if (value := getattr(settings, name)) is not None}
    if not is_own_function(settings.loss):
        return partial(LOSS_FUNCTIONS[settings.loss], **options)
    function = load_function("LOSS", settings.loss)
    for name in options.keys() - inspect.signature(function).parameters.keys():
        raise ConfigurationError(f"{name.upper()} is set, but LOSS={settings.loss} has no keyword argument {name}")

    def loss(tokens: LossTokens) -> TokenLosses:
        result = function(tokens, **options)
        if not isinstance(result, TokenLosses) or result.losses.shape != tokens.logprobs.shape:
            raise ConfigurationError(
                f"LOSS={settings.loss} must return TokenLosses with one loss for each of {len(tokens.logprobs)} tokens"
            )
        return result

    return loss


def advantage_function(settings: TrainerSettings) -> AdvantageFunction:
    """Return the function that ADVANTAGE names.

    Raises:
        ConfigurationError: it is a function of the user's that cannot be loaded.
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
