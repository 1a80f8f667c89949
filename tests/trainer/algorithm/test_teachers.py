"""The distance from a teacher has the reverse KL's gradient, on the tokens that a teacher has scored, no others."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.protocol.groups import TEACHER, TokenSequence, pack_sequences, unpack_sequences
from tests.sequences import changed, make_group, trained_sequence
from tests.trainer.algorithm.formulas import distributions, gradient_of
from tests.trainer.tiny import random_trees
from trainer.algorithm.loss import KL_LIMIT, PolicyLoss, StepSize, teacher_loss
from trainer.algorithm.methods import Aggregation, ImportanceCorrection
from trainer.algorithm.packing import BASELINE, MicroBatch, TrainingGroup, pack
from trainer.algorithm.policy_losses import clipped
from trainer.algorithm.teachers import gaps, jensen_shannon, teacher_metrics, with_baselines, with_teacher
from trainer.config import TrainerSettings
from trainer.config.objective import Objective
from trainer.model.logprobs import Lesson, divergence, top_overlap

V = 30


def every_token(behaviour: Tensor, teacher: Tensor) -> MicroBatch:
    """Return a batch with each token of the vocabulary once, weighted by the chance that the behaviour sampled it."""
    tokens = [
        changed(trained_sequence([v], [behaviour[v].item()], [1.0]), teacher_logprobs=[teacher[v].item()])
        for v in range(V)
    ]
    batch = pack([TrainingGroup([1], tokens)])
    double = {"behaviour_logprobs": behaviour, "teacher_logprobs": teacher, "weights": behaviour.exp()}
    return replace(batch, **double)


@pytest.mark.parametrize("is_on_policy", [True, False])
def test_its_gradient_is_that_of_the_reverse_kl(is_on_policy: bool) -> None:
    """Exactly, over all tokens that the policy, or an older one, may sample."""
    theta, teacher, other = distributions(3, V)
    # Near enough that no importance weight is above 2, where it would be cut off.
    older = (0.7 * theta + 0.3 * other).log_softmax(0)
    batch = every_token(theta if is_on_policy else older, teacher)

    def reverse_kl(x: Tensor) -> Tensor:
        p = x.log_softmax(0)
        return (p.exp() * (p - teacher)).sum()

    def term(x: Tensor) -> Tensor:
        return teacher_loss(batch, x.log_softmax(0), StepSize(1, 1, taught=1))

    torch.testing.assert_close(term(theta), reverse_kl(theta))
    torch.testing.assert_close(gradient_of(term, theta), gradient_of(reverse_kl, theta))

    def forward_kl(x: Tensor) -> Tensor:
        return (teacher.exp() * (teacher - x.log_softmax(0))).sum()

    difference = gradient_of(forward_kl, theta) - gradient_of(reverse_kl, theta)
    assert difference.norm() > 0.1 * gradient_of(reverse_kl, theta).norm(), "the other direction is told apart"


def taught_groups() -> list[TrainingGroup]:
    """Return groups of agents' sequences; a teacher has scored every other sequence."""
    groups = random_trees(3)
    draw = np.random.default_rng(0)
    return [
        replace(
            group,
            sequences=[
                changed(s, **{TEACHER: np.where(s.mask, draw.uniform(-4, -1, s.tokens), 0.0)}) if i % 2 else s
                for i, s in enumerate(group.sequences)
            ],
        )
        for group in groups
    ]


def loss_of(groups: list[TrainingGroup], size: StepSize, **weights: float) -> Tensor:
    """Return the gradient of the loss with respect to the log-probabilities of the trained tokens."""
    batch = pack(groups)
    theta = (batch.behaviour_logprobs + 0.1).requires_grad_()
    loss = PolicyLoss(clipped, ImportanceCorrection.TRUNCATED, Aggregation.TOKEN_MEAN, 16, **weights)
    (gradient,) = torch.autograd.grad(loss(batch, theta, torch.zeros_like(theta), size)[0], theta)
    return gradient


def test_neither_term_dilutes_the_other() -> None:
    groups = taught_groups()
    batch = pack(groups)
    is_taught = ~batch.teacher_logprobs.isnan()
    taught, tokens = int(is_taught.sum()), len(batch.targets)
    assert 0 < taught < tokens
    size = StepSize(tokens, batch.n_sequences, taught)
    together = loss_of(groups, size, teacher_coef=0.3)
    policy_alone = loss_of(groups, size)
    distance_alone = loss_of(groups, size, teacher_coef=0.3, reward_weight=0.0)
    torch.testing.assert_close(together, policy_alone + distance_alone)
    assert not distance_alone[~is_taught].any()
    d = (batch.behaviour_logprobs + 0.1 - batch.teacher_logprobs)[is_taught]
    weight = torch.tensor(0.1).exp()
    torch.testing.assert_close(distance_alone[is_taught], 0.3 * weight * d / taught, rtol=1e-4, atol=1e-6)
    assert loss_of(groups, replace(size, tokens=2 * tokens), reward_weight=0.0, teacher_coef=0.3).equal(distance_alone)


def test_the_values_stay_at_their_tokens_through_masks_packing_and_the_wire() -> None:
    """A value is a function of its token's place; one that was shifted would be another."""
    (group, *_) = random_trees(5)
    values = [np.arange(s.tokens) / 100 + s.completion_ids for s in group.sequences]
    made = make_group(sequences=group.sequences, prompt_ids=group.prompt_ids)
    scored = with_teacher(made, [s.trained(x) for s, x in zip(made.sequences, values, strict=True)])
    header, fields = unpack_sequences(pack_sequences({}, scored.sequences))
    sent = [TokenSequence.trusted(of_sequence) for of_sequence in fields]
    for s, x in zip(sent, values, strict=True):
        assert s.arrays[TEACHER].tolist() == np.where(s.mask, x, 0.0).tolist()
        np.testing.assert_allclose(gaps(s), s.trained(s.logprobs) - s.trained(x))
    batch = pack([replace(group, sequences=sent)])
    expected = np.concatenate([s.trained(x) for s, x in zip(sent, values, strict=True)])
    np.testing.assert_allclose(batch.teacher_logprobs.numpy(), expected, rtol=1e-6)
    assert ((batch.teacher_logprobs - batch.targets) * 100).round().min() >= 0
    assert header == {}


# --- the baseline ---------------------------------------------------------------------------------------------------


def taught_sequence(*gaps_: float, **fields: Any) -> TokenSequence:
    """Return a sequence that is as far from the teacher as told, token by token."""
    sequence = trained_sequence([2] * len(gaps_), [-20.0] * len(gaps_), **fields)
    return changed(sequence, **{TEACHER: [-20.0 - gap for gap in gaps_]})


def baselines(groups: list[TrainingGroup]) -> list[list[float]]:
    return [[set(s.arrays[BASELINE]).pop() if BASELINE in s.arrays else math.nan for s in g.sequences] for g in groups]


UNTAUGHT = trained_sequence([2], [-1.0])
BASELINES: dict[str, tuple[list[list[TokenSequence]], list[list[float]]]] = {
    "tokens of all groups": ([[taught_sequence(1, 2), taught_sequence(6)], [taught_sequence(3)]], [[4.5, 2], [3]]),
    "one completion": ([[taught_sequence(1, 2)]], [[0]]),
    "an untaught one": ([[taught_sequence(1), UNTAUGHT], [taught_sequence(5)]], [[5, math.nan], [1]]),
    "masked tokens": (
        [[taught_sequence(1, 7, loss_mask=[True, False]), taught_sequence(2)], [taught_sequence(9, loss_mask=[False])]],
        [[2, 1], [1.5]],
    ),
    "the sequences of an episode": (
        [[taught_sequence(1, episode=0), taught_sequence(2, episode=0), taught_sequence(6, episode=1)]],
        [[6, 6, 1.5]],
    ),
    "the seats of a game": (
        [[taught_sequence(1, episode=0, seat=0), taught_sequence(2, episode=1, seat=1)], [taught_sequence(4, seat=0)]],
        [[4, 4], [1.5]],
    ),
    "games of one seat": ([[taught_sequence(1, episode=0, seat=1), taught_sequence(2, episode=1, seat=1)]], [[2, 1]]),
    "an unbounded distance": ([[taught_sequence(1), taught_sequence(400)]], [[KL_LIMIT, 1]]),
}


@pytest.mark.parametrize("name", BASELINES)
def test_the_baseline_is_the_mean_distance_of_all_other_episodes(name: str) -> None:
    sequences, expected = BASELINES[name]
    groups = with_baselines([TrainingGroup([1], of_group) for of_group in sequences])
    for found, wanted in zip(baselines(groups), expected, strict=True):
        assert found == pytest.approx(wanted, nan_ok=True)


def test_each_source_with_its_teacher_has_its_own_baseline(tmp_path: Path) -> None:
    file = tmp_path / "sources.yaml"
    file.write_text("- {name: a, teacher_model: org/a}\n- {name: b, teacher_model: org/b}\n- name: c\n")
    objective = Objective(TrainerSettings.load(sources=str(file), max_steps=1))
    distances = [("a", 1), ("b", 3), ("a", 2), ("b", 5)]
    groups = [TrainingGroup([1], [taught_sequence(distance)], source=name) for name, distance in distances]
    *of_taught, of_other = baselines(objective.with_advantages([*groups, TrainingGroup([1], [UNTAUGHT], source="c")]))
    assert of_taught == [[2], [5], [1], [3]]
    assert math.isnan(of_other[0])


# --- the whole vocabulary --------------------------------------------------------------------------------------------


def by_formula(logits: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """[n] the generalised Jensen-Shannon divergence, for autograd."""
    log_p = logits.log_softmax(1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(1)

    if beta in (0.0, 1.0):
        return kl(log_p, log_t) if beta else kl(log_t, log_p)
    log_m = ((1 - beta) * log_p.exp() + beta * log_t.exp()).log()
    return beta * kl(log_t, log_m) + (1 - beta) * kl(log_p, log_m)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_divergence_over_the_vocabulary_is_the_formula_in_value_and_gradient(beta: float) -> None:
    logits = torch.stack(distributions(4, V)).requires_grad_()
    log_t = torch.stack(distributions(8, V)[4:])
    expected = by_formula(logits, log_t, beta)
    values, gradient = jensen_shannon(logits.detach().log_softmax(1), log_t, beta)
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), logits)[0])
    assert (values > 1e-3).all()


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [3, 256])
def test_it_is_the_same_by_chunks_and_leaves_out_the_other_models_unused_rows(
    monkeypatch: pytest.MonkeyPatch, beta: float, temperature: float, chunk: int
) -> None:
    monkeypatch.setattr("trainer.model.logprobs.CPU_CHUNK", chunk)
    draw = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) / 2

    hidden, weight = random(8, 6).requires_grad_(), random(V, 6).requires_grad_()
    theirs, their_weight, state_weights = random(8, 10), random(V + 5, 10), random(8).abs()
    total = divergence(hidden, weight, Lesson(theirs, their_weight, state_weights, beta), temperature)
    log_t = (theirs @ their_weight[:V].T / temperature).log_softmax(1)
    expected = state_weights @ by_formula(hidden @ weight.T / temperature, log_t, beta)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)
    for ours, wanted in zip(
        torch.autograd.grad(3 * total, (hidden, weight)),
        torch.autograd.grad(3 * expected, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def test_the_overlap_is_the_share_of_common_likely_tokens() -> None:
    eye = torch.eye(4)
    ours, theirs = torch.tensor([[4.0, 3, 2, 1], [4, 3, 2, 1]]), torch.tensor([[4.0, 3, 2, 1], [1, 4, 3, 2]])
    assert top_overlap(ours, eye, Lesson(theirs, eye, torch.ones(2), 0.0), 2).tolist() == [1.0, 0.5]


# --- metrics ---------------------------------------------------------------------------------------------------------


def group_of(source: str, gap: float, tokens: int, **prompt: Any) -> Any:
    sequence = trained_sequence([2] * tokens, [-1.0] * tokens)
    scored = changed(sequence, **{TEACHER: [-1.0 - gap] * tokens})
    return make_group(sequences=[scored], source=source, **prompt)


def test_metrics_tell_the_distance_by_source_teacher_and_place() -> None:
    groups = [
        group_of("maths", 0.5, 20),
        group_of("code", -0.1, 10),
        make_group(sequences=[trained_sequence([2], [-1.0])], source="code"),
    ]
    metrics = teacher_metrics(groups, {"maths": "org/big", "code": "http://host:1"})
    assert metrics["teacher_k1"] == pytest.approx((20 * 0.5 - 10 * 0.1) / 30)
    assert metrics["teacher_k1/maths"] == metrics["teacher_k1_of_big"] == pytest.approx(0.5)
    assert metrics["teacher_k1/code"] == metrics["teacher_k1_of_host:1"] == pytest.approx(-0.1)
    assert metrics["teacher_k3/maths"] == pytest.approx(np.exp(-0.5) + 0.5 - 1)
    assert metrics["teacher_k1_from_0"] == pytest.approx((16 * 0.5 - 10 * 0.1) / 26)
    assert metrics["teacher_k1_from_16"] == pytest.approx(0.5)
    assert "teacher_k1_from_64" not in metrics
    assert metrics["teacher_missing"] == 1
    assert teacher_metrics(groups, {"maths": "", "code": ""}) == {}
    alone = teacher_metrics([group_of("", 1.0, 1)], {"": "x"})
    assert alone == pytest.approx(
        {"teacher_k1": 1, "teacher_k1_from_0": 1, "teacher_k3": 1 / np.e, "teacher_missing": 0}
    )
