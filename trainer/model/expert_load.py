"""The load of a mixture's experts: how evenly the routers share the trained tokens among them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.algorithm.attention_layout import PathRows
from trainer.algorithm.packing import MicroBatch
from trainer.model.ranks import Ranks

COLUMN = "expert_max_violation"
"""The metric's name in metrics.jsonl."""


class ExpertLoad:
    """Counts of the tokens that each layer's routers send to each expert.

    Counted are the states that predict trained tokens, once for each token. So padding and repeated prompts do not
    count, and layouts, micro-batches and ranks make no difference.
    """

    def __init__(self, model: nn.Module) -> None:
        """Watch the mixtures of a model: the modules with transformers' interface of experts."""
        self._mixtures: list[Any] = [
            part for part in model.modules() if hasattr(part, "has_gate") and hasattr(part, "num_experts")
        ]
        for mixture in self._mixtures:
            mixture.token_weights = mixture.expert_tokens = None
            mixture.register_forward_pre_hook(_count)

    @contextmanager
    def counting(self, batch: MicroBatch) -> Iterator[None]:
        """Count, within the context, what a forward pass with gradient chooses; its recomputation counts nothing."""
        if not self._mixtures or not torch.is_grad_enabled():
            yield
            return
        weights = _token_weights(batch)
        for mixture in self._mixtures:
            mixture.token_weights = weights
            if mixture.expert_tokens is None:
                mixture.expert_tokens = weights.new_zeros(mixture.num_experts)
        yield
        weights.zero_()

    def clear(self) -> None:
        """Forget the counts."""
        for mixture in self._mixtures:
            mixture.expert_tokens = None

    def take(self, ranks: Ranks) -> dict[str, float]:
        """Return the metric of what all ranks have counted, empty if that is nothing, and forget it. A collective.

        It is MaxVio, the largest load of an expert over the mean load, less 1 (Wang et al. 2024, arXiv:2408.15664), as
        a mean over the layers: 0 if all experts have equally much to do.
        """
        counts = [mixture.expert_tokens for mixture in self._mixtures if mixture.expert_tokens is not None]
        self.clear()
        if not counts:
            return {}
        total = torch.stack(ranks.gather_vectors(torch.cat(counts).cpu())).sum(0)
        loads = [load / load.mean() for load in total.split([len(count) for count in counts]) if load.any()]
        return {COLUMN: float(torch.stack([load.max() for load in loads]).mean()) - 1} if loads else {}


def _token_weights(batch: MicroBatch) -> Tensor:
    """Return how many trained tokens the state of each token of a forward pass predicts, float64."""
    rows, size = batch.predict_rows, len(batch.input_ids)
    if isinstance(batch.layout, PathRows):
        rows, size = batch.layout.places[rows], batch.layout.paths.numel()
    counts = torch.zeros(size, dtype=torch.float64, device=rows.device)
    return (
        counts
        if batch.is_filler
        else counts.index_add_(0, rows[batch.state_ids], counts.new_ones(len(batch.state_ids)))
    )


def _count(mixture: Any, arguments: tuple[Any, ...]) -> None:
    """Add the weights of tokens to the counts of the experts [T, K] that were chosen for them."""
    if torch.is_grad_enabled() and mixture.token_weights is not None and len(arguments) > 1:
        chosen = arguments[1].long()
        weights = mixture.token_weights[:, None].expand(-1, chosen.shape[-1])
        mixture.expert_tokens.scatter_add_(0, chosen.flatten(), weights.flatten())
