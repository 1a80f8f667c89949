"""CREDIT=turn, and rewards of turns with a critic, against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from services.protocol.groups import TokenSequence, Turn
from tests.sequences import changed, make_group, trained_sequence
from tests.trainer.tiny import has_signal
from trainer.algorithm.packing import TrainingGroup
from trainer.config import TrainerSettings
from trainer.config.objective import Objective


def settings_of(**options: Any) -> TrainerSettings:
    return TrainerSettings.load(**({"rollout": "environment", "credit": "turn", "advantage": "dr_grpo"} | options))


def episode(*rewards: float, number: int = 0, tokens: int = 1) -> TokenSequence:
    """Return an episode whose turns have ``tokens`` tokens each, and a token of the environment between two."""
    size = tokens + 1
    turns = [Turn(number=i, start=i * size, end=i * size + tokens, reward=r) for i, r in enumerate(rewards)]
    mask = ([True] * tokens + [False]) * len(rewards)
    n = len(mask)
    return trained_sequence([5] * n, [-1.0] * n, [0.0] * n, mask, sum(rewards), episode=number, turns=turns)


def advantages(*sequences: TokenSequence, settings: TrainerSettings, **given: Any) -> list[list[float]]:
    [group] = Objective(settings).with_advantages([TrainingGroup([1], list(sequences))], **given)
    return [s.trained(s.advantages).tolist() for s in group.sequences]


def test_a_turn_has_the_rewards_from_it_on_less_their_mean_over_the_episodes_that_have_it() -> None:
    # Rewards to go: 3, 2; 1, 1; 4. Means: 8/3 of the first turns, 3/2 of the second ones.
    found = advantages(episode(1, 2), episode(0, 1, number=1), episode(4, number=2), settings=settings_of())
    assert found[0] == pytest.approx([1 / 3, 0.5])
    assert found[1] == pytest.approx([-5 / 3, -0.5])
    assert found[2] == pytest.approx([4 / 3])


def test_every_formula_sees_the_turns_of_one_number_as_a_group() -> None:
    sequences = (episode(1, 2), episode(0, 1, number=1), episode(4, number=2))
    rloo = advantages(*sequences, settings=settings_of(advantage="rloo"))
    assert rloo[0] == pytest.approx([3 - 2.5, 2 - 1])
    grpo = advantages(*sequences, settings=settings_of(advantage="grpo", advantage_eps=0))
    # Standard deviations with ddof 1: of 3, 1, 4 and of 2, 1.
    assert grpo[0] == pytest.approx([(1 / 3) / math.sqrt(7 / 3), 0.5 / math.sqrt(0.5)])


def test_tokens_of_a_turn_share_its_advantage_and_the_environments_have_none() -> None:
    [group] = Objective(settings_of()).with_advantages(
        [TrainingGroup([1], [episode(1, 2, tokens=2), episode(0, 0, number=1)])]
    )
    assert group.sequences[0].advantages == pytest.approx([1.5, 1.5, 0, 1, 1, 0])


def test_a_turn_that_one_episode_alone_has_gets_no_advantage() -> None:
    assert advantages(episode(1, 1), episode(0, number=1), settings=settings_of())[0] == pytest.approx([1, 0])


def test_credit_is_the_episodes_by_default_and_where_turns_have_no_rewards() -> None:
    one, two = episode(1, 2), episode(0, 1, number=1)
    assert advantages(one, two, settings=settings_of(credit="episode")) == [[1.0, 1.0], [-1.0, -1.0]]
    bare = [changed(s, turns=None) for s in (one, two)]
    assert advantages(*bare, settings=settings_of()) == [[1.0, 1.0], [-1.0, -1.0]]


def in_two_sequences(sequence: TokenSequence) -> list[TokenSequence]:
    """Return an episode of two turns as an agent plays it that forgets the first turn before the second."""
    first, second = sequence.turns or []
    parts = []
    for turn in (first, second):
        # A sequence's last turn has the rewards of the later turns that other sequences have.
        reward = turn.reward + (second.reward if turn is first else 0)
        n = turn.end - turn.start + 1
        parts.append(
            changed(
                sequence,
                completion_ids=[5] * n,
                logprobs=sequence.logprobs[turn.start : turn.end + 1],
                loss_mask=[True] * (n - 1) + [False],
                turns=[Turn(number=turn.number, start=0, end=n - 1, reward=reward)],
            )
        )
    return parts


@pytest.mark.parametrize("advantage", ["dr_grpo", "grpo", "rloo"])
def test_a_turn_pays_the_kl_of_later_turns_whichever_sequences_they_are_in(advantage: str) -> None:
    settings = settings_of(kl_coef=0.5, kl_in_reward=True, advantage=advantage)
    one, two = episode(1, 2, tokens=2), episode(0, 2, number=1, tokens=2)
    rows = [[-2.0, -3.0, -0.5, -4.0], [-1.0, -2.0, -1.0, -1.5]]
    whole = advantages(one, two, settings=settings, reference=[rows])
    apart = [part for sequence in (one, two) for part in in_two_sequences(sequence)]
    halves = [half for row in rows for half in (row[:2], row[2:])]
    found = advantages(*apart, settings=settings, reference=[halves])
    assert [found[0] + found[1], found[2] + found[3]] == [pytest.approx(row) for row in whole]


def test_samples_of_one_turn_count_once_and_share_its_advantage() -> None:
    # The second episode asks three times; without its other samples, each of them is compared with the first episode.
    samples = [episode(0, number=1) for _ in range(3)]
    found = advantages(episode(1), *samples, settings=settings_of(advantage="rloo"))
    assert found == [[1.0], *[[-1.0]] * 3]


def test_episodes_of_equal_returns_differ_by_their_turns() -> None:
    def experience(number: int, *rewards: float) -> dict[str, Any]:
        turns = [{"number": i, "start": i, "end": i + 1, "reward": r} for i, r in enumerate(rewards)]
        return {
            "completion_ids": [5] * len(rewards),
            "logprobs": [-1.0] * len(rewards),
            "policy_versions": [1] * len(rewards),
            "finish_reason": "stop",
            "result": {"reward": sum(rewards)},
            "episode": number,
            "turns": turns,
        }

    fields = {"group_id": "g", "prompt": "", "ground_truth": "", "prompt_ids": [1]}
    early, late = experience(0, 1, 0), experience(1, 0, 1)
    made = make_group(**(fields | {"sequences": [early, late]}))
    assert has_signal(made, settings_of())
    assert not has_signal(made, settings_of(credit="episode"))
    assert not has_signal(make_group(**(fields | {"sequences": [early, experience(1, 1, 0)]})), settings_of())
