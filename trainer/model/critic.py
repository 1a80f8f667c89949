"""The critic: a value head on a model of its own, or on the policy's, that estimates each token's value."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.algorithm.loss import Diagnostics, StepSize, critic_loss
from trainer.algorithm.packing import MicroBatch, TrainingGroup
from trainer.algorithm.training_groups import PerToken
from trainer.config import CriticModel, TrainerSettings
from trainer.model.gathering import gather_state, whole_parameters
from trainer.model.learner import Learner, UpdateResult
from trainer.model.loading import ValueHead, choose_compute, load_model
from trainer.model.micro_batching import make_part, packed, part_order, unknown_ids
from trainer.model.optimizer import Training, learning_rate, make_optimizer
from trainer.model.policy import of_tokens, predicting_states
from trainer.model.ranks import Ranks
from trainer.model.rounding import Rounding
from trainer.model.saving import DiskFullError, follow_umask, write_whole
from trainer.model.sharding import shard


class Critic(nn.Module):
    """A decoder with a value head, float32 master weights, sharded by FSDP2 over all ranks.

    A forward pass is a collective: every rank must call the critic equally often.
    """

    def __init__(self, decoder: PreTrainedModel, value_head: ValueHead) -> None:
        super().__init__()
        self.decoder = decoder
        self.value_head = value_head

    def forward(self, batch: MicroBatch) -> Tensor:
        """Return the values [N], float32, of the states before a micro-batch's N trained tokens."""
        return of_tokens(self.value_head(predicting_states(self.decoder, batch)), batch)


def load_critic(settings: TrainerSettings, ranks: Ranks) -> Critic:
    """Load MODEL_NAME's decoder with a new value head, and shard it. A collective.

    Raises:
        ConfigurationError: the model cannot be loaded, or its architecture is not supported.
    """
    decoder = cast("PreTrainedModel", load_model(settings, materialise=ranks.is_main).base_model)
    critic = Critic(decoder, ValueHead(decoder, ranks))
    critic.eval().requires_grad_()
    shard(critic, decoder, settings, ranks, choose_compute(settings, ranks))
    return critic


class CriticLearner:
    """The critic with its optimizer. With CRITIC=shared both are the policy's. Every method is a collective."""

    def __init__(self, learner: Learner) -> None:
        """Load the critic for a learner's policy.

        Raises:
            ConfigurationError: the model cannot be loaded.
        """
        self.learner = learner
        self.settings = learner.settings
        self.ranks = learner.ranks
        self.policy = learner.policy
        self.is_shared = self.settings.critic is CriticModel.SHARED
        self.module: nn.Module
        self.optimizer: torch.optim.Optimizer
        self.compute: Callable[[MicroBatch], Tensor]
        if self.is_shared:
            self.module, self.optimizer = learner.policy, learner.optimizer
            self.compute = learner.policy.values
        else:
            self.module = self.compute = load_critic(self.settings, self.ranks)
            self.optimizer = make_optimizer(self.settings, self.module)

    def trains_alone(self, step: int) -> bool:
        """Return whether the critic has an update of its own in a training step, after or instead of the policy's."""
        return not self.is_shared or step < self.settings.critic_warmup_steps

    def values(self, groups: Sequence[TrainingGroup]) -> list[PerToken]:
        """Return the values of the states before the groups' trained tokens, on every rank."""
        return self.learner.token_numbers(groups, self.compute)

    def update(
        self, groups: Sequence[TrainingGroup], step: int, *, position: float | None = None, may_stop: bool = True
    ) -> UpdateResult:
        """Make as many optimizer steps of the critic alone as ``Learner.update`` makes, on the same parts.

        Groups with token ids outside the model's vocabulary are left out. A shared critic trains its head only.

        Args:
            groups: all groups to train on, with returns and values; every rank passes the same.
            step: number of the training step, for the learning rate.
            position: where the learning rate's decay is among the steps; see ``learning_rate``.
            may_stop: stop before the first optimizer step when the learner is asked to.

        Raises:
            StopRequestedError: some rank was asked to stop; nothing has changed.
        """
        started = time.perf_counter()
        settings = self.settings
        known = [group for group in groups if not len(unknown_ids(group, self.policy.config.vocab_size))]
        shares = [known[i :: settings.updates_per_batch] for i in range(settings.updates_per_batch)]
        parts = [make_part(share, share, settings.micro_batch_tokens, self.ranks) for share in shares]
        parts = [parts[i] for i in part_order(settings, step)]
        rate = learning_rate(settings, step, self.learner.total_steps, settings.critic_learning_rate, position)
        rates = [rate] * len(self.optimizer.param_groups)
        batches = packed([pieces for part in parts for pieces in part.micro_batches], self.ranks)
        passes = [[partial(self._backward, batches, part.size) for _ in part.micro_batches] for part in parts]
        should_stop = self.learner.training.should_stop if may_stop else None
        training = Training(settings, self.ranks, self.module, self.optimizer, should_stop)
        result = UpdateResult.of(training.take_steps(passes, rates), parts, started)
        return replace(result, metrics={name: value for name, value in result.metrics.items() if "value_" in name})

    def _backward(self, batches: Iterator[MicroBatch], size: StepSize) -> Diagnostics:
        batch = next(batches)
        loss, diagnostics = critic_loss(batch, self.compute(batch), size, self.settings.value_clip)
        # FSDP averages gradients over the ranks, but the denominator of the loss counts all ranks already.
        (loss * self.ranks.world_size).backward()
        return diagnostics

    def save(self, directory: Path) -> None:
        """Write a model directory that ``AutoModelForTokenClassification.from_pretrained`` loads. A collective.

        Weights are float32, because no engine reads them.

        The label's logit at a token is the value of the state after it.

        Raises:
            DiskFullError: the disk is full; raised on every rank.
        """
        # No copy on a CPU: everything is written before the parameters change.
        state = gather_state(self._full_parameters(), self.ranks, copy=False)

        def write(hidden: Path) -> None:
            description = self.policy.description
            assert description is not None, "rank 0 has it"
            config = copy.deepcopy(description.config.get_text_config())
            config.dtype, config.num_labels = torch.float32, 1
            names = config.architectures or []
            config.architectures = [name.replace("ForCausalLM", "ForTokenClassification") for name in names]
            save_torch_state_dict(state, hidden, metadata={"format": "pt"})
            config.save_pretrained(hidden)
            description.tokenizer.save_pretrained(hidden)
            follow_umask(hidden, "config.json")

        self.ranks.on_main(lambda: write_whole(directory, write), DiskFullError)

    def _full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every whole parameter by its name in a token classifier, LoRA adapters merged. A collective."""
        whole = Rounding(torch.float32)
        if isinstance(self.module, Critic):
            prefix = self.module.decoder.base_model_prefix
            for name, value in whole_parameters(self.module.decoder, whole):
                yield f"{prefix}.{name}", value
        else:
            for name, value in self.policy.full_parameters(whole):
                if not name.startswith("lm_head."):
                    yield name, value
        for name, value in whole_parameters(self.module.get_submodule("value_head"), whole):
            yield f"score.{name}", value
