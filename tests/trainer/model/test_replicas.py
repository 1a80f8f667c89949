"""On a 2-D mesh, shards within a node and replicas between nodes, gradients and weights are those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer import rank_jobs
from tests.trainer.model.test_learner import CUT, assert_same_gradients, assert_same_weights
from tests.trainer.processes import run_on_ranks
from tests.trainer.rank_jobs import Trained
from trainer.model.ranks import Ranks, join_ranks

WAYS: list[dict[str, Any]] = [
    {"micro_batch_tokens": 40},
    {"micro_batch_tokens": 40, "shard_parameters": False},
    {"micro_batch_tokens": 40, "activation_checkpointing": True},
]


def updates_on_replicas(ranks: Ranks, model: Path) -> list[Trained]:
    return rank_jobs.updates_of_many_shapes(ranks.replicated(2), model, WAYS, CUT)


@pytest.mark.slow
def test_replicas_of_shards_make_the_update_of_one_rank(model: Path) -> None:
    with join_ranks() as alone:
        whole = rank_jobs.update(alone, model, {"micro_batch_tokens": 10_000}, CUT)
    by_rank = run_on_ranks(4, updates_on_replicas, model)
    for results in by_rank:
        for trained in results:
            assert_same_gradients(trained.gradients, whole.gradients, 1e-5)
            assert trained.result.metrics == pytest.approx(whole.result.metrics, rel=1e-4)
    for other in by_rank[1:]:
        for ours, theirs in zip(by_rank[0], other, strict=True):
            assert_same_weights(theirs.weights, ours.weights)


def test_one_replica_is_the_flat_mesh(alone: Ranks) -> None:
    assert alone.replicated(1) is alone
