"""The KL penalty in value and gradient, and the mean over a step, against their formulas in float64."""

from __future__ import annotations

import itertools
import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.algorithm.formulas import distributions, gradient_of, losses_by_formula
from tests.trainer.ragged import Ragged, random_ragged
from trainer.algorithm.loss import KL_LIMIT, StepSize, aggregate, k3, kl_penalty
from trainer.algorithm.methods import Aggregation

SEEDS = range(5)


@pytest.mark.parametrize("seed", SEEDS)
def test_k3_is_the_formula(seed: int) -> None:
    batch = random_ragged(seed)
    expected = losses_by_formula(batch, "reference", lambda new, ref, _: math.exp(ref - new) - (ref - new) - 1)
    torch.testing.assert_close(k3(batch.packed("theta"), batch.packed("reference")), expected, rtol=1e-9, atol=1e-12)


def test_k3_of_nearly_equal_policies_is_not_lost_to_rounding() -> None:
    theta = torch.tensor([-1.0, -2.0])
    torch.testing.assert_close(k3(theta, theta + 2e-3), torch.full((2,), 2e-6), rtol=1e-2, atol=0)


def test_the_penalty_averages_to_the_divergence_and_its_gradient_to_the_divergences_gradient() -> None:
    """Exactly, over tokens that an older policy sampled, with the importance weight of each."""
    logits, reference, behaviour = distributions(3, 50)
    logits.requires_grad_()

    def divergence(x: Tensor) -> Tensor:
        theta = x.log_softmax(0)
        return (theta.exp() * (theta - reference)).sum()

    def penalty(x: Tensor) -> Tensor:
        theta = x.log_softmax(0)
        weights = (theta - behaviour).exp().detach()
        return (behaviour.exp() * kl_penalty(theta, reference, weights)).sum()

    torch.testing.assert_close(penalty(logits), divergence(logits))
    torch.testing.assert_close(gradient_of(penalty, logits.detach()), gradient_of(divergence, logits.detach()))


def test_one_token_cannot_outweigh_the_others() -> None:
    theta = torch.tensor([-9.0], dtype=torch.float64)
    penalty = kl_penalty(theta, torch.zeros(1, dtype=torch.float64), torch.ones(1))
    assert penalty.item() == KL_LIMIT < 8093
    gradient = gradient_of(lambda x: kl_penalty(x, torch.full((1,), 40.0), torch.ones(1)), theta)
    assert gradient.item() == -KL_LIMIT


def test_no_gradient_flows_through_the_reference() -> None:
    theta, reference = (torch.tensor([x], requires_grad=True) for x in (-1.0, -1.5))
    kl_penalty(theta, reference, torch.ones(1)).backward()
    assert reference.grad is None
    assert theta.grad is not None


G = 3
"""Completions of a group."""


def aggregated(losses: Tensor, batch: Ragged, method: Aggregation, start: int = 0, end: int | None = None) -> Tensor:
    """Aggregate the losses of the completions from ``start`` to ``end`` of a step that is the batch."""
    end = batch.n_sequences if end is None else end
    ids = batch.sequence_ids
    own = (ids >= start) & (ids < end)
    of_groups = torch.tensor([sum(batch.lengths[i : i + G]) for i in range(0, batch.n_sequences, G)])
    part = micro_batch(ids[own] - start, end - start, of_groups[ids[own] // G])
    step = StepSize(sum(batch.lengths), batch.n_sequences, groups=int((of_groups > 0).sum()))
    return aggregate(losses[own], part, method, step, 17)


def micro_batch(sequence_ids: Tensor, n_sequences: int, group_tokens: Tensor) -> Any:
    """Return a micro-batch as far as an aggregation reads it."""
    return SimpleNamespace(sequence_ids=sequence_ids, n_sequences=n_sequences, group_tokens=group_tokens)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", list(Aggregation))
def test_aggregations_are_the_formulas(seed: int, method: Aggregation) -> None:
    batch = random_ragged(seed)
    rows = batch.rows["theta"]
    total = math.fsum(x for row in rows for x in row)
    groups = [[x for row in rows[i : i + G] for x in row] for i in range(0, len(rows), G)]
    expected = {
        Aggregation.TOKEN_MEAN: total / sum(batch.lengths),
        Aggregation.PROMPT_MEAN: statistics.fmean(statistics.fmean(group) for group in groups if group),
        Aggregation.SEQUENCE_MEAN: math.fsum(statistics.fmean(row) for row in rows if row) / len(rows),
        Aggregation.CONSTANT_LENGTH: total / (len(rows) * 17),
    }[method]
    assert aggregated(batch.packed("theta"), batch, method).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("method", list(Aggregation))
@settings(max_examples=50)
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(0, 9), max_size=3))
def test_a_step_cut_into_micro_batches_adds_up_to_the_same_loss(
    method: Aggregation, seed: int, cuts: list[int]
) -> None:
    batch = random_ragged(seed)
    losses = batch.packed("theta")
    bounds = itertools.pairwise([0, *sorted(cuts), batch.n_sequences])
    parts = [aggregated(losses, batch, method, start, end) for start, end in bounds]
    torch.testing.assert_close(sum(parts), aggregated(losses, batch, method), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", list(Aggregation))
def test_the_loss_of_no_tokens_is_0_and_can_be_differentiated(method: Aggregation) -> None:
    losses, none = torch.tensor([], requires_grad=True), torch.tensor([]).long()
    result = aggregate(losses, micro_batch(none, 0, none), method, StepSize(0, 0), 1)
    result.backward()
    assert result.item() == 0
