"""Checks that settings fit together. Each raises ValueError with the variable, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from services.protocol.base import MAX_SEQUENCES
from trainer.algorithm.methods import (
    ADVANTAGES,
    GROUP_ADVANTAGES,
    LOSS_OPTIONS,
    LOSSES,
    Credit,
    ImportanceCorrection,
    is_own_function,
)
from trainer.config.sections import SELF, CriticSection, Mode, Rollout, Transport

if TYPE_CHECKING:
    from trainer.config.settings import TrainerSettings


def lengths_fit(settings: TrainerSettings) -> None:
    """Check the lengths of completions and of updates."""
    if settings.overlong_buffer >= settings.max_new_tokens:
        raise ValueError(
            f"OVERLONG_BUFFER is {settings.overlong_buffer}; allowed is less than "
            f"MAX_NEW_TOKENS ({settings.max_new_tokens})"
        )
    if settings.updates_per_batch > settings.batch_size:
        raise ValueError(
            f"UPDATES_PER_BATCH is {settings.updates_per_batch}; allowed is at most BATCH_SIZE ({settings.batch_size})"
        )


def target_is_compared(settings: TrainerSettings) -> None:
    """Check that there are evaluations for TARGET_ACCURACY."""
    for variable, value in (("EVAL_PROMPTS", settings.eval_prompts), ("EVAL_EVERY", settings.eval_every)):
        if settings.target_accuracy is not None and not value:
            raise ValueError(
                f"TARGET_ACCURACY is set, but {variable} is 0, so nothing is compared with it during the run; "
                f"set {variable}, or unset TARGET_ACCURACY"
            )


def engines_can_sleep(settings: TrainerSettings) -> None:
    """Check that ENGINE_SLEEPS finds engines that have nothing to do."""
    if not settings.engine_sleeps:
        return
    if settings.mode is Mode.ASYNC:
        raise ValueError(
            "ENGINE_SLEEPS is set, but MODE=async generates while the trainer trains, so no engine can sleep; "
            "set MODE=sync, or give engines GPUs of their own and unset ENGINE_SLEEPS"
        )
    if settings.publish_transport is Transport.BROADCAST and not settings.lora_rank:
        raise ValueError(
            "ENGINE_SLEEPS is set, but PUBLISH_TRANSPORT=broadcast needs NCCL, which joins no two processes on one "
            "GPU; set PUBLISH_TRANSPORT=disk"
        )


def agent_fits(settings: TrainerSettings) -> None:
    """Check that an agent is there exactly where ROLLOUT needs one."""
    for needed, variable, value in (
        (Rollout.AGENT, "AGENT", settings.agent),
        (Rollout.PROGRAM, "AGENT_COMMAND", settings.agent_command),
    ):
        if value and settings.rollout is not needed:
            raise ValueError(
                f"{variable} is {value!r}, but ROLLOUT is {settings.rollout}; set ROLLOUT={needed}, or unset {variable}"
            )
    if settings.rollout is Rollout.AGENT and not is_own_function(settings.agent):
        raise ValueError(f"AGENT is {settings.agent!r}, but ROLLOUT is agent; give the agent as module:function")
    if settings.rollout is Rollout.PROGRAM and not settings.agent_command.strip():
        raise ValueError("AGENT_COMMAND is empty, but ROLLOUT is program; give the agent as a shell command")


def opponent_fits(settings: TrainerSettings) -> None:
    """Check OPPONENT, which only self-play has."""
    if settings.opponent == SELF:
        return
    if not settings.opponent.startswith(("http://", "https://")):
        raise ValueError(
            f"OPPONENT is {settings.opponent!r}; allowed is `self`, or an endpoint such as http://host:port"
        )
    if settings.rollout is not Rollout.ENVIRONMENT:
        raise ValueError(f"OPPONENT is set, but ROLLOUT is {settings.rollout}; set ROLLOUT=environment, or unset it")


def episodes_fit(settings: TrainerSettings) -> None:
    """Check the lengths and the rewards of episodes of several turns."""
    if settings.rollout is Rollout.COMPLETION:
        return
    if settings.agent_max_tokens < settings.max_new_tokens:
        raise ValueError(
            f"AGENT_MAX_TOKENS is {settings.agent_max_tokens}; allowed is at least MAX_NEW_TOKENS "
            f"({settings.max_new_tokens}), the longest turn"
        )
    if settings.group_size * settings.agent_max_turns > MAX_SEQUENCES:
        raise ValueError(
            f"GROUP_SIZE times AGENT_MAX_TURNS is {settings.group_size * settings.agent_max_turns}; allowed is at most "
            f"{MAX_SEQUENCES}, the most sequences of a group"
        )
    if settings.overlong_buffer:
        raise ValueError(
            f"OVERLONG_BUFFER is set, but ROLLOUT is {settings.rollout}; unset it, the agent gives the rewards"
        )


def methods_exist(settings: TrainerSettings) -> None:
    """Check ADVANTAGE and LOSS, and that LOSS has the bounds that are set."""
    for variable, name, known in (
        ("ADVANTAGE", settings.advantage, ADVANTAGES),
        ("LOSS", settings.loss, tuple(LOSSES)),
    ):
        if name not in known and not is_own_function(name):
            raise ValueError(f"{variable} is {name!r}; allowed is {', '.join(known)}, or module:function")
    for option in LOSS_OPTIONS if settings.loss in LOSSES else ():
        if getattr(settings, option) is not None and option not in LOSSES[settings.loss].options:
            raise ValueError(f"{option.upper()} is set, but LOSS={settings.loss} has no such bound; unset it")


def options_have_their_method(settings: TrainerSettings) -> None:
    """Check that the options of critic, credit and KL belong to a method that is set."""
    unused = [name.upper() for name in CriticSection.__annotations__ if name in settings.model_fields_set]
    if unused and not settings.has_critic:
        raise ValueError(
            f"{', '.join(unused)} is set, but ADVANTAGE={settings.advantage} has no critic; "
            "unset it, or set ADVANTAGE=gae"
        )
    if settings.credit is Credit.TURN and (settings.has_critic or settings.rollout is Rollout.COMPLETION):
        why = "completions have one turn" if settings.rollout is Rollout.COMPLETION else "ADVANTAGE=gae has a critic"
        raise ValueError(f"CREDIT is turn, but {why}; unset CREDIT")
    if settings.kl_in_reward and not settings.kl_coef:
        raise ValueError("KL_IN_REWARD is set, but KL_COEF is 0; give the weight of the KL")


def groups_can_be_compared(settings: TrainerSettings) -> None:
    """Check that group advantages get groups of two or more."""
    # Collectors elsewhere may bring advantages of their own.
    is_made_here = settings.mode is Mode.SYNC or settings.collector_in_process
    if settings.group_size == 1 and settings.advantage in GROUP_ADVANTAGES and is_made_here:
        raise ValueError(
            f"GROUP_SIZE is 1, but ADVANTAGE={settings.advantage} compares a completion with the rest of its group; "
            "allowed is at least 2, or ADVANTAGE=reinforce or gae"
        )


def importance_cap_has_an_effect(settings: TrainerSettings) -> None:
    """Check that IMPORTANCE_CAP finds weights to bound."""
    if settings.importance_cap is None:
        return
    if settings.importance_correction is ImportanceCorrection.NONE:
        raise ValueError("IMPORTANCE_CAP is set, but IMPORTANCE_CORRECTION is none; unset IMPORTANCE_CAP")
    is_truncated = settings.importance_correction is ImportanceCorrection.TRUNCATED
    if is_truncated and settings.loss_truncates and settings.updates_per_step == 1:
        raise ValueError(
            f"IMPORTANCE_CAP is set, but LOSS={settings.loss} truncates the weight of a token itself; "
            "set CLIP_HIGH instead"
        )


def cautions(settings: TrainerSettings) -> list[str]:
    """Return a sentence for each setting that is allowed but has no effect, or hardly the one that is meant."""
    found = []
    bounds = [name.upper() for name in LOSS_OPTIONS if getattr(settings, name) is not None]
    is_decoupled = settings.importance_correction is not ImportanceCorrection.NONE and not settings.loss_truncates
    if bounds and settings.loss in LOSSES and settings.updates_per_step == 1 and is_decoupled:
        found.append(
            f"{', '.join(bounds)} {'has' if len(bounds) == 1 else 'have'} no effect with one update a batch: the ratio "
            "of the policy to that at the start of the step is 1; IMPORTANCE_CAP bounds the weight of stale tokens"
        )
    if settings.lora_rank and "learning_rate" not in settings.model_fields_set:
        found.append(
            f"LORA_RANK is set, but LEARNING_RATE is the whole model's default, {settings.learning_rate:g}; adapters "
            "learn at 10 to 30 times the rate of the whole model, such as 3e-5"
        )
    return found


CHECKS: tuple[Callable[[TrainerSettings], None], ...] = (
    lengths_fit,
    target_is_compared,
    engines_can_sleep,
    agent_fits,
    opponent_fits,
    episodes_fit,
    methods_exist,
    options_have_their_method,
    groups_can_be_compared,
    importance_cap_has_an_effect,
)
"""All checks, in the order in which they are made."""
