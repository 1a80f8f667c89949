"""A model of a step: seconds follow from its work and from rates, which are fitted to measured runs.

generate = longest * decode_iteration + tokens * token
score    = completions * score_completion
train    = trained_tokens * trained_token
publish  = publish
rest     = rest
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from scripts.launch.prediction import Work


@dataclass(frozen=True)
class Seconds:
    """The seconds of a step, by phase."""

    generate: float
    score: float
    train: float
    publish: float
    rest: float

    @property
    def total(self) -> float:
        """The sum of the phases, as in MODE=sync."""
        return self.rollouts + self.learning

    @property
    def rollouts(self) -> float:
        """The seconds from prompts to scored groups."""
        return self.generate + self.score

    @property
    def learning(self) -> float:
        """The seconds from scored groups to the next policy version."""
        return self.train + self.publish + self.rest


PHASES = tuple(field.name for field in fields(Seconds))


@dataclass(frozen=True)
class Measured:
    """A measured step of a run."""

    work: Work
    seconds: Seconds

    @classmethod
    def of_metrics(cls, line: dict[str, float]) -> Self:
        """Return the step of a line of metrics.jsonl; storing groups counts as scoring."""
        work = Work(
            completions=line["completions"],
            tokens=line["prompt_tokens"] + line["completion_tokens"],
            longest=line["length_max"],
            trained_tokens=line.get("trained_tokens", 0.0),
        )
        generate, train, publish = line["seconds_generate"], line["seconds_train"], line["seconds_publish"]
        score = line["seconds_score"] + line.get("seconds_store", 0.0)
        whole = line["seconds_step"] - line.get("seconds_evaluate", 0.0)
        return cls(work, Seconds(generate, score, train, publish, whole - generate - score - train - publish))


def read(path: Path) -> list[Measured]:
    """Read the steps of a metrics.jsonl, without the first one, which warms up."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Measured.of_metrics(line) for line in lines if line["step"] > 1 and "seconds_step" in line]


@dataclass(frozen=True)
class Rates:
    """Seconds of each unit of work, of all engines and of all trainer nodes together."""

    decode_iteration: float
    token: float
    score_completion: float
    trained_token: float
    publish: float
    rest: float

    def seconds(self, work: Work) -> Seconds:
        """Return the seconds of the work."""
        return Seconds(
            generate=work.longest * self.decode_iteration + work.tokens * self.token,
            score=work.completions * self.score_completion,
            train=work.trained_tokens * self.trained_token,
            publish=self.publish,
            rest=self.rest,
        )


def fit(steps: Sequence[Measured]) -> Rates:
    """Return the rates with the least relative errors of the measured steps' seconds.

    The steps must differ in length: with one length, iterations and tokens cannot be told apart. The model assumes that
    a token of a prompt costs as much as a token of a completion without its iteration.
    """
    works, seconds = [step.work for step in steps], [step.seconds for step in steps]
    generate = _fit([[work.longest, work.tokens] for work in works], [one.generate for one in seconds])
    trained = [step for step in steps if step.work.trained_tokens]
    train = _fit([[step.work.trained_tokens] for step in trained], [step.seconds.train for step in trained])
    return Rates(
        decode_iteration=generate[0],
        token=generate[1],
        score_completion=sum(one.score for one in seconds) / sum(work.completions for work in works),
        trained_token=train[0],
        publish=float(np.median([one.publish for one in seconds])),
        rest=float(np.median([one.rest for one in seconds])),
    )


def _fit(features: Sequence[Sequence[float]], measured: Sequence[float]) -> list[float]:
    """Return the rates of the least squares of the relative errors, without negative rates."""
    target = np.asarray(measured, dtype=float)
    matrix: npt.NDArray[np.float64] = np.asarray(features, dtype=float) / target[:, None]
    free = list(range(matrix.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, free], np.ones(len(target)), rcond=None)
        if (found >= 0).all():
            rates = np.zeros(matrix.shape[1])
            rates[free] = found
            return [float(rate) for rate in rates]
        free.pop(int(found.argmin()))


def mean(values: Sequence[Seconds]) -> Seconds:
    """Return the mean of each phase."""
    return Seconds(**{phase: float(np.mean([getattr(value, phase) for value in values])) for phase in PHASES})
