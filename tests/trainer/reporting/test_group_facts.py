"""Facts about groups: copies, unequal rewards of equal answers, tokens that do not belong, tools, advantages."""

from __future__ import annotations

from typing import Any

import pytest

from services.protocol.chat import EpisodeFigures
from services.protocol.groups import Group, TokenSequence
from services.protocol.rewards import FinishReason, RewardResult, RewardStatus
from services.run_page.diagnosis import question_key
from tests.sequences import make_group
from trainer.config import TrainerSettings
from trainer.config.objective import Objective
from trainer.reporting.group_facts import GroupFacts

SPECIAL, END = 0, 1


def answer(ids: list[int], reward: float, **fields: Any) -> TokenSequence:
    result = RewardResult(reward=reward, status=RewardStatus.SCORED, components={"math": reward}, extracted=None)
    numbers = {"logprobs": [-2.0] * len(ids), "policy_versions": [0] * len(ids)}
    return TokenSequence(completion_ids=ids, finish_reason=FinishReason.STOP, result=result, **numbers, **fields)


def group(name: str, *answers: TokenSequence, prompt: tuple[int, ...] = (5, 6), **fields: Any) -> Group:
    ids = {"prompt": "1+1=", "ground_truth": "2", "prompt_ids": [*prompt]}
    return make_group(group_id=name, id=name, sequences=[*answers], **ids, **fields)


def facts(*groups: Group) -> dict[str, Any]:
    return GroupFacts(TrainerSettings.load(run_id="r"), {SPECIAL, END}, {END}).of_step(groups)


def test_unlikely_equal_answers_are_copies_and_likely_ones_are_not() -> None:
    copied = group("a", *[answer([7, 8, END], 1.0)] * 4)
    short = group("b", *[answer([7, END], 1.0)] * 2)
    assert facts(copied, short)["copies"] == [2.0, 1.0, 0.0]
    assert facts(copied, short)["examples"]["copies"] == ["a"]


def test_equal_answers_with_unequal_rewards_are_counted_by_pair() -> None:
    mixed = group("a", *(answer([7, END], reward) for reward in (1.0, 1.0, 0.0)), answer([8, END], 0.0))
    assert facts(mixed)["equal"] == [3.0, 2.0]


def test_tokens_that_no_template_writes_are_counted_and_ends_of_turns_are_not() -> None:
    padded = answer([7, SPECIAL, SPECIAL, 8], 1.0)
    turns = answer([7, END, 9, 8, END], 0.0, loss_mask=[True, True, False, True, True])
    found = facts(group("a", padded, turns), group("b", answer([7, END], 1.0), prompt=(SPECIAL, SPECIAL, 5)))
    assert found["special"] == [10.0, 2.0]
    assert found["ends"] == [3.0, 1.0]
    assert found["prompt"] == [2.0, 1.0]
    assert found["read"] == [3.0, 3.0]
    assert found["prompts"] == [[0, 0, question_key("1+1=", "2"), ""]] * 2


def test_rewards_are_counted_with_and_without_a_call_of_an_offered_tool() -> None:
    figures = {
        0: EpisodeFigures(turns=2, tools_offered=2, tool_calls=1, unparsed_tool_calls=1),
        1: EpisodeFigures(turns=1, tools_offered=1),
        2: EpisodeFigures(turns=1),
    }
    episodes = [answer([7, 7 + number, END], 0.5 * number, episode=number) for number in range(3)]
    assert facts(group("a", *episodes, episode_figures=figures))["tools"] == [2.0, 1.0, 1.0, 1.0, 0.5, 1.0, 0.0]


def test_advantages_and_surprise_are_those_of_groups_with_a_signal() -> None:
    settings = TrainerSettings.load(run_id="r")
    groups = [group("a", answer([7, END], 1.0), answer([8, END], 0.0)), group("b", *[answer([7, END], 1.0)] * 2)]
    objective = Objective(settings)
    trained = objective.with_advantages([objective.training_group(one) for one in groups])
    found = GroupFacts(settings, {SPECIAL, END}, {END}).of_step(groups, trained)
    assert found["advantage"] == pytest.approx([1.0, 1.0])
    assert found["surprise"] == [4.0, 8.0, 16.0]
