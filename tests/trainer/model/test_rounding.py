"""Weights rounded to bfloat16: right on average, the same bytes on every rank, and those that the passes have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.weights.policy_store import PolicyStore
from tests.tolerance import logprob_tolerance
from tests.trainer import rank_jobs
from tests.trainer.processes import run_on_ranks
from tests.trainer.rank_jobs import Arrays, make_learner
from tests.trainer.tiny import FAMILIES, plain_logprobs, plain_model, random_groups, save_model
from trainer.config import TrainerSettings
from trainer.model.policy import load_policy
from trainer.model.ranks import Ranks
from trainer.model.rounding import BLOCK, Masters, NearestRounding, Rounding, UnbiasedRounding, shifted

N = 400_000


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
    assert torch.equal(UnbiasedRounding()("weight", given).float().nan_to_num(7.0), given.nan_to_num(7.0))
    # The NaN of CUDA has every bit set, and a carry would make it 0. The other's upper half is that of infinity.
    for pattern in (0x7FFFFFFF, 0x7F800001):
        nan = torch.full((N,), pattern, dtype=torch.int32).view(torch.float32)
        assert UnbiasedRounding()("weight", nan).isnan().all()


@pytest.mark.parametrize("are_cast", [True, False], ids=["cast", "kept"])
@pytest.mark.parametrize("rounding", [UnbiasedRounding(), NearestRounding()], ids=["unbiased", "nearest"])
def test_masters_return_to_the_bit(rounding: UnbiasedRounding, are_cast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCK, "cpu", 1000)
    halves = (on_grid(0).view(torch.int32) + (1 << 15)).view(torch.float32)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-40, -1e-40, 1e-45, -1e-45, 3.3e38, -3.3e38])
    start = torch.cat([torch.randn(3001), torch.zeros(500), halves, special])
    weights = start.clone()
    masters = Masters([("a", weights)], rounding, are_cast=are_cast)
    rounded = weights.clone()
    assert are_cast or torch.equal(rounded.bfloat16().float(), rounded)
    # Between two numbers equally near, casts to the nearest and the kept halves may choose unlike.
    expected, found = rounding("a", start).float(), rounded.bfloat16().float()
    is_tie = shifted(start, rounding.offsets("a", 0, start)).view(torch.int32) & 0xFFFF == 1 << 15
    assert torch.equal(found[~is_tie], expected[~is_tie])
    with masters.in_place(), masters.in_place():
        assert torch.equal(as_bits(weights), as_bits(start))
        weights[:3000] += 1
    with masters.in_place():
        assert torch.equal(as_bits(weights), as_bits(torch.cat([start[:3000] + 1, start[3000:]])))
        weights[:3000] = start[:3000]
        weights[3000] = math.nan
    with masters.in_place():
        assert weights[3000].isnan()
        weights[3000] = start[3000]
    assert torch.equal(as_bits(weights), as_bits(rounded))


def as_bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def test_the_dither_of_a_weight_is_that_of_its_name_and_index_alone() -> None:
    given = torch.randn(1001, 300, generator=torch.Generator().manual_seed(0))
    whole = UnbiasedRounding()("a", given)
    for cut in (1, 7, 500, 1000):
        pieces = [UnbiasedRounding()("a", given[:cut]), UnbiasedRounding()("a", given[cut:], cut * 300)]
        assert torch.equal(torch.cat(pieces), whole)
    assert not torch.equal(UnbiasedRounding()("b", given), whole)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model on bfloat16's grid, as most checkpoints are; its rows do not divide evenly among ranks."""
    path = save_model(tmp_path / "model", FAMILIES["qwen2"])
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.slow
def test_one_rank_and_several_publish_the_same_bytes(model: Path) -> None:
    (one,) = run_on_ranks(1, rank_jobs.published, model, 1e-5)
    for n_ranks, replicas in ((2, 1), (3, 1), (4, 2)):
        first, *others = run_on_ranks(n_ranks, rank_jobs.published, model, 1e-5, replicas)
        assert not any(weights for weights, _ in others), "rank 0 alone has them"
        assert [name for name, value in one[0].items() if first[0][name] != value] == []
        assert {share for _, share in others} == {first[1]}
        assert first[1] == pytest.approx(one[1], rel=1e-4)


def test_a_small_change_arrives_that_rounding_to_the_nearest_takes_back(alone: Ranks, model: Path) -> None:
    policy = load_policy(TrainerSettings.load(model_name=str(model), compute_type="float32"), alone)

    def parameters() -> Tensor:
        return torch.cat([x.flatten() for _, x in policy.full_parameters(Rounding(torch.float32))])

    start = parameters()
    measured = rank_jobs.measured(policy)
    assert measured.share(alone) is None, "nothing is trained"
    rank_jobs.change(policy, 1e-5)
    with policy.masters.in_place():
        change = parameters() - start

    def share(published: Tensor) -> float:
        return (torch.dot(published - start, change) / torch.dot(change, change)).item()

    expected = share(parameters())
    assert measured.share(alone) == pytest.approx(expected, rel=1e-4)
    assert expected == pytest.approx(1, abs=0.3), "of 12,000 weights, by chance"
    assert share((start + change).bfloat16().float()) < 0.2


TYPES = [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32")]
"""COMPUTE_TYPE with PUBLISH_TYPE."""
GROUPS = random_groups(3)


@pytest.mark.parametrize(("compute_type", "publish_type"), TYPES)
def test_passes_have_the_bytes_that_are_published(
    alone: Ranks, model: Path, tmp_path: Path, compute_type: str, publish_type: str
) -> None:
    settings: dict[str, Any] = {"compute_type": compute_type, "publish_type": publish_type, "learning_rate": 1e-3}
    for transport in ("disk", "broadcast", "local"):
        directory, way = tmp_path / transport, settings | {"publish_transport": transport}
        check_published(rank_jobs.computed_and_published(alone, model, directory, way, GROUPS), directory, settings)
    directory = tmp_path / "two ranks"
    for computed in run_on_ranks(2, rank_jobs.computed_and_published, model, directory, settings, GROUPS):
        check_published(computed, directory, settings)


def check_published(computed: tuple[Arrays, Any], directory: Path, settings: dict[str, Any]) -> None:
    """Check that a forward pass has the weights of a published version, and what a model that loads these computes."""
    weights, logprobs = computed
    path = PolicyStore(TrainerSettings.load(shared_dir=directory, run_id="r").policy_dir).path(1)
    published = load_file(path / "model.safetensors")
    assert {x.dtype for x in published.values()} == {getattr(torch, settings["publish_type"])}
    assert published.keys() == weights.keys()
    assert [name for name, x in published.items() if not np.array_equal(x.float().numpy(), weights[name])] == []
    tolerance, plain = logprob_tolerance(settings["compute_type"]), plain_model(path)
    for group, of_group in zip(GROUPS, logprobs, strict=True):
        for given, wanted in zip(of_group, plain_logprobs(plain, group), strict=True):
            assert given == pytest.approx(wanted.tolist(), abs=tolerance)


@pytest.mark.both_types
@pytest.mark.parametrize(("compute_type", "most"), [("float32", 1e-5), ("bfloat16", 5e-3)])
def test_small_updates_leave_trainer_and_engines_one_policy(
    alone: Ranks, model: Path, compute_type: str, most: float
) -> None:
    """By the mean distance of log-probabilities, 0.012 if passes had weights rounded to the nearest."""
    settings: dict[str, Any] = {"compute_type": compute_type, "publish_type": "bfloat16", "learning_rate": 2e-5}
    learner = make_learner(alone, model, **settings)
    before = learner.logprobs(GROUPS, temperature=1.0)
    for step in range(12):
        learner.update(GROUPS, step)
    after, engine = learner.logprobs(GROUPS, temperature=1.0), plain_model(model)
    engine.load_state_dict(dict(learner.policy.full_parameters(Rounding(torch.bfloat16))), strict=False)
    assert mean_distance(after, before) > 0.015
    assert mean_distance(after, [plain_logprobs(engine, group) for group in GROUPS]) < most


def mean_distance(first: Sequence[Any], second: Sequence[Any]) -> float:
    a, b = (torch.cat([torch.as_tensor(x) for group in all_ for x in group]) for all_ in (first, second))
    return float((a - b).abs().mean().detach())


def test_adapters_are_computed_with_as_they_are_published(alone: Ranks, model: Path) -> None:
    learner = make_learner(alone, model, lora_rank=4, publish_type="bfloat16", learning_rate=1e-3)
    learner.update(GROUPS, 0)
    adapters = {name: p for name, p in learner.policy.named_parameters() if p.requires_grad}
    rounded = {name: rank_jobs.array(p) for name, p in adapters.items()}
    with learner.policy.masters.in_place():
        for name, p in adapters.items():
            assert np.array_equal(rank_jobs.array(p.bfloat16().float()), rounded[name])
            assert "lora_A" not in name or not np.array_equal(rank_jobs.array(p), rounded[name])
