"""A model of a step: seconds follow from its work and from rates, which are fitted to measured runs.

generate = longest * decode_iteration + (completion_tokens * decode_token + prompt_tokens * prompt_token) / engines
score    = completions * score_completion
train    = updates * update + trained_tokens * trained_token
publish  = publish
rest     = rest
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

PHASES = ("generate", "score", "train", "publish", "rest")


@dataclass(frozen=True)
class Work:
    """The work of a step."""

    groups: float
    completions: float
    prompt_tokens: float
    """A group's prompt counts once."""
    completion_tokens: float
    longest: float
    """Tokens of the longest completion."""
    trained_tokens: float
    """Prompts and completions of the groups with a gradient, replayed ones included."""
    updates: float
    """Optimizer steps, those on replayed groups included."""


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
        return float(sum(getattr(self, phase) for phase in PHASES))


@dataclass(frozen=True)
class Measured:
    """A measured step of a run."""

    work: Work
    seconds: Seconds


@dataclass(frozen=True)
class Run:
    """The measured steps of a run, and a line about the run."""

    name: str
    about: str
    steps: tuple[Measured, ...]

    @classmethod
    def of_metrics(cls, name: str, about: str, lines: Sequence[dict[str, Any]], skip: int = 1) -> Self:
        """Return the steps of the lines of a metrics.jsonl, without the first ones, which warm up."""
        return cls(name, about, tuple(_measured(line) for line in lines[skip:]))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file that ``write`` writes."""
        return TypeAdapter(cls).validate_json(path.read_bytes())

    def write(self, path: Path) -> None:
        """Write the run as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def _measured(line: dict[str, Any]) -> Measured:
    trained = line.get("trained_tokens", 0.0)
    fresh = line["groups"] > line["zero_variance_groups"]
    work = Work(
        groups=line["groups"],
        completions=line["completions"],
        prompt_tokens=line["prompt_tokens"],
        completion_tokens=line["completion_tokens"],
        longest=line["length_max"],
        trained_tokens=trained,
        updates=float(fresh) + float(line.get("replay_groups", 0.0) > 0),
    )
    phases = {
        "generate": line["seconds_generate"],
        # Runs of version 0.1 call it seconds_reward.
        "score": line.get("seconds_score", line.get("seconds_reward", 0.0)) + line["seconds_store"],
        "train": line["seconds_train"],
        "publish": line["seconds_publish"],
    }
    return Measured(work, Seconds(**phases, rest=line["seconds_step"] - sum(phases.values())))


@dataclass(frozen=True)
class Rates:
    """Seconds of each unit of work, of one engine and of all trainer nodes together."""

    decode_iteration: float
    decode_token: float
    prompt_token: float
    score_completion: float
    update: float
    trained_token: float
    publish: float
    rest: float

    def seconds(self, work: Work, engines: int = 1) -> Seconds:
        """Return the seconds of the work. Engines on one machine share its cores, so they count as one."""
        decoded = work.completion_tokens * self.decode_token + work.prompt_tokens * self.prompt_token
        return Seconds(
            generate=work.longest * self.decode_iteration + decoded / engines,
            score=work.completions * self.score_completion,
            train=work.updates * self.update + work.trained_tokens * self.trained_token,
            publish=self.publish,
            rest=self.rest,
        )


def fit(runs: Sequence[Run]) -> Rates:
    """Return the rates with the least relative errors of the measured steps' seconds.

    The runs must differ in length: with one length, iterations and tokens cannot be told apart. The model assumes that
    a token of a prompt costs as much as a token of a completion without its iteration.
    """
    steps = [step for run in runs for step in run.steps]
    works, seconds = [step.work for step in steps], [step.seconds for step in steps]
    generate = _fit([[w.longest, w.completion_tokens + w.prompt_tokens] for w in works], [s.generate for s in seconds])
    trained = [i for i, work in enumerate(works) if work.updates]
    train = _fit([[works[i].updates, works[i].trained_tokens] for i in trained], [seconds[i].train for i in trained])
    return Rates(
        decode_iteration=generate[0],
        decode_token=generate[1],
        prompt_token=generate[1],
        score_completion=sum(s.score for s in seconds) / sum(w.completions for w in works),
        update=train[0],
        trained_token=train[1],
        publish=float(np.median([s.publish for s in seconds])),
        rest=float(np.median([s.rest for s in seconds])),
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
    return Seconds(**{f.name: float(np.mean([getattr(value, f.name) for value in values])) for f in fields(Seconds)})
