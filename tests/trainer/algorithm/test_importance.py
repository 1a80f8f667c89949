"""Importance weights and masks against their formulas, written out token by token in float64."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from tests.trainer.algorithm.formulas import losses_by_formula
from tests.trainer.ragged import pack_rows, random_ragged
from trainer.algorithm.methods import ImportanceCorrection
from trainer.algorithm.policy_losses import importance_weights, off_policy_mask, sequence_means

SEEDS = range(5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("correction", list(ImportanceCorrection))
def test_weights_are_the_formulas(seed: int, correction: ImportanceCorrection) -> None:
    batch = random_ragged(seed, spread=0.7)
    totals = [
        sum(new - old for new, old in zip(news, olds, strict=True))
        for news, olds in zip(batch.rows["theta"], batch.rows["behaviour"], strict=True)
    ]
    by_sequence = {
        ImportanceCorrection.SEQUENCE: [min(math.exp(total), 2.0) for total in totals],
        ImportanceCorrection.GEOMETRIC: [
            float(1 / 1.3 <= math.exp(total / max(length, 1)) <= 1.3)
            for total, length in zip(totals, batch.lengths, strict=True)
        ],
    }

    def by_token(new: float, old: float, _: float) -> float:
        ratio = math.exp(new - old)
        if correction is ImportanceCorrection.ICEPOP:
            return ratio if 0.5 <= ratio <= 5.0 else 0.0
        return min(ratio, 2.0)

    match correction:
        case ImportanceCorrection.NONE:
            expected = torch.ones(sum(batch.lengths), dtype=torch.float64)
        case ImportanceCorrection.SEQUENCE:
            expected = pack_rows([[w] * n for w, n in zip(by_sequence[correction], batch.lengths, strict=True)])
        case ImportanceCorrection.GEOMETRIC:
            kept = pack_rows([[w] * n for w, n in zip(by_sequence[correction], batch.lengths, strict=True)])
            expected = kept * losses_by_formula(batch, "behaviour", by_token)
            assert {0.0, 1.0} == set(by_sequence[correction]), "some completions are left out, and some kept"
        case _:
            expected = losses_by_formula(batch, "behaviour", by_token)
    weights = importance_weights(
        correction,
        batch.packed("theta").requires_grad_(),
        batch.packed("behaviour"),
        batch.sequence_ids,
        batch.n_sequences,
        1.3 if correction is ImportanceCorrection.GEOMETRIC else None,
    )
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)
    assert not weights.requires_grad


@pytest.mark.parametrize("correction", list(ImportanceCorrection))
def test_a_broken_token_cannot_overflow_the_step(correction: ImportanceCorrection) -> None:
    theta, old = torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0])
    assert importance_weights(correction, theta, old, torch.tensor([0, 1]), 2).isfinite().all()


@pytest.mark.parametrize("seed", SEEDS)
def test_completions_with_negative_advantage_that_theta_left_behind_are_masked(seed: int) -> None:
    batch = random_ragged(seed, spread=1.0, n_sequences=30)
    rows = []
    for new, old, advantage in zip(*(batch.rows[x] for x in ("theta", "behaviour", "advantage")), strict=True):
        distance = statistics.fmean(o - n for n, o in zip(new, old, strict=True)) if new else 0.0
        rows.append([a >= 0 or distance <= 0.1 for a in advantage])
    theta, behaviour, advantages = (batch.packed(x) for x in ("theta", "behaviour", "advantage"))
    kept = off_policy_mask(theta, behaviour, advantages, batch.sequence_ids, batch.n_sequences, max_kl=0.1)
    assert kept.tolist() == [x for row in rows for x in row]
    assert {True, False} == set(kept.tolist())


def test_the_mean_over_a_completion_without_tokens_is_0() -> None:
    means = sequence_means(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), 2)
    assert means.tolist() == [2.0, 0.0]
