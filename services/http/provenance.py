"""A component's record of its provenance: its settings, the code's commit and the versions of packages.

The trainer collects the records of all components in config.json. A service returns its record at GET /settings; a
component without this route (the rollout node's launcher, a collector) writes it into the run directory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from services.core.endpoints import Task, node_rank
from services.core.files import atomic_write
from services.core.logs import get_logger
from services.core.settings import SECRET, Settings
from services.protocol.base import ComponentRecord

log = get_logger(__name__)

PACKAGES = ("skypilot-grpo", "torch", "transformers", "sglang", "sglang-router", "math-verify", "datasets")
"""Packages that affect numbers and rewards; recorded where they are installed."""

OF_EVERY_RUN = ("shared_dir", "run_id")
"""Settings that each run has values of its own for, so they are not among the changed ones."""
GIT_SECONDS = 10.0


def describe(settings: Settings) -> ComponentRecord:
    """Return the record of this process and its ``settings``, with asterisks for secrets."""
    defaults = {
        name: field.get_default(call_default_factory=True, validated_data=dict(settings))
        for name, field in type(settings).model_fields.items()
    }
    return ComponentRecord(
        settings=_without_secrets(settings.model_dump(mode="json")),
        changed=[n for n, default in defaults.items() if n not in OF_EVERY_RUN and getattr(settings, n) != default],
        packages={"python": platform.python_version(), **_versions()},
        commit=_commit(),
    )


def _without_secrets(value: Any, name: str = "") -> Any:
    """Return a JSON value with asterisks for the texts whose name says that they are secret, as in JUDGE_ARGS."""
    if isinstance(value, dict):
        return {key: _without_secrets(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_secrets(item, name) for item in value]
    return "**********" if isinstance(value, str) and SECRET.search(name) else value


def write_record(settings: Settings, task: Task) -> None:
    """Write this component's record into the run directory, on the task's first node only: the other nodes' are equal.

    Nothing is written outside a job group, because there is no run.
    """
    if "SKYPILOT_JOBGROUP_NAME" not in os.environ or node_rank() > 0:
        return
    path = _record_path(settings.run_dir, task)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, describe(settings).model_dump_json(indent=2))
    except OSError as error:
        # Not worth ending a component: a component that needs the volume fails by itself.
        log.warning("settings not written for config.json", path=str(path), reason=str(error))


def read_record(run_dir: Path, task: Task) -> ComponentRecord | None:
    """Return the record that ``task`` wrote into the run directory; None while there is none."""
    path = _record_path(run_dir, task)
    return ComponentRecord.model_validate_json(path.read_bytes()) if path.exists() else None


def _record_path(run_dir: Path, task: Task) -> Path:
    return run_dir / "components" / f"{task.value}.json"


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


@functools.cache
def _commit() -> str | None:
    """Return the commit of this code's checkout, with ``-dirty`` if tracked files differ from it."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):  # git is missing, or the file system hangs
        return None
    return described.stdout.strip() or None
