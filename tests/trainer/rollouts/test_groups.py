"""What of a group is trained on: scored completions, each with its advantage; and what is refused before."""

from __future__ import annotations

import asyncio
import math
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
import torch
from pydantic import ValidationError

from services.core.errors import ConfigurationError
from services.protocol.groups import Group, TokenSequence
from services.protocol.prompts import Prompt
from services.protocol.rewards import FinishReason, RewardResult, RewardStatus
from tests.sequences import changed, make_group
from tests.trainer.tiny import has_signal
from trainer.algorithm.advantages import Outcomes
from trainer.algorithm.methods import GROUP_ADVANTAGES
from trainer.algorithm.packing import TrainingGroup
from trainer.algorithm.policy_losses import importance_weights
from trainer.config import TrainerSettings
from trainer.config.objective import Objective
from trainer.reporting.step_metrics import failures, group_metrics, reward_counts
from trainer.rollouts.batch import Batch, within_kl
from trainer.rollouts.groups import Answers, GroupMaker

SETTINGS = TrainerSettings.load(max_new_tokens=10)


def experience(reward: float | None, length: int = 2, **changes: Any) -> TokenSequence:
    status = RewardStatus.ERROR if reward is None else RewardStatus.SCORED
    fields: dict[str, Any] = {
        "completion": "x" * length,
        "completion_ids": [5] * length,
        "logprobs": [-0.5] * length,
        "policy_versions": [3] * length,
        "finish_reason": FinishReason.STOP,
        "result": RewardResult(reward=reward, status=status, reason="none" if reward is None else None),
    }
    return TokenSequence(**(fields | changes))


def group(*experiences: TokenSequence, **changes: Any) -> Group:
    fields: dict[str, Any] = {
        "group_id": "g",
        "id": "p",
        "prompt": "1+1=",
        "ground_truth": "2",
        "prompt_ids": [2, 3],
        "sequences": list(experiences),
    }
    return make_group(**(fields | changes))


def advantages(made: Group, settings: TrainerSettings = SETTINGS) -> list[float]:
    """Return the advantage of each scored completion, which all its tokens have."""
    (trained,) = Objective(settings).with_advantages([Objective(settings).training_group(made)])
    assert all(len(set(s.advantages)) == 1 for s in trained.sequences)
    return [s.advantages[0] for s in trained.sequences]


def test_advantages_come_from_the_group_alone() -> None:
    one = 0.5 / (1 / math.sqrt(3) + 1e-4)
    assert advantages(group(*map(experience, [1.0, 0.0, 0.0, 1.0]))) == pytest.approx([one, -one, -one, one])


def test_what_could_not_be_scored_is_left_out_and_moves_nobody() -> None:
    with_gap = group(experience(1.0), experience(None), experience(0.0))
    assert advantages(with_gap) == advantages(group(experience(1.0), experience(0.0)))
    assert len(with_gap.sequences) == 3, "the record stays whole"


def test_what_was_aborted_is_left_out() -> None:
    made = group(experience(1.0), experience(0.0), experience(0.0, finish_reason=FinishReason.ABORT))
    assert len(Objective(SETTINGS).training_group(made).sequences) == 2


@pytest.mark.parametrize("rewards", [[0.5], [1.0] * 4, [0.0, None], [None, None]], ids=str)
def test_a_group_of_one_and_one_of_equal_rewards_teach_nothing(rewards: list[float | None]) -> None:
    made = group(*map(experience, rewards))
    assert set(advantages(made)) <= {0.0}
    assert not has_signal(made, SETTINGS)


@pytest.mark.parametrize(
    "changes",
    [
        {"advantage": "gae"},
        {"advantage": "reinforce"},
        {"advantage": f"{__name__}:ranks_of"},
    ],
    ids=str,
)
def test_groups_of_equal_rewards_are_kept_where_they_teach(changes: dict[str, Any]) -> None:
    """Dynamic sampling replaces only the group that has nothing to train on."""
    settings = TrainerSettings.load(batch_size=3, dynamic_sampling_tries=2, mask_truncated=True, **changes)
    cut = experience(1.0, finish_reason=FinishReason.LENGTH)
    made = [group(experience(1.0)), group(experience(None)), group(cut), group(experience(0.0), experience(0.0))]
    assert [has_signal(one, settings) for one in made] == [True, False, False, True]
    batch = Batch(Objective(settings))
    batch.add(made)
    assert (batch.groups, batch.counts["groups_resampled"]) == ([made[0], made[3]], 2)


@pytest.mark.parametrize("advantage", GROUP_ADVANTAGES)
def test_groups_of_equal_rewards_are_replaced_where_a_group_is_compared_with_itself(advantage: str) -> None:
    settings = SETTINGS.model_copy(update={"advantage": advantage})
    assert not has_signal(group(experience(1.0), experience(1.0)), settings)
    assert has_signal(group(experience(1.0), experience(0.0)), settings)


def group_of(settings: TrainerSettings, prompt: Prompt, played: list[TokenSequence]) -> Group:
    """Return the group that a maker makes of a prompt whose answers these are."""
    sampler = MagicMock(answer=AsyncMock(return_value=Answers([2, 3], played)), teacher=None)
    made = asyncio.run(GroupMaker(settings, sampler).make_group(prompt))
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("rewards", "most", "given"),
    [
        ([0.5, 1.0], 0.0, 0.0),
        ([-0.5, 1.0], 0.0, -0.5),
        ([-0.5, 1.0], -1.0, -1.0),
        ([None, None], 0.0, 0.0),
        ([], -2.0, -2.0),
    ],
    ids=str,
)
def test_an_answer_over_a_limit_has_the_lowest_reward(rewards: list[float | None], most: float, given: float) -> None:
    settings = TrainerSettings.load(over_limit_reward=most)
    over = experience(None, result=RewardResult(reward=None, status=RewardStatus.OVER_LIMIT, reason="said"))
    prompt = Prompt(id="p", prompt="1+1=", ground_truth="2", prompt_ids=[2, 3])
    made = group_of(settings, prompt, [over, *map(experience, rewards)])
    assert [e.reward for e in made.sequences] == [given, *rewards]
    assert made.sequences[0].result == RewardResult(reward=given, status=RewardStatus.OVER_LIMIT, reason="said")
    assert len(Objective(settings).training_group(made).sequences) == 1 + sum(reward is not None for reward in rewards)
    reasons = {reason: count for reason, count, _ in failures([made])}
    assert reasons["reward_over_limit"] == 1
    assert group_metrics([made], 5)["over_limit"] == 1


def test_the_lowest_reward_of_a_game_is_that_of_the_same_seat() -> None:
    over = RewardResult(reward=None, status=RewardStatus.OVER_LIMIT)
    prompt = Prompt(id="p", prompt="1+1=", ground_truth="2", prompt_ids=[2, 3])
    played = [experience(None, episode=seat, seat=seat, result=over) for seat in (0, 1)]
    played += [experience(reward, episode=2 + seat, seat=seat) for seat, reward in enumerate((-1.0, 1.0))]
    made = group_of(SETTINGS, prompt, played)
    assert [e.reward for e in made.sequences] == [-1.0, 0.0, -1.0, 1.0]


def test_a_long_completion_is_worth_less_with_overlong_shaping() -> None:
    settings = TrainerSettings.load(max_new_tokens=10, overlong_buffer=4)
    made = group(experience(1.0, length=2), experience(1.0, length=8))
    assert has_signal(made, settings)
    assert not has_signal(made, SETTINGS)
    assert Objective(settings).training_group(made).sequences[1].reward == 0.5
    assert Objective(settings).training_group(made).sequences[1].trained_tokens == 8


def test_what_was_cut_off_counts_in_its_group_and_is_not_trained_on_if_masked() -> None:
    made = group(experience(1.0), experience(0.0, length=10, finish_reason=FinishReason.LENGTH))
    masking = TrainerSettings.load(max_new_tokens=10, mask_truncated=True)
    (trained,) = Objective(masking).with_advantages([Objective(masking).training_group(made)])
    assert advantages(made, masking) == advantages(made)
    assert [s.trained_tokens for s in trained.sequences] == [2, 0]


def seated(*rewards: float) -> Group:
    """Return a group of games: even numbers of ``rewards`` are seat 0's, odd ones seat 1's."""
    return group(*(experience(reward, episode=i, seat=i % 2) for i, reward in enumerate(rewards)))


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "pass_at_k"])
def test_the_rewards_of_a_seat_are_compared_with_those_of_the_same_seat(advantage: str) -> None:
    settings = SETTINGS.model_copy(update={"advantage": advantage})
    # Seat 0 wins three games of four, so that its win is worth less than the one of seat 1.
    zero, one = [1.0, 1.0, 1.0, -1.0], [-1.0, -1.0, -1.0, 1.0]
    both = advantages(seated(*(reward for game in zip(zero, one, strict=True) for reward in game)), settings)
    assert both[::2] == advantages(group(*map(experience, zero)), settings)
    assert both[1::2] == advantages(group(*map(experience, one)), settings)


def test_a_group_in_which_each_seat_always_gets_the_same_teaches_nothing() -> None:
    decided = seated(1.0, -1.0, 1.0, -1.0)
    assert set(advantages(decided)) == {0.0}
    assert not has_signal(decided, SETTINGS)
    assert has_signal(seated(1.0, -1.0, -1.0, 1.0), SETTINGS)
    metrics = group_metrics([decided, seated(1.0, -1.0, -1.0, 1.0)], 3)
    assert (metrics["zero_variance_groups"], metrics["completions"]) == (1, 8)


def test_an_experience_may_bring_the_advantages_of_its_tokens() -> None:
    made = group(experience(1.0, advantages=[0.25, -0.5]), experience(1.0))
    (trained,) = Objective(SETTINGS).with_advantages([Objective(SETTINGS).training_group(made)])
    assert [s.advantages.tolist() for s in trained.sequences] == [[0.25, -0.5], [0.0, 0.0]]
    assert trained.mean_absolute_advantage == pytest.approx(0.75 / 4)
    assert has_signal(made, SETTINGS)


def test_an_episode_counts_once_in_its_group_however_many_sequences_it_has() -> None:
    branched = group(experience(1.0, episode=0), experience(1.0, episode=0), experience(0.0, episode=1))
    assert branched.rewards == [1.0, 0.0]
    one, none = advantages(group(experience(1.0), experience(0.0)))
    assert advantages(branched) == [one, one, none]
    assert not has_signal(group(experience(1.0, episode=0), experience(1.0, episode=0)), SETTINGS)


def test_an_episode_is_as_long_as_its_sequences_together() -> None:
    settings = TrainerSettings.load(max_new_tokens=10, advantage=f"{__name__}:lengths_of")
    masked = experience(1.0, length=4, episode=0, loss_mask=[False, True, True, True])
    made = group(experience(1.0, episode=0), masked, experience(0.0, length=7, episode=1), experience(0.0))
    assert advantages(made, settings) == [5.0, 5.0, 7.0, 2.0]


def lengths_of(outcomes: Outcomes) -> torch.Tensor:
    return outcomes.lengths.double()


def test_kl_in_the_reward_of_an_episode_is_that_of_the_sampled_tokens_of_all_its_sequences() -> None:
    masked = experience(0.0, episode=1, logprobs=[-9.0, -0.5], loss_mask=[False, True])
    settings = TrainerSettings.load(max_new_tokens=10, kl_coef=0.1, kl_in_reward=True, advantage="dr_grpo")
    made = Objective(settings).training_group(group(experience(1.0, episode=0), masked, experience(1.0, episode=0)))
    (trained,) = Objective(settings).with_advantages([made], reference=[[[-1.0, -2.0], [-3.0], [-0.5, -4.5]]])
    first, second = 1.0 - 0.1 * (0.5 + 1.5 + 0.0 + 4.0), 0.0 - 0.1 * 2.5
    half = (first - second) / 2
    assert [s.trained(s.advantages)[0] for s in trained.sequences] == pytest.approx([half, -half, half])


def test_a_continued_completion_is_as_old_as_its_oldest_token_and_corrected_token_by_token() -> None:
    old, new = [3, 3], [5, 5]
    begun = experience(1.0, logprobs=[-2.0, -1.0], policy_versions=old, finish_reason=FinishReason.ABORT)
    whole = begun.then(experience(1.0, logprobs=[-0.5, -0.25], policy_versions=new))
    made = group(experience(0.0, policy_versions=new), changed(whole, reward=1.0))
    assert made.policy_version == 3
    assert group_metrics([made], 6)["staleness_max"] == 3
    trained = Objective(SETTINGS).training_group(made).sequences[1]
    assert trained.logprobs.tolist() == [-2.0, -1.0, -0.5, -0.25]
    # The newer policy gives the tokens that it sampled the log-probabilities that they have.
    now = torch.tensor([-3.0, 0.0, -0.5, -0.25])
    one = torch.zeros(4, dtype=torch.int64)
    weights = importance_weights(SETTINGS.importance_correction, now, torch.tensor(trained.logprobs.tolist()), one, 1)
    assert weights.tolist() == pytest.approx([math.exp(-1.0), 2.0, 1.0, 1.0])


def test_the_sequences_of_an_episode_have_one_reward() -> None:
    with pytest.raises(ValidationError, match="the sequences of episode 3 have different rewards"):
        group(experience(1.0, episode=3), experience(0.0, episode=3))


def test_the_age_of_a_sequence_is_that_of_its_sampled_tokens() -> None:
    spans = [1, 7, 5]
    assert experience(1.0, length=3, policy_versions=spans).oldest_version == 1
    assert experience(1.0, length=3, policy_versions=spans, loss_mask=[False, True, True]).oldest_version == 5


@pytest.mark.parametrize("advantage", ["grpo", "batch_std"])
@pytest.mark.parametrize("rewards", [[1.0, 1.0], [1.0, 0.0]], ids=["equal", "different"])
def test_kl_in_the_reward_keeps_its_weight_where_rewards_are_divided_by_a_deviation(
    advantage: str, rewards: list[float]
) -> None:
    made = group(*map(experience, rewards))
    without = advantages(made, TrainerSettings.load(advantage=advantage))
    for kl_coef in (1e-4, 1e-2):
        settings = TrainerSettings.load(kl_coef=kl_coef, kl_in_reward=True, advantage=advantage)
        # KL terms of 2 and 1.4 in all.
        reference = [[[-1.5, -1.5], [-1.2, -1.2]]]
        (trained,) = Objective(settings).with_advantages([Objective(settings).training_group(made)], reference)
        found = [s.advantages[0] - a for s, a in zip(trained.sequences, without, strict=True)]
        assert found == pytest.approx([-0.3 * kl_coef, 0.3 * kl_coef])


def ranks_of(outcomes: Outcomes) -> torch.Tensor:
    return outcomes.rewards.argsort().argsort().double()


def test_a_function_of_ones_own_computes_advantages() -> None:
    made = group(experience(0.3), experience(0.9), experience(-2.0))
    assert advantages(made, TrainerSettings.load(advantage=f"{__name__}:ranks_of")) == [1.0, 2.0, 0.0]
    with pytest.raises(ConfigurationError, match="ADVANTAGE is 'nowhere:f', which cannot be imported"):
        advantages(made, TrainerSettings.load(advantage="nowhere:f"))


def test_groups_that_the_policy_has_moved_too_far_from_are_not_replayed() -> None:
    made = [Objective(SETTINGS).training_group(group(experience(1.0), experience(0.0), group_id=name)) for name in "ab"]
    near, far = [[-0.5, -0.5], [-0.6, -0.4]], [[-0.5, -0.5], [-3.0, -0.5]]
    assert [g.group_id for g in within_kl(made, [near, far], max_kl=0.1)] == ["a"]


def test_the_kl_of_a_replayed_group_is_from_the_policy_that_sampled_it_to_the_present_one() -> None:
    def sampled(logprob: float) -> TrainingGroup:
        return Objective(SETTINGS).training_group(group(experience(1.0, length=1, logprobs=[logprob])))

    # k3 is e^-2 + 1 for a token that has become less likely, and e^2 - 3 for one that has become more likely.
    less, more = sampled(-0.5), sampled(-2.5)
    assert within_kl([less, more], [[[-2.5]], [[-0.5]]], max_kl=2.0) == [less]


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


def test_a_batch_counts_an_episode_as_one_completion() -> None:
    cut = experience(1.0, length=6, episode=0, finish_reason=FinishReason.LENGTH, loss_mask=[False] * 3 + [True] * 3)
    made = [group(experience(1.0, episode=0), cut, experience(0.0, episode=1), experience(None, episode=2))]
    metrics = group_metrics(made, policy_version=5)
    assert (metrics["completions"], metrics["unscorable"], metrics["reward_mean"]) == (3, 1, 0.5)
    assert (metrics["completion_tokens"], metrics["length_max"]) == (9, 5)
    assert metrics["truncation_rate"] == pytest.approx(1 / 3)
    assert reward_counts(made) == [(0.0, 1), (1.0, 1)]


def test_a_batch_tells_the_means_of_the_parts_of_its_rewards() -> None:
    scored = [RewardResult(reward=0.5 * math + 1, components={"math": math, "own:brief": 1.0}) for math in (0.0, 1.0)]
    failed = RewardResult(reward=None, status="error", components={"math": 1.0, "own:brief": None})
    metrics = group_metrics([group(*(experience(1.0, result=result) for result in (*scored, failed)))], 1)
    assert metrics["reward_part_math"] == pytest.approx(2 / 3)
    assert metrics["reward_part_own:brief"] == 1.0
    alone = RewardResult(reward=1.0, components={"math": 1.0})
    assert not any(name.startswith("reward_part_") for name in group_metrics([group(experience(1.0, result=alone))], 1))


def test_a_batch_counts_its_failures_and_quotes_one_of_each_reason() -> None:
    timeout, error, over = (
        RewardResult(reward=reward, status=status, reason=said)
        for reward, status, said in ((None, "timeout", "slow"), (None, "error", "no\n1"), (0.0, "over_limit", "much"))
    )
    made = [experience(None, result=timeout), *[experience(None, result=error)] * 3, experience(1.0)]
    groups = [group(*made, *[experience(0.0, result=over)] * 2)]
    told = [("reward_error", 3, "no 1"), ("reward_over_limit", 2, "much"), ("reward_timeout", 1, "slow")]
    assert failures(groups) == told
    metrics = group_metrics(groups, 5)
    assert (metrics["over_limit"], metrics["unscorable"], metrics["reward_mean"]) == (2, 4, pytest.approx(1 / 3))
    played = group(experience(None, episode=0)).model_copy(
        update={"episodes_failed": {"limit": 3}, "failure_examples": {"limit": "had its 2 turns"}}
    )
    assert failures([played, played]) == [("limit", 6, "had its 2 turns")]


def test_a_batch_counts_its_rewards() -> None:
    groups = [group(experience(1.0), experience(0.0)), group(experience(None), experience(1.0))]
    assert reward_counts(groups) == [(0.0, 1), (1.0, 2)]
    assert reward_counts([group(experience(0.1 + 0.2), experience(0.3))]) == [(0.3, 2)]
    many = reward_counts([group(*(experience(place / 100) for place in range(101)))])
    assert len(many) == 20
    assert sum(count for _, count in many) == 101
    assert many[0] == (pytest.approx(0.025), 5)
