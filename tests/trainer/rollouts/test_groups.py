"""What of a group is trained on: scored completions, each with its advantage; and what is refused before."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from services.core.seeds import derive_seed
from services.protocol.groups import Experience, FinishReason, Group, RewardResult, RewardStatus, VersionSpan
from trainer.algorithm.advantages import has_signal, training_group
from trainer.config import TrainerSettings
from trainer.reporting.step_metrics import group_metrics, reward_counts
from trainer.rollouts.groups import initial_priority

SETTINGS = TrainerSettings.load(max_new_tokens=10)


def experience(reward: float | None, length: int = 2, **changes: Any) -> Experience:
    status = RewardStatus.ERROR if reward is None else RewardStatus.SCORED
    fields: dict[str, Any] = {
        "completion": "x" * length,
        "completion_ids": [5] * length,
        "logprobs": [-0.5] * length,
        "policy_versions": [VersionSpan(version=3, start=0, end=length)],
        "finish_reason": FinishReason.STOP,
        "result": RewardResult(reward=reward, status=status, reason="none" if reward is None else None),
    }
    return Experience(**(fields | changes))


def group(*experiences: Experience, **changes: Any) -> Group:
    fields: dict[str, Any] = {
        "group_id": "g",
        "prompt_id": "p",
        "prompt": "1+1=",
        "ground_truth": "2",
        "prompt_ids": [2, 3],
        "experiences": list(experiences),
    }
    return Group(**(fields | changes))


def advantages(made: Group, settings: TrainerSettings = SETTINGS) -> list[float]:
    return [s.advantage for s in training_group(made, settings).sequences]


def test_advantages_come_from_the_group_alone() -> None:
    one = 0.5 / (1 / math.sqrt(3) + 1e-4)
    assert advantages(group(*map(experience, [1.0, 0.0, 0.0, 1.0]))) == pytest.approx([one, -one, -one, one])


def test_what_could_not_be_scored_is_left_out_and_moves_nobody() -> None:
    with_gap = group(experience(1.0), experience(None), experience(0.0))
    assert advantages(with_gap) == advantages(group(experience(1.0), experience(0.0)))
    assert len(with_gap.experiences) == 3, "the record stays whole"


def test_what_was_aborted_is_left_out() -> None:
    made = group(experience(1.0), experience(0.0), experience(0.0, finish_reason=FinishReason.ABORT))
    assert len(training_group(made, SETTINGS).sequences) == 2


@pytest.mark.parametrize("rewards", [[0.5], [1.0] * 4, [0.0, None], [None, None]], ids=str)
def test_a_group_of_one_and_one_of_equal_rewards_teach_nothing(rewards: list[float | None]) -> None:
    made = group(*map(experience, rewards))
    assert set(advantages(made)) <= {0.0}
    assert not has_signal(made, SETTINGS)
    assert initial_priority(made) == 0


def test_a_long_completion_is_worth_less_with_overlong_shaping() -> None:
    settings = TrainerSettings.load(max_new_tokens=10, overlong_buffer=4)
    made = group(experience(1.0, length=2), experience(1.0, length=8))
    assert has_signal(made, settings)
    assert not has_signal(made, SETTINGS)


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": [-0.5]},
        {"logprobs": [-0.5, math.nan]},
        {"completion_ids": [5, -1]},
        {"completion_ids": ["5", None]},
        {"finish_reason": "because"},
        {"policy_versions": [VersionSpan(version=3, start=0, end=1)]},
    ],
    ids=str,
)
def test_a_truncated_or_malformed_record_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        experience(1.0, **changes)


@pytest.mark.parametrize("reward", [math.nan, math.inf, "much"])
def test_a_reward_that_is_no_number_is_refused(reward: Any) -> None:
    with pytest.raises(ValidationError):
        RewardResult(reward=reward)


def test_a_batch_tells_of_its_completions() -> None:
    cut = experience(0.0, length=6, finish_reason=FinishReason.LENGTH)
    metrics = group_metrics([group(experience(1.0), cut), group(experience(None), experience(1.0))], policy_version=5)
    assert metrics["reward_mean"] == pytest.approx(2 / 3)
    assert (metrics["completions"], metrics["unscorable"], metrics["zero_variance_groups"]) == (4, 1, 1)
    assert (metrics["truncation_rate"], metrics["length_max"], metrics["staleness_max"]) == (0.25, 6, 2)


def test_a_batch_tells_the_means_of_the_parts_of_its_rewards() -> None:
    scored = [RewardResult(reward=0.5 * math + 1, components={"math": math, "own:brief": 1.0}) for math in (0.0, 1.0)]
    failed = RewardResult(reward=None, status="error", components={"math": 1.0, "own:brief": None})
    metrics = group_metrics([group(*(experience(1.0, result=result) for result in (*scored, failed)))], 1)
    assert metrics["reward_part_math"] == pytest.approx(2 / 3)
    assert metrics["reward_part_own:brief"] == 1.0
    alone = RewardResult(reward=1.0, components={"math": 1.0})
    assert not any(name.startswith("reward_part_") for name in group_metrics([group(experience(1.0, result=alone))], 1))


def test_a_batch_counts_its_rewards() -> None:
    groups = [group(experience(1.0), experience(0.0)), group(experience(None), experience(1.0))]
    assert reward_counts(groups) == [(0.0, 1), (1.0, 2)]
    assert reward_counts([group(experience(0.1 + 0.2), experience(0.3))]) == [(0.3, 2)]
    many = reward_counts([group(*(experience(place / 100) for place in range(101)))])
    assert len(many) == 20
    assert sum(count for _, count in many) == 101
    assert many[0] == (pytest.approx(0.025), 5)


def test_seeds_depend_on_every_part() -> None:
    seeds = {derive_seed(a, b, c) for a in range(4) for b in range(4) for c in range(4)}
    assert len(seeds) == 64
    assert all(0 <= seed < 2**31 for seed in seeds)
