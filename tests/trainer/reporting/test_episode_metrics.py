"""The metrics of agents' episodes, in whichever process they were played: they come with their groups."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.protocol.groups import Group
from tests.sequences import make_group
from trainer.reporting.metrics import export
from trainer.reporting.step_metrics import group_metrics

EXPERIENCE = {
    "completion_ids": [5],
    "logprobs": [-0.5],
    "policy_versions": [1] * 1,
    "finish_reason": "stop",
    "result": {"reward": 1.0},
}


def group(**told: Any) -> Group:
    fields = {"group_id": "g", "prompt": "", "ground_truth": "", "prompt_ids": [1], "sequences": [EXPERIENCE]}
    return make_group(**(fields | told))


def test_a_batch_tells_between_which_rewards_most_completions_are() -> None:
    rewards = [0.0] * 2 + [0.25] * 7 + [1.0] * 2
    made = [group(sequences=[EXPERIENCE | {"result": {"reward": reward}} for reward in rewards])]
    metrics = group_metrics(made, policy_version=1)
    assert (metrics["reward_q10"], metrics["reward_q90"]) == (0.0, 1.0)
    one = group_metrics([group()], policy_version=1)
    assert (one["reward_q10"], one["reward_q90"]) == (1.0, 1.0)
    nothing = group_metrics(
        [group(sequences=[EXPERIENCE | {"result": {"reward": None, "status": "error"}}])], policy_version=1
    )
    assert "reward_q10" not in nothing


def test_a_batch_tells_of_its_episodes() -> None:
    calling = {"turns": 4, "tool_calls": 2, "unparsed_tool_calls": 1, "branches": 1, "calls_repeated": 2}
    made = [
        group(episode_figures={0: {"turns": 1}, 1: calling}, episodes_failed={"limit": 1}),
        group(
            episode_figures={0: {"turns": 4, "calls_repeated": 1}, 1: {"turns": 3}},
            episodes_failed={"timeout": 2, "limit": 1},
        ),
    ]
    metrics = group_metrics(made, policy_version=1)
    named = ("turns_mean", "turns_max", "tool_calls_mean", "tool_calls_parsed", "branches_mean", "episodes_failed")
    assert [metrics[name] for name in named] == [3.0, 4.0, 0.75, pytest.approx(2 / 3), 0.25, 4.0]
    assert metrics["episode_calls_repeated"] == 3
    assert (metrics["episodes_failed_limit"], metrics["episodes_failed_timeout"]) == (2.0, 2.0)
    assert "tool_calls_parsed" not in group_metrics(made[1:], policy_version=1), "no share of nothing"
    assert not group_metrics([group()], policy_version=1).keys() & {*named, "episodes_failed_limit"}


def test_failed_episodes_add_up_by_reason() -> None:
    def failed() -> float:
        return REGISTRY.get_sample_value("trainer_episodes_failed_total", {"reason": "timeout"}) or 0.0

    before = failed()
    export({"episodes_failed": 3.0, "episodes_failed_timeout": 3.0})
    export({"episodes_failed": 1.0, "episodes_failed_timeout": 1.0})
    assert failed() == before + 4
