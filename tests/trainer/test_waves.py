"""A step that trains while groups arrive takes the step of the whole batch, whatever order they arrive in."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, cast

import numpy as np
import pytest

from services.core.endpoints import tiers_are_apart
from services.core.errors import ConfigurationError
from services.core.tasks import ServiceThread
from services.protocol.groups import Group
from services.protocol.prompts import Prompt
from services.protocol.replay import SampledGroup
from services.run_page.progress import Activity
from tests.sequences import changed
from tests.trainer.processes import run_on_ranks
from tests.trainer.rank_jobs import Arrays
from tests.trainer.runs import STEPS, Outside, Run, group, train
from tests.trainer.tiny import FAMILIES, save_model
from trainer.algorithm.packing import TrainingGroup
from trainer.config import TrainerSettings
from trainer.config.objective import Objective
from trainer.explain import explain
from trainer.model.ranks import Ranks
from trainer.rollouts.batch import Batch
from trainer.rollouts.service_calls import ServiceCalls
from trainer.waves import Waves, wave_size

PROMPTS = 8
ON: dict[str, Any] = {
    "batch_size": PROMPTS,
    "train_while_generating": True,
    "record_groups": "all",
    "checkpoints_kept": 9,
    "adam_eps": 1e-3,  # else a step is as large as the learning rate where a gradient is rounding alone
}
OFF = ON | {"train_while_generating": False}
IN_ORDER = [*range(PROMPTS)]


class Arrivals(Outside):
    """Makes the groups of eight prompts, which arrive in a given order; prompt 5 never gets a group."""

    def __init__(self, order: Sequence[int] = IN_ORDER, lost: str = "", *, replays: bool = False) -> None:
        super().__init__(lost)
        self.order = order
        self.replays = replays
        self.made: list[Group] = []

    def fetch_prompts(self, _wanted: int) -> list[Any]:
        return [None] * PROMPTS if self.steps < STEPS else []

    def generate_and_score(self, _prompts: Any, batch: Batch, meanwhile: Callable[[], None]) -> list[Group]:
        super().generate_and_score(_prompts, batch, meanwhile)
        made = [None if place == 5 else self.group_of(place) for place in range(PROMPTS)]
        if (waves := batch.waves) is not None:
            waves.begin(PROMPTS)
            for place in self.order:
                waves.arrive(place, made[place])
                waves.train()
            batch.seconds_training = waves.end()
        self.made = [one for one in made if one is not None]
        return self.made

    def group_of(self, place: int) -> Group:
        """A group with as many tokens as the place has; in every third one all rewards are equal."""
        whole = group(f"g{self.steps}-{place}", self.steps - 1)
        sequences = [
            changed(
                one,
                completion_ids=[*one.completion_ids, *range(7, 7 + place + number)],
                logprobs=[-2.0] * (2 + place + number),
                policy_versions=[self.steps - 1] * (2 + place + number),
                **({"result": whole.sequences[0].result} if place % 3 == 2 else {}),
            )
            for number, one in enumerate(whole.sequences)
        ]
        return whole.model_copy(update={"sequences": sequences})

    def draw_replayed(self, batch: Any, step: int, *_: Any) -> None:
        super().draw_replayed()
        if self.replays and step:
            old = group("replayed", step - 1)
            batch.replayed = [SampledGroup(group=old, priority=1.0, probability=1.0, weight=0.75)]


def compare(run: Run, other: Run) -> float:
    """The largest difference of two weights."""
    return max(float(np.abs(value - other.weights[name]).max()) for name, value in run.weights.items())


SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "maxrl": {"advantage": "maxrl", "aggregation": "prompt_mean", "entropy_coef": 0.01},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "constant_length", "drop_equal_groups": True},
    "gspo": {"loss": "gspo", "advantage": "rloo", "kl_coef": 0.1},
    "lora": {"lora_rank": 4, "max_grad_norm": 0.01},
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n == "maxrl" else []) for n in SETTINGS])
def test_the_weights_are_those_of_the_whole_batch_within_rounding(
    alone: Ranks, model: Path, tmp_path: Path, name: str
) -> None:
    whole = train(alone, model, tmp_path / "whole", Arrivals(), **OFF | SETTINGS[name])
    waves = train(alone, model, tmp_path / "waves", Arrivals(), **ON | SETTINGS[name])
    assert whole.error is waves.error is None
    assert "overlap_seconds" not in whole.metrics[0]
    assert all(line["overlap_seconds"] > 0 for line in waves.metrics)
    assert compare(whole, waves) < 1e-4
    for of_whole, of_waves in zip(whole.metrics, waves.metrics, strict=True):
        for metric in ("loss", "grad_norm", "entropy", "groups", "learning_rate", "kl_behaviour"):
            assert of_waves[metric] == pytest.approx(of_whole[metric], rel=1e-3, abs=1e-5), metric
        assert of_waves["trained_tokens"] == of_whole["trained_tokens"]


def test_no_order_of_arrival_changes_a_bit_and_neither_does_a_lost_service(
    alone: Ranks, model: Path, tmp_path: Path
) -> None:
    first = train(alone, model, tmp_path / "first", Arrivals(), **ON)
    backwards = train(alone, model, tmp_path / "backwards", Arrivals(IN_ORDER[::-1]), **ON)
    assert backwards.ends_as(first)
    assert [line["overlap_seconds"] for line in backwards.metrics] == [0.0] * STEPS, "each wave waits for the first"
    cut = train(alone, model, tmp_path / "cut", Arrivals([3, 1, 0, 2, 7, 4, 5, 6], "draw_replayed"), **ON)
    assert str(cut.error) == "draw_replayed found nobody"
    resumed = train(alone, model, tmp_path / "cut", Arrivals([7, 0, 3, 2, 1, 4, 6, 5]), **ON)
    assert resumed.ends_as(first)
    assert [line["step"] for line in resumed.metrics] == [*range(1, STEPS + 1)]


def test_a_step_of_waves_and_replayed_groups_is_computed_again_to_the_bit(
    alone: Ranks, model: Path, tmp_path: Path
) -> None:
    outside = Arrivals([6, 0, 1, 2, 5, 3, 4, 7], replays=True)
    run = train(alone, model, tmp_path, outside, **ON, replay_groups=1, replay_max_kl=9.0)
    for step in (1, 3):
        explained = explain(run.directory, step, alone)
        assert explained.compared.step is None, explained.compared
        assert (explained.compared.tensors or 0) > 20


def weights_of_waves(ranks: Ranks, model: Path, directory: Path, order: list[int], settings: dict[str, Any]) -> Arrays:
    return train(ranks, model, directory, Arrivals(order), **settings).weights


@pytest.mark.slow
@pytest.mark.parametrize("shards", [True, False])
def test_two_ranks_take_the_step_of_one(alone: Ranks, model: Path, tmp_path: Path, shards: bool) -> None:
    settings = ON | {"shard_parameters": shards}
    one = train(alone, model, tmp_path / "one", Arrivals(), **OFF)
    for name, order in (("forwards", IN_ORDER), ("backwards", IN_ORDER[::-1])):
        two = run_on_ranks(2, weights_of_waves, model, tmp_path / f"{name}{shards}", order, settings)
        assert max(np.abs(two[0][n] - value).max() for n, value in one.weights.items()) < 1e-4


class Slow:
    """A maker of groups, the last of which waits until training has begun."""

    last_generated = 0.0

    def __init__(self, begun: threading.Event) -> None:
        self.begun = begun

    async def make_group(self, prompt: Prompt) -> Group:
        if prompt.position == 3:
            await asyncio.to_thread(self.begun.wait, 30)
        return group(f"g{prompt.position}", 0)

    def judge(self, _groups: Sequence[Group]) -> None:
        pass


@pytest.mark.parametrize("is_in_order", [True, False])
def test_waves_are_trained_on_while_a_slow_engine_generates(is_in_order: bool) -> None:
    settings = TrainerSettings.load(batch_size=4)
    begun, trained = threading.Event(), []

    def add(groups: Sequence[TrainingGroup]) -> None:
        trained.append([one.group_id for one in groups])
        begun.set()

    batch = Batch(Objective(settings))
    batch.waves = Waves(batch, 1, add, is_in_order=is_in_order)
    prompts = [Prompt(id=str(n), prompt="1+1=", ground_truth="2", position=n) for n in range(4)]
    with ServiceThread() as thread:
        calls = cast(Any, ServiceCalls.__new__(ServiceCalls))
        calls.thread, calls.makers, calls.activity = thread, {"": Slow(begun)}, Activity()
        made = ServiceCalls.generate_and_score(calls, prompts, batch, lambda: None)
    assert len(made) == 4
    assert batch.waves.overlap_seconds > 0
    assert batch.seconds_training >= 0 <= batch.seconds_scoring
    batch.add(made)
    batch.waves.finish(batch.objective.with_advantages(batch.prepared(batch.groups)))
    assert trained == [["g0"], ["g1"], ["g2"], ["g3"]]
    assert batch.waves.sizes(batch.prepared(batch.groups)) == [1, 1, 1, 1]


def test_out_of_order_a_slow_group_holds_nobody_up() -> None:
    trained: list[str] = []
    batch = Batch(Objective(TrainerSettings.load()))
    waves = Waves(batch, 2, lambda groups: trained.extend(one.group_id for one in groups), is_in_order=False)
    waves.begin(6)
    for place in (5, 2, 3, 0, 4, 1):
        waves.arrive(place, group(f"g{place}", 0))
        waves.train()
    assert trained == ["g2", "g3", "g4", "g5", "g0", "g1"]


NEEDS_WHOLE: list[dict[str, Any]] = [
    {"method": "sft"},
    {"mode": "async"},
    {"engine_sleeps": True},
    {"updates_per_batch": 2},
    {"epochs_per_batch": 2},
    {"dynamic_sampling_tries": 1},
    {"kl_in_reward": True, "kl_coef": 0.1},
    {"teacher_model": "other"},
    {"teacher_url": "http://teacher"},
    *({"advantage": name} for name in ("batch_std", "reinforce", "reinforce_baseline", "gdpo", "rae", "gae", "a:b")),
]


@pytest.mark.parametrize("settings", NEEDS_WHOLE, ids=str)
def test_what_needs_the_whole_batch_is_named_and_refused_with_waves(settings: dict[str, Any]) -> None:
    reason = TrainerSettings.load(**settings).whole_batch_reason
    assert reason.split("=")[0].lower() in settings
    assert not TrainerSettings.load(**settings).trains_while_generating(are_tiers_apart=True)
    if "mode" not in settings:  # where the variable is unknown
        with pytest.raises(ConfigurationError, match=f"TRAIN_WHILE_GENERATING.*{reason}"):
            TrainerSettings.load(**settings, train_while_generating=True)


def test_a_step_of_waves_needs_engines_elsewhere_or_a_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = TrainerSettings.load(replay_groups=2, kl_coef=0.1, entropy_coef=0.1, lora_rank=4)
    assert [chosen.trains_while_generating(are_tiers_apart=apart) for apart in (True, False)] == [True, False]
    for demand in (True, False):
        settings = TrainerSettings.load(train_while_generating=demand)
        assert settings.trains_while_generating(are_tiers_apart=not demand) is demand
    monkeypatch.delenv("SKYPILOT_JOBGROUP_NAME", raising=False)
    assert not tiers_are_apart()
    monkeypatch.setenv("SKYPILOT_JOBGROUP_NAME", "grpo")
    assert tiers_are_apart(), "tasks of a job group on a cluster have nodes of their own"
    monkeypatch.setenv("JOBGROUP_ENDPOINTS", '{"ppo-trainer-0:8004": "127.0.0.1:1"}')
    assert not tiers_are_apart()
    monkeypatch.setenv("JOBGROUP_TIERS_APART", "true")
    assert tiers_are_apart()


@pytest.mark.parametrize(
    ("ranks", "batch", "expected"), [(1, 128, 1), (4, 128, 4), (8, 16, 4), (8, 2, 1), (1, 8, 1)], ids=str
)
def test_a_wave_is_about_a_micro_batch_of_each_rank(ranks: int, batch: int, expected: int) -> None:
    settings = TrainerSettings.load(batch_size=batch, group_size=16, max_new_tokens=1024, micro_batch_tokens=16_384)
    assert wave_size(settings, ranks) == expected


LONG = 64
"""Tokens of a completion of the groups of SlowEngine."""


class SlowEngine(Outside):
    """Makes eight groups of eight completions with an engine elsewhere, which has one more each ``seconds`` / 8."""

    last_generated = 0.0

    def __init__(self, thread: ServiceThread, seconds: float) -> None:
        super().__init__("", prompts=STEPS)
        self.seconds = seconds
        self.calls = cast(Any, ServiceCalls.__new__(ServiceCalls))
        self.calls.thread, self.calls.makers, self.calls.activity = thread, {"": self}, Activity()

    def generate_and_score(self, _prompts: Any, batch: Batch, meanwhile: Callable[[], None]) -> list[Group]:
        self.steps += 1
        prompts = [Prompt(id=str(n), prompt="1+1=", ground_truth="2", position=n) for n in range(PROMPTS)]
        return ServiceCalls.generate_and_score(self.calls, prompts, batch, meanwhile)

    async def make_group(self, prompt: Prompt) -> Group:
        await asyncio.sleep(self.seconds * (prompt.position + 1) / PROMPTS)
        self.last_generated = time.perf_counter()
        whole = group(f"g{self.steps}-{prompt.position}", self.steps - 1)
        draw = Random(PROMPTS * self.steps + prompt.position)
        sequences = [
            changed(
                whole.sequences[number % 2],
                completion_ids=draw.choices(range(5, 15), k=LONG),
                logprobs=[-2.0] * LONG,
                policy_versions=[self.steps - 1] * LONG,
            )
            for number in range(8)
        ]
        return whole.model_copy(update={"sequences": sequences})

    def judge(self, _groups: Sequence[Group]) -> None:
        pass


@pytest.mark.slow
def test_with_a_slow_engine_a_step_trains_its_last_wave_after_generating(alone: Ranks, tmp_path: Path) -> None:
    """`pytest -m slow -s -k slow_engine` prints the seconds of a step."""
    config = FAMILIES["qwen2"]
    larger = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    model = save_model(tmp_path / "model", type(config)(**{**config.to_dict(), **larger, "layer_types": None}))
    rare = {"checkpoint_every": 0, "record_groups": "off"}
    with ServiceThread() as thread:
        first = train(alone, model, tmp_path / "first", SlowEngine(thread, 0.0), **OFF | rare)
        seconds = median(line["seconds_train"] for line in first.metrics)  # as long as the engine takes from now on
        whole = train(alone, model, tmp_path / "whole", SlowEngine(thread, seconds), **OFF | rare)
        waves = train(alone, model, tmp_path / "waves", SlowEngine(thread, seconds), **ON | rare)
    for name, run in (("a whole batch", whole), ("groups as they arrive", waves)):
        columns = ("seconds_step", "seconds_generate", "seconds_train", "overlap_seconds")
        medians = {column: median(line.get(column, 0.0) for line in run.metrics) for column in columns}
        print(name, {column: round(value, 2) for column, value in medians.items()})
    assert compare(whole, waves) < 1e-4
    for line in waves.metrics:
        assert line["overlap_seconds"] > 0 < line["seconds_train"]
        of_phases = sum(value for name, value in line.items() if name.startswith("seconds_") and name != "seconds_step")
        assert of_phases == pytest.approx(line["seconds_step"])
