"""Datasets that are generated: arithmetic, seeds of episodes, questions of reasoning-gym; and Harbor tasks as rows.

Each generator returns training and held-out rows as tables with the text columns question and answer, and perhaps
ground_truth (otherwise read from the answers) and category.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from string import Formatter
from typing import Annotated, Any, TypeVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from services.core.errors import ConfigurationError
from services.core.extras import install_command
from services.core.logs import get_logger
from services.core.processes import describe_exit
from services.data_server.settings import HARBOR, DataSettings
from services.data_server.task_sets import passed_tasks
from services.protocol.ground_truths import REASONING_GYM

log = get_logger(__name__)

Tables = tuple[pa.Table, pa.Table | None]
"""Training rows, and held-out ones if there is a split of them."""

Config = TypeVar("Config", bound=BaseModel)

ARITHMETIC_HELD_OUT_SHARE = 0.2
_PAIRS_A_LEVEL = 20_000
"""Pairs of operands that a level and operation keeps at most, which bounds the memory of three-digit questions."""


@dataclass(frozen=True)
class Question:
    """A question with its answer and its level, such as ``2-digit +``."""

    question: str
    answer: str
    category: str


def arithmetic_questions(
    *, digits: list[int], operations: str, template: str, seed: int
) -> tuple[list[Question], list[Question]]:
    """Return all questions, split into training and held-out ones, the same for the same arguments.

    The two orders of a sum or product are on one side, so that no held-out question is a training question turned
    round. Differences are never negative.

    Args:
        digits: levels; both operands have that many digits (a zero counts as one).
        operations: some of ``+``, ``-`` and ``*``.
        template: text with the fields ``a``, ``op`` and ``b``.
        seed: decides the split, and the pairs of a level that has too many.
    """
    train: list[Question] = []
    held_out: list[Question] = []
    for level in sorted(set(digits)):
        low, high = (0 if level == 1 else 10 ** (level - 1)), 10**level
        for operation in sorted(set(operations)):
            chooser = random.Random(f"{seed}/{level}/{operation}")
            number_of_pairs = (high - low) * (high - low + 1) // 2
            chosen = chooser.sample(range(number_of_pairs), min(number_of_pairs, _PAIRS_A_LEVEL))
            cut = max(1, round(ARITHMETIC_HELD_OUT_SHARE * len(chosen)))
            for place, code in enumerate(chosen):
                smaller, larger = _pair(code)
                side = held_out if place < cut else train
                side.extend(
                    _ask_arithmetic(low + smaller, low + larger, operation, template, f"{level}-digit {operation}")
                )
    return train, held_out


def _pair(code: int) -> tuple[int, int]:
    """Return pair number ``code`` of (0, 0), (0, 1), (1, 1), (0, 2), ...: every pair with first <= second once."""
    second = (math.isqrt(8 * code + 1) - 1) // 2
    return code - second * (second + 1) // 2, second


def _ask_arithmetic(smaller: int, larger: int, operation: str, template: str, category: str) -> list[Question]:
    if operation == "-":
        return [Question(template.format(a=larger, op="-", b=smaller), str(larger - smaller), category)]
    orders = {(smaller, larger), (larger, smaller)}
    answer = str(smaller + larger if operation == "+" else smaller * larger)
    return [Question(template.format(a=a, op=operation, b=b), answer, category) for a, b in sorted(orders)]


class _ArithmeticConfig(BaseModel):
    """DATASET_CONFIG of arithmetic."""

    model_config = ConfigDict(extra="forbid")

    digits: list[Annotated[int, Field(ge=1, le=3)]] = Field([1], min_length=1)
    operations: str = Field("+", pattern=r"^[-+*]+$")
    template: str = "What is {a} {op} {b}? Answer with just the number."

    @field_validator("template")
    @classmethod
    def _check_template(cls, template: str) -> str:
        fields = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
        if not {"a", "b"} <= fields <= {"a", "op", "b"}:
            raise ValueError("allowed are the fields {a}, {op} and {b}, of which {a} and {b} are needed")
        template.format(a=1, op="+", b=2)
        return template


def _arithmetic_tables(settings: DataSettings, _refused: Counter[str]) -> Tables:
    config = _read_config(settings, _ArithmeticConfig, '{"digits": [1, 2], "operations": "+-"}')
    train, held_out = arithmetic_questions(**vars(config), seed=settings.data_seed)
    return pa.Table.from_pylist([*map(vars, train)]), pa.Table.from_pylist([*map(vars, held_out)])


def _read_config(settings: DataSettings, form: type[Config], example: str) -> Config:
    """Return DATASET_CONFIG as a generator's form.

    Raises:
        ConfigurationError: it is not of that form; the message has an example.
    """
    try:
        return form.model_validate_json(settings.dataset_config or "{}")
    except ValidationError as error:
        first = error.errors()[0]
        where = f"{'.'.join(map(str, first['loc']))}: " if first["loc"] else ""
        raise ConfigurationError(
            f"DATASET_CONFIG {settings.dataset_config!r}: {where}{first['msg']}; write JSON such as {example}"
        ) from error


TRAINING_SEEDS = range(10_000)
HELD_OUT_SEEDS = range(10_000, 11_000)
"""No held-out seed is a training seed with any DATA_SEED."""


def _seed_tables(_settings: DataSettings, _refused: Counter[str]) -> Tables:
    """Return seeds as prompts, for ROLLOUT=environment: an episode begins with a seed instead of a question."""
    return _seeds(TRAINING_SEEDS), _seeds(HELD_OUT_SEEDS)


def _seeds(seeds: range) -> pa.Table:
    numbers = [str(seed) for seed in seeds]
    questions = [f"The episode of seed {number}" for number in numbers]
    return pa.table({"question": questions, "answer": numbers, "ground_truth": numbers})


REASONING_INSTRUCTION = "Think step by step, then give only the final answer between <answer> and </answer>."


class _ReasoningConfig(BaseModel):
    """DATASET_CONFIG of reasoning-gym; a further field has the parameters of the generator of its name."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]]

    size: int = Field(1000, ge=2, le=10_000_000)
    levels: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1)


def _reasoning_tables(settings: DataSettings, refused: Counter[str]) -> Tables:
    """Return questions of reasoning-gym, which runs in a process of its own (``reasoning_questions``).

    A question (its text) is on one side only: DATA_SEED and the text itself decide which. Held-out questions are
    distinct; training questions recur where a generator has few at a level. ``refused`` counts questions that the
    generator could not make.

    Raises:
        ConfigurationError: the package is missing, or DATASET or DATASET_CONFIG is wrong.
    """
    example = '{"size": 1000, "levels": [0, 1], "chain_sum": {"max_terms": 3}}'
    config = _read_config(settings, _ReasoningConfig, example)
    generator = settings.dataset.removeprefix(REASONING_GYM)
    plan = {"generator": generator, "parameters": config.model_extra, "seed": settings.data_seed}
    rows = _generate_reasoning(plan | {"size": config.size, "levels": config.levels}, refused)
    texts = {row["question"] for row in rows}
    in_random_order = sorted(texts, key=lambda text: hashlib.blake2b(f"{settings.data_seed} {text}".encode()).digest())
    held_out = set(in_random_order[: max(1, round(settings.dataset_held_out * len(texts)))])
    train = [row for row in rows if row["question"] not in held_out]
    test = {row["question"]: row for row in rows if row["question"] in held_out}
    schema = pa.schema([(name, pa.string()) for name in ("question", "answer", "ground_truth", "category")])
    return pa.Table.from_pylist(train, schema), pa.Table.from_pylist(list(test.values()), schema)


def _generate_reasoning(plan: dict[str, Any], refused: Counter[str]) -> list[dict[str, str]]:
    """Return the questions of a ``reasoning_questions.Plan``."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigurationError(
            f"DATASET {REASONING_GYM} needs reasoning-gym; run: {install_command('data', 'reasoning-gym')}"
        )
    log.info("generating questions", of=plan["size"])
    done = subprocess.run(
        [sys.executable, "-m", "services.data_server.reasoning_questions"],
        input=json.dumps(plan),
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONHASHSEED": "0"},
        check=False,
    )
    if done.returncode != 0:
        raise ConfigurationError(f"the generator of questions {describe_exit(done.returncode)}; see its error above")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    if records and "error" in records[0]:
        raise ConfigurationError(records[0]["error"])
    rows = [record for record in records if "failed" not in record]
    failures = [record["failed"] for record in records if "failed" in record]
    refused["not generated"] += len(failures)
    if not rows:
        raise ConfigurationError(f"DATASET: no question could be made; {failures[0][:300]}; correct DATASET_CONFIG")
    return rows


_TASK_SCHEMA = pa.schema([(name, pa.string()) for name in ("question", "ground_truth", "category")])


def _task_tables(settings: DataSettings, refused: Counter[str]) -> Tables:
    """Return the tasks that have passed ``grpo tasks check`` as rows, and the held-out ones of DATASET_TEST.

    A row's ground truth is the number of its task. ``refused`` counts the tasks that are left out, by reason.

    Raises:
        ConfigurationError: there is no task, or none has passed.
    """
    table = _task_table(settings.dataset, refused)
    held_out = settings.dataset_test
    return table, None if held_out is None else _task_table(f"{HARBOR}{held_out}", refused)


def _task_table(dataset: str, refused: Counter[str]) -> pa.Table:
    tasks, left_out = passed_tasks(dataset)
    refused.update(left_out.values())
    rows = [
        {"question": task.steps[0].instruction, "ground_truth": str(task.number), "category": task.category}
        for task in tasks
    ]
    return pa.Table.from_pylist(rows, _TASK_SCHEMA)


TABLES: dict[str, Callable[[DataSettings, Counter[str]], Tables]] = {
    "arithmetic": _arithmetic_tables,
    "seeds": _seed_tables,
    REASONING_GYM: _reasoning_tables,
    HARBOR: _task_tables,
}
"""The generators by their name in settings.GENERATORS. They count rows that they could not make, by reason."""
