"""An optimizer step on the gradients of a rank's micro-batches, and its learning rate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer.algorithm.loss import Diagnostics
from trainer.config import Schedule, TrainerSettings
from trainer.model.ranks import Ranks
from trainer.model.sharding import reshard

ADAM_BETA1 = 0.9
HEAD_GROUPS = 2
"""Parameter groups of a value head: its matrix and its bias."""


class StopRequestedError(Exception):
    """A request to stop in the middle of an update; the weights are as they were before the update."""


def make_optimizer(settings: TrainerSettings, module: nn.Module) -> torch.optim.AdamW:
    """Return an AdamW for the trainable parameters of a module, a ``value_head`` among them.

    Weight decay applies to matrices, not to norms' weights and to biases: these vectors set the scale of activations,
    and decay would pull it to 0 whatever the gradient. The value head is the last HEAD_GROUPS parameter groups.
    """
    trained = [(name.startswith("value_head."), p) for name, p in module.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = []
    for wants_head in (False, True):
        part = [p for is_head, p in trained if is_head is wants_head]
        groups.append({"params": [p for p in part if p.ndim > 1]})
        groups.append({"params": [p for p in part if p.ndim <= 1], "weight_decay": 0.0})
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(ADAM_BETA1, settings.adam_beta2),
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


@dataclass
class Training:
    """A module in training, sharded by FSDP2, with its optimizer. Its methods are collectives of all ranks."""

    settings: TrainerSettings
    """SHARD_PARAMETERS and MAX_GRAD_NORM."""
    ranks: Ranks
    module: nn.Module
    optimizer: torch.optim.Optimizer
    should_stop: Callable[[], bool] | None = None
    """Called on every rank before each pass of an update's first step, which ends if it is true on some rank."""

    def take_steps(
        self, steps: Sequence[Sequence[Callable[[], Diagnostics]]], rates: Sequence[float]
    ) -> list[dict[str, float]]:
        """Take an optimizer step on the summed gradients of each of ``steps`` that has passes; return their metrics.

        A step whose loss or gradient is not finite leaves module and optimizer unchanged; see ``is_finite``.

        Args:
            steps: this rank's micro-batches of each step, forward and backward passes; every rank has equally many.
            rates: the learning rate of each of the optimizer's parameter groups.

        Raises:
            StopRequestedError: ``should_stop`` was true on some rank; nothing has changed.
        """
        metrics: list[dict[str, float]] = []
        for passes in filter(None, steps):
            diagnostics = self.add_gradients(passes, may_stop=not metrics)
            metrics.append(self.take_step(diagnostics, rates))
        return metrics

    def add_gradients(self, passes: Sequence[Callable[[], Diagnostics]], *, may_stop: bool = True) -> Diagnostics:
        """Add the gradients of ``passes`` to those of the module; return this rank's diagnostics. See ``take_steps``.

        Raises:
            StopRequestedError: ``should_stop`` was true on some rank; the module has no gradients any more.
        """
        diagnostics, sharded = Diagnostics(), cast("FSDPModule", self.module)
        for index, compute in enumerate(passes):
            if may_stop and self.should_stop is not None and self.ranks.any(self.should_stop()):
                reshard(self.module)
                self.optimizer.zero_grad()
                raise StopRequestedError
            # With SHARD_PARAMETERS every micro-batch reduces its gradients and frees them and the gathered parameters;
            # otherwise only the last micro-batch does.
            is_last = index == len(passes) - 1
            frees = is_last or self.settings.shard_parameters is not False
            # Replicas of the shards add up their gradients once, after the last micro-batch.
            sharded.set_requires_gradient_sync(frees)
            sharded.set_reshard_after_backward(frees)
            sharded.set_requires_all_reduce(is_last)
            sharded.set_is_last_backward(is_last)
            computed = compute()
            # Every rank of a context group has the same.
            if self.ranks.context.rank == 0:
                diagnostics.add(computed)
        return diagnostics

    def take_step(self, diagnostics: Diagnostics, rates: Sequence[float], denominator: int = 1) -> dict[str, float]:
        """Take one optimizer step on the gradients that the module has, and return its metrics. See ``take_steps``.

        Args:
            diagnostics: this rank's diagnostics of the passes that made the gradients.
            rates: the learning rate of each of the optimizer's parameter groups.
            denominator: the number by which gradients and loss are divided first.
        """
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if denominator != 1:
            for gradient in (parameter.grad for parameter in trained):
                if gradient is not None:
                    gradient.div_(denominator)
            if "loss" in diagnostics.sums:
                diagnostics.sums["loss"] = diagnostics.sums["loss"] / denominator
        norm = torch.nn.utils.clip_grad_norm_(trained, self.settings.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        # The fused optimizer leaves out the step by itself, so the host need not wait for the numbers before it.
        cast("Any", self.optimizer).found_inf = 1.0 - _all_finite(diagnostics, norm, self.ranks).float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return diagnostics.metrics(self.ranks.total, self.ranks.maximum) | {"grad_norm": norm.item()}


def _all_finite(diagnostics: Diagnostics, norm: Tensor, ranks: Ranks) -> Tensor:
    """Return whether the loss of all ranks and the gradient's norm are finite, a scalar bool beside the gradients."""
    loss = diagnostics.sums.get("loss", torch.zeros_like(norm)).to(torch.float64, copy=True)
    if ranks.world_size > 1:
        dist.all_reduce(loss)
    return loss.isfinite().to(norm.device) & norm.isfinite()


def is_finite(metrics: Mapping[str, float]) -> bool:
    """Return whether the loss and the gradient of an optimizer step are finite."""
    return math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])


def over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each metric over the optimizer steps that have it: its mean, and of extreme ratios the most extreme."""
    by_name: dict[str, list[float]] = {}
    for metrics in steps:
        for name, value in metrics.items():
            by_name.setdefault(name, []).append(value)
    return {name: _combination(name)(values) for name, values in by_name.items()}


def _combination(name: str) -> Callable[[Sequence[float]], float]:
    if name.endswith("ratio_max"):
        return max
    return min if name.endswith("ratio_min") else statistics.fmean


def learning_rate(
    settings: TrainerSettings,
    step: int,
    total_steps: int,
    peak: float | None = None,
    position: float | None = None,
) -> float:
    """Return the learning rate of a step: linear warm-up, then constant, or linear or cosine decay to 0.

    Args:
        settings: LEARNING_RATE, LR_SCHEDULE and WARMUP_STEPS.
        step: the step, counted from 0.
        total_steps: the steps of the whole run.
        peak: the highest rate, LEARNING_RATE by default.
        position: where the decay is among the steps; by default at the step itself.
    """
    peak, warmup = settings.learning_rate if peak is None else peak, settings.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = ((step if position is None else position) - warmup) / max(total_steps - warmup, 1)
    match settings.lr_schedule:
        case Schedule.CONSTANT:
            return peak
        case Schedule.LINEAR:
            return peak * max(1 - progress, 0.0)
        case Schedule.COSINE:
            return peak * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
