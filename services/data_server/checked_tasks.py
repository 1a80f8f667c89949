"""The table of a dataset ``harbor:DIR``: its tasks that have passed ``grpo tasks check``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa

from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.data_server.harbor import read_tasks
from services.data_server.settings import HARBOR, DataSettings

log = get_logger(__name__)

CHECKS = "tasks-check.jsonl"
"""The file beside the tasks into which ``grpo tasks check`` writes its verdicts."""
_SCHEMA = pa.schema([(name, pa.string()) for name in ("question", "ground_truth", "category")])


def checks_file(dataset: str) -> Path:
    """Return the file with the verdicts of ``grpo tasks check`` on the tasks of a dataset."""
    place = Path(dataset.removeprefix(HARBOR)).expanduser()
    return place.with_name(f"{place.name}.{CHECKS}") if place.is_file() else place / CHECKS


def read_checks(dataset: str) -> dict[str, dict[str, Any]]:
    """Return the verdicts by the digest of their task; the last one of each.

    Raises:
        ConfigurationError: a line of the file cannot be read.
    """
    path, found = checks_file(dataset), {}
    for number, line in enumerate(path.read_text("utf-8").splitlines() if path.exists() else (), 1):
        try:
            record = json.loads(line)
            found[record["digest"]] = record
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{path}, line {number}, is no verdict ({error}); remove it") from error
    return found


def task_tables(settings: DataSettings, refused: Counter[str]) -> tuple[pa.Table, pa.Table | None]:
    """Return the tasks that have passed ``grpo tasks check`` as rows, and the held-out ones of DATASET_TEST.

    A row's ground truth is the number of its task. ``refused`` counts the tasks that are left out, by reason.

    Raises:
        ConfigurationError: there is no task, or none has passed.
    """
    table = _task_table(settings.dataset, refused)
    held_out = settings.dataset_test
    return table, None if held_out is None else _task_table(f"{HARBOR}{held_out}", refused)


def _task_table(dataset: str, refused: Counter[str]) -> pa.Table:
    tasks, reasons = read_tasks(dataset)
    checks = read_checks(dataset)
    left_out = {name: (f"cannot be done: {error.kind}", str(error)) for name, error in reasons.items()}
    rows = []
    for number, task in tasks.items():
        check = checks.get(task.digest)
        if check is None or not check.get("passes"):
            why = "was not checked" if check is None else f"did not pass: {check.get('reason')}"
            left_out[task.name] = (why, "" if check is None else str(check.get("detail", "")))
            continue
        row = {"question": task.steps[0].instruction, "ground_truth": str(number), "category": task.category}
        rows.append(row)
    for name, (reason, detail) in left_out.items():
        refused[reason] += 1
        log.warning("a task is left out", task=name, reason=reason, detail=detail or None)
    if not rows:
        counted = Counter(reason for reason, _ in left_out.values())
        why = ", ".join(f"{count} {reason}" for reason, count in counted.items())
        raise ConfigurationError(
            f"DATASET {dataset!r} has no task that has passed ({why}); run `grpo tasks check "
            f"{dataset.removeprefix(HARBOR)}`"
        )
    return pa.Table.from_pylist(rows, _SCHEMA)
