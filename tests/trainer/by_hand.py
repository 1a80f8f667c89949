"""The update as the papers have it, on a plain transformers model: one forward pass a completion, no packing, no
sharding, no chunks; autograd and AdamW do the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.protocol.groups import TokenSequence
from tests.trainer.rank_jobs import Arrays, array
from tests.trainer.tiny import plain_forward, plain_model
from trainer.algorithm.packing import TrainingGroup
from trainer.config import TrainerSettings
from trainer.model.micro_batching import part_order
from trainer.model.optimizer import ADAM_BETA1


@dataclass
class Hand:
    """Gradients of the last optimizer step before clipping, its loss, and the weights afterwards."""

    gradients: Arrays
    weights: Arrays
    loss: float
    grad_norm: float


def update(
    directory: Path,
    groups: Sequence[TrainingGroup],
    settings: TrainerSettings,
) -> Hand:
    """Update by the clipped surrogate with token mean; decoupled if there is a correction."""
    model, reference = plain_model(directory), plain_model(directory)
    named = list(model.named_parameters())
    undecayed = [p for name, p in named if "norm" in name or name.endswith("bias")]
    decayed = [p for name, p in named if not ("norm" in name or name.endswith("bias"))]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": undecayed, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(ADAM_BETA1, settings.adam_beta2),
        eps=settings.adam_eps,
    )
    n_parts = settings.updates_per_batch
    parts = [groups[i::n_parts] for i in range(n_parts)]
    with torch.no_grad():
        proximal = [_forward(model, part, settings) for part in parts]
    decoupled = settings.importance_correction == "truncated"
    for number in part_order(settings, 0):
        part, before = parts[number], proximal[number]
        with torch.no_grad():
            references = _forward(reference, part, settings)
        optimizer.zero_grad()
        now = _forward(model, part, settings)
        sequences = [(group.weight, s) for group in part for s in group.sequences]
        losses = [
            weight * _token_losses(sequence, settings, decoupled, *(x[i] for x in (now, before, references)))
            for i, (weight, sequence) in enumerate(sequences)
        ]
        loss = torch.cat(losses).sum() / sum(len(s.completion_ids) for _, s in sequences)
        loss.backward()
        gradients = {name: array(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
    weights = {name: array(p) for name, p in model.named_parameters()}
    return Hand(gradients, weights, loss.item(), norm.item())


Forward = list[tuple[Tensor, Tensor]]


def _forward(model: PreTrainedModel, groups: Sequence[TrainingGroup], settings: TrainerSettings) -> Forward:
    return [x for group in groups for x in plain_forward(model, group, settings.temperature)]


def _token_losses(
    sequence: TokenSequence,
    settings: TrainerSettings,
    decoupled: bool,
    now: tuple[Tensor, Tensor],
    before: tuple[Tensor, Tensor],
    reference: tuple[Tensor, Tensor],
) -> Tensor:
    (logprobs, entropies), proximal = now, before[0]
    advantages, behaviour = (
        torch.tensor(numbers.tolist()) for numbers in (sequence.per_token["advantages"], sequence.logprobs)
    )
    stale = (logprobs.detach() - behaviour).exp()
    weight, old = torch.tensor(1.0), behaviour
    if decoupled:
        weight, old = (proximal - behaviour).exp().clamp(max=settings.importance_cap or 2.0), proximal
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - 0.2, 1 + (settings.clip_high or 0.2))
    losses = -weight * torch.minimum(ratio * advantages, clipped * advantages)
    # Differentiated through the ratio, the penalty has the gradient of the divergence.
    d = reference[0] - logprobs
    capped = (logprobs - behaviour).exp() * (stale.clamp(max=2.0) / stale)
    return losses + settings.kl_coef * capped * (d.exp() - d - 1) - settings.entropy_coef * entropies
