"""Tasks in Harbor's format, as DATASET=harbor:DIR names them.

A task is a directory with task.toml, instruction.md, environment/, tests/ and solution/, or with steps/NAME/ in
place of the instruction. Schemas 1.0 to 1.4 are read, with their older spellings. What a box cannot do is refused by
task, with the reason. ``services.environment_server.harbor`` runs what is read here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.core.errors import ConfigurationError
from services.data_server.dockerfile import TaskRefusedError, read_dockerfile, resolved
from services.data_server.settings import HARBOR

FIRST_NUMBER = 2**20
"""Seeds from here on are numbers of tasks; a lower seed draws one."""
LARGEST_TASK = 64 * 2**20
"""Bytes of a task's files."""
SERVER = "server_command"
"""The key of [metadata] with the command that starts the server which the tests ask."""
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_UNITS = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class _Table(BaseModel):
    """A table of task.toml. Keys that no box reads are ``unread``; others are kept, so that they can be named."""

    model_config = ConfigDict(extra="allow")
    unread: ClassVar[str] = ""

    def unknown(self, where: str = "") -> Iterator[str]:
        """Yield the keys that the format does not have, with their tables."""
        yield from (f"{where}{name}" for name in self.model_extra or {} if name not in self.unread.split())
        for name in type(self).model_fields:
            value = getattr(self, name)
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, _Table):
                    yield from part.unknown(f"{where}{name}.")


class _Identity(_Table):
    unread = "version description authors keywords"
    name: str | None = None


class _Agent(_Table):
    unread = "network_mode allowed_hosts"
    timeout_sec: float | None = Field(None, gt=0)
    user: Any = None


class _Verifier(_Agent):
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] = "shared"
    environment: Any = None
    collect: list[Any] = Field(default_factory=list)


class _Solution(_Table):
    env: dict[str, str] = Field(default_factory=dict)


class _HealthCheck(_Table):
    unread = "interval_sec timeout_sec start_period_sec start_interval_sec retries"
    command: str


class _Environment(_Table):
    unread = "build_timeout_sec cpus gpu_types allowed_hosts"
    docker_image: str | None = None
    os: str = "linux"
    memory_mb: int | None = Field(None, gt=0)
    storage_mb: int | None = Field(None, gt=0)
    gpus: Any = None
    tpu: Any = None
    mcp_servers: Any = None
    env: dict[str, str] = Field(default_factory=dict)
    skills_dir: Any = None
    healthcheck: _HealthCheck | None = None
    workdir: str | None = None
    network_mode: Literal["public", "no-network", "allowlist"] = "public"

    @model_validator(mode="before")
    @classmethod
    def _older(cls, values: Any) -> Any:
        """Rename the spellings of older schemas: memory, storage ("2G") and allow_internet."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for name in ("memory", "storage"):
            if (text := values.pop(name, None)) is not None:
                match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", str(text), re.IGNORECASE)
                if match is None:
                    raise ValueError(f"{name} is {text!r}; write such as 2G")
                values.setdefault(f"{name}_mb", max(1, int(float(match[1]) * _UNITS[match[2].upper()]) >> 20))
        if (may := values.pop("allow_internet", None)) is not None:
            values.setdefault("network_mode", "public" if may else "no-network")
        return values


class _StepTable(_Table):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    agent: _Agent = Field(default_factory=_Agent)
    verifier: _Verifier = Field(default_factory=_Verifier)
    min_reward: float | dict[str, float] | None = None
    healthcheck: Any = None
    artifacts: list[Any] = Field(default_factory=list)


class _File(_Table):
    unread = "version source"
    schema_version: str = Field("1.4", pattern=r"^1\.\d+$")
    artifacts: list[Any] = Field(default_factory=list)
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"
    steps: list[_StepTable] = Field(default_factory=list)
    task: _Identity = Field(default_factory=_Identity)
    metadata: dict[str, Any] = Field(default_factory=dict)
    agent: _Agent = Field(default_factory=_Agent)
    verifier: _Verifier = Field(default_factory=_Verifier)
    solution: _Solution = Field(default_factory=_Solution)
    environment: _Environment = Field(default_factory=_Environment)

    @model_validator(mode="before")
    @classmethod
    def _older(cls, values: Any) -> Any:
        """Take ``version`` of older schemas for ``schema_version``."""
        return {"schema_version": values["version"]} | values if "version" in values else values


@dataclass(frozen=True)
class Step:
    """A step of a task: its instruction, its limits, and where its tests and its solution are."""

    name: str
    instruction: str
    agent_seconds: float | None
    verifier_seconds: float
    verifier_environment: dict[str, str]
    tests: tuple[Path, ...]
    """Directories that are laid over each other as /tests."""
    solution: Path
    workdir: Path
    """The files that the working directory gets before the step, if it exists."""
    min_reward: Mapping[str, float]
    """The least of each name with which the next step begins."""


@dataclass(frozen=True)
class Task:
    """A task that a box can do."""

    name: str
    path: Path
    image: str
    """The name of the image that its Dockerfile begins with."""
    workdir: str
    environment: dict[str, str]
    copies: Mapping[str, Path]
    """Files of this machine by their paths in the box."""
    places: tuple[str, ...]
    """The directories that its programs may write to, the working directory first."""
    steps: tuple[Step, ...]
    takes_last: bool
    """True if the reward is that of the last step; otherwise it is the mean over the steps."""
    solution_environment: dict[str, str]
    memory_mb: int | None
    disk_mb: int | None
    server: str
    """The command that starts the server which its tests ask; empty without one."""
    health_command: str
    category: str | None
    notes: tuple[str, ...]
    """The parts of the task that a box leaves out, and the keys that the format does not have."""

    @cached_property
    def digest(self) -> str:
        """A digest of the names, contents and modes of all of its files."""
        digest = hashlib.blake2b(digest_size=16)
        for path in _files_below(self.path):
            head = [str(path.relative_to(self.path)), bool(path.stat().st_mode & 0o100), path.stat().st_size]
            digest.update(json.dumps(head).encode() + path.read_bytes())
        return digest.hexdigest()

    @property
    def number(self) -> int:
        """The seed that begins an episode of this task, and of no other one."""
        return FIRST_NUMBER + int(self.digest[:12], 16) % (2**31 - FIRST_NUMBER)


def read_task(path: Path, name: str | None = None) -> Task:
    """Read the task in a directory.

    Raises:
        TaskRefusedError: it is not a task, or a box cannot do it; the message says why.
    """
    try:
        file = _File.model_validate(tomllib.loads((path / "task.toml").read_text("utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        raise TaskRefusedError("task.toml", f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TaskRefusedError("task.toml", str(error)) from error
    _check(path, file)
    environment = file.environment
    image = read_dockerfile(path / "environment", environment.docker_image)
    workdir = str(PurePosixPath("/", resolved(environment.workdir or image.workdir, image.environment)))
    steps = tuple(_steps(path, file, image.environment))
    server = str(file.metadata.get(SERVER, ""))
    if environment.healthcheck is not None and not server:
        raise TaskRefusedError(
            "needs a server", f"it needs a running server; name the command that starts it, as [metadata] {SERVER}"
        )
    title = name or file.task.name or path.name
    category = file.metadata.get("category", file.metadata.get("difficulty"))
    return Task(
        name=title,
        path=path,
        image=image.base,
        workdir=workdir,
        environment=image.environment | _values(environment.env, "environment.env"),
        copies=image.copies,
        places=_places(workdir, [str(PurePosixPath(place).parent) for place in image.copies], file),
        steps=steps,
        takes_last=file.multi_step_reward_strategy == "final",
        solution_environment=_values(file.solution.env, "solution.env"),
        memory_mb=environment.memory_mb,
        disk_mb=environment.storage_mb,
        server=server,
        health_command=environment.healthcheck.command if environment.healthcheck else "",
        category=None if category is None else str(category),
        notes=tuple(_notes(path, file, image.notes)),
    )


def _check(path: Path, file: _File) -> None:
    """Refuse what no box does."""
    environment, verifiers = file.environment, [file.verifier, *(step.verifier for step in file.steps)]
    size = 0
    for found in _files_below(path):
        size += found.stat().st_size
        if size > LARGEST_TASK:
            raise TaskRefusedError("size", f"its files have more than {LARGEST_TASK >> 20} MiB")
    refused = {
        f"os {environment.os}": environment.os != "linux",
        "GPUs or TPUs": bool(environment.gpus or environment.tpu),
        "MCP servers": bool(environment.mcp_servers),
        "docker-compose": any(path.glob("environment/*compose*.y*ml")),
        "an image of the verifier": any(v.environment_mode == "separate" or v.environment for v in verifiers)
        or (path / "tests/Dockerfile").exists(),
        "verifier.collect": any(v.collect for v in verifiers),
        "a health check of a step": any(step.healthcheck for step in file.steps),
    }
    for what, is_there in refused.items():
        if is_there:
            raise TaskRefusedError(what, f"it needs {what}, which a box does not have")


def _steps(path: Path, file: _File, variables: Mapping[str, str]) -> Iterator[Step]:
    tables = file.steps or [_StepTable.model_construct(name="", agent=file.agent, verifier=file.verifier)]
    for table in tables:
        folder = path / "steps" / table.name if file.steps else path
        try:
            text = (folder / "instruction.md").read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TaskRefusedError("instruction.md", str(error)) from error
        own = folder / "tests"
        tests = tuple(part for part in dict.fromkeys((path / "tests", own)) if part.is_dir())
        if not any((part / "test.sh").is_file() for part in tests):
            raise TaskRefusedError("no tests/test.sh", f"there is no {own / 'test.sh'}")
        least = table.min_reward
        yield Step(
            name=table.name,
            instruction=without_canary(text),
            agent_seconds=table.agent.timeout_sec or file.agent.timeout_sec,
            verifier_seconds=table.verifier.timeout_sec or 600.0,
            verifier_environment=_values(file.verifier.env | table.verifier.env, "verifier.env", variables),
            tests=tests,
            solution=folder / "solution",
            workdir=folder / "workdir",
            min_reward=least if isinstance(least, dict) else {} if least is None else {"reward": least},
        )


def without_canary(text: str) -> str:
    """Return an instruction without its first lines that are canaries, and the blank lines after them."""
    lines = text.splitlines()
    if not lines or not _CANARY.fullmatch(lines[0].strip()):
        return text.strip()
    while lines and (not lines[0].strip() or _CANARY.fullmatch(lines[0].strip())):
        del lines[0]
    return "\n".join(lines).strip()


def _values(given: Mapping[str, str], where: str, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return variables of a task. ``${NAME:-default}`` becomes its default: a task reads no variable of a service."""

    def value(match: re.Match[str]) -> str:
        found = (known or {}).get(match[1], match[2])
        if found is None:
            raise TaskRefusedError(
                f"a variable of the host in {where}", f"{where} needs ${{{match[1]}}} of the host, which no box gets"
            )
        return found

    return {name: _VARIABLE.sub(value, text) for name, text in given.items()}


HOME, TEMPORARY = "/home/agent", "/tmp"
LOGS = ("/logs/agent", "/logs/artifacts")


def _places(workdir: str, folders: Sequence[str], file: _File) -> tuple[str, ...]:
    """Return the directories that programs may write to: each is memory of its own, so none is the root."""
    wanted = []
    for artifact in [*file.artifacts, *(one for step in file.steps for one in step.artifacts)]:
        source = artifact.get("source", "") if isinstance(artifact, dict) else str(artifact)
        if isinstance(artifact, dict) and artifact.get("service", "main") != "main":
            raise TaskRefusedError("artifacts of a service", f"{source} is an artifact of another service")
        path = PurePosixPath("/", workdir, source)
        wanted.append(str(path.parent if path.suffix else path))
    others = [TEMPORARY, HOME, *LOGS]
    kept = [workdir]
    for place in sorted({*folders, *wanted}):
        if not any(PurePosixPath(place).is_relative_to(other) for other in [*kept, *others]):
            kept.append(place)
    for place in kept:
        top = PurePosixPath(place).parts[1:2]
        if not top or top[0] in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "proc", "dev", "sys", "tests"):
            raise TaskRefusedError("a directory that is read-only", f"it writes to {place}, which a box cannot")
    return (*kept, *(place for place in others if place != workdir))


def _notes(path: Path, file: _File, of_image: Sequence[str]) -> Iterator[str]:
    if unknown := list(file.unknown()):
        yield f"unknown keys: {', '.join(unknown)}"
    if file.environment.network_mode != "no-network":
        yield f"network_mode {file.environment.network_mode}: there is no network"
    if file.environment.skills_dir:
        yield "skills_dir is not read"
    if next(path.rglob("trajectory.json"), None) is not None:
        yield "trajectory.json, an earlier conversation, is not read"
    users = {str(user) for table in (file.agent, file.verifier, *file.steps) if (user := getattr(table, "user", None))}
    if users:
        yield f"user {', '.join(sorted(users))}: programs run as the box's user"
    yield from of_image


def _files_below(path: Path) -> Iterator[Path]:
    """Yield the files of a task in order; TaskRefusedError for a link, which could lead to another one's files."""
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted([*names, *folders]):
            if (found := Path(folder, name)).is_symlink() or not (found.is_file() or found.is_dir()):
                raise TaskRefusedError("a link", f"{found.relative_to(path)} is a link or no regular file")
            if found.is_file():
                yield found


def task_folders(dataset: str) -> list[Path]:
    """Return the directories of the tasks that ``harbor:DIR`` names: of DIR, DIR/tasks, DIR itself, or a list file.

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
        folders = sorted(found.parent for pattern in ("*", "tasks/*") for found in place.glob(f"{pattern}/task.toml"))
    if not folders:
        raise ConfigurationError(
            f"DATASET {dataset!r}: {place} has no directory with a task.toml, seen from {Path.cwd()}; name a directory "
            "of tasks, or a file with a directory a line"
        )
    return folders


def read_tasks(dataset: str) -> tuple[dict[int, Task], dict[str, TaskRefusedError]]:
    """Return the tasks that can be done by their numbers, and why others cannot by their names.

    Raises:
        ConfigurationError: there is no task.
    """
    tasks: dict[int, Task] = {}
    refused: dict[str, TaskRefusedError] = {}
    for folder in task_folders(dataset):
        try:
            task = read_task(folder)
            if (other := tasks.setdefault(task.number, task)) is not task:
                raise TaskRefusedError("is there twice", f"it is the same task as {other.path}")
        except TaskRefusedError as error:
            refused[str(folder)] = error
    return tasks, refused
