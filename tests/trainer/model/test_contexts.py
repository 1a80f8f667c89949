"""Ranks that compute each micro-batch together have the numbers, gradients and weights of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.protocol.groups import TEACHER
from tests.sequences import trained_sequence
from tests.trainer import rank_jobs
from tests.trainer.model.test_critic import rewarded
from tests.trainer.model.test_learner import assert_same_gradients, assert_same_weights
from tests.trainer.processes import run_on_ranks
from tests.trainer.rank_jobs import Arrays, Trained, make_learner, weights_of
from tests.trainer.tiny import FAMILIES, random_groups, random_trees, save_model
from trainer.algorithm.packing import Context, TrainingGroup, pack
from trainer.config.objective import Objective
from trainer.model.critic import CriticLearner
from trainer.model.ranks import Ranks, join_ranks

GROUPS = [*random_groups(3, n_groups=8), *random_trees(3, n_groups=3)]
"""Plain groups, and trees of sequences that share what they begin with."""
SETTINGS: dict[str, Any] = {"adam_eps": 1e-3}
"""With a tiny epsilon, a first step of AdamW has the same size for any gradient, also for one that should be 0."""
WAYS: list[dict[str, Any]] = [
    {"micro_batch_tokens": 30},
    {"micro_batch_tokens": 500, "activation_checkpointing": True},
    {"micro_batch_tokens": 60, "shard_parameters": False, "kl_coef": 0.1, "entropy_coef": 0.1, "updates_per_batch": 2},
    {"micro_batch_tokens": 60, "loss": "gspo", "importance_correction": "sequence", "lora_rank": 2},
]


def updates(ranks: Ranks, model: Path, size: int, replicas: int, ways: list[dict[str, Any]]) -> list[Trained]:
    cases = [SETTINGS | way for way in ways]
    return rank_jobs.updates_of_many_shapes(ranks.replicated(replicas).in_contexts(size), model, cases, GROUPS)


def compare(by_rank: list[list[Trained]], expected: list[Trained]) -> None:
    for results in by_rank:
        for trained, whole in zip(results, expected, strict=True):
            assert trained.gradients.keys() == whole.gradients.keys()
            # A new adapter's first matrix has none.
            moved = {name: value for name, value in whole.gradients.items() if value.any()}
            assert_same_gradients({name: trained.gradients[name] for name in moved}, moved, 1e-5)
            assert_same_weights(trained.weights, whole.weights, within=1e-5)
            assert trained.result.metrics == pytest.approx(whole.result.metrics, rel=1e-5, abs=1e-6)
    for other in by_rank[1:]:
        for ours, theirs in zip(by_rank[0], other, strict=True):
            assert_same_weights(theirs.weights, ours.weights)


@pytest.mark.parametrize(
    ("n_ranks", "size", "replicas"),
    [
        pytest.param(2, 2, 1, id="one group"),
        pytest.param(4, 2, 1, id="two groups", marks=pytest.mark.slow),
        pytest.param(4, 2, 2, id="two groups, replicated", marks=pytest.mark.slow),
    ],
)
def test_an_update_is_that_of_one_rank(model: Path, n_ranks: int, size: int, replicas: int) -> None:
    with join_ranks() as alone:
        expected = updates(alone, model, 1, 1, [way | {"micro_batch_tokens": 10_000} for way in WAYS])
    compare(run_on_ranks(n_ranks, updates, model, size, replicas, WAYS), expected)


@pytest.mark.parametrize(
    ("family", "n_ranks"),
    [
        ("llama-one-key-head", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("qwen3_moe", 4), ("gpt_oss", 2), ("gemma2", 2))),
    ],
)
def test_layers_of_any_kind_are_those_of_one_rank(tmp_path: Path, family: str, n_ranks: int) -> None:
    model = save_model(tmp_path, FAMILIES[family])
    with join_ranks() as alone:
        expected = updates(alone, model, 1, 1, [{}])
    compare(run_on_ranks(n_ranks, updates, model, n_ranks, 1, [{}]), expected)


def readings(ranks: Ranks, model: Path, teacher: Path, size: int) -> dict[str, Any]:
    """Return all that is computed of tokens besides the update."""
    learner = make_learner(ranks.in_contexts(size), model, kl_coef=0.1, teacher_model=str(teacher), advantage="gae")
    critic = CriticLearner(learner)
    with torch.no_grad():
        critic.module.get_submodule("value_head").get_parameter("weight").fill_(0.1)
    # A prompt that fills the first rank's part: no token is predicted there.
    groups = [*GROUPS, TrainingGroup([5] * 50, [trained_sequence([3, 4], [-1.0, -1.0], [1.0, 1.0])])]
    numbers = {
        "policy": learner.logprobs(groups, 1.0),
        "reference": learner.reference_logprobs(groups),
        "teacher": learner.teacher_logprobs(groups),
        "values": critic.values(groups),
        "alone": learner.logprobs(groups[-1:], 1.0),
    }
    flat = {name: np.concatenate([x for group in of_all for x in group or ()]) for name, of_all in numbers.items()}
    return flat | {"entropy": learner.mean_entropy(groups), "overlap": learner.teacher_overlap(groups[-1:], 3)}


def test_all_that_is_read_of_tokens_is_in_the_order_of_one_rank(model: Path, tmp_path: Path) -> None:
    teacher = save_model(tmp_path, FAMILIES["qwen2"], seed=1)
    with join_ranks() as alone:
        expected = readings(alone, model, teacher, 1)
    assert expected["values"].any()
    for found in run_on_ranks(2, readings, model, teacher, 2):
        for name, numbers in expected.items():
            np.testing.assert_allclose(found[name], numbers, atol=1e-5, err_msg=name)


def taught(ranks: Ranks, model: Path, teacher: Path, size: int) -> Trained:
    settings = SETTINGS | {"teacher_model": str(teacher), "teacher_jsd_beta": 0.5, "micro_batch_tokens": 40}
    scored = [
        replace(group, sequences=[s.model_copy(update={"arrays": {TEACHER: s.logprobs}}) for s in group.sequences])
        for group in GROUPS
    ]
    return rank_jobs.update(ranks.in_contexts(size), model, settings, scored)


def test_a_teacher_of_the_whole_vocabulary_teaches_the_same(model: Path, tmp_path: Path) -> None:
    teacher = save_model(tmp_path, FAMILIES["qwen2"], seed=1)
    with join_ranks() as alone:
        expected = taught(alone, model, teacher, 1)
    assert expected.result.metrics["teacher_loss"] > 0
    compare([[found] for found in run_on_ranks(2, taught, model, teacher, 2)], [expected])


def criticised(ranks: Ranks, model: Path, kind: str, size: int) -> Arrays:
    options: dict[str, Any] = SETTINGS | {"advantage": "gae", "critic": kind, "critic_learning_rate": 1e-2}
    learner = make_learner(ranks.in_contexts(size), model, micro_batch_tokens=40, **options)
    critic = CriticLearner(learner)
    for step in range(2):
        scored = rewarded(n_groups=7)
        groups = Objective(learner.settings).with_advantages(scored, None, critic.values(scored))
        learner.update(groups, step)
        if critic.trains_alone(step):
            critic.update(groups, step)
    return weights_of(learner.policy) | {f"critic.{n}": w for n, w in weights_of(critic.module).items()}


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_a_critic_learns_the_same(model: Path, kind: str) -> None:
    with join_ranks() as alone:
        expected = criticised(alone, model, kind, 1)
    assert expected["critic.value_head.weight"].any()
    for weights in run_on_ranks(2, criticised, model, kind, 2):
        assert_same_weights(weights, expected, within=1e-5)


def test_parts_have_each_token_once() -> None:
    whole = pack(GROUPS)
    parts = [pack(GROUPS, context=Context("", rank, 3)) for rank in range(3)]
    assert {len(part.input_ids) for part in parts} == {-(-len(whole.input_ids) // 3)}
    owned = [part.own for part in parts if part.own is not None]
    assert sorted(torch.cat(owned).tolist()) == list(range(len(whole.targets)))
    for part in parts:
        assert part.own is not None
        rows = part.predict_rows[part.state_ids] + part.context.rank * len(part.input_ids)
        assert rows.tolist() == whole.predict_rows[whole.state_ids][part.own].tolist()
