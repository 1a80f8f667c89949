"""An update is the papers' update, however it is packed, cut and sharded; what must not change a policy does not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from tests.sequences import changed, trained_sequence
from tests.tolerance import both_types, logprob_tolerance
from tests.trainer import by_hand, rank_jobs
from tests.trainer.processes import run_on_ranks
from tests.trainer.rank_jobs import Arrays, Trained, make_learner, weights_of
from tests.trainer.tiny import (
    VOCABULARY,
    plain_forward,
    plain_logprobs,
    plain_model,
    random_groups,
    random_trees,
)
from trainer.algorithm.packing import TrainingGroup
from trainer.config import TrainerSettings
from trainer.model.micro_batching import part_order, share_out
from trainer.model.optimizer import StopRequestedError, learning_rate
from trainer.model.ranks import Ranks, join_ranks


def settings_of(model: Path, **options: Any) -> TrainerSettings:
    return TrainerSettings.load(model_name=str(model), **rank_jobs.options(options))


def near(groups: Sequence[TrainingGroup], learner: Any, spread: float = 0.3) -> list[TrainingGroup]:
    """Return the groups as if a policy close to the learner's had sampled them: some ratios are clipped, not all."""
    noise = torch.Generator().manual_seed(0)
    result = []
    for group, of_group in zip(groups, learner.logprobs(groups, temperature=1.0), strict=True):
        sequences = [
            changed(s, logprobs=[x + spread * torch.randn(1, generator=noise).item() for x in logprobs])
            for s, logprobs in zip(group.sequences, of_group, strict=True)
        ]
        result.append(replace(group, sequences=sequences))
    return result


def assert_same_gradients(gradients: Arrays, expected: Arrays, relative: float) -> None:
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        difference = np.linalg.norm(gradients[name] - value) / np.linalg.norm(value)
        assert difference < relative, f"{name} differs by {difference:.1e}"


def assert_same_weights(weights: Arrays, expected: Arrays, within: float = 0.0) -> None:
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        difference = np.abs(weights[name] - value).max()
        assert difference <= within, f"{name} differs by {difference:.1e}"


# --- an update is what the papers say --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "clip_high": 0.28, "weight_decay": 0.1, "adam_eps": 1e-3},
        {"max_grad_norm": 0.05},
        {"importance_correction": "none", "updates_per_batch": 2},
        {"importance_cap": 0.9, "updates_per_batch": 2},
        {"kl_coef": 0.3, "updates_per_batch": 2},
        {"epochs_per_batch": 3, "updates_per_batch": 3},
        {"entropy_coef": 0.2},
    ],
    ids=str,
)
def test_an_update_is_the_objective_computed_by_hand(alone: Ranks, model: Path, settings: dict[str, Any]) -> None:
    groups = near(random_groups(1), make_learner(alone, model, **settings))
    groups = [replace(g, weight=1 - i / 10) for i, g in enumerate(groups)]
    trained = rank_jobs.update(alone, model, settings, groups)
    expected = by_hand.update(model, groups, settings_of(model, **settings))
    if "max_grad_norm" not in settings:  # the learner's are looked at after clipping
        assert_same_gradients(trained.gradients, expected.gradients, 1e-4)
    # AdamW's first steps are about the learning rate in size, whatever the gradient's.
    assert_same_weights(trained.weights, expected.weights, within=2e-4)
    if settings_of(model, **settings).updates_per_step == 1:
        assert trained.result.metrics["loss"] == pytest.approx(expected.loss, rel=1e-4)
        assert trained.result.metrics["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-4)


def test_weight_decay_leaves_norms_and_biases_alone(alone: Ranks, model: Path) -> None:
    learner = make_learner(alone, model, learning_rate=0.5, weight_decay=0.5)
    before = weights_of(learner.policy)
    for parameter in learner.policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    learner.optimizer.step()
    after = weights_of(learner.policy)
    assert {name.rsplit(".", 1)[1] for name in before} == {"weight", "bias"}
    for name, value in before.items():
        is_spared = "norm" in name or name.endswith("bias")
        np.testing.assert_allclose(after[name], value * (1.0 if is_spared else 0.75), rtol=1e-6, err_msg=name)


@both_types
def test_the_log_probabilities_are_the_models(alone: Ranks, model: Path, compute_type: str) -> None:
    learner = make_learner(alone, model, compute_type=compute_type)
    plain, tolerance = plain_model(model), logprob_tolerance(compute_type)
    groups = random_groups(1)
    for group, of_group in zip(groups, learner.logprobs(groups), strict=True):
        for given, wanted in zip(of_group, plain_logprobs(plain, group), strict=True):
            assert given == pytest.approx(wanted.tolist(), abs=tolerance)


def test_metrics_tell_of_clipping_and_of_the_reference(alone: Ranks, model: Path) -> None:
    learner = make_learner(alone, model, kl_coef=0.1, importance_correction="none")
    metrics = learner.update(near(random_groups(2), learner), 0).metrics
    assert metrics["kl_reference"] == pytest.approx(0, abs=1e-6), "the policy starts as the reference"
    assert 0 < metrics["clip_fraction_low"] + metrics["clip_fraction_high"] < 1
    assert metrics["ratio_min"] < 1 < metrics["ratio_max"]
    assert 0 < metrics["entropy"] < math.log(VOCABULARY)
    assert learner.update(near(random_groups(2), learner), 1).metrics["kl_reference"] > 1e-3


def test_the_mean_entropy_is_of_all_trained_tokens(alone: Ranks, model: Path) -> None:
    learner = make_learner(alone, model, temperature=0.7)
    groups = [*random_groups(2), without_advantage(random_groups(3)[0]), *random_trees(4, n_groups=1)]
    plain = plain_model(model)
    with torch.no_grad():
        entropies = [
            entropy
            for group in groups
            for s, (_, found) in zip(group.sequences, plain_forward(plain, group, 0.7), strict=True)
            for entropy in s.trained(found.numpy()).tolist()
        ]
    unknown = replace(groups[0], prompt_ids=[VOCABULARY])
    assert learner.mean_entropy([*groups, unknown]) == pytest.approx(np.mean(entropies), rel=1e-5)
    assert learner.mean_entropy([unknown]) is None


# --- however it is cut -----------------------------------------------------------------------------------------------


def budgets(groups: Sequence[TrainingGroup], n_ranks: int) -> list[int]:
    """Token budgets which make 1, 2 and 8 micro-batches a rank."""
    by_count = {len(share_out(groups, n_ranks, budget)[0]): budget for budget in range(3, 4000, 3)}
    return [by_count[count] for count in (1, 2, 8)]


CUT = [*random_groups(3, n_groups=18), *random_trees(3, n_groups=4)]
WAYS: list[dict[str, Any]] = [{"shard_parameters": False}, {"activation_checkpointing": True}]


@pytest.fixture(scope="module")
def whole(model: Path) -> dict[str, Trained]:
    """The gradient on one rank as one micro-batch, by aggregation."""
    with join_ranks() as ranks:
        return {
            name: rank_jobs.update(ranks, model, {"micro_batch_tokens": 10_000, "aggregation": name}, CUT)
            for name in ("token_mean", "prompt_mean")
        }


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_the_gradient_does_not_depend_on_ranks_and_micro_batches(
    model: Path, whole: dict[str, Trained], n_ranks: int
) -> None:
    cuts: list[dict[str, Any]] = [{"micro_batch_tokens": budget} for budget in budgets(CUT, n_ranks)]
    cases = cuts + [cuts[1] | way for way in WAYS] + [cuts[2] | {"aggregation": "prompt_mean"}]
    if n_ranks == 1:
        with join_ranks() as ranks:
            by_rank = [rank_jobs.updates_of_many_shapes(ranks, model, cases, CUT)]
    else:
        by_rank = run_on_ranks(n_ranks, rank_jobs.updates_of_many_shapes, model, cases, CUT)
    for results in by_rank:
        for case, trained in zip(cases, results, strict=True):
            expected = whole[case.get("aggregation", "token_mean")]
            assert_same_gradients(trained.gradients, expected.gradients, 1e-5)
            assert trained.result.metrics == pytest.approx(expected.result.metrics, rel=1e-4)
    first, *others = by_rank
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert_same_weights(theirs.weights, ours.weights)


def test_a_state_in_host_memory_takes_the_same_step_to_the_bit(model: Path) -> None:
    cases = [{"micro_batch_tokens": 60, "kl_coef": 0.1, "cpu_offload": offload} for offload in (False, True)]
    for resident, offloaded in run_on_ranks(2, rank_jobs.updates_of_many_shapes, model, cases, CUT):
        assert offloaded.result.metrics == resident.result.metrics
        assert offloaded.weights.keys() == resident.weights.keys()
        assert all(np.array_equal(offloaded.weights[name], x) for name, x in resident.weights.items())


def test_ranks_without_work_take_part(model: Path) -> None:
    groups = random_groups(4, n_groups=1, n_completions=1)
    with join_ranks() as ranks:
        expected = rank_jobs.update(ranks, model, {}, groups)
    for trained in run_on_ranks(2, rank_jobs.update, model, {}, groups):
        assert_same_gradients(trained.gradients, expected.gradients, 1e-5)
        assert trained.result.metrics == pytest.approx(expected.result.metrics, rel=1e-4)


def test_bfloat16_computes_the_same_to_its_precision_over_float32_master_weights(alone: Ranks, model: Path) -> None:
    low = rank_jobs.update(alone, model, {"compute_type": "bfloat16"}, CUT)
    high = rank_jobs.update(alone, model, {}, CUT)
    a, b = (np.concatenate([g.ravel() for g in x.gradients.values()]) for x in (low, high))
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.99
    learner = make_learner(alone, model, compute_type="bfloat16")
    assert {p.dtype for p in learner.policy.parameters()} == {torch.float32}


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_without_sharding_parameters_are_gathered_once_a_step(
    alone: Ranks, model: Path, monkeypatch: pytest.MonkeyPatch, activation_checkpointing: bool
) -> None:
    gathered: list[str] = []
    to_unsharded = FSDPParamGroup._to_unsharded

    def remember(group: FSDPParamGroup) -> None:
        gathered.append(str(group._module_fqn))
        to_unsharded(group)

    monkeypatch.setattr(FSDPParamGroup, "_to_unsharded", remember)
    settings = {"micro_batch_tokens": 60, "activation_checkpointing": activation_checkpointing}
    sharding = make_learner(alone, model, **settings)
    sharding.update(CUT, 0)
    assert max(Counter(gathered).values()) > 2
    gathered.clear()
    learner = make_learner(alone, model, **settings, shard_parameters=False)
    learner.update(CUT, 0)
    assert len(gathered) == len(set(gathered)) == 3, "two layers and what is around them"
    assert all(isinstance(p, DTensor) for p in learner.policy.parameters())
    assert_same_weights(weights_of(learner.policy), weights_of(sharding.policy), within=1e-6)


@pytest.mark.parametrize("settings", [{}, {"kl_coef": 0.1}], ids=["no reference", "reference"])
def test_adapters_train_on_after_a_pass_without_them(alone: Ranks, model: Path, settings: dict[str, Any]) -> None:
    gradients = []
    for shards in (True, False):
        learner = make_learner(alone, model, lora_rank=4, shard_parameters=shards, max_grad_norm=1e-3, **settings)
        groups = random_groups(1)
        learner.logprobs(groups, use_adapters=False)
        gradients.append([learner.update(groups, step).metrics["grad_norm"] for step in range(3)])
    assert min(gradients[0]) > 0
    assert gradients[1] == pytest.approx(gradients[0], rel=1e-4)


# --- no wasted work --------------------------------------------------------------------------------------------------


def without_advantage(group: TrainingGroup) -> TrainingGroup:
    return replace(
        group,
        group_id=group.group_id + "-flat",
        sequences=[changed(s, advantages=[0.0] * s.tokens) for s in group.sequences],
    )


def count_passes(learner: Any) -> list[int]:
    """Return a list that grows by one with every forward pass of the policy."""
    passes: list[int] = []
    learner.policy.register_forward_pre_hook(lambda *_: passes.append(1))
    return passes


def test_each_pass_over_a_batch_takes_its_parts_in_an_order_of_its_own() -> None:
    settings = TrainerSettings.load(batch_size=8, updates_per_batch=8, epochs_per_batch=3)
    first, *others = (part_order(settings, step) for step in range(3))
    assert first[:8] == list(range(8))
    orders = [tuple(order[start : start + 8]) for order in (first, *others) for start in (8, 16)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len(set(orders)) == 6, "by step and pass"
    assert part_order(settings, 0) == first
    assert part_order(settings.model_copy(update={"seed": 1}), 0)[8:] != first[8:]


def test_groups_without_advantage_count_in_the_mean_and_cost_nothing(alone: Ranks, model: Path) -> None:
    groups = random_groups(5)
    flat = [without_advantage(g) for g in groups]
    trained = rank_jobs.update(alone, model, {}, groups)
    mixed = rank_jobs.update(alone, model, {}, [*groups, *flat])
    assert mixed.result.tokens == trained.result.tokens == sum(g.tokens for g in groups)
    halved: Arrays = {name: value / np.float32(2) for name, value in trained.gradients.items()}
    assert_same_gradients(mixed.gradients, halved, 1e-5)


@pytest.mark.parametrize("updates", [1, 2])
def test_groups_without_advantage_leave_no_trace_where_they_are_dropped(
    alone: Ranks, model: Path, updates: int
) -> None:
    """They are dropped before a batch is divided: else the first of two updates would have all groups that teach."""
    groups = random_groups(5)
    flat = [without_advantage(g) for g in groups]
    options = {"drop_equal_groups": True, "updates_per_batch": updates}
    interleaved = [g for pair in zip(groups, flat, strict=True) for g in pair]
    trained, mixed = (rank_jobs.update(alone, model, options, given) for given in (groups, interleaved))
    assert (mixed.result.tokens, mixed.result.steps) == (trained.result.tokens, updates)
    assert_same_gradients(mixed.gradients, trained.gradients, 1e-7)
    assert make_learner(alone, model, **options).update(flat, 0).steps == 0


@pytest.mark.parametrize("settings", [{"kl_coef": 0.1}, {"entropy_coef": 0.1}], ids=str)
def test_groups_without_advantage_are_kept_where_another_term_learns_from_them(
    alone: Ranks, model: Path, settings: dict[str, Any]
) -> None:
    groups = [*random_groups(5), *(without_advantage(g) for g in random_groups(5))]
    kept, dropped = (
        rank_jobs.update(alone, model, settings | {"drop_equal_groups": drops}, groups) for drops in (False, True)
    )
    assert_same_gradients(dropped.gradients, kept.gradients, 1e-7)


EMPTY = trained_sequence([], [], [])


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean", "sequence_mean", "constant_length"])
def test_completions_that_are_empty_or_masked_whole_do_not_count_in_the_mean(
    alone: Ranks, model: Path, aggregation: str
) -> None:
    """With MASK_TRUNCATED such are those that were cut off."""
    groups = random_groups(5)
    masked = [EMPTY, *(changed(s, loss_mask=[False] * s.tokens) for s in random_groups(6)[0].sequences)]
    assert_same_gradients(
        rank_jobs.update(
            alone,
            model,
            {"aggregation": aggregation},
            [replace(g, sequences=[EMPTY, *g.sequences, *masked]) for g in groups],
        ).gradients,
        rank_jobs.update(alone, model, {"aggregation": aggregation}, groups).gradients,
        1e-5,
    )


def test_a_step_without_trained_tokens_changes_nothing_whatever_its_loss_has(alone: Ranks, model: Path) -> None:
    """Momentum would move the weights by a gradient of 0."""
    learner = make_learner(alone, model, entropy_coef=0.1, kl_coef=0.1, weight_decay=0.1)
    learner.update(random_groups(2), 0)
    before = weights_of(learner.policy)
    masked = [
        replace(g, sequences=[changed(s, loss_mask=[False] * s.tokens) for s in g.sequences]) for g in random_groups(3)
    ]
    for groups in ([], [TrainingGroup([2, 3], [], "all unscorable")], [TrainingGroup([2, 3], [EMPTY, EMPTY])], masked):
        result = learner.update(groups, 1)
        assert (result.steps, result.skipped, result.tokens) == (0, 0, 0)
        assert_same_weights(weights_of(learner.policy), before)


# --- bad input -------------------------------------------------------------------------------------------------------


def broken(group: TrainingGroup, **changes: Any) -> TrainingGroup:
    first, *rest = group.sequences
    return replace(group, sequences=[changed(first, **changes), *rest])


def with_advantage(group: TrainingGroup, advantage: float) -> TrainingGroup:
    return broken(group, advantages=[advantage] * len(group.sequences[0].completion_ids))


BREAKS: dict[str, Callable[[TrainingGroup], TrainingGroup]] = {
    "advantage nan": lambda group: with_advantage(group, math.nan),
    "advantage inf": lambda group: with_advantage(group, math.inf),
    "weight nan": lambda group: replace(group, weight=math.nan),
}


@pytest.mark.parametrize("change", BREAKS)
def test_a_loss_that_is_not_finite_leaves_the_policy_as_it_was(alone: Ranks, model: Path, change: str) -> None:
    learner, groups = make_learner(alone, model), random_groups(7)
    learner.update(groups, 0)
    before, moments = weights_of(learner.policy), optimizer_state(learner)
    result = learner.update([*groups, BREAKS[change](groups[0])], 1)
    assert (result.steps, result.skipped) == (1, 1)
    assert not math.isfinite(result.metrics["loss"])
    assert_same_weights(weights_of(learner.policy), before)
    assert_same_weights(optimizer_state(learner), moments)
    assert learner.update(groups, 2).skipped == 0
    assert all(np.isfinite(value).all() for value in weights_of(learner.policy).values())


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_all(model: Path) -> None:
    groups = random_groups(7)
    groups[0] = with_advantage(groups[0], math.nan)
    with join_ranks() as ranks:
        start = weights_of(make_learner(ranks, model).policy)
    for trained in run_on_ranks(2, rank_jobs.update, model, {}, groups):
        assert trained.result.skipped == 1
        assert_same_weights(trained.weights, start)


def test_a_gradient_that_is_not_finite_is_skipped_too(alone: Ranks, model: Path) -> None:
    learner = make_learner(alone, model)
    before = weights_of(learner.policy)

    def break_gradient(_module: Any, _inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        output[0].register_hook(lambda gradient: gradient / 0)

    learner.policy.register_forward_hook(break_gradient)
    result = learner.update(random_groups(7), 0)
    assert math.isfinite(result.metrics["loss"])
    assert result.skipped == 1
    assert_same_weights(weights_of(learner.policy), before)


@pytest.mark.parametrize(("where", "token"), [("prompt", VOCABULARY), ("completion", -1), ("completion", 2**31 - 1)])
def test_groups_with_tokens_that_the_model_does_not_know_are_left_out_and_counted(
    alone: Ranks, model: Path, where: str, token: int
) -> None:
    groups = random_groups(8)
    bad = replace(groups[0], group_id="bad")
    if where == "prompt":
        bad = replace(bad, prompt_ids=[2, token])
    else:
        bad = broken(bad, completion_ids=[2, token], logprobs=[-1.0, -1.0], advantages=[1.0, 1.0])
    with structlog.testing.capture_logs() as logs:
        trained = rank_jobs.update(alone, model, {}, [bad, *groups])
    assert trained.result.metrics["groups_refused"] == 1
    told = [(line["group_id"], line["ids"], line["vocabulary"]) for line in logs if "group_id" in line]
    assert told == [("bad", [token], VOCABULARY)]
    assert_same_gradients(trained.gradients, rank_jobs.update(alone, model, {}, groups).gradients, 1e-6)


# --- stopping, schedules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [True, False], ids=["sharding", "gathering once"])
def test_a_request_to_stop_leaves_the_policy_as_it_was(alone: Ranks, model: Path, shards: bool) -> None:
    learner = make_learner(alone, model, micro_batch_tokens=40, shard_parameters=shards)
    answers = iter([False, True])
    passes, before = count_passes(learner), weights_of(learner.policy)
    learner.training.should_stop = lambda: next(answers)
    with pytest.raises(StopRequestedError):
        learner.update(random_groups(9), 0)
    assert len(passes) == 1
    assert_same_weights(weights_of(learner.policy), before)
    assert all(p.grad is None for p in learner.policy.parameters())


def test_a_request_to_stop_comes_too_late_after_the_first_optimizer_step(alone: Ranks, model: Path) -> None:
    learner = make_learner(alone, model, importance_correction="none", updates_per_batch=2)
    passes = count_passes(learner)
    learner.training.should_stop = lambda: bool(passes)
    assert learner.update(random_groups(9), 0).steps == 2


def test_what_one_rank_is_asked_all_do(model: Path) -> None:
    assert run_on_ranks(2, rank_jobs.stop_one_rank, model, random_groups(9)) == ["stopped", "stopped"]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0]),
        ("cosine", [1 / 3, 2 / 3, *(0.5 + 0.5 * math.cos(math.pi * i / 8) for i in range(9))]),
    ],
)
def test_the_learning_rate_warms_up_and_decays(schedule: str, expected: list[float]) -> None:
    settings = TrainerSettings.load(learning_rate=2e-4, lr_schedule=schedule, warmup_steps=2)
    rates = [learning_rate(settings, step, 10) for step in range(11)]
    assert rates == pytest.approx([2e-4 * x for x in expected], abs=1e-12)
    assert learning_rate(settings, 50, 10) == pytest.approx(rates[-1]), "beyond the end"
    assert learning_rate(settings, 0, 1) > 0, "a run shorter than its warm-up"


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_decays_by_its_position_after_the_warm_up(schedule: str) -> None:
    settings = TrainerSettings.load(lr_schedule=schedule, warmup_steps=2)
    assert learning_rate(settings, 1, 10, position=9.0) == learning_rate(settings, 1, 10)
    assert learning_rate(settings, 4, 10, position=9.0) == learning_rate(settings, 9, 10)
    assert learning_rate(settings, 9, 10, position=10.5) == pytest.approx(0, abs=1e-12), "the data end"


def test_an_update_uses_the_rate_of_its_position(alone: Ranks, model: Path) -> None:
    learner = make_learner(alone, model, lr_schedule="linear", total_steps=4)
    assert learner.update(random_groups(9), 1, position=3.5).metrics["learning_rate"] == pytest.approx(0.125e-2)


def optimizer_state(learner: Any) -> Arrays:
    return {
        f"{i}-{name}": rank_jobs.array(value)
        for i, state in enumerate(learner.optimizer.state.values())
        for name, value in state.items()
    }
