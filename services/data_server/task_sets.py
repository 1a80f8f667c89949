"""The tasks of a dataset ``harbor:DIR``, and the verdicts of ``grpo tasks check`` on them, which stand beside them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from services.core.errors import ConfigurationError
from services.core.files import read_from, read_records
from services.core.logs import get_logger
from services.data_server.harbor import Task, TaskRefusedError, read_task
from services.data_server.settings import HARBOR, DataSettings

log = get_logger(__name__)

CHECKS = "tasks-check.jsonl"
"""The file beside the tasks into which ``grpo tasks check`` writes its verdicts."""


def read_tasks(dataset: str) -> tuple[dict[int, Task], dict[str, TaskRefusedError]]:
    """Return the tasks that can be done by their numbers, and why others cannot by their directories.

    ``harbor:DIR`` names the directories in DIR or DIR/tasks, DIR itself, or those that a list file names.

    Raises:
        ConfigurationError: there is none.
    """
    place = Path(dataset.removeprefix(HARBOR)).expanduser()
    if place.is_file():
        lines = [line.strip() for line in place.read_text("utf-8").splitlines()]
        folders = [place.parent / line for line in lines if line and not line.startswith("#")]
    elif (place / "task.toml").is_file():
        folders = [place]
    else:
        folders = sorted(file.parent for pattern in ("*", "tasks/*") for file in place.glob(f"{pattern}/task.toml"))
    if not folders:
        raise ConfigurationError(
            f"DATASET {dataset!r}: {place} has no directory with a task.toml, seen from {Path.cwd()}; name a directory "
            "of tasks, or a file with a directory a line"
        )
    tasks: dict[int, Task] = {}
    refused: dict[str, TaskRefusedError] = {}
    for folder in folders:
        try:
            task = read_task(folder)
            if (other := tasks.setdefault(task.number, task)) is not task:
                raise TaskRefusedError("is there twice", f"it is the same task as {other.path}")
        except TaskRefusedError as error:
            refused[str(folder)] = error
    return tasks, refused


def datasets_of(data: DataSettings) -> list[str]:
    """Return the datasets ``harbor:DIR`` of a run: of DATASET, of its sources, and held-out ones.

    With one of them, the rows of DATASET are not played.
    """
    named: dict[str, None] = {}
    for own in (data, *data.by_source().values()):
        if own.dataset.startswith(HARBOR):
            named |= {own.dataset: None} | ({f"{HARBOR}{own.dataset_test}": None} if own.dataset_test else {})
    return list(named)


def checks_file(dataset: str) -> Path:
    """Return the file with the verdicts of ``grpo tasks check`` on the tasks of a dataset."""
    place = Path(dataset.removeprefix(HARBOR)).expanduser()
    return place.with_name(f"{place.name}.{CHECKS}") if place.is_file() else place / CHECKS


def read_checks(dataset: str) -> dict[str, dict[str, Any]]:
    """Return the verdicts by the digest of their task; the last one of each.

    Raises:
        DamagedFileError: a line of the file cannot be read.
    """
    path = checks_file(dataset)
    with read_from(path):
        return {record["digest"]: record for record in read_records(path)}


def passed_tasks(dataset: str) -> tuple[list[Task], dict[str, str]]:
    """Return the tasks that have passed ``grpo tasks check``, and why others are left out by their names.

    Raises:
        ConfigurationError: there is no task, or none has passed.
    """
    tasks, refused = read_tasks(dataset)
    checks, passed = read_checks(dataset), list[Task]()
    left_out = {name: (f"cannot be done: {error.kind}", str(error)) for name, error in refused.items()}
    for task in tasks.values():
        check = checks.get(task.digest)
        if check is not None and check.get("passes"):
            passed.append(task)
        else:
            why = "was not checked" if check is None else f"did not pass: {check.get('reason')}"
            left_out[task.name] = (why, "" if check is None else str(check.get("detail", "")))
    for name, (reason, detail) in left_out.items():
        log.warning("a task is left out", task=name, reason=reason, detail=detail or None)
    reasons = {name: reason for name, (reason, _) in left_out.items()}
    if not passed:
        why = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons.values()).items())
        raise ConfigurationError(
            f"no task of DATASET {dataset!r} has passed ({why}); run `grpo tasks check {dataset.removeprefix(HARBOR)}`"
        )
    return passed, reasons
