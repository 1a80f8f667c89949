"""Losses worked out token by token in float64, and derivatives, to compare the packed functions with."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.trainer.ragged import Ragged, Rows, pack_rows
from trainer.algorithm.policy_losses import LossTokens


def loss_tokens(batch: Ragged, theta: Tensor | None = None, old: str = "old") -> LossTokens:
    """Return the batch as a policy loss sees it, with ``theta`` instead of its own if given."""
    return LossTokens(
        logprobs=batch.packed("theta") if theta is None else theta,
        old_logprobs=batch.packed(old),
        advantages=batch.packed("advantage"),
        sequence_ids=batch.sequence_ids,
        n_sequences=batch.n_sequences,
    )


def losses_by_formula(batch: Ragged, old: str, loss: Callable[[float, float, float], float]) -> Tensor:
    """[N] ``loss(log pi, log pi_old, advantage)`` of every token."""
    rows: Rows = []
    for own, olds, advantages in zip(batch.rows["theta"], batch.rows[old], batch.rows["advantage"], strict=True):
        rows.append([loss(*token) for token in zip(own, olds, advantages, strict=True)])
    return pack_rows(rows)


def clamped_ratio(new: float, old: float) -> float:
    return math.exp(min(max(new - old, -20.0), 20.0))


def gradient_of(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """[N] derivative of the sum of ``loss``."""
    at = at.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(at).sum(), at)
    return gradient


def distributions(n: int, tokens: int) -> list[Tensor]:
    """Return ``n`` log-probability distributions over so many tokens, not far from each other."""
    common = torch.randn(tokens, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    noise = [torch.randn(tokens, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(n)]
    return [(common + 0.3 * x).log_softmax(0) for x in noise]
