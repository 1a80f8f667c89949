"""The update of the policy: loss, gradients and optimizer steps on packed groups."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self, cast

import torch
from torch import Tensor

from services.core.logs import get_logger
from services.core.settings import Method
from trainer.algorithm.loss import UNDIVIDED, Diagnostics, StepSize
from trainer.algorithm.methods import ImportanceCorrection
from trainer.algorithm.packing import MicroBatch, TrainingGroup
from trainer.algorithm.training_groups import PerToken
from trainer.config import CriticModel, TrainerSettings
from trainer.config.objective import step_loss
from trainer.model.logprobs import Lesson
from trainer.model.micro_batching import Part, make_part, packed, part_order, token_numbers, unknown_ids
from trainer.model.optimizer import HEAD_GROUPS, Training, is_finite, learning_rate, make_optimizer, over_steps
from trainer.model.policy import Policy, load_policy
from trainer.model.ranks import Ranks
from trainer.model.sharding import reshard
from trainer.model.teachers import load_teachers

log = get_logger(__name__)

WAVE_PIECES = 2
"""The least pieces of a wave for each of several ranks: a wave is too few groups to balance the ranks' work."""


@dataclass
class UpdateResult:
    """The optimizer steps of one update."""

    steps: int = 0
    skipped: int = 0
    """Optimizer steps left out because the loss or the gradient was not finite."""
    is_without_effect: bool = False
    """True if every optimizer step of the policy, or every one of the critic, was skipped."""
    tokens: int = 0
    """Tokens in forward passes with gradient, over all ranks."""
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """Over the optimizer steps that have the metric; see ``over_steps``."""

    @classmethod
    def of(cls, steps: Sequence[Mapping[str, float]], parts: Sequence[Part], started: float, **metrics: float) -> Self:
        """Return the result of an update that began at ``started`` (time.perf_counter).

        Args:
            steps: the metrics of its optimizer steps.
            parts: this rank's parts of them.
            started: when the update began.
            metrics: further metrics of the update.
        """
        skipped = sum(not is_finite(of_step) for of_step in steps)
        return cls(
            steps=len(steps),
            skipped=skipped,
            is_without_effect=skipped == len(steps) > 0,
            tokens=sum(part.tokens for part in parts),
            seconds=time.perf_counter() - started,
            metrics=over_steps(steps) | metrics,
        )

    def with_critic(self, critic: UpdateResult) -> UpdateResult:
        """Return the policy's update together with the critic's on the same groups, whose tokens count once."""
        return replace(
            self,
            skipped=self.skipped + critic.skipped,
            is_without_effect=self.is_without_effect or critic.is_without_effect,
            tokens=self.tokens or critic.tokens,
            seconds=self.seconds + critic.seconds,
            metrics=self.metrics | critic.metrics,
        )


@dataclass
class _Waves:
    """The waves of the step under way, whose gradients the parameters have; see ``Learner.add_wave``."""

    parts: list[Part] = field(default_factory=list)
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    refused: int = 0
    seconds: float = 0.0


class Learner:
    """The owner of the policy's optimizer. Every method is a collective of all ranks."""

    def __init__(
        self, settings: TrainerSettings, policy: Policy, ranks: Ranks, total_steps: int, *, has_teachers: bool = True
    ) -> None:
        """Make the optimizer, and load the frozen reference, and the teachers if ``has_teachers``.

        Raises:
            ConfigurationError: a teacher cannot be loaded, or has the student's weights.
        """
        self.settings = settings
        self.policy = policy
        self.ranks = ranks
        needs_reference = settings.kl_coef > 0 and not policy.has_adapters
        self.reference = load_policy(settings, ranks, trainable=False) if needs_reference else None
        self.teachers = load_teachers(settings, policy, ranks) if has_teachers else {}
        """The frozen teachers by the name of their model."""
        self.total_steps = total_steps
        self.loss = step_loss(settings)
        self._waves = _Waves()
        self.optimizer = make_optimizer(settings, policy)
        # Each step changes the masters, and the next pass computes with them rounded anew.
        self.optimizer.register_step_pre_hook(lambda *_: policy.masters.restore())
        self.optimizer.register_step_post_hook(lambda *_: policy.masters.round())
        self.training = Training(settings, ranks, policy, self.optimizer)

    def update(self, groups: Sequence[TrainingGroup], step: int, *, position: float | None = None) -> UpdateResult:
        """Make UPDATES_PER_BATCH optimizer steps, each on an equal share of ``groups``, EPOCHS_PER_BATCH times.

        Groups with token ids outside the model's vocabulary are left out and counted. There is no optimizer step on a
        share whose tokens are all masked, nor on one in which every advantage is 0, unless the loss has KL, entropy or
        values. An optimizer step whose loss or gradient is not finite leaves policy and optimizer unchanged and is
        counted.

        Args:
            groups: all groups to train on, fresh and replayed; every rank passes the same.
            step: number of the training step, for the learning rate.
            position: where the learning rate's decay is among the steps; see ``learning_rate``.

        Raises:
            StopRequestedError: some rank was asked to stop before the first optimizer step; nothing has changed.
        """
        started = time.perf_counter()
        known = [group for group in groups if self._knows(group)]
        parts = [self.part(share) for share in self.shares(known)]
        # The log-probabilities of the proximal policy; those of the first part come with its gradient.
        is_decoupled = self.settings.importance_correction is not ImportanceCorrection.NONE
        is_decoupled = is_decoupled and self.settings.method is Method.RL
        proximal: list[list[Tensor | None]] = [
            self._logprobs(part) if is_decoupled and i else [None] * len(part.micro_batches)
            for i, part in enumerate(parts)
        ]
        rates = self._rates(step, position)
        self.policy.expert_load.clear()
        order = part_order(self.settings, step)
        batches = packed([pieces for i in order for pieces in parts[i].micro_batches], self.ranks)
        passes = [self._passes(batches, parts[i].size, proximal[i]) for i in order]
        steps = self.training.take_steps(passes, rates)
        metrics = {"learning_rate": rates[0], "groups_refused": float(len(groups) - len(known))}
        metrics |= self.policy.expert_load.take(self.ranks)
        return UpdateResult.of(steps, [parts[i] for i in order], started, **metrics)

    def add_gradients(self, part: Part, size: StepSize) -> Diagnostics:
        """Add to the policy's gradients what a part contributes to a step whose loss has the denominators ``size``.

        The gradient is that of the present weights, as in the first optimizer step of an update.
        """
        batches = packed(part.micro_batches, self.ranks)
        return self.training.add_gradients(self._passes(batches, size, [None] * len(part.micro_batches)))

    def add_wave(self, groups: Sequence[TrainingGroup]) -> None:
        """Add the gradients of some groups of a step, before the step's other groups and its denominators are known.

        ``finish_waves`` takes the optimizer step. Waves need one update a batch, and a loss with one denominator.

        Raises:
            StopRequestedError: some rank was asked to stop; the step has no waves any more.
        """
        started = time.perf_counter()
        part, refused = self.wave_part(groups)
        waves, self._waves = self._waves, _Waves()
        if not waves.parts:
            self.policy.expert_load.clear()
        waves.diagnostics.add(self.add_gradients(part, UNDIVIDED))
        waves.parts.append(part)
        waves.refused += refused
        waves.seconds += time.perf_counter() - started
        self._waves = waves

    def wave_part(self, groups: Sequence[TrainingGroup]) -> tuple[Part, int]:
        """Return this rank's part of a wave, and the number of its groups that are refused for unknown token ids."""
        known = [group for group in groups if self._knows(group)]
        [share] = self.shares(known)
        return self.part(share, pieces_per_rank=WAVE_PIECES), len(groups) - len(known)

    def finish_waves(self, step: int, *, position: float | None = None) -> UpdateResult:
        """Take the optimizer step on the gradients of all waves; the arguments are those of ``update``."""
        started = time.perf_counter()
        waves, self._waves = self._waves, _Waves()
        rates, steps = self._rates(step, position), []
        if any(part.micro_batches for part in waves.parts):
            # A forward pass since the last wave may have gathered parameters, which have no gradients.
            reshard(self.policy)
            size = sum((part.size for part in waves.parts), StepSize(0, 0))
            denominator = size.denominator(self.settings.loss_aggregation)
            steps = [self.training.take_step(waves.diagnostics, rates, denominator)]
        metrics = {"learning_rate": rates[0], "groups_refused": float(waves.refused)}
        metrics |= self.policy.expert_load.take(self.ranks)
        return UpdateResult.of(steps, waves.parts, started - waves.seconds, **metrics)

    def logprobs(
        self, groups: Sequence[TrainingGroup], temperature: float | None = None, *, use_adapters: bool = True
    ) -> list[PerToken]:
        """Return the policy's log-probabilities of the groups' trained tokens, on every rank.

        Args:
            groups: the groups; the ranks share them.
            temperature: of the distribution; without it, TEMPERATURE.
            use_adapters: compute with the LoRA adapters, if there are any.
        """
        with nullcontext() if use_adapters else self.policy.without_adapters():
            return self.token_numbers(groups, lambda batch: self.policy(batch, temperature)[0])

    def mean_entropy(self, groups: Sequence[TrainingGroup]) -> float | None:
        """Return the policy's mean entropy at the groups' trained tokens, in nats, on every rank; None without any."""
        known = [group for group in groups if not len(unknown_ids(group, self.policy.config.vocab_size))]
        numbers = self.token_numbers(known, lambda batch: self.policy(batch).entropies)
        entropies = [x for group in numbers for of_sequence in group for x in of_sequence.tolist()]
        return statistics.fmean(entropies) if entropies else None

    def reference_logprobs(self, groups: Sequence[TrainingGroup]) -> list[PerToken]:
        """Return the reference's log-probabilities of the groups' trained tokens at TEMPERATURE, on every rank."""
        return self.token_numbers(groups, self._reference_logprobs)

    def teacher_logprobs(self, groups: Sequence[TrainingGroup]) -> list[PerToken | None]:
        """Return the log-probabilities of the groups' trained tokens by the teacher of each, on every rank.

        They are at TEMPERATURE. A group has None whose source has no teacher in the trainer, or that is longer than the
        teacher's context or has tokens that the teacher does not know.
        """
        return self._by_teacher(groups, lambda teacher, batch: teacher(batch).logprobs)

    def teacher_overlap(self, groups: Sequence[TrainingGroup], k: int) -> float | None:
        """Return the mean share of the policy's k most likely tokens that are their teacher's, too, on every rank.

        The mean is over the groups' trained tokens; None if no teacher has any.
        """

        def compute(teacher: Policy, batch: MicroBatch) -> Tensor:
            return self.policy.overlap(batch, teacher.lesson(batch, batch.weights, 0.0), k)

        numbers = self._by_teacher(groups, compute)
        shares = [x for group in numbers for of_sequence in group or () for x in of_sequence.tolist()]
        return statistics.fmean(shares) if shares else None

    @torch.no_grad()
    def _by_teacher(
        self, groups: Sequence[TrainingGroup], compute: Callable[[Policy, MicroBatch], Tensor]
    ) -> list[PerToken | None]:
        """Return a number of each trained token by group, completion and token, computed with the group's teacher."""
        results: dict[int, PerToken] = {}
        of_source, max_tokens = self.settings.teachers, self.settings.micro_batch_tokens
        # Every rank calls the teachers in the same order.
        for name, teacher in self.teachers.items():
            vocabulary = min(teacher.config.vocab_size, self.policy.config.vocab_size)
            places = [
                place
                for place, group in enumerate(groups)
                if of_source[group.source] == name
                and max(branch.length for branch in group.branches) <= teacher.config.max_position_embeddings
                and not len(unknown_ids(group, vocabulary))
            ]
            chosen = [groups[place] for place in places]
            numbers = token_numbers(chosen, partial(compute, teacher), max_tokens, vocabulary, self.ranks)
            results |= zip(places, numbers, strict=True)
        return [results.get(place) for place in range(len(groups))]

    def _lessons(self, batch: MicroBatch) -> list[Lesson]:
        """Return what each teacher says of a micro-batch with TEACHER_JSD_BETA; none without."""
        beta, of_source = self.settings.teacher_jsd_beta, self.settings.teachers
        if beta is None:
            return []
        lessons = []
        # Every rank calls every teacher on each of its micro-batches, because a forward pass is a collective.
        for name, teacher in self.teachers.items():
            is_its = torch.tensor([of_source[source] == name for source in batch.sources], device=batch.weights.device)
            is_taught = is_its[batch.sequence_ids] & ~batch.teacher_logprobs.isnan()
            lessons.append(teacher.lesson(batch, batch.weights * is_taught, beta))
        return lessons

    def token_numbers(self, groups: Sequence[TrainingGroup], compute: Callable[[MicroBatch], Tensor]) -> list[PerToken]:
        """Return a number of each of the groups' trained tokens, on every rank; see ``token_numbers``."""
        vocabulary, max_tokens = self.policy.config.vocab_size, self.settings.micro_batch_tokens
        return token_numbers(groups, compute, max_tokens, vocabulary, self.ranks)

    def _knows(self, group: TrainingGroup) -> bool:
        vocabulary = self.policy.config.vocab_size
        unknown = unknown_ids(group, vocabulary)
        if len(unknown) and self.ranks.is_main:
            log.warning(
                "group left out: token ids outside the model's vocabulary",
                group_id=group.group_id,
                ids=unknown[:8].tolist(),
                vocabulary=vocabulary,
            )
        return not len(unknown)

    def shares(self, known: Sequence[TrainingGroup]) -> list[Sequence[TrainingGroup]]:
        """Return the share of the groups that each of UPDATES_PER_BATCH optimizer steps trains on.

        With DROP_EQUAL_GROUPS groups without advantages are in none, unless another term of the loss needs them.
        """
        settings, n_parts = self.settings, self.settings.updates_per_batch
        if settings.drop_equal_groups and not settings.learns_beyond_advantages:
            known = [g for g in known if g.mean_absolute_advantage]
        return [known[i::n_parts] for i in range(n_parts)]

    def part(self, groups: Sequence[TrainingGroup], *, pieces_per_rank: int = 1) -> Part:
        """Return this rank's part of the optimizer step on a share of the groups; see ``share_out``."""
        needs_all = self.settings.learns_beyond_advantages
        trainable = [g for g in groups if needs_all or g.mean_absolute_advantage]
        max_tokens = self.settings.micro_batch_tokens
        return make_part(groups, trainable, max_tokens, self.ranks, pieces_per_rank=pieces_per_rank)

    def _rates(self, step: int, position: float | None) -> list[float]:
        """Return the learning rate of each of the optimizer's parameter groups."""
        settings = self.settings
        peaks = [settings.learning_rate] * len(self.optimizer.param_groups)
        if settings.has_critic and settings.critic is CriticModel.SHARED:
            peaks[-HEAD_GROUPS:] = [settings.critic_learning_rate] * HEAD_GROUPS
        return [learning_rate(settings, step, self.total_steps, peak, position) for peak in peaks]

    @torch.no_grad()
    def _logprobs(self, part: Part) -> list[Tensor | None]:
        return [self.policy(batch)[0] for batch in packed(part.micro_batches, self.ranks)]

    def _passes(
        self, batches: Iterator[MicroBatch], size: StepSize, proximal: list[Tensor | None]
    ) -> list[Callable[[], Diagnostics]]:
        """Return the passes of a part, which has as many micro-batches as ``proximal`` has numbers; see _backward."""
        return [partial(self._backward, batches, size, proximal, number) for number in range(len(proximal))]

    def _backward(
        self, batches: Iterator[MicroBatch], size: StepSize, proximal: list[Tensor | None], number: int
    ) -> Diagnostics:
        """Add the gradient of micro-batch ``number`` of a part; keep its log-probabilities where there are none yet."""
        batch = next(batches)
        reference = self._reference_logprobs(batch) if self.settings.has_kl_loss else None
        outputs = self.policy(batch, lessons=self._lessons(batch))
        loss, diagnostics = self.loss(
            batch,
            outputs.logprobs,
            outputs.entropies,
            size,
            proximal_logprobs=proximal[number],
            reference_logprobs=reference,
            values=outputs.values,
            divergence=None if outputs.divergence is None else outputs.divergence[0],
        )
        if proximal[number] is None:
            proximal[number] = outputs.logprobs.detach()
        if batch.is_filler:
            loss = torch.cat([output for output in outputs if output is not None]).sum() * 0.0
        # FSDP averages gradients over the ranks, but the denominators of the loss count all ranks already.
        (loss * self.ranks.world_size).backward()
        return diagnostics

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        if self.reference is not None:
            return cast("Tensor", self.reference(batch)[0])
        with self.policy.without_adapters():
            return cast("Tensor", self.policy(batch)[0])
