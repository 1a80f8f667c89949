"""Questions of reasoning-gym as tables: the names and weights of DATASET, and the split into training and held-out.

The package runs in a process of its own (``reasoning_questions``).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.core.errors import ConfigurationError
from services.core.extras import install_command
from services.core.logs import get_logger
from services.data_server.settings import DataSettings
from services.protocol.ground_truths import REASONING_GYM

log = get_logger(__name__)

INSTRUCTION = "Think step by step, then give only the final answer between <answer> and </answer>."

_GENERATOR = re.compile(r"(?P<name>\w+)(?:=(?P<weight>\d*\.?\d+))?")
_LOGGED_EVERY = 500


class _Config(BaseModel):
    """DATASET_CONFIG of reasoning-gym."""

    model_config = ConfigDict(extra="forbid")

    size: int = Field(1000, ge=2, le=10_000_000)
    levels: list[int] | None = Field(None, min_length=1)
    generators: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather_generators(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        own = {key: value for key, value in given.items() if key in ("size", "levels")}
        return {**own, "generators": {key: value for key, value in given.items() if key not in own}}


def tables(settings: DataSettings, refused: Counter[str]) -> tuple[pa.Table, pa.Table]:
    """Return training and held-out questions, with the columns question, answer, ground_truth and category.

    A question (its text) is on one side only: DATA_SEED and the text itself decide which. Held-out questions are
    distinct; training questions recur where a generator has few at a level. ``refused`` counts questions that the
    generator could not make.

    Raises:
        ConfigurationError: the package is missing, or DATASET or DATASET_CONFIG is wrong.
    """
    rows = _generate(_plan(settings), refused)
    texts = {row["question"] for row in rows}
    in_random_order = sorted(texts, key=lambda text: hashlib.blake2b(f"{settings.data_seed} {text}".encode()).digest())
    held_out = set(in_random_order[: max(1, round(settings.dataset_held_out * len(texts)))])
    train = [row for row in rows if row["question"] not in held_out]
    test = {row["question"]: row for row in rows if row["question"] in held_out}
    schema = pa.schema([(name, pa.string()) for name in ("question", "answer", "ground_truth", "category")])
    return pa.Table.from_pylist(train, schema), pa.Table.from_pylist(list(test.values()), schema)


def _plan(settings: DataSettings) -> dict[str, Any]:
    """Return the fields of ``reasoning_questions.Plan``."""
    weights: dict[str, float] = {}
    for part in settings.dataset.removeprefix(REASONING_GYM).split(","):
        match = _GENERATOR.fullmatch(part.strip())
        if match is None or float(match["weight"] or 1) == 0 or match["name"] in weights:
            raise ConfigurationError(
                f"DATASET {settings.dataset!r}: {part.strip()!r} is no generator with a weight above 0, or occurs "
                f"twice; write {REASONING_GYM}NAME or {REASONING_GYM}NAME=2,OTHER=1"
            )
        weights[match["name"]] = float(match["weight"] or 1)
    try:
        config = _Config.model_validate_json(settings.dataset_config or "{}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigurationError(
            f"DATASET_CONFIG {settings.dataset_config!r}: {where}{': ' if where else ''}{first['msg']}; "
            f'write JSON such as {{"size": 1000, "levels": [0, 1], "chain_sum": {{"max_terms": 3}}}}'
        ) from error
    if config.levels is not None and min(config.levels) < 0:
        raise ConfigurationError(f"DATASET_CONFIG has the level {min(config.levels)}; the easiest level is 0")
    return {
        "weights": weights,
        "size": config.size,
        "levels": config.levels,
        "parameters": config.generators,
        "seed": settings.data_seed,
    }


def _generate(plan: dict[str, Any], refused: Counter[str]) -> list[dict[str, str]]:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigurationError(
            f"DATASET {REASONING_GYM}... needs reasoning-gym, which is not installed; run: "
            f"{install_command('data', 'reasoning-gym')}"
        )
    rows: list[dict[str, str]] = []
    failures: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", "services.data_server.reasoning_questions"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONHASHSEED": "0"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        # A process that ends before it has read or written everything says why by its exit code.
        with contextlib.suppress(BrokenPipeError), process.stdin:
            json.dump(plan, process.stdin)
        for line in process.stdout:
            try:
                found = json.loads(line)
            except json.JSONDecodeError:
                break
            if "error" in found:
                raise ConfigurationError(found["error"])
            if "failed" in found:
                failures.append(found["failed"])
            else:
                rows.append(found)
            if (len(rows) + len(failures)) % _LOGGED_EVERY == 0:
                log.info("generating", questions=len(rows), of=plan["size"])
    if process.returncode != 0:
        raise ConfigurationError(
            f"the generator of reasoning-gym's questions ended with {process.returncode}; see its error above"
        )
    refused["not generated"] += len(failures)
    if not rows:
        raise ConfigurationError(f"DATASET: no question could be made; {failures[0][:300]}; correct DATASET_CONFIG")
    return rows
