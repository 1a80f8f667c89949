"""Weights on their way to bfloat16: right on average, the same bytes from every rank, and a measure of what arrives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.trainer import rank_jobs
from tests.trainer.processes import run_on_ranks
from tests.trainer.tiny import FAMILIES, save_model
from trainer.config import TrainerSettings
from trainer.model.policy import load_policy
from trainer.model.ranks import Ranks, join_ranks
from trainer.model.rounding import MeasuredRounding, Rounding, UnbiasedRounding, random_bits

N = 400_000


@pytest.fixture
def alone() -> Iterator[Ranks]:
    with join_ranks() as ranks:
        yield ranks


def on_grid(seed: int) -> Tensor:
    """[N] numbers of bfloat16's grid as float32, of both signs and many sizes."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(N, generator=generator) * torch.logspace(-6, 3, N)).bfloat16().float()


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.9])
def test_a_weight_goes_up_or_down_with_the_chance_that_makes_its_mean_exact(fraction: float) -> None:
    low = on_grid(0)
    high = (low.view(torch.int32) + (1 << 16)).view(torch.float32)  # the next number away from 0
    given = torch.lerp(low, high, fraction)
    rounded = UnbiasedRounding()("weight", given).float()
    assert ((rounded == low) | (rounded == high)).all()
    share = (rounded == high).float().mean().item()
    assert share == pytest.approx(fraction, abs=4 * math.sqrt(fraction * (1 - fraction) / N))


def test_numbers_of_the_grid_and_no_numbers_stay_as_they_are() -> None:
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40]
    given = torch.cat([on_grid(1), torch.tensor(special).bfloat16().float()])
    assert torch.equal(UnbiasedRounding()("weight", given).view(torch.int16), given.bfloat16().view(torch.int16))
    # The NaN of CUDA has every bit set, and a carry would make it 0.
    nan = torch.full((N,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    assert UnbiasedRounding()("weight", nan).isnan().all()


def test_the_bits_of_a_weight_are_those_of_its_name_and_index_alone() -> None:
    given = torch.randn(1001, 300, generator=torch.Generator().manual_seed(0))
    whole = UnbiasedRounding()("a", given)
    for cut in (1, 7, 500, 1000):
        pieces = [UnbiasedRounding()("a", given[:cut]), UnbiasedRounding()("a", given[cut:], cut * 300)]
        assert torch.equal(torch.cat(pieces), whole)
    assert not torch.equal(UnbiasedRounding()("b", given), whole)


def test_the_bits_are_uniform_and_those_of_neighbours_unrelated() -> None:
    bits = random_bits(12345, 0, torch.empty(4_000_000)).double()
    assert bits.mean().item() == pytest.approx(2**15 - 0.5, abs=4 * 2**16 / math.sqrt(12 * 4_000_000))
    counts = torch.histc(bits, 256, 0, 65536)
    assert ((counts - 15625) ** 2 / 15625).sum().item() < 345, "chi-square of 255 degrees, 1 in 10,000"
    centred = bits - bits.mean()
    for distance in (1, 2, 3, 4, 5, 64, 576):
        correlation = (centred[distance:] * centred[:-distance]).mean() / bits.var()
        assert abs(correlation.item()) < 4 / math.sqrt(4_000_000), distance
    other = random_bits(12346, 0, torch.empty(4_000_000)).double()
    assert abs(((other - other.mean()) * centred).mean().item() / bits.var().item()) < 4 / math.sqrt(4_000_000)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model on bfloat16's grid, as most checkpoints are; its rows do not divide evenly among ranks."""
    path = save_model(tmp_path / "model", FAMILIES["qwen2"])
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.slow
def test_one_rank_and_several_publish_the_same_bytes(model: Path) -> None:
    (one,) = run_on_ranks(1, rank_jobs.published, model, 1e-5)
    for n_ranks in (2, 3):
        first, *others = run_on_ranks(n_ranks, rank_jobs.published, model, 1e-5)
        assert not any(weights for weights, _ in others), "rank 0 alone has them"
        assert [name for name, value in one[0].items() if first[0][name] != value] == []
        assert {share for _, share in others} == {first[1]}
        assert first[1] == pytest.approx(one[1], rel=1e-4)


def test_a_small_change_arrives_that_rounding_to_the_nearest_takes_back(alone: Ranks, model: Path) -> None:
    policy = load_policy(TrainerSettings.load(model_name=str(model), compute_type="float32"), alone)
    start = {name: x.clone() for name, x in policy.full_parameters(Rounding(torch.float32))}
    measured = MeasuredRounding(policy.model.named_parameters())
    dict(policy.full_parameters(measured))
    assert measured.share(alone) is None, "nothing is trained"
    rank_jobs.change(policy, 1e-5)

    def share(rounding: Rounding) -> float:
        trained = dict(policy.full_parameters(Rounding(torch.float32)))
        published = {name: x.float() for name, x in policy.full_parameters(rounding)}
        change = torch.cat([(trained[name] - start[name]).flatten() for name in start])
        arrived = torch.cat([(published[name] - start[name]).flatten() for name in start])
        return (torch.dot(arrived, change) / torch.dot(change, change)).item()

    expected = share(measured)
    assert measured.share(alone) == pytest.approx(expected, rel=1e-4)
    assert expected == pytest.approx(1, abs=0.3), "of 12,000 weights, by chance"
    assert share(Rounding(torch.bfloat16)) < 0.2
