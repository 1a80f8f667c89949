"""Distillation beside GRPO by generated tokens, with two controls of what a teacher's numbers are worth.

The teacher is the task's own model, trained by GRPO. A control changes the teacher's log-probabilities before the loss
sees them: if it learns as well, the gain was not the teacher's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.results.comparisons import spread, table
from benchmarks.results.in_process import InProcess
from benchmarks.results.runs import Result, Results, Run, Settings, Train, by_variant, result_of
from benchmarks.results.tasks import REWARDS, with_model
from services.protocol.groups import TEACHER, Group, TokenSequence
from trainer.algorithm.packing import BASELINE, TrainingGroup
from trainer.algorithm.teachers import gaps, taught
from trainer.algorithm.training_groups import Array, PerToken
from trainer.config import TrainerSettings
from trainer.config.objective import Objective
from trainer.model.learner import Learner
from trainer.model.ranks import join_ranks
from trainer.model.saving import save_pretrained
from trainer.model.teachers import load_teachers

BASE = "GRPO, 8 x 8"
ONE = "distillation, 8 x 1"
WITHOUT_REWARDS: Settings = {"REWARD_WEIGHT": "0", "TEACHER_MODEL": "made for the run"}
ENOUGH = 0.9
"""The share of the teacher's accuracy at which a student has learned the task."""
WITHOUT = f"{ONE}, no baseline"
EVERY = 2
"""Steps between two evaluations."""
UNLIKELY, PENALTY = -3.0, 5.0
"""The log-probability below which ``constant_penalty`` acts, and the teacher's distance there, in nats."""

Control = Callable[[np.random.Generator, Array, Array], Array]
"""Returns other log-probabilities, of the policy's [L] and the teacher's [L] of all trained tokens of a step."""


def constant_penalty(_random: np.random.Generator, policy: Array, _teacher: Array) -> Array:
    """Put every token that the policy found unlikely equally far from the teacher, and agree with all others."""
    return policy - np.where(policy < UNLIKELY, PENALTY, 0.0)


def shuffled(random: np.random.Generator, policy: Array, teacher: Array) -> Array:
    """Give each token the distance from the teacher of another token of the step."""
    distances: Array = random.permutation(policy - teacher)
    return policy - distances


class WithoutBaselines(Objective):
    """The objective of a run whose distances from the teacher have no baseline."""

    def with_advantages(
        self,
        groups: Sequence[TrainingGroup],
        reference: Sequence[PerToken] | None = None,
        values: Sequence[PerToken] | None = None,
    ) -> list[TrainingGroup]:
        """Return the groups of a step with their advantages."""
        computed = super().with_advantages(groups, reference, values)
        return [replace(group, sequences=[without_baseline(s) for s in group.sequences]) for group in computed]


def without_baseline(sequence: TokenSequence) -> TokenSequence:
    """Return a sequence without the baseline of its distances."""
    arrays = {name: numbers for name, numbers in sequence.arrays.items() if name != BASELINE}
    return sequence.model_copy(update={"arrays": arrays})


class Student(InProcess):
    """A run in this process that measures accuracy and distance from a teacher as it goes."""

    teacher: Learner
    """Computes the teacher's log-probabilities of the policy's tokens, also where the policy does not learn from it."""
    control: Control | None = None

    def taught(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with their teacher's log-probabilities, as the control changes them."""
        scored = super().taught(groups)
        if self.control is None or not self.learner.teachers:
            return scored
        sequences = [s for group in scored for s in group.sequences]
        policy = np.concatenate([s.logprobs for s in sequences])
        teacher = np.concatenate([s.arrays[TEACHER] for s in sequences])
        changed = self.control(np.random.default_rng([self.settings.seed, len(self.stored)]), policy, teacher)
        parts = iter(np.split(changed, np.cumsum([len(s.logprobs) for s in sequences])[:-1]))
        return [g.model_copy(update={"sequences": [taught(s, next(parts)) for s in g.sequences]}) for g in scored]

    def _step(self, step: int, result: Result) -> None:
        super()._step(step, result)
        if (step + 1) % EVERY == 0:
            self.measure(step + 1, result)

    def measure(self, step: int, result: Result) -> None:
        """Write the accuracy, the distance from the teacher and the tokens generated so far to the figures."""
        learner, self.learner = self.learner, self.teacher
        measured = replace(result, figures={})
        groups = super().taught(self.evaluate(measured, "avg"))
        self.learner = learner
        distance = np.concatenate([gaps(s) for group in groups for s in group.sequences]).mean()
        assert measured.accuracy is not None
        result.figures |= {f"accuracy_{step}": measured.accuracy, f"kl_{step}": float(distance)}
        result.figures[f"tokens_{step}"] = sum(result.tokens)


def train(run: Run, *, teacher: Settings, control: Control | None = None, has_baseline: bool = True) -> Result:
    """Make a run that is measured by a teacher, and learns from it if the run's settings have one.

    Args:
        run: the run.
        teacher: the settings of the run that makes the teacher.
        control: changes what the teacher says.
        has_baseline: the gradient subtracts the mean distance of other completions.
    """
    directory, accuracy = made_teacher(tuple(sorted(teacher.items())))
    name = {"TEACHER_MODEL": str(directory)}
    started = time.process_time()
    result = result_of(run)
    result.figures["teacher_accuracy"] = accuracy
    with join_ranks() as ranks, with_model(run.settings) as settings:
        learns_from_it = "TEACHER_MODEL" in settings
        student = Student(settings | (name if learns_from_it else {}), REWARDS[settings["REWARD_FN"]], ranks)
        student.control, student.teacher = control, student.learner
        if not has_baseline:
            student.objective = WithoutBaselines(student.settings)
        if not learns_from_it:
            with_teacher = TrainerSettings.load(**{key.lower(): value for key, value in (settings | name).items()})
            teachers = load_teachers(with_teacher, student.policy, ranks)
            student.teacher = Learner(with_teacher, student.policy, ranks, None, with_teacher.max_steps, teachers)
        student.train(result)
    result.processor_seconds = time.process_time() - started
    return result


@cache
def made_teacher(settings: tuple[tuple[str, str], ...]) -> tuple[Path, float]:
    """Train a model by settings, and return its directory, which lives as long as this process, and its accuracy."""
    directory = TemporaryDirectory()
    _kept.append(directory)
    path = Path(directory.name) / "teacher"
    with join_ranks() as ranks, with_model(dict(settings)) as complete:
        run = InProcess(complete, REWARDS[complete["REWARD_FN"]], ranks)
        run.train(result := Result("teacher", "", 0, complete))
        save_pretrained(run.policy, ranks, path, run.rounding)
    assert result.accuracy is not None, "the settings ask for an evaluation"
    return path, result.accuracy


_kept: list[TemporaryDirectory[str]] = []


def variants(teacher: Settings) -> dict[str, tuple[Settings, Train]]:
    """Return GRPO, distillation by reward-free completions, and the controls, all measured by the teacher."""
    ways: dict[str, tuple[Settings, Control | None]] = {
        BASE: ({}, None),
        "GRPO, 2 x 4": ({"BATCH_SIZE": "2", "GROUP_SIZE": "4"}, None),
        "distillation, 8 x 8": (WITHOUT_REWARDS, None),
        ONE: (WITHOUT_REWARDS | {"GROUP_SIZE": "1"}, None),
        f"{ONE}, whole vocabulary": (WITHOUT_REWARDS | {"GROUP_SIZE": "1", "TEACHER_JSD_BETA": "1"}, None),
        f"{ONE}, constant penalty": (WITHOUT_REWARDS | {"GROUP_SIZE": "1"}, constant_penalty),
        f"{ONE}, shuffled teacher": (WITHOUT_REWARDS | {"GROUP_SIZE": "1"}, shuffled),
    }
    return {name: (own, partial(train, teacher=teacher, control=control)) for name, (own, control) in ways.items()}


def baselined(teacher: Settings) -> dict[str, tuple[Settings, Train]]:
    """Return distillation at the sampled tokens of a completion a prompt, with the baseline and without."""
    with_it = variants(teacher)[ONE]
    return {ONE: with_it, WITHOUT: (with_it[0], partial(train, teacher=teacher, has_baseline=False))}


def by_tokens(results: Results, task: str) -> str:
    """Return a table of a task's ways: tokens until ENOUGH of the teacher's accuracy, and accuracy and distance there.

    The numbers of tokens are those of the first evaluation at which a run is there, in the mean over the seeds.
    """
    rows = []
    for variant, runs in by_variant(results, task).items():
        last = len(runs[0].rewards)
        reached = [tokens for run in runs if (tokens := tokens_until(run)) is not None]
        seeds = f"{spread(reached, 0)}" if len(reached) == len(runs) else f"{len(reached)} of {len(runs)} seeds"
        ends = [[run.figures[f"{name}_{last}"] for run in runs] for name in ("tokens", "accuracy", "kl")]
        rows.append((variant, seeds, *(spread(of, digits) for of, digits in zip(ends, (0, 2, 2), strict=True))))
    columns = (
        f"tokens until {ENOUGH:.0%} of the teacher's accuracy",
        "tokens",
        "accuracy",
        "nats a token from the teacher",
    )
    return table(("", *columns), rows)


def tokens_until(run: Result) -> float | None:
    """Return the tokens that a run had generated when its accuracy was first ENOUGH of the teacher's; None if never."""
    for step in range(1, len(run.rewards) + 1):
        if run.figures.get(f"accuracy_{step}", -1) >= ENOUGH * run.figures["teacher_accuracy"]:
            return run.figures[f"tokens_{step}"]
    return None


def teacher_accuracy(results: Results, task: str) -> str:
    """Return the accuracy of a task's teacher."""
    return spread(sorted({run.figures["teacher_accuracy"] for run in results if run.task == task}))
