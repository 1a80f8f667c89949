"""The load of experts counts each trained token once, whatever the layout, the ranks and the recomputation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig

from tests.trainer import rank_jobs
from tests.trainer.model.test_rows import OTHERS
from tests.trainer.processes import run_on_ranks
from tests.trainer.tiny import FAMILIES, SHAPE, plain_model, random_groups, random_trees, save_model
from trainer.algorithm.packing import TrainingGroup
from trainer.config import Layout
from trainer.model.policy import EXPERT_COLUMN, ExpertLoad
from trainer.model.ranks import Ranks

GROUPS = [*random_groups(1, n_groups=3), *random_trees(2, n_groups=2)]
"""Completions of several lengths, and episodes that branch and have tokens that are not trained."""
WAYS: dict[str, dict[str, Any]] = {
    "trees": {"micro_batch_tokens": 40},
    "trees, recomputed": {"micro_batch_tokens": 60, "activation_checkpointing": True, "shard_parameters": False},
    "rows": {"micro_batch_tokens": 60, "layout": "rows"},
    "rows, recomputed, twice": {"layout": "rows", "activation_checkpointing": True, "epochs_per_batch": 2},
}


def expected(model: Path, groups: list[TrainingGroup], module: str) -> float:
    """MaxVio by plain forward passes: each trained token counts for the experts of the token before it."""
    plain = plain_model(model)
    loads: dict[str, torch.Tensor] = {}
    for name, part in plain.named_modules():
        if name.endswith(module):
            loads[name] = torch.zeros(4)
            part.register_forward_hook(lambda _, __, output, name=name: chosen.update({name: output[2]}))
    chosen: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for group in groups:
            for sequence in group.sequences:
                plain(input_ids=torch.tensor([[*group.prompt_ids, *sequence.completion_ids.tolist()]]))
                places = torch.arange(sequence.tokens) + len(group.prompt_ids) - 1
                trained = torch.from_numpy(sequence.trained(places.numpy()))
                for name, experts in chosen.items():
                    loads[name] += experts[trained].flatten().bincount(minlength=4)
    return float(torch.stack([load.max() / load.mean() for load in loads.values()]).mean()) - 1


class Counted(ExpertLoad):
    """Remembers how many choices it has counted when they are taken."""

    choices = 0.0

    def take(self, ranks: Ranks) -> dict[str, float]:
        own = sum(float(mixture.expert_tokens.sum()) for mixture in self._mixtures if mixture.expert_tokens is not None)
        self.choices = ranks.total({"choices": own})["choices"]
        return super().take(ranks)


def loads_of(ranks: Ranks, model: Path) -> list[tuple[float, float]]:
    """The metric and the choices that were counted, by WAYS."""
    found = []
    for way in WAYS.values():
        laid_out = ranks.laid_out(Layout(way.get("layout", "tree")))
        settings: dict[str, Any] = {"layout": "tree", "learning_rate": 1e-12} | way
        learner = rank_jobs.make_learner(laid_out, model, **settings)
        learner.policy.expert_load.__class__ = Counted
        metric = learner.update(GROUPS, 0).metrics[EXPERT_COLUMN]
        found.append((metric, cast("Counted", learner.policy.expert_load).choices))
        assert EXPERT_COLUMN not in learner.update([], 0).metrics
    return found


def expected_loads(model: Path, layers: int, router: str) -> list[Any]:
    wanted = expected(model, GROUPS, router)
    assert wanted > 0.05
    choices = 2 * layers * sum(group.trained_tokens for group in GROUPS)
    return [(pytest.approx(wanted, abs=1e-6), way.get("epochs_per_batch", 1) * choices) for way in WAYS.values()]


@pytest.mark.parametrize(
    ("family", "layers", "router"),
    [
        ("qwen3_moe", 1, "gate"),
        pytest.param("gpt_oss", 2, "router", marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe_text", 2, "mlp.gate", marks=pytest.mark.slow),
    ],
)
def test_the_load_is_that_of_trained_tokens_by_every_layout(
    alone: Ranks, tmp_path: Path, family: str, layers: int, router: str
) -> None:
    config = FAMILIES.get(family) or AutoConfig.for_model(family, **SHAPE, **OTHERS[family])
    model = save_model(tmp_path, config)
    assert loads_of(alone, model) == expected_loads(model, layers, router)


@pytest.mark.slow
def test_two_ranks_count_what_one_counts(tmp_path: Path) -> None:
    model = save_model(tmp_path, FAMILIES["qwen3_moe"])
    assert run_on_ranks(2, loads_of, model) == [expected_loads(model, 1, "gate")] * 2
