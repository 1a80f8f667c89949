"""Whole runs in one process: the driver, its ranks and its files, with ``Outside`` in the place of all services."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson

from services.core.errors import ConfigurationError, DependencyLostError
from services.engines.proof import Evidence
from services.protocol.groups import Group, TokenSequence
from services.protocol.prompts import Cursor, DataStats
from services.protocol.rewards import FinishReason, RewardResult, RewardStatus
from tests.sequences import make_group
from tests.trainer.rank_jobs import Arrays, make_learner, weights_of
from trainer.checkpoints.checkpoint import CheckpointStore
from trainer.checkpoints.run_checkpoints import resume
from trainer.loop import TrainingLoop
from trainer.model.critic import CriticLearner
from trainer.model.ranks import Ranks
from trainer.rank_calls import RankCalls
from trainer.reporting.run_files import RunFiles
from trainer.reporting.status import RunStatus
from trainer.rollouts.batch import Batch
from trainer.rollouts.service_calls import ServiceCalls

STEPS = 4
LAST = 2
"""The step in which a service is lost."""


class Outside:
    """All that is outside the trainer: hands out groups, and loses a service in one call of step LAST.

    In ``acknowledge`` of that step, ``happens`` is called before.
    """

    def __init__(
        self,
        lost: str,
        happens: Callable[[], None] = lambda: None,
        deleted: Sequence[int] = (),
        prompts: int = 4,
        kind: type[Exception] = DependencyLostError,
    ) -> None:
        """``deleted`` are versions that go from the shared volume as soon as they are published."""
        self.lost = lost
        self.deleted = deleted
        self.prompts = prompts
        self.kind = kind
        self.happens = happens
        self.error: Exception | None = None
        self.steps = 0
        self.saved: list[str] = []
        self.snapshot_seconds: list[float | None] = []
        self.forgotten: list[str] = []
        self.writes: list[int] = []
        """Versions, each time that one is written."""
        self.on_gpus = None
        self.evidence = Evidence()
        self.is_exact = True
        self.written = 0
        self.thread = None
        self.ask_engines = None
        self.first: list[str] = []
        """The calls before the first step, in order."""
        self.samples: list[dict[str, Any]] = []
        self.failure: str | None = None
        self.evaluator = self

    @property
    def cursors(self) -> dict[str, Cursor]:
        return {"": Cursor(epoch=0, position=self.steps)}

    def fetch_prompts(self, _wanted: int) -> list[Any]:
        return [None] if self.steps < self.prompts else []

    def generate_and_score(self, _prompts: Any, _batch: Batch, meanwhile: Callable[[], None]) -> list[Group]:
        meanwhile()
        self._reach("generate", self.steps + 1)
        self.steps += 1
        return [group(f"g{self.steps}", self.steps - 1)]

    def store(self, _batch: Batch) -> None:
        pass

    def draw_replayed(self, *_: Any) -> None:
        self._reach("draw_replayed", self.steps)

    def free_engines_memory(self) -> None:
        self._reach("free_engines_memory", self.steps)

    def acknowledge(self, _: dict[str, float]) -> None:
        if self.steps == LAST:
            self.happens()
        self._reach("acknowledge", self.steps)

    def save_replay(self, label: str, deadline: float | None = None) -> None:
        self.saved.append(label)
        self.snapshot_seconds.append(deadline)

    def forget_replay(self, label: str, deadline: float | None = None) -> None:
        self.forgotten.append(label)

    def wait_for_workers(self, _meanwhile: Callable[[], None]) -> None:
        self.first.append("workers")

    def write(self, version: int) -> None:
        self.writes.append(version)
        self.written = version
        if not self.steps:
            self.first.append(f"write {version}")

    def release(self) -> None:
        pass

    def is_on_volume(self, version: int) -> bool:
        return version == 0 or version in self.writes

    def publish(self, version: int) -> dict[str, float]:
        if not version:
            self.first.append("publish 0")
        else:
            if version not in self.deleted:
                self.writes.append(version)
            self.written = version
            self._reach("publish", self.steps)
        return {}

    def evaluate(self) -> dict[str, float]:
        self._reach("evaluate", self.steps)
        accuracy = min(1.0, 0.25 * self.steps)
        ends = {"accuracy_low": accuracy / 2, "accuracy_high": accuracy / 2 + 0.5}
        return {"accuracy": accuracy, **ends, "eval_prompts": 64.0, "eval_left_out": 1.0}

    def statistics(self) -> dict[str, float]:
        return {}

    def _reach(self, call: str, step: int) -> None:
        if call == self.lost and step == LAST:
            raise self.kind(f"{call} found nobody")


def group(name: str, version: int) -> Group:
    experiences = [
        TokenSequence(
            completion="x",
            completion_ids=[5 + number, 6],
            logprobs=[-2.0, -2.0],
            policy_versions=[version] * 2,
            finish_reason=FinishReason.STOP,
            result=RewardResult(reward=float(number), status=RewardStatus.SCORED),
        )
        for number in range(2)
    ]
    return make_group(group_id=name, id=name, prompt="1+1=", ground_truth="2", prompt_ids=[2, 3], sequences=experiences)


@dataclass
class Run:
    """A run's end. The loop exists on rank 0 alone."""

    loop: TrainingLoop
    weights: Arrays
    """Those of the policy and, as ``critic.*``, of the critic."""
    error: Exception | None

    @property
    def directory(self) -> Path:
        return self.loop.settings.run_dir

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [orjson.loads(line) for line in (self.directory / "metrics.jsonl").read_bytes().splitlines()]

    def ends_as(self, other: Run) -> bool:
        """Return whether both have the same weights, to the bit."""
        assert self.weights.keys() == other.weights.keys()
        return all(np.array_equal(value, other.weights[name]) for name, value in self.weights.items())


def train(
    ranks: Ranks, model: Path, directory: Path, outside: Outside | None = None, prompts: float = 16, **settings: Any
) -> Run:
    """Train from the newest checkpoint, if any, until a service is lost or to the end.

    The schedule follows ``prompts``, of which each step takes one.
    """
    options: dict[str, Any] = {"run_id": "r", "eval_prompts": 0, "checkpoint_every": 1, "checkpoints_kept": 1}
    learner = make_learner(ranks, model, STEPS, shared_dir=directory, **(options | settings))
    chosen = learner.settings
    critic = CriticLearner(learner) if chosen.has_critic else None
    checkpoints = CheckpointStore(chosen.checkpoint_dir, chosen.checkpoints_kept, ranks, chosen.keep_checkpoints_every)
    data = DataStats(source="walks", train_prompts=9, test_prompts=1, refused={})
    state = resume(learner, checkpoints, data, critic)
    outside = outside or Outside("")
    outside.steps = state.cursors[""].position if state.cursors else 0
    services = cast(ServiceCalls, outside)
    rank_calls = RankCalls(chosen, ranks, learner, cast(Any, outside), checkpoints, critic)
    loop = None
    if ranks.is_main:
        files = RunFiles(chosen, state.step, str)
        loop = TrainingLoop(chosen, services, rank_calls, files, RunStatus(), state, STEPS, prompts)
        loop.publisher.publish = outside.publish  # type: ignore[method-assign]
        try:
            with rank_calls.leading():
                loop.run()
        except (DependencyLostError, ConfigurationError) as error:
            outside.error = error
        files.close()
    else:
        rank_calls.follow()
    of_critic = {f"critic.{name}": w for name, w in weights_of(critic.module).items()} if critic else {}
    return Run(cast(TrainingLoop, loop), weights_of(learner.policy) | of_critic, outside.error)


def weights_after(ranks: Ranks, model: Path, directory: Path, settings: dict[str, Any], prompts: float = 16) -> Arrays:
    """Return the weights of a run on several ranks."""
    return train(ranks, model, directory, prompts=prompts, **settings).weights


def resumed_run(ranks: Ranks, model: Path, directory: Path, lost: str, prompts: float = 16, **settings: Any) -> Run:
    """Check that a run that loses ``lost`` and resumes ends as one that loses nothing, to the bit; return it."""
    whole = train(ranks, model, directory / "whole", prompts=prompts, **settings)
    cut = train(ranks, model, directory / "cut", Outside(lost), prompts, **settings)
    assert (whole.error, str(cut.error)) == (None, f"{lost} found nobody")
    resumed = train(ranks, model, directory / "cut", prompts=prompts, **settings)
    assert resumed.error is None
    assert resumed.ends_as(whole)
    assert [line["step"] for line in resumed.metrics] == list(range(1, STEPS + 1))
    return resumed
