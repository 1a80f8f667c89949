"""Rewards and values become advantages, returns and metrics of a step's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.protocol.groups import TokenSequence, Turn
from tests.sequences import changed, trained_sequence
from trainer.algorithm.gae import critic_metrics
from trainer.algorithm.packing import TrainingGroup, pack
from trainer.config import TrainerSettings
from trainer.config.objective import Objective

# Three sampled tokens; and a sampled token, an observation, a sampled token.
FIRST = trained_sequence([3, 4, 5], [-1.0, -2.0, -3.0], [0.0] * 3, reward=1.0)
SECOND = trained_sequence([6, 7, 8], [-1.0, -9.0, -2.0], [0.0] * 3, loss_mask=[True, False, True], reward=-1.0)
EMPTY = trained_sequence([], [], [], reward=5.0)
GROUPS = [TrainingGroup([2], [FIRST, EMPTY], "a"), TrainingGroup([2, 2], [SECOND], "b")]
VALUES = [[[0.1, 0.2, 0.3], []], [[0.4, 0.5]]]


def settings_of(**options: Any) -> TrainerSettings:
    return TrainerSettings.load(**({"advantage": "gae"} | options))


def returns_of(groups: list[TrainingGroup]) -> list[list[float]]:
    return [s.trained(s.arrays["returns"]).tolist() for group in groups for s in group.sequences]


def test_the_reward_is_of_the_last_token_and_observations_take_no_step() -> None:
    groups = Objective(settings_of(gamma=0.5)).with_advantages(GROUPS, None, VALUES)
    assert returns_of(groups) == [pytest.approx([0.25, 0.5, 1.0]), [], pytest.approx([-0.5, -1.0])]
    assert [s.arrays["values"].tolist() for group in groups for s in group.sequences] == [
        [0.1, 0.2, 0.3],
        [],
        [0.4, 0.0, 0.5],
    ]
    advantages = torch.tensor([0.15, 0.3, 0.7, -0.9, -1.5])
    expected = (advantages - advantages.mean()) / advantages.std()
    found = [a for group in groups for s in group.sequences for a in s.trained(s.advantages)]
    assert found == pytest.approx(expected.tolist(), rel=1e-4)


def test_the_kl_of_a_token_is_taken_from_its_reward() -> None:
    reference = [[[-1.5, -2.0, -3.0], []], [[-1.0, -4.0]]]
    settings = settings_of(kl_coef=0.1, kl_in_reward=True)
    groups = Objective(settings).with_advantages(GROUPS, reference, VALUES)
    assert returns_of(groups) == [pytest.approx([0.95, 1.0, 1.0]), [], pytest.approx([-1.2, -1.2])]


def test_a_turn_pays_the_kl_of_the_turns_after_it_whichever_sequences_they_are_in() -> None:
    settings = settings_of(kl_coef=0.1, kl_in_reward=True)

    def sequence(*numbers: int) -> TokenSequence:
        """Return turns of one token each, of the episode's four, with a token of the environment after each."""
        turns = [
            Turn(number=number, start=2 * place, end=2 * place + 1, reward=0.0) for place, number in enumerate(numbers)
        ]
        n = 2 * len(numbers)
        mask = [True, False] * len(numbers)
        return trained_sequence([5] * n, [-1.0] * n, [0.0] * n, mask, episode=0, turns=turns)

    # log(pi_behaviour / pi_reference) of the turns 0 to 3 is 1, 2, 4 and 8.
    for of_sequences in ([(0, 1, 2, 3)], [(0, 1), (2, 3)], [(0, 3), (1,), (2,)]):
        group = TrainingGroup([2], [sequence(*numbers) for numbers in of_sequences])
        reference = [[-1.0 - 2.0**number for number in numbers] for numbers in of_sequences]
        zeros = [[0.0] * len(numbers) for numbers in of_sequences]
        [group] = Objective(settings).with_advantages([group], [reference], [zeros])
        to_go = {0: -1.5, 1: -1.4, 2: -1.2, 3: -0.8}
        assert returns_of([group]) == [pytest.approx([to_go[number] for number in numbers]) for numbers in of_sequences]


def test_steps_of_turns_are_those_of_the_rewarded_turns_or_of_runs_of_trained_tokens() -> None:
    settings = settings_of(credit="turn", rollout="environment", gamma=0.5)
    # Turns of two tokens and of one, without a token between them: the last reward is a turn away from the first one.
    turns = [Turn(number=0, start=0, end=2, reward=0.0), Turn(number=1, start=2, end=3, reward=1.0)]
    [played, runs] = [changed(FIRST, turns=turns), changed(SECOND, reward=1.0)]
    groups = [TrainingGroup([2], [played, FIRST, runs])]
    groups = Objective(settings).with_advantages(groups, None, [[[0.0] * 3, [0.0] * 3, [0.0] * 2]])
    assert returns_of(groups) == [pytest.approx(row) for row in ([0.5, 0.5, 1.0], [1.0, 1.0, 1.0], [0.5, 1.0])]


def test_every_sequence_of_an_episode_ends_with_its_reward() -> None:
    # The second sequence forgets the first one's second token, and has its first as context.
    first = changed(FIRST, completion_ids=[3, 4], logprobs=[-1.0] * 2, episode=0)
    second = changed(SECOND, completion_ids=[3, 7, 8], loss_mask=[False, True, True], reward=1.0, episode=0)
    values = [[[0.1, 0.2], [0.4, 0.5]]]
    [group] = Objective(settings_of()).with_advantages([TrainingGroup([2], [first, second])], None, values)
    assert returns_of([group]) == [pytest.approx([1.0, 1.0]), pytest.approx([1.0, 1.0])]
    [group] = Objective(settings_of(gae_lambda=0.5)).with_advantages(
        [TrainingGroup([2], [first, second])], None, values
    )
    assert returns_of([group]) == [pytest.approx([0.6, 1.0]), pytest.approx([0.75, 1.0])]


def test_advantages_that_came_with_a_completion_stay() -> None:
    own = changed(FIRST, advantages=[7.0, 8.0, 9.0])
    [first, _] = Objective(settings_of()).with_advantages(
        [TrainingGroup([2], [own]), GROUPS[1]], None, [[VALUES[0][0]], VALUES[1]]
    )
    assert first.sequences[0].advantages.tolist() == [7.0, 8.0, 9.0]
    assert first.sequences[0].arrays["returns"] == pytest.approx([1.0, 1.0, 1.0])


def test_nothing_to_train_on_stays_as_it_is() -> None:
    masked = TrainingGroup([2], [changed(FIRST, loss_mask=[False] * 3), EMPTY])
    assert Objective(settings_of()).with_advantages([masked], None, [[[], []]]) == [masked]
    assert Objective(settings_of()).with_advantages([], None, []) == []
    assert critic_metrics([masked]) == {}


def test_a_micro_batch_has_returns_and_old_values_of_trained_tokens_only() -> None:
    batch = pack(Objective(settings_of()).with_advantages(GROUPS, None, VALUES))
    assert batch.returns.tolist() == pytest.approx([1, 1, 1, -1, -1])
    assert batch.old_values.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    without = pack(GROUPS)
    assert without.returns.tolist() == without.old_values.tolist() == [0.0] * 5


def test_metrics_are_over_trained_tokens() -> None:
    metrics = critic_metrics(Objective(settings_of()).with_advantages(GROUPS, None, VALUES))
    assert metrics["value_mean"] == pytest.approx(0.3)
    assert metrics["return_mean"] == pytest.approx(0.2)
    errors = torch.tensor([0.9, 0.8, 0.7, -1.4, -1.5])
    assert metrics["explained_variance"] == pytest.approx(1 - errors.var(correction=0).item() / 0.96, rel=1e-5)
