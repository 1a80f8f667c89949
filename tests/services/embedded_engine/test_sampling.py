"""Sampling follows the distribution, depends on seeds alone, and tells exact log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.embedded_engine.sampling import Sampler, Sampling, stream_key, uniforms

CPU = torch.device("cpu")


def positions(count: int, value: int = 0) -> np.ndarray:
    return np.full(count, value, dtype=np.uint64)


def draw(logits: torch.Tensor, count: int, **fields: float) -> torch.Tensor:
    """Tokens that ``count`` differently seeded rows draw from the same logits [V]."""
    rows = [Sampling(stream_key(7, row), **fields) for row in range(count)]  # type: ignore[arg-type]
    return Sampler(rows, CPU).sample(logits.repeat(count, 1), positions(count))[0]


@pytest.mark.parametrize(("size", "temperature"), [(17, 0.7), (512, 1.0), (513, 0.7), (5000, 1.0)])
def test_frequencies_are_the_probabilities(size: int, temperature: float) -> None:
    torch.manual_seed(size)
    logits = torch.randn(size) * 2
    count = 20_000 if size < 600 else 3_000
    seen = torch.bincount(draw(logits, count, temperature=temperature), minlength=size).double()
    wanted = (logits.double() / temperature).softmax(-1) * count
    # Cells with less than 5 expected are put together, as the chi-square test asks.
    rare = wanted < 5
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    chi_square = float(((seen - wanted) ** 2 / wanted.clamp(min=1e-9)).sum())
    degrees = len(wanted) - 1
    # Five standard deviations of a chi-square variable above its mean.
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((3000,), -torch.inf)
    allowed = torch.tensor([0, 511, 512, 700, 2999])
    logits[allowed] = torch.tensor([0.0, 1.0, -3.0, 2.0, 0.5])
    assert set(draw(logits, 5000).tolist()) == set(allowed.tolist())


def test_logprobs_are_those_of_the_temperature_scaled_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 1000) * 3
    temperatures = [1.0, 0.5, 2.0, 0.0, 1.0, 0.7]
    cuts = [{}, {}, {}, {}, {"top_k": 5}, {"top_p": 0.5}]
    rows = [
        Sampling(stream_key(1, row), temperature, **cut)  # type: ignore[arg-type]
        for row, (temperature, cut) in enumerate(zip(temperatures, cuts, strict=True))
    ]
    tokens, logprobs = Sampler(rows, CPU).sample(logits.clone(), positions(6))
    for row, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
        wanted = (logits[row].double() / (temperatures[row] or 1.0)).log_softmax(-1)[token]
        assert logprob == pytest.approx(float(wanted), abs=2e-6)
    assert tokens[3] == logits[3].argmax()


def test_top_k_top_p_and_min_p_cut_what_they_say() -> None:
    logits = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()
    assert set(draw(logits, 3000, top_k=2).tolist()) == {0, 1}
    # The token that reaches top_p is kept.
    assert set(draw(logits, 3000, top_p=0.75).tolist()) == {0, 1, 2}
    assert set(draw(logits, 3000, min_p=0.3).tolist()) == {0, 1, 2}
    assert set(draw(logits, 3000, top_k=4, top_p=0.5).tolist()) == {0, 1}
    assert set(draw(logits, 500, top_k=1).tolist()) == {0}
    assert set(draw(logits, 500, temperature=0.0).tolist()) == {0}


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    torch.manual_seed(1)
    logits = torch.randn(40, 2000) * 2
    rows = [Sampling(stream_key(5, row), 0.9, top_p=0.9 if row % 3 else 1.0) for row in range(40)]
    places = np.arange(40, dtype=np.uint64)
    tokens, logprobs = Sampler(rows, CPU).sample(logits.clone(), places)
    for chosen in ([3], [39, 3], list(range(39, 0, -2))):
        some = Sampler([rows[row] for row in chosen], CPU).sample(logits[chosen].clone(), places[chosen])
        assert torch.equal(some[0], tokens[chosen])
        assert torch.equal(some[1], logprobs[chosen])


def test_uniform_numbers_are_uniform_and_differ_by_seed_completion_and_position() -> None:
    keys = np.array([stream_key(seed, completion) for seed in range(30) for completion in range(30)], dtype=np.uint64)
    numbers = np.concatenate([uniforms(keys, positions(900, place)) for place in range(30)])
    assert len(np.unique(numbers)) == len(numbers)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    expected = len(numbers) / 50
    assert ((counts - expected) ** 2 / expected).sum() < 49 + 5 * 98**0.5


def test_logits_that_are_not_finite_are_told_by_their_logprob() -> None:
    logits = torch.zeros(2, 100)
    logits[1, 3] = torch.nan
    _, logprobs = Sampler([Sampling(1), Sampling(2)], CPU).sample(logits, positions(2))
    assert torch.isfinite(logprobs[0])
    assert torch.isnan(logprobs[1])
