"""The steps of a run of several sources: quotas, refills, statistics, evaluation."""

from __future__ import annotations

import asyncio
import math
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from services.clients.replay import ReplayClient
from services.core.errors import ConfigurationError
from services.core.sources import Schedule
from services.protocol.accuracy import GREEDY, Estimate
from services.protocol.groups import Group
from services.protocol.prompts import Prompt
from services.protocol.replay import LeaseReply
from services.protocol.rewards import RewardResult, RewardStatus
from tests.sequences import make_group
from trainer.checkpoints.state import RunState, note_accuracy
from trainer.collector import groups_within
from trainer.config import TrainerSettings
from trainer.config.objective import Objective
from trainer.reporting.metrics import export
from trainer.reporting.step_metrics import headline, source_metrics
from trainer.rollouts.batch import Batch, sample_groups
from trainer.rollouts.evaluate import Measured, macro_means
from trainer.rollouts.groups import LEAST_FAILURES, Answers, Completions, make_groups, makers_of

MIX = """
- name: a
  ratio: 2
- name: b
  max_new_tokens: 8
  group_size: 3
"""


@pytest.fixture
def mix(tmp_path: Path) -> Any:
    path = tmp_path / "mix.yaml"
    path.write_text(MIX)

    def load(**settings: Any) -> TrainerSettings:
        return TrainerSettings.load(**{"sources": path, "max_steps": 9, "shared_dir": tmp_path, **settings})

    return load


def made(source: str, *rewards: float | None, name: str = "g", tokens: int = 1, version: int = 0) -> Group:
    """Return a group of a source with these rewards; None could not be scored."""
    sequences = [
        {
            "completion_ids": [3] * tokens,
            "logprobs": [-0.5] * tokens,
            "policy_versions": [version] * tokens,
            "finish_reason": "stop",
            "result": {"reward": reward, "status": "scored" if reward is not None else "error"},
        }
        for reward in rewards
    ]
    group = make_group(group_id=name, sequences=sequences)
    return group.model_copy(update={"prompt": group.prompt.model_copy(update={"source": source})})


def test_a_prompt_without_a_group_and_a_group_without_a_reward_give_way_to_their_own_source(mix: Any) -> None:
    batch = Batch(Objective(mix(batch_size=3)), {"a": 2, "b": 1})
    assert batch.missing == {"a": 2, "b": 1}
    batch.add([made("a", 1.0, 0.0)])
    assert batch.missing == {"a": 1, "b": 1}
    batch.add([made("a", 1.0, 1.0), made("b", None, None)])
    assert batch.missing == {"b": 1}
    batch.add([])
    assert batch.missing == {"b": 1}
    batch.add([made("b", 0.0, None)])
    assert not batch.missing
    assert [group.prompt.source for group in batch.groups] == ["a", "a", "b"]
    assert {name: batch.counts[name] for name in ("groups_resampled", "groups_resampled/b")} == {
        "groups_resampled": 1.0,
        "groups_resampled/b": 1.0,
    }


def test_dynamic_sampling_refills_from_the_same_source_a_bounded_number_of_times(mix: Any) -> None:
    flat = (1.0, 1.0)
    batch = Batch(Objective(mix(batch_size=3, dynamic_sampling_tries=1)), {"a": 2, "b": 1})
    batch.add([made("a", *flat), made("a", 1.0, 0.0), made("b", *flat)])
    assert batch.missing == {"a": 1, "b": 1}
    batch.add([made("a", *flat), made("b", *flat)])
    assert not batch.missing
    queued = Batch(Objective(mix(batch_size=3, dynamic_sampling_tries=1)), {"a": 2, "b": 1})
    # Each source has tries of its own: a may drop as many groups as it has in the step.
    leased = [(source, made(source, *flat, name=str(n))) for n, source in enumerate(("b", "a", "a", "a", "b"))]
    replies = [(source, LeaseReply(lease_id="l", groups=[group])) for source, group in leased]
    assert [len(queued.take_leased(*reply)[1]) for reply in replies] == [0, 0, 0, 1, 1]
    assert queued.missing == {"a": 1}


async def test_each_source_has_its_share_of_the_replayed_groups(mix: Any) -> None:
    asked: list[Any] = []

    class Replay:
        async def sample(self, request: Any) -> list[Any]:
            asked.append(request)
            return []

    settings, fresh = mix(replay_groups=2, replay_max_staleness=3), [made("a", 1.0, name="f")]
    for step in range(3):
        await sample_groups(settings, cast(ReplayClient, Replay()), step, 7, fresh)
    counts = {source: sum(r.batch_size for r in asked if r.source == source) for source in ("a", "b")}
    assert counts == {"a": 4, "b": 2}
    assert {(request.min_policy_version, *request.exclude) for request in asked} == {(4, "f")}
    assert len({request.seed for request in asked}) == len(asked)


@pytest.mark.parametrize("advantage", ["batch_std", "reinforce", "reinforce_baseline"])
def test_statistics_over_a_batch_are_those_of_a_source_alone(mix: Any, advantage: str) -> None:
    objective = Objective(mix(advantage=advantage))
    small = [made("a", 0.0, 1.0, name="a1"), made("a", 0.0, 0.0, name="a2", tokens=3)]
    large = [made("b", 0.0, 50.0, 100.0, name="b1"), made("b", 7.0, 0.0, 9.0, name="b2")]

    def advantages(groups: list[Group]) -> dict[str, list[list[float]]]:
        computed = objective.with_advantages([objective.training_group(group) for group in groups])
        return {g.group_id: [s.advantages.tolist() for s in g.sequences if s.advantages is not None] for g in computed}

    mixed = advantages([large[0], small[0], large[1], small[1]])
    assert mixed == advantages(small) | advantages(large)
    assert list(mixed) == ["b1", "a1", "b2", "a2"], "the groups stay in their order"
    assert len({x for of_group in advantages(small).values() for of in of_group for x in of}) > 1


class Refused(Completions):
    """Completions of which each fails by the user's code for some sources."""

    def __init__(self, settings: TrainerSettings, fails: bool) -> None:
        super().__init__(settings, None, None)  # type: ignore[arg-type]
        self.fails = fails

    async def answer(self, prompt: Prompt, params: Any, n: int, seed: int, **_: Any) -> Answers:
        result = RewardResult(reward=None, status=RewardStatus.ERROR, reason="no column") if self.fails else None
        group = made(prompt.source, *([1.0] * n))
        changes = {"result": result} if result else {}
        return Answers([1], [sequence.model_copy(update=changes) for sequence in group.sequences])


def test_a_source_whose_every_reward_fails_ends_the_run_with_its_name(mix: Any) -> None:
    settings = mix(batch_size=4)
    settings.run_dir.mkdir(parents=True)
    makers = makers_of(settings, {"a": Refused(settings, False), "b": Refused(settings, True)})
    assert (makers["a"].batch_size, makers["b"].batch_size) == (3, 2)

    def prompts(source: str, count: int) -> list[Prompt]:
        return [
            Prompt(id=f"{source}/train/{n}", prompt="", ground_truth="", prompt_ids=[1], source=source, position=n)
            for n in range(count)
        ]

    rounds = [*prompts("a", 2), *prompts("b", 1)]
    groups = asyncio.run(make_groups(makers, rounds))
    assert {group.group_id for group in groups} == {f"{settings.run_id}-{name}" for name in ("a-0-0", "a-0-1", "b-0-0")}
    assert [len(group.sequences) for group in groups] == [8, 8, 3]
    for _ in range(LEAST_FAILURES - 2):
        asyncio.run(make_groups(makers, rounds))
    with pytest.raises(ConfigurationError, match=r"every answer of 8 prompts of source 'b' in a row: .*no column"):
        asyncio.run(make_groups(makers, rounds))


@pytest.mark.parametrize("ratios", [{"a": 1, "b": 1}, {"a": 3, "b": 2}, {"a": 0.7, "b": 0.02, "c": 0.29}])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_the_bound_of_a_source_is_what_any_steps_train_at_least(ratios: dict[str, float], steps: int) -> None:
    schedule, batch = Schedule(ratios), 8
    for source, share in schedule.shares.items():
        bound = groups_within(batch * share, steps)
        least = min(schedule.counts(batch * t, batch * (t + steps))[source] for t in range(60))
        assert bound <= least <= bound + 1, source
    assert groups_within(Fraction(4), 2) == 8


def test_each_source_has_its_metrics_beside_the_total(mix: Any) -> None:
    groups = [made("a", 1.0, 0.0, version=3), made("b", 5.0, 7.0, tokens=4, version=1)]
    metrics = source_metrics(groups, policy_version=4)
    names = ("reward_mean", "length_mean", "completion_tokens", "groups", "staleness_max", "truncation_rate", "epoch")
    assert [metrics[f"{name}/b"] for name in names] == [6.0, 4.0, 8.0, 1.0, 3.0, 0.0, 0.0]
    assert metrics["staleness_max/a"] == 1.0
    assert source_metrics([made("", 1.0, 0.0)], 0) == {}
    assert headline({"reward_mean": 0.5, **metrics})["reward/b"] == "6"
    export(metrics)
    assert REGISTRY.get_sample_value("trainer_source", {"column": "reward_mean", "source": "b"}) == 6.0


def test_the_accuracy_of_several_sources_is_their_macro_mean() -> None:
    def measured(value: float, stderr: float, **figures: float) -> Measured:
        return Measured({GREEDY: Estimate(value=value, stderr=stderr, low=0, high=1, prompts=1)}, figures)

    sources = [measured(0.9, 0.03, eval_prompts=100), measured(0.5, 0.04, eval_prompts=10, eval_environment_legal=1)]
    means = macro_means(sources).columns
    assert means.pop("eval_prompts") == 110
    expected = {"accuracy": 0.7, "accuracy_stderr": 0.025, "accuracy_low": 0.7 - 0.049, "accuracy_high": 0.7 + 0.049}
    assert means == pytest.approx(expected, abs=1e-5), "a figure that one source has is no mean of all"
    means = macro_means([measured(1.0, 0.1)] * 2).columns
    assert means["accuracy_high"] == 1.0
    assert math.isclose(means["accuracy_stderr"], 0.1 / math.sqrt(2))


def test_the_state_keeps_the_accuracy_of_each_source_before_training_and_the_newest(mix: Any) -> None:
    state = RunState(model_type="m", parameters=1)
    whole = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6, "eval_prompts": 9.0}
    for step, value in enumerate((0.1, 0.4, 0.3)):
        state.step = step
        note_accuracy(mix(), state, {**whole, "accuracy/a": value, "accuracy_low/a": 0.0})
    assert state.accuracies_by_source == {"a": [0.1, 0.3]}
