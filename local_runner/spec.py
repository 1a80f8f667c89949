"""Job groups as the local runner reads them from YAML; keys that SkyPilot would silently ignore are refused."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dotenv import dotenv_values

from services.core.endpoints import Task, component_of, is_colocated
from services.core.errors import ConfigurationError
from services.core.sources import read_yaml

HEADER_KEYS = {"name", "execution", "primary_tasks", "termination_delay", "inter_connection"}
RECOVERY_KEYS = {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}
NAME = re.compile(r"[A-Za-z0-9_-]+")
DURATION = re.compile(r"(\d+)\s*([smhdw]?)", re.IGNORECASE)
ROOT = Path(__file__).parents[1]
JOB_GROUPS = (
    *("jobgroup.yaml", "jobgroups/async.yaml", "jobgroups/agent.yaml", "jobgroups/environment.yaml"),
    *("jobgroups/sft.yaml", "jobgroups/colocated.yaml"),
)
"""The job groups of this project."""
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@dataclass(frozen=True)
class TaskSpec:
    """One task: the command of its nodes, and the rules for its end."""

    name: str
    run: str
    num_nodes: int = 1
    gpus_per_node: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    declared: frozenset[str] = frozenset()
    """The variables that the file itself names."""
    mounts: Mapping[str, str] = field(default_factory=dict)
    """Volume names by mount path."""
    max_restarts_on_errors: int = 0
    recover_on_exit_codes: frozenset[int] = frozenset()
    termination_delay: float = 0.0
    """Seconds that the task continues after the primary tasks."""
    is_primary: bool = False

    @property
    def components(self) -> list[str]:
        """Its own component, and the names of other tasks whose components run on its nodes."""
        is_host = self.name == Task.TRAINER and is_colocated(self.environment)
        return [component_of(self.name), *([Task.ROLLOUT_SERVER.value] if is_host else [])]


@dataclass(frozen=True)
class JobGroup:
    """A job group: tasks that run side by side, at least one of them primary."""

    name: str
    tasks: tuple[TaskSpec, ...]


@dataclass(frozen=True)
class Overrides:
    """Additions of the command line: variables for every task, and node counts by task, or of all other tasks."""

    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    num_nodes: Mapping[str, int] = field(default_factory=dict)
    other_nodes: int | None = None


def find(path: Path) -> Path:
    """Return ``path``, or this project's file of that name if there is no file ``path``.

    Raises:
        ConfigurationError: neither exists.
    """
    file = _file(path)
    if file is None:
        choices = f"this project has {', '.join(JOB_GROUPS)}; a setting is given as --env NAME=VALUE"
        raise ConfigurationError(f"cannot read the job group: there is no file {path}; {choices}")
    return file


def _file(path: Path) -> Path | None:
    """Return ``path``, or this project's file of that name; None if neither exists."""
    return next((file for file in (path, ROOT / path) if file.is_file()), None)


def load(path: Path, overrides: Overrides | None = None) -> JobGroup:
    """Return the job group of the file ``path``.

    A task's variables are its ``envs`` and ``secrets``, and ``overrides``, which win and reach every task. A variable
    that the file leaves null must be among the overrides, as with SkyPilot.

    Raises:
        ConfigurationError: the file cannot be read, or a key is unknown, missing or of the wrong kind.
    """
    overrides = overrides or Overrides()
    header, *described = documents(path)
    if unknown := set(header) - HEADER_KEYS:
        raise ConfigurationError(f"{path}: unknown header keys {sorted(unknown)}; allowed: {sorted(HEADER_KEYS)}")
    if not NAME.fullmatch(str(header.get("name", ""))):
        raise ConfigurationError(f"{path}: the header's name must be letters, digits, - and _")
    if header.get("execution") != "parallel":
        raise ConfigurationError(f"{path}: the header must say `execution: parallel`, else SkyPilot runs a pipeline")
    tasks = [_task(path, document, overrides) for document in described]
    names = [task.name for task in tasks]
    if not tasks or len(set(names)) != len(names):
        raise ConfigurationError(f"{path}: the tasks need different names, got {names}")
    if misnamed := sorted(set(overrides.num_nodes) - set(names)):
        near = nearest(misnamed[0], names)
        raise ConfigurationError(f"--num-nodes names {misnamed[0]}{near}; the tasks of {path} are {', '.join(names)}")
    primary = header.get("primary_tasks") or names
    if unknown := set(primary) - set(names):
        raise ConfigurationError(f"{path}: primary_tasks names {sorted(unknown)}; the tasks are {names}")
    delays = _delays(path, header.get("termination_delay"), names)
    tasks = [replace(task, is_primary=task.name in primary) for task in tasks]
    tasks = [replace(task, termination_delay=delays[task.name]) for task in tasks]
    return JobGroup(str(header["name"]), tuple(tasks))


def nearest(name: str, names: Iterable[str], which: str = "nearest") -> str:
    """Return words that name the nearest of ``names``; empty if none is near."""
    matches = difflib.get_close_matches(name, list(names), 1)
    return f"; the {which} is {matches[0]}" if matches else ""


def assignments(pairs: Sequence[str], option: str) -> dict[str, str]:
    """Return the ``NAME=VALUE`` pairs of a command line; ``NAME`` alone takes its value from the environment.

    Raises:
        ConfigurationError: a name is empty, or stands alone and is not set.
    """
    result = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        # Spaces around the sign mean nothing, as in an env file.
        name, value = name.strip(), value.strip() if name.endswith(" ") else value
        if not separator:
            if name not in os.environ:
                raise ConfigurationError(f"{option} {pair}: not set in the environment; give {option} {pair}=VALUE")
            value = os.environ[name]
        if not name:
            raise ConfigurationError(f"{option} {pair!r}: expected NAME=VALUE")
        result[name] = value
    return result


def env_file(path: Path) -> dict[str, str]:
    """Return the variables of a file with a ``NAME=VALUE`` a line, read by dotenv as SkyPilot reads it.

    If the file does not exist, this project's file of that name is read.

    Raises:
        ConfigurationError: the file does not exist, or a line has no value.
    """
    file = _file(path)
    if file is None:
        raise ConfigurationError(f"there is no --env-file {path}")
    values = dotenv_values(file)
    result = {name: value for name, value in values.items() if value is not None}
    if missing := sorted(values.keys() - result.keys()):
        raise ConfigurationError(f"{path}: {missing} have no value; expected NAME=VALUE")
    return result


def env_files(paths: Sequence[Path]) -> dict[str, str]:
    """Return the variables of several files of ``NAME=VALUE`` lines; a later file wins."""
    return {name: value for path in paths for name, value in env_file(path).items()}


def counts(pairs: Sequence[str]) -> dict[str, int]:
    """Return the ``TASK=COUNT`` pairs of a command line.

    Raises:
        ConfigurationError: a pair has another form.
    """
    result = {}
    for pair in pairs:
        task, _, count = pair.partition("=")
        if not count.isdecimal() or int(count) < 1:
            raise ConfigurationError(f"--num-nodes {pair}: expected TASK=COUNT with a count of 1 or more")
        result[task] = int(count)
    return result


def seconds(duration: str | int) -> float:
    """Return ``30``, ``"30s"``, ``"5m"``, ``"12h"``, ``"7d"`` or ``"2w"`` in seconds.

    Raises:
        ValueError: ``duration`` has another form.
    """
    match = DURATION.fullmatch(str(duration))
    if match is None:
        raise ValueError(f"{duration!r} is not a duration such as 30, 30s, 5m, 12h, 7d or 2w")
    return int(match[1]) * UNITS[match[2].lower()]


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a job group's file, the header first; ConfigurationError where it is not one."""
    if path.suffix == ".env":
        raise ConfigurationError(f"{path} is a file of variables; give it as --env-file {path}")
    documents = read_yaml(path, str(path), has_several=True)
    if len(documents) < 2 or not all(isinstance(document, dict) for document in documents):
        raise ConfigurationError(f"{path}: a job group is a header document and one document a task")
    return list(documents)


def _task(path: Path, document: dict[str, Any], overrides: Overrides) -> TaskSpec:
    name = str(document.get("name", ""))
    if not NAME.fullmatch(name):
        raise ConfigurationError(f"{path}: a task's name must be letters, digits, - and _, got {name!r}")
    if not isinstance(document.get("run"), str):
        raise ConfigurationError(f"{path}: task {name} has no `run` command")
    resources = document.get("resources") or {}
    recovery = resources.get("job_recovery") or {}
    if not isinstance(recovery, dict) or set(recovery) - RECOVERY_KEYS:
        raise ConfigurationError(f"{path}: job_recovery of task {name} takes {sorted(RECOVERY_KEYS)}, got {recovery}")
    codes = recovery.get("recover_on_exit_codes", [])
    num_nodes = overrides.num_nodes.get(name, overrides.other_nodes or int(document.get("num_nodes", 1)))
    if num_nodes < 1:
        raise ConfigurationError(f"task {name} has {num_nodes} nodes; allowed are 1 and more")
    variables = _with_values(path, name, document.get("envs") or {}, overrides.environment, "--env")
    secrets = _with_values(path, name, document.get("secrets") or {}, overrides.secrets, "--secret")
    return TaskSpec(
        name=name,
        run=document["run"],
        num_nodes=num_nodes,
        gpus_per_node=_gpus(resources.get("accelerators")),
        environment=variables | secrets,
        declared=frozenset((document.get("envs") or {}) | (document.get("secrets") or {})),
        mounts={str(mount): str(volume) for mount, volume in (document.get("volumes") or {}).items()},
        max_restarts_on_errors=int(recovery.get("max_restarts_on_errors", 0)),
        recover_on_exit_codes=frozenset([codes] if isinstance(codes, int) else codes),
    )


def _with_values(
    path: Path, task: str, declared: Mapping[str, Any], values: Mapping[str, str], option: str
) -> dict[str, str]:
    missing = sorted(name for name, value in declared.items() if value is None and name not in values)
    if missing:
        raise ConfigurationError(f"{path}: task {task} needs {missing}; give {option} {missing[0]}=VALUE")
    return {name: str(value) for name, value in declared.items() if name not in values} | dict(values)


def _gpus(accelerators: Any) -> int:
    """Return the number of GPUs in ``H100``, ``H100:2`` or ``{H100: 2}``; the first of several choices counts."""
    if not accelerators:
        return 0
    if isinstance(accelerators, dict):
        return math.ceil(float(next(iter(accelerators.values())) or 1))
    first = accelerators if isinstance(accelerators, str) else next(iter(accelerators))
    return math.ceil(float(str(first).partition(":")[2] or 1))


def _delays(path: Path, value: Any, names: Sequence[str]) -> dict[str, float]:
    """Return the termination delay of every task, in seconds."""
    delays = value if isinstance(value, dict) else {"default": value if value is not None else 0}
    if unknown := set(delays) - set(names) - {"default"}:
        raise ConfigurationError(f"{path}: termination_delay names {sorted(unknown)}; the tasks are {list(names)}")
    try:
        parsed = {name: seconds(duration) for name, duration in delays.items()}
    except ValueError as error:
        raise ConfigurationError(f"{path}: termination_delay: {error}") from error
    return {name: parsed.get(name, parsed.get("default", 0.0)) for name in names}
