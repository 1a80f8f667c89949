"""The update of the policy: loss, gradients and optimizer steps on packed groups."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from services.core.logs import get_logger
from trainer.algorithm.loss import Diagnostics, PolicyLoss, StepSize, add_up
from trainer.algorithm.methods import ImportanceCorrection
from trainer.algorithm.packing import MicroBatch, TrainingGroup, pack, share_out
from trainer.algorithm.training_groups import TokenNumbers
from trainer.config import Schedule, TrainerSettings
from trainer.model.policy import Policy
from trainer.model.ranks import Ranks

log = get_logger(__name__)


class StopRequestedError(Exception):
    """A request to stop in the middle of an update; the policy is as it was before the update."""


@dataclass
class UpdateResult:
    """The optimizer steps of one update."""

    steps: int = 0
    skipped: int = 0
    """Optimizer steps left out because the loss or the gradient was not finite."""
    refused: int = 0
    """Groups left out because the model does not know some of their tokens."""
    tokens: int = 0
    """Tokens in forward passes with gradient, over all ranks."""
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """Means over the optimizer steps that have the metric."""


@dataclass(frozen=True)
class _Part:
    """This rank's part of one optimizer step."""

    own: list[list[TrainingGroup]]
    """This rank's micro-batches. Each is packed when its turn comes, so that the device holds one at a time."""
    size: StepSize
    tokens: int


class Learner:
    """The owner of the policy's optimizer. Every method is a collective of all ranks."""

    def __init__(
        self, settings: TrainerSettings, policy: Policy, ranks: Ranks, reference: Policy | None, total_steps: int
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.ranks = ranks
        self.reference = reference
        self.total_steps = total_steps
        self.loss = PolicyLoss(settings)
        self.optimizer = torch.optim.AdamW(
            [p for p in policy.parameters() if p.requires_grad],
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            weight_decay=settings.weight_decay,
        )

    def update(
        self,
        groups: Sequence[TrainingGroup],
        step: int,
        *,
        n_steps: int = 1,
        should_stop: Callable[[], bool] | None = None,
    ) -> UpdateResult:
        """Make ``n_steps`` optimizer steps, each on an equal share of ``groups``.

        Groups with token ids outside the model's vocabulary are left out and counted. A share in which every advantage
        is 0 is not computed, unless the loss has KL or entropy. An optimizer step whose loss or gradient is not finite
        leaves policy and optimizer unchanged and is counted.

        Args:
            groups: all groups to train on, fresh and replayed; every rank passes the same.
            step: number of the training step, for the learning rate.
            n_steps: optimizer steps.
            should_stop: called on every rank between the micro-batches before the first optimizer step.

        Raises:
            StopRequestedError: ``should_stop`` was true on some rank; nothing has changed.
        """
        started = time.perf_counter()
        rate = learning_rate(self.settings, step, self.total_steps)
        known = [group for group in groups if self._knows(group)]
        parts = [self._part(known[i::n_steps]) for i in range(n_steps)]
        # With one optimizer step theta is the proximal policy, and its log-probabilities come with the gradient.
        is_decoupled = n_steps > 1 and self.settings.importance_correction is not ImportanceCorrection.NONE
        proximal = [self._logprobs(part) if is_decoupled else None for part in parts]
        result = UpdateResult(refused=len(groups) - len(known))
        counts: Counter[str] = Counter()
        for part, part_proximal in zip(parts, proximal, strict=True):
            if not part.own:
                continue
            metrics = self._optimizer_step(part, part_proximal, rate, None if result.steps else should_stop)
            result.steps += 1
            result.tokens += part.tokens
            result.skipped += int(not _is_finite(metrics))
            add_up(result.metrics, metrics)
            counts.update(metrics.keys())
        result.metrics = {name: value / counts[name] for name, value in result.metrics.items()}
        result.metrics |= {"learning_rate": rate, "groups_refused": float(result.refused)}
        result.seconds = time.perf_counter() - started
        return result

    def logprobs(
        self, groups: Sequence[TrainingGroup], temperature: float | None = None, *, use_adapters: bool = True
    ) -> list[TokenNumbers]:
        """Return the policy's log-probabilities of the groups' trained tokens, on every rank.

        Args:
            groups: the groups; the ranks share them.
            temperature: of the distribution; without it, TEMPERATURE.
            use_adapters: compute with the LoRA adapters, if there are any.
        """
        with nullcontext() if use_adapters else self.policy.without_adapters():
            return self._token_numbers(groups, lambda batch: cast("Tensor", self.policy(batch, temperature)[0]))

    def reference_logprobs(self, groups: Sequence[TrainingGroup]) -> list[TokenNumbers]:
        """Return the reference's log-probabilities of the groups' trained tokens at TEMPERATURE, on every rank."""
        return self._token_numbers(groups, self._reference_logprobs)

    @torch.no_grad()
    def _token_numbers(
        self, groups: Sequence[TrainingGroup], compute: Callable[[MicroBatch], Tensor]
    ) -> list[TokenNumbers]:
        """Return ``compute`` of the trained tokens by group, completion and token; the ranks share the work."""
        places = {id(s): (i, j) for i, group in enumerate(groups) for j, s in enumerate(group.sequences)}
        own: list[tuple[int, int, list[float]]] = []
        shares = share_out(groups, self.ranks.world_size, self.settings.micro_batch_tokens)
        for pieces in shares[self.ranks.rank]:
            values = compute(self._packed(pieces)).cpu()
            sequences = [s for piece in pieces for s in piece.sequences]
            parts = values.split([s.trained_tokens for s in sequences]) if sequences else ()
            own += [(*places[id(s)], part.tolist()) for s, part in zip(sequences, parts, strict=True)]
        result: list[TokenNumbers] = [[[] for _ in group.sequences] for group in groups]
        for i, j, numbers in (entry for entries in self.ranks.gather_json(own) for entry in entries):
            result[i][j] = numbers
        return result

    def _knows(self, group: TrainingGroup) -> bool:
        vocabulary = self.policy.config.vocab_size
        unknown = [i for ids in group.all_ids() for i in ids if not 0 <= i < vocabulary]
        if unknown and self.ranks.is_main:
            log.warning(
                "group left out: token ids outside the model's vocabulary",
                group_id=group.group_id,
                ids=unknown[:8],
                vocabulary=vocabulary,
            )
        return not unknown

    def _part(self, groups: Sequence[TrainingGroup]) -> _Part:
        needs_all = self.settings.entropy_coef != 0 or (self.settings.kl_coef != 0 and not self.settings.kl_in_reward)
        trainable = [g for g in groups if needs_all or g.mean_absolute_advantage]
        shares = share_out(trainable, self.ranks.world_size, self.settings.micro_batch_tokens)
        return _Part(
            own=shares[self.ranks.rank],
            size=StepSize(
                tokens=sum(g.trained_tokens for g in groups),
                sequences=sum(s.trained_tokens > 0 for g in groups for s in g.sequences),
            ),
            tokens=sum(piece.tokens for batches in shares for pieces in batches for piece in pieces),
        )

    @torch.no_grad()
    def _logprobs(self, part: _Part) -> list[Tensor]:
        return [self.policy(self._packed(pieces))[0] for pieces in part.own]

    def _packed(self, pieces: Sequence[TrainingGroup]) -> MicroBatch:
        return pack(pieces).to(self.ranks.device)

    def _optimizer_step(
        self,
        part: _Part,
        proximal: list[Tensor] | None,
        rate: float,
        should_stop: Callable[[], bool] | None,
    ) -> dict[str, float]:
        diagnostics, policy = Diagnostics(), cast("FSDPModule", self.policy)
        for index, pieces in enumerate(part.own):
            if should_stop is not None and self.ranks.any(should_stop()):
                self.optimizer.zero_grad()
                _reshard(self.policy)
                raise StopRequestedError
            # With SHARD_PARAMETERS every micro-batch reduces its gradients and frees them and the gathered parameters;
            # otherwise only the last micro-batch does.
            is_last = index == len(part.own) - 1
            policy.set_requires_gradient_sync(is_last or self.settings.shard_parameters)
            policy.set_reshard_after_backward(is_last or self.settings.shard_parameters)
            policy.set_is_last_backward(is_last)
            before = proximal[index] if proximal else None
            diagnostics.add(self._backward(self._packed(pieces), part.size, before))
        total, maximum = self.ranks.total, self.ranks.maximum
        diagnostics = Diagnostics(total(diagnostics.sums), maximum(diagnostics.maxima))
        metrics = diagnostics.metrics()
        metrics["grad_norm"] = self._clip()
        if _is_finite(metrics):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self.optimizer.zero_grad()
        return metrics

    def _backward(self, batch: MicroBatch, size: StepSize, proximal: Tensor | None) -> Diagnostics:
        has_kl = self.settings.kl_coef != 0 and not self.settings.kl_in_reward
        reference = self._reference_logprobs(batch) if has_kl else None
        logprobs, entropies = self.policy(batch)
        loss, diagnostics = self.loss(
            batch, logprobs, entropies, size, proximal_logprobs=proximal, reference_logprobs=reference
        )
        if batch.is_filler:
            loss = logprobs.sum() * 0.0
        # FSDP averages gradients over the ranks, but the denominators of the loss count all ranks already.
        (loss * self.ranks.world_size).backward()
        return diagnostics

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        if self.reference is not None:
            return cast("Tensor", self.reference(batch)[0])
        with self.policy.without_adapters():
            return cast("Tensor", self.policy(batch)[0])

    def _clip(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(
            [p for p in self.policy.parameters() if p.requires_grad], self.settings.max_grad_norm
        )
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _reshard(policy: Policy) -> None:
    """Free gathered parameters, so that only the shards remain."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _is_finite(metrics: dict[str, float]) -> bool:
    return math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])


def learning_rate(settings: TrainerSettings, step: int, total_steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then constant, or linear or cosine decay to 0.

    Args:
        settings: LEARNING_RATE, LR_SCHEDULE and WARMUP_STEPS.
        step: the step, counted from 0.
        total_steps: the steps of the whole run.
    """
    peak, warmup = settings.learning_rate, settings.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(total_steps - warmup, 1)
    match settings.lr_schedule:
        case Schedule.CONSTANT:
            return peak
        case Schedule.LINEAR:
            return peak * max(1 - progress, 0.0)
        case Schedule.COSINE:
            return peak * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
