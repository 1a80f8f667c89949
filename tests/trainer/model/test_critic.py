"""A critic's values and updates, on a model of its own and on the policy's, however they are packed and sharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForTokenClassification

from tests.sequences import changed
from tests.trainer import rank_jobs
from tests.trainer.rank_jobs import Arrays, make_learner, weights_of
from tests.trainer.tiny import plain_model, random_groups
from trainer.algorithm.packing import TrainingGroup
from trainer.config import TrainerSettings
from trainer.config.objective import Objective
from trainer.model.critic import CriticLearner
from trainer.model.policy import load_policy
from trainer.model.ranks import Ranks
from trainer.rank_calls import update_models

BOTH = pytest.mark.parametrize("kind", ["own", "shared"])


def rewarded(seed: int = 1, **options: Any) -> list[TrainingGroup]:
    """Return groups whose completions have rewards, and some an observation between two turns."""
    groups = []
    for group in random_groups(seed, **options):
        sequences = [
            changed(s, reward=i / 2 - 0.5, loss_mask=[j != 1 for j in range(s.tokens)] if i % 2 else None)
            for i, s in enumerate(group.sequences)
        ]
        groups.append(replace(group, sequences=sequences))
    return groups


def make_critic(ranks: Ranks, model: Path, kind: str, **settings: Any) -> CriticLearner:
    return CriticLearner(make_learner(ranks, model, advantage="gae", critic=kind, **settings))


def with_targets(critic: CriticLearner, groups: Sequence[TrainingGroup]) -> list[TrainingGroup]:
    return Objective(critic.settings).with_advantages(groups, None, critic.values(groups))


def plain_values(states: torch.nn.Module, head: tuple[Tensor, Tensor], group: TrainingGroup) -> list[list[float]]:
    """Return the values of the trained tokens by one forward pass of transformers a completion."""
    weight, bias = head
    result = []
    for sequence in group.sequences:
        ids = torch.tensor([group.prompt_ids + sequence.completion_ids.tolist()])
        before = states(input_ids=ids).last_hidden_state[0, len(group.prompt_ids) - 1 : -1]
        result.append(sequence.trained((before @ weight.T + bias).squeeze(1).detach().numpy()).tolist())
    return result


def gradients_of(module: torch.nn.Module) -> Arrays:
    return {name: rank_jobs.array(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def set_head(critic: CriticLearner) -> tuple[Tensor, Tensor]:
    """Give the value head other weights than zeros, and return them."""
    head = critic.module.get_submodule("value_head")
    cast("FSDPModule", head).reshard()
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
            cast("DTensor", parameter).to_local().copy_(noise)
    weight, bias = (torch.from_numpy(rank_jobs.array(parameter)) for parameter in head.parameters())
    return weight, bias


# --- values ----------------------------------------------------------------------------------------------------------


@BOTH
def test_values_start_at_zero_and_are_those_of_the_states_before_the_tokens(
    alone: Ranks, model: Path, kind: str
) -> None:
    critic, groups = make_critic(alone, model, kind, micro_batch_tokens=60), rewarded()
    assert {x for of_group in critic.values(groups) for row in of_group for x in row} == {0.0}
    head, states = set_head(critic), plain_model(model).base_model
    with torch.no_grad():
        for group, found in zip(groups, critic.values(groups), strict=True):
            for row, expected in zip(found, plain_values(states, head, group), strict=True):
                assert row == pytest.approx(expected, abs=1e-4)


@BOTH
def test_groups_with_unknown_tokens_get_no_values_and_no_update(alone: Ranks, model: Path, kind: str) -> None:
    critic, groups = make_critic(alone, model, kind), rewarded()
    bad = replace(groups[0], prompt_ids=[2, 10_000])
    set_head(critic)
    assert {x for row in critic.values([bad, *groups])[0] for x in row} == {0.0}
    assert critic.update(with_targets(critic, [bad, *groups]), 0).steps == 1


# --- updates ---------------------------------------------------------------------------------------------------------


def test_an_own_critics_update_is_the_value_loss_by_hand(alone: Ranks, model: Path) -> None:
    critic, groups = make_critic(alone, model, "own", value_clip=0.2), rewarded()
    weight, bias = (part.requires_grad_() for part in set_head(critic))
    # As in the second update of a batch: values have moved since the advantages were computed.
    groups = with_targets(critic, groups)
    rounds = [[changed(s, values=s.arrays["values"] - 0.3) for s in g.sequences] for g in groups]
    groups = [replace(g, sequences=sequences) for g, sequences in zip(groups, rounds, strict=True)]
    states = plain_model(model).base_model
    losses = []
    for group in groups:
        for s in group.sequences:
            ids = torch.tensor([group.prompt_ids + s.completion_ids.tolist()])
            before = states(input_ids=ids).last_hidden_state[0, len(group.prompt_ids) - 1 : -1]
            now = (before @ weight.T + bias).squeeze(1)
            old, returns = (torch.tensor(s.arrays[name].tolist()) for name in ("values", "returns"))
            near = old + (now - old).clamp(-0.2, 0.2)
            every = torch.maximum((now - returns) ** 2, (near - returns) ** 2) / 2
            losses.append(every[torch.tensor(s.mask)])
    expected = torch.cat(losses).mean()
    expected.backward()
    gradients: Arrays = {}
    critic.optimizer.register_step_pre_hook(lambda *_: gradients.update(gradients_of(critic.module)))
    metrics = critic.update(groups, 0).metrics
    assert metrics["value_loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert 0 < metrics["value_clip_fraction"] < 1
    for name, parameter in states.named_parameters():
        assert parameter.grad is not None
        assert np.allclose(gradients[f"decoder.{name}"], parameter.grad.numpy(), atol=1e-5), name
    assert weight.grad is not None
    assert np.allclose(gradients["value_head.weight"], weight.grad.numpy(), atol=1e-4)


def test_a_shared_critic_adds_its_loss_to_the_policys(alone: Ranks, model: Path) -> None:
    """The gradient is that of the policy's loss plus VALUE_COEF times that of the value loss."""
    groups = rewarded()

    def gradients(value_coef: float) -> tuple[Arrays, dict[str, float]]:
        learner = make_learner(alone, model, advantage="gae", critic="shared", value_coef=value_coef)
        critic = CriticLearner(learner)
        set_head(critic)
        found: Arrays = {}
        learner.optimizer.register_step_pre_hook(lambda *_: found.update(gradients_of(learner.policy)))
        return found, learner.update(with_targets(critic, groups), 0).metrics

    (one, metrics), (two, _), (three, _) = (gradients(coefficient) for coefficient in (0.5, 1.0, 2.0))
    for name, gradient in two.items():
        assert np.allclose(three[name] - gradient, 2 * (gradient - one[name]), atol=1e-4), name
        assert np.abs(gradient - one[name]).max() > 0, name
    assert metrics["value_loss"] > 0
    assert {"loss", "entropy", "value_clip_fraction"} <= metrics.keys()


@BOTH
def test_in_a_warm_up_the_critic_moves_and_the_policy_stays(alone: Ranks, model: Path, kind: str) -> None:
    critic = make_critic(alone, model, kind, critic_warmup_steps=2, weight_decay=0.1)
    assert [critic.trains_alone(step) for step in range(4)] == [True, True, *[kind == "own"] * 2]
    before = weights_of(critic.policy)
    for step in range(2):
        result = critic.update(with_targets(critic, rewarded()), step)
        assert result.steps == 1
        assert result.metrics["value_loss"] > 0
    changed = {name for name, weights in weights_of(critic.policy).items() if not np.array_equal(weights, before[name])}
    assert changed == (set() if kind == "own" else {"value_head.weight", "value_head.bias"})
    assert any(x for of_group in critic.values(rewarded()) for row in of_group for x in row)


def test_an_own_critic_learns_at_its_own_rate(alone: Ranks, model: Path) -> None:
    critic = make_critic(alone, model, "own", learning_rate=1e-2, critic_learning_rate=3e-3)
    set_head(critic)
    before = weights_of(critic.module)
    critic.update(with_targets(critic, rewarded()), 0)
    # AdamW's first step is as long as the rate, whatever the gradient.
    moved = [np.abs(weights - before[name]).max() for name, weights in weights_of(critic.module).items()]
    assert max(moved) == pytest.approx(3e-3, rel=1e-3)


def test_a_shared_head_learns_at_the_critics_rate(alone: Ranks, model: Path) -> None:
    learner = make_learner(alone, model, advantage="gae", critic="shared", critic_learning_rate=3e-3)
    learner.update(with_targets(CriticLearner(learner), rewarded()), 0)
    rates = {p: group["lr"] for group in learner.optimizer.param_groups for p in group["params"]}
    for name, parameter in learner.policy.named_parameters():
        assert rates[parameter] == (3e-3 if name.startswith("value_head.") else 1e-2), name


# --- files ------------------------------------------------------------------------------------------------------------


@BOTH
def test_what_is_saved_loads_as_a_token_classifier_with_the_same_values(
    alone: Ranks, model: Path, tmp_path: Path, kind: str
) -> None:
    """With LoRA adapters, which the policy's model has merged into it."""
    learner, groups = make_learner(alone, model, advantage="gae", critic=kind, lora_rank=2), rewarded()
    critic = CriticLearner(learner)
    for step in range(2):
        targets = with_targets(critic, groups)
        learner.update(targets, step)
        if critic.trains_alone(step):
            critic.update(targets, step)
    critic.save(tmp_path)
    loaded, said = AutoModelForTokenClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    head = (loaded.score.weight, loaded.score.bias)
    with torch.no_grad():
        for row, expected in zip(critic.values(groups)[0], plain_values(loaded.model, head, groups[0]), strict=True):
            assert row == pytest.approx(expected, abs=1e-5)


def test_a_model_that_is_not_trained_has_no_critic(alone: Ranks, model: Path) -> None:
    settings = TrainerSettings.load(model_name=str(model), advantage="gae", critic="shared", compute_type="float32")
    heads = [load_policy(settings, alone, trainable=trainable).value_head for trainable in (True, False)]
    assert [head is not None for head in heads] == [True, False]


def test_the_policy_moves_from_the_first_step_after_the_warm_up(alone: Ranks, model: Path) -> None:
    critic = make_critic(alone, model, "shared", critic_warmup_steps=1)
    results = [update_models(critic.learner, critic, with_targets(critic, rewarded()), step, step) for step in (0, 1)]
    assert ["grad_norm" in result.metrics for result in results] == [False, True]
