"""The trainer's settings: one typed class, read from environment variables of the same names in capitals.

Each section of the settings is a base class of ``TrainerSettings``. A value that nobody has reason to change is a
constant in the module that uses it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import model_validator

from services.core.errors import ConfigurationError
from trainer.algorithm.methods import LOSSES, Aggregation, is_own_function
from trainer.config.checks import CHECKS, cautions
from trainer.config.sections import (
    AlgorithmSection,
    CriticSection,
    EvaluationSection,
    MemorySection,
    Mode,
    OptimisationSection,
    PublishedType,
    PublishingSection,
    Rollout,
    RunSection,
    SamplingSection,
)

LEAST_CONCURRENCY = 64
"""Prompts in flight at once if a batch has fewer, so that an evaluation keeps the engines busy."""


class TrainerSettings(
    RunSection,
    SamplingSection,
    AlgorithmSection,
    CriticSection,
    OptimisationSection,
    MemorySection,
    PublishingSection,
    EvaluationSection,
):
    """All settings of the trainer, section by section."""

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Self:
        for check in CHECKS:
            check(self)
        return self

    def total_steps(self, train_prompts: int) -> int:
        """Return the steps of a run with so many training prompts.

        Raises:
            ConfigurationError: they are too few for one step.
        """
        prompts = self.num_epochs * train_prompts
        if prompts < self.batch_size:
            raise ConfigurationError(
                f"BATCH_SIZE is {self.batch_size}, but the data have {train_prompts} prompt{'s'[: train_prompts != 1]} "
                f"to train on, {prompts} in NUM_EPOCHS={self.num_epochs}: not one step; "
                f"set BATCH_SIZE={train_prompts}, or give more rows"
            )
        return min(prompts // self.batch_size, self.max_steps or prompts)

    @property
    def cautions(self) -> list[str]:
        """Sentences on settings that are allowed, but have no effect or are hardly meant."""
        return cautions(self)

    @property
    def publishes_in_place(self) -> bool:
        """True when weights change under generations in flight: PUBLISH_IN_PLACE, or the default of the mode."""
        return self.mode is Mode.ASYNC if self.publish_in_place is None else self.publish_in_place

    @property
    def own_functions(self) -> dict[str, str]:
        """The functions of the user's own among AGENT, where agents play, LOSS and ADVANTAGE, by variable."""
        agent = {"AGENT": self.agent} if self.rollout is Rollout.AGENT else {}
        named = {**agent, "LOSS": self.loss, "ADVANTAGE": self.advantage}
        return {variable: name for variable, name in named.items() if is_own_function(name)}

    @property
    def has_critic(self) -> bool:
        """True when advantages need values."""
        return self.advantage == "gae"

    @property
    def has_kl_loss(self) -> bool:
        """True when the KL to the reference is added to the loss."""
        return self.kl_coef != 0 and not self.kl_in_reward

    @property
    def loss_aggregation(self) -> Aggregation:
        """The mean over token losses: AGGREGATION, or that of the loss's paper."""
        if self.aggregation is not None:
            return self.aggregation
        return LOSSES[self.loss].aggregation if self.loss in LOSSES else Aggregation.TOKEN_MEAN

    @property
    def loss_truncates(self) -> bool:
        """True when LOSS truncates the weight of a token itself."""
        return self.loss in LOSSES and LOSSES[self.loss].truncates

    @property
    def saved_type(self) -> PublishedType:
        """The number format of the trained model: SAVE_TYPE, or the published one; of merged adapters float32."""
        if self.save_type is not None:
            return self.save_type
        return PublishedType.FLOAT32 if self.lora_rank else self.publish_type

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a training step."""
        return self.updates_per_batch * self.epochs_per_batch

    @property
    def longest_answer(self) -> int:
        """Most tokens that the model samples for one answer to a prompt."""
        return self.max_new_tokens if self.rollout is Rollout.COMPLETION else self.agent_max_tokens

    @property
    def generation_concurrency(self) -> int:
        """Prompts in flight at once: a whole batch, so that no engine waits for the others."""
        return max(self.batch_size, LEAST_CONCURRENCY)

    @property
    def generation_deadline_seconds(self) -> float:
        """Longest wait for one prompt's completions once it is in flight, retries included."""
        # Settings are also checked where no request is made and the client's imports would only take time.
        from services.clients.rollout import generation_seconds

        return generation_seconds(self.max_new_tokens)

    @property
    def longest_answer_seconds(self) -> float:
        """Longest time that one answer to a prompt takes once it is in flight; an episode may wait AGENT_SECONDS."""
        return self.generation_deadline_seconds if self.rollout is Rollout.COMPLETION else 2 * self.agent_seconds

    @property
    def start_deadline_seconds(self) -> float:
        """Longest wait for services and workers when the trainer starts."""
        return self.engine_start_seconds + self.service_deadline_seconds

    @property
    def checkpoint_dir(self) -> Path:
        """The directory of the run's checkpoints."""
        return self.run_dir / "checkpoints"
