"""The program that generates questions by reasoning-gym, in a process of its own for the data-server.

It is started with PYTHONHASHSEED=0, because a few generators walk over sets, and their questions would differ from
process to process. The data-server thus neither imports the package nor keeps its memory.

Standard input has a ``Plan`` as JSON. Standard output gets a JSON object a line: a question each (``Question``), or
``{"failed": reason}`` for a question that the generator could not make, or ``{"error": message}`` as the only line.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import reasoning_gym.factory as gym
from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode

from services.protocol.ground_truths import Entry

_CLOSE_NAMES = 3


class _FixedDate(datetime.date):
    """A date whose today is always the same."""

    @classmethod
    def today(cls) -> _FixedDate:
        """Return the first day of 2000."""
        return cls(2000, 1, 1)


# The generator keeps today's date in its entries, so that a run could not be resumed tomorrow.
_times = vars(sys.modules["reasoning_gym.arithmetic.time_intervals"])
_times["date"] = _FixedDate
_times["parser"] = SimpleNamespace(parse=partial(_times["parser"].parse, default=datetime.datetime(2000, 1, 1)))


@dataclass(frozen=True)
class Plan:
    """The questions to generate."""

    generator: str
    size: int
    levels: list[int] | None
    """Difficulty levels in equal parts; None: the generator's default difficulty."""
    parameters: dict[str, dict[str, Any]]
    """The generator's parameters by its name, in place of its defaults and of its levels'."""
    seed: int


@dataclass(frozen=True)
class Question:
    """A question, its answer for the solved examples of a prompt, its ground truth and its category."""

    question: str
    answer: str
    ground_truth: str
    category: str


class PlanError(Exception):
    """A plan that cannot be followed. The message says what is wrong and what to do."""


def questions(plan: Plan) -> Iterator[Question | str]:
    """Yield the questions level by level; for a question that cannot be made, the reason.

    Raises:
        PlanError: the generator does not exist, or refuses its parameters.
    """
    _check_names(plan)
    levels = _levels_of(plan.generator, plan.levels)
    size = max(1, round(plan.size / len(levels)))
    for level, dataset, parameters in [(level, *_made(plan, level, size)) for level in levels]:
        for index in range(size):
            random.seed(index)  # For the few generators that draw from Python's global generator.
            # A generator that gives up on one question, or holds what JSON cannot, still has others.
            try:
                entry = dataset[index]
                truth = Entry(plan.generator, parameters, entry).to_json()
            except Exception as error:  # noqa: BLE001
                yield f"{plan.generator}: {type(error).__name__}: {error}"
                continue
            answer = "" if entry["answer"] is None else f"<answer>{entry['answer']}</answer>"
            category = plan.generator if level is None else f"{plan.generator} {level}"
            yield Question(str(entry["question"]), answer, truth, category)


def _made(plan: Plan, level: int | None, size: int) -> tuple[Any, dict[str, Any]]:
    """Return the questions of a level, and the parameters that differ from the generator's defaults.

    Raises:
        PlanError: the generator refuses its parameters.
    """
    name = plan.generator
    # Questions at neighbouring seeds of reasoning-gym are the same questions moved by one.
    digest = hashlib.blake2b(f"{plan.seed}/{name}/{level}".encode(), digest_size=4).digest()
    parameters = {**_at_level(name, level), **plan.parameters.get(name, {})}
    seed = int.from_bytes(digest, "big") // 2
    try:
        return gym.create_dataset(name, **parameters, size=size, seed=seed), _changed(name, parameters)
    # A generator checks its parameters by assertions, by errors of its own, or not before its use.
    except Exception as error:
        at_level = "" if level is None else f" at level {level}"
        raise PlanError(
            f"DATASET: {name}{at_level} refuses its parameters: {type(error).__name__}: {error}; correct "
            f"DATASET_CONFIG (it has {', '.join(_fields(name))})"
        ) from error


def _check_names(plan: Plan) -> None:
    names = sorted(gym.DATASETS.keys() - {"composite"})
    if plan.generator not in names:
        close = difflib.get_close_matches(plan.generator, names, _CLOSE_NAMES, cutoff=0.5)
        hint = f"close are {', '.join(close)}" if close else f"it has {', '.join(names)}"
        form = "write reasoning_gym:NAME, and mix several by SOURCES"
        raise PlanError(f"DATASET: reasoning-gym has no generator {plan.generator!r}; {hint}; {form}")
    if others := plan.parameters.keys() - {plan.generator}:
        raise PlanError(f"DATASET_CONFIG has {', '.join(sorted(others))}, but DATASET names {plan.generator}")


def _levels_of(name: str, wanted: list[int] | None) -> list[int | None]:
    """Return the wanted levels that a generator has; its highest one for those above it, None without a curriculum."""
    if wanted is None or not gym.has_curriculum(name):
        return [None]
    attributes = gym.create_curriculum(name).attributes.values()
    highest = max((len(attribute.levels) for attribute in attributes), default=1) - 1
    return [*sorted({min(level, highest) for level in wanted})]


def _at_level(name: str, level: int | None) -> dict[str, Any]:
    """Return the parameters of a level, without those of the levels below it; none without a level."""
    if level is None:
        return {}
    curriculum = gym.create_curriculum(name)
    curriculum.set_global_level(level)
    context = DefaultCurriculumContext(mode=RangeAttributeMode.UPPER_BOUND)
    return _changed(name, dataclasses.asdict(curriculum.generate_configuration(context=context)))


def _changed(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters that differ from the generator's defaults."""
    defaults = vars(gym.DATASETS[name][1]())
    return {
        key: value
        for key, value in parameters.items()
        if key not in ("seed", "size") and (key not in defaults or value != defaults[key])
    }


def _fields(name: str) -> list[str]:
    return sorted({field.name for field in dataclasses.fields(gym.DATASETS[name][1])} - {"seed", "size"})


def main() -> None:
    """Read a plan and write its questions."""
    # Some generators print; that goes where errors go.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        os.dup2(2, 1)
        try:
            for question in questions(Plan(**json.load(sys.stdin))):
                line = {"failed": question} if isinstance(question, str) else vars(question)
                lines.write(json.dumps(line) + "\n")
        except PlanError as error:
            lines.write(json.dumps({"error": str(error)}) + "\n")


if __name__ == "__main__":
    main()
