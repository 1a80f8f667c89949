"""Log-probabilities of given tokens, computed a chunk of tokens at a time.

Logits [N, V] in float32 would take more memory than everything else in a step (N = 16,000 and V = 152,000: 10 GB). So
they exist for one chunk of tokens at a time, and the backward pass computes them again, except for the last chunk,
whose logits still exist when it begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LOGIT_CHUNK_TOKENS = 256
"""Tokens whose logits exist at the same time: 156 MB for 152,000 tokens of vocabulary, and enough rows to keep matrix
products fast."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk_tokens: int = LOGIT_CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(hidden weight^T / temperature) at ``targets``, and the entropy of that distribution.

    Both are differentiable with respect to ``hidden`` and ``weight``.

    Args:
        hidden: [N, D] float32 or bfloat16, the hidden states that predict the targets.
        weight: [V, D] output embedding, of the same type.
        targets: [N] int64.
        temperature: temperature of the sampling distribution.
        chunk_tokens: tokens whose logits exist at the same time.

    Returns:
        logprobs [N] float32 and entropies [N] float32 (in nats).
    """
    return _apply(hidden, weight, targets, temperature, chunk_tokens)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        normalisers = torch.empty_like(logprobs)
        space, log_p = _Space(hidden, weight, chunk_tokens), None
        for rows in _chunks(targets, chunk_tokens):
            logits = space.logits(hidden[rows], weight, targets[rows], temperature)
            normalisers[rows] = logits.logsumexp(1)
            log_p = logits.sub_(normalisers[rows, None])
            logprobs[rows] = log_p.gather(1, targets[rows, None]).squeeze(1)
            entropies[rows] = -torch.linalg.vecdot(space.exp(log_p), log_p)
        ctx.save_for_backward(hidden, weight, targets, normalisers, entropies)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.last = space, log_p
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        logprob_gradient, entropy_gradient = gradients
        hidden, weight, targets, normalisers, entropies = ctx.saved_tensors
        if logprob_gradient is None:
            logprob_gradient = torch.zeros_like(normalisers)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
        # Accumulated in float32, whatever the compute type.
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        # The first backward pass uses up the last chunk; another backward pass computes all logits again.
        space, log_p = ctx.last or (_Space(hidden, weight, ctx.chunk_tokens), None)
        ctx.last = None
        for rows in reversed(_chunks(targets, ctx.chunk_tokens)):
            if log_p is None:
                logits = space.logits(hidden[rows], weight, targets[rows], ctx.temperature)
                log_p = logits.sub_(normalisers[rows, None])
            p = space.exp(log_p)
            # d logp[target] / d logits = onehot - p;  d H / d logits = -p (log p + H)
            if entropy_gradient is None:
                gradient = p.mul_(-logprob_gradient[rows, None])
            else:
                scale = log_p.add_(entropies[rows, None]).mul_(entropy_gradient[rows, None])
                gradient = p.mul_(scale.add_(logprob_gradient[rows, None])).neg_()
            gradient.scatter_add_(1, targets[rows, None], logprob_gradient[rows, None])
            if ctx.temperature != 1:
                gradient.div_(ctx.temperature)
            gradient = gradient.to(hidden.dtype)
            if hidden_gradient is not None:
                torch.mm(gradient, weight, out=hidden_gradient[rows])
            if weight_gradient is not None:
                _add_product(weight_gradient, gradient.T, hidden[rows])
            log_p = None
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        return hidden_gradient, weight_gradient, None, None, None


def _chunks(targets: Tensor, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, len(targets), chunk_tokens)]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to ``total``, without a temporary of its size where the types allow."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


class _Space:
    """Two buffers of the size of one chunk's logits, which every chunk uses again.

    On a CPU, allocating new memory for each chunk takes as much time as computing the logits.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, chunk_tokens: int) -> None:
        shape = (min(len(hidden), chunk_tokens), len(weight))
        self._logits = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
        self._other = torch.empty(shape, dtype=torch.float32, device=hidden.device)

    def logits(self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Return hidden weight^T / temperature less a constant a row, [n, V] float32; valid until the next call.

        Softmax does not depend on the constant. In float32 it is 0, in bfloat16 about the target's logit: the product
        is accumulated in float32, and rounded to bfloat16 once, after the constant was subtracted. Rounding changes a
        logit of 20 by up to 0.06. The shift brings the logits of the target and of likely tokens close to 0, where
        rounding changes them little.
        """
        logits = self._logits[: len(hidden)]
        if hidden.dtype == torch.float32:
            torch.mm(hidden, weight.T, out=logits)
        else:
            shift = torch.linalg.vecdot(hidden, weight[targets]).neg_()
            logits = logits.copy_(shift[:, None]).addmm_(hidden, weight.T).float()
        return logits if temperature == 1 else logits.div_(temperature)

    def exp(self, values: Tensor) -> Tensor:
        """Return exp of float32 values of the shape of the logits; valid until the next call."""
        return torch.exp(values, out=self._other[: len(values)])


_apply: Callable[[Tensor, Tensor, Tensor, float, int], tuple[Tensor, Tensor]] = _TokenLogprobs.apply
