"""GAE and the critic's loss against verl 0.9.1's own functions, on random ragged batches; `make test-oracles` runs it.

TRL 1.16 has no PPO any more.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.algorithm.test_oracles import CLOSE, SEEDS, oracle
from tests.trainer.ragged import Ragged, random_ragged
from trainer.algorithm import gae

pytestmark = pytest.mark.oracles


@pytest.fixture(scope="module")
def verl() -> Any:
    return oracle("verl.trainer.ppo.core_algos")


def padded(batch: Ragged, packed: Tensor) -> Tensor:
    """[S, L], 1.25 where there is no token."""
    matrix = torch.full(batch.mask.shape, 1.25, dtype=torch.float64)
    matrix[batch.mask.bool()] = packed.double()
    return matrix


def random_episode(seed: int) -> tuple[Ragged, Tensor, Tensor, Tensor]:
    """Return a batch with rewards, values and a loss mask [N]: a reward a sampled token, none at an observation."""
    batch = random_ragged(seed)
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(batch.lengths), dtype=torch.float64, generator=generator)
    loss_mask = torch.rand(len(rewards), generator=generator) < 0.7
    return batch, rewards * loss_mask, values, loss_mask


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.9, 0.0)])
def test_advantages_and_returns_are_verls(verl: Any, seed: int, gamma: float, lam: float) -> None:
    batch, rewards, values, loss_mask = random_episode(seed)
    response_mask = padded(batch, loss_mask) * batch.mask
    expected, returns = verl.compute_gae_advantage_return(
        padded(batch, rewards) * batch.mask, padded(batch, values), response_mask, gamma, lam
    )
    advantages = gae.generalized_advantages(rewards, values, batch.sequence_ids, loss_mask, gamma, lam)
    targets = gae.value_targets(advantages, values)
    torch.testing.assert_close(targets[loss_mask], batch.unpadded(returns)[loss_mask], **CLOSE)
    ours = gae.whitened(advantages, loss_mask)
    torch.testing.assert_close(ours[loss_mask], batch.unpadded(expected)[loss_mask], **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", [0.2, 0.5])
def test_the_value_loss_is_verls_in_value_and_gradient(verl: Any, seed: int, clip: float) -> None:
    batch, returns, old, loss_mask = random_episode(seed)
    noise = torch.Generator().manual_seed(seed + 100)
    values = old + 0.4 * torch.randn(len(old), dtype=torch.float64, generator=noise)
    theirs, ours = padded(batch, values).requires_grad_(), values.clone().requires_grad_()
    response_mask = padded(batch, loss_mask) * batch.mask
    expected, fraction = verl.compute_value_loss(
        theirs, padded(batch, returns), padded(batch, old), response_mask, cliprange_value=clip
    )
    losses, is_clipped = gae.value_loss(ours, old, returns, clip)
    loss = losses[loss_mask].sum() / loss_mask.sum()
    torch.testing.assert_close(loss, expected, **CLOSE)
    torch.testing.assert_close(is_clipped[loss_mask].double().mean(), fraction.double(), **CLOSE)
    (gradient,) = torch.autograd.grad(loss, ours)
    (their_gradient,) = torch.autograd.grad(expected, theirs)
    torch.testing.assert_close(gradient, batch.unpadded(their_gradient), **CLOSE)
