"""A component's record of what it runs with: its settings, the code's commit and the versions of the packages.

The trainer puts the records of all components into config.json. A service answers GET /settings with its own; a
component without routes of this project (the rollout node's launcher, a collector) leaves it in the run directory.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import orjson

from services.core.endpoints import Task, node_rank
from services.core.logs import get_logger
from services.core.settings import Settings
from services.protocol import ComponentRecord

log = get_logger(__name__)

PACKAGES = ("skypilot-grpo", "torch", "transformers", "sglang", "sglang-router", "math-verify", "datasets")
"""Packages that decide about numbers and rewards; recorded where a component has them installed."""

GIT_SECONDS = 10.0


def describe(settings: Settings) -> ComponentRecord:
    """Return the record of this process, which runs with ``settings``. Secrets are asterisks in it."""
    defaults = {
        name: field.get_default(call_default_factory=True) for name, field in type(settings).model_fields.items()
    }
    return ComponentRecord(
        settings=settings.model_dump(mode="json"),
        changed=[name for name, default in defaults.items() if getattr(settings, name) != default],
        packages={"python": platform.python_version(), **_versions()},
        commit=_commit(),
    )


def leave_record(settings: Settings, task: Task) -> None:
    """Write this component's record into the run directory, from the task's first node: the others run with the same.

    Outside a job group there is no run, and nothing is written.
    """
    if "SKYPILOT_JOBGROUP_NAME" not in os.environ or node_rank() > 0:
        return
    path = _left_record(settings.run_dir, task)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.partial")
        temporary.write_bytes(orjson.dumps(describe(settings).model_dump(), option=orjson.OPT_INDENT_2))
        temporary.rename(path)
    except OSError as error:
        # What needs the volume says so itself, with a deadline; config.json is not worth ending a component.
        log.warning("settings not left for config.json", path=str(path), reason=str(error))


def read_left_record(run_dir: Path, task: Task) -> ComponentRecord | None:
    """Return the record that ``task`` left in the run directory; None while there is none."""
    path = _left_record(run_dir, task)
    return ComponentRecord.model_validate_json(path.read_bytes()) if path.exists() else None


def _left_record(run_dir: Path, task: Task) -> Path:
    return run_dir / "components" / f"{task.value}.json"


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def _commit() -> str | None:
    """Return the commit of the checkout that this code is in, with ``-dirty`` where tracked files differ from it."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):  # git is missing, or the file system hangs
        return None
    return done.stdout.strip() or None
