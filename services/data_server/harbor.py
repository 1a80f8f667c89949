"""Tasks in Harbor's format, as DATASET=harbor:DIR names them.

A task is a directory with task.toml, instruction.md, environment/, tests/ and solution/, or with steps/NAME/ in place
of the instruction. Schemas 1.0 to 1.4 are read with their older spellings, and a Dockerfile as far as it needs no
build, or somebody has built it (docker_image). What a box cannot do is refused by task, with the file, the key and
the reason. ``services.environment_server.harbor`` runs what is read here.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch, fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, AliasPath, BaseModel, BeforeValidator, Field, ValidationError

FIRST_NUMBER = 2**20
"""Seeds from here on are numbers of tasks; a lower seed draws one."""
LARGEST_TASK = 64 * 2**20
"""Bytes of a task's files."""
HOME = "/home/agent"
_WRITABLE = ("/tmp", HOME, "/logs/agent", "/logs/artifacts")
"""The directories that programs of every task may write to."""
_READ_ONLY = {"usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "proc", "dev", "sys", "tests"}
_KEYS = {
    "": "schema_version version source artifacts multi_step_reward_strategy steps task metadata agent verifier "
    "solution environment",
    "agent": "timeout_sec user network_mode allowed_hosts",
    "artifacts": "source destination exclude service",
    "env": "",
    "environment": "build_timeout_sec docker_image os cpus memory_mb memory storage_mb storage gpus gpu_types tpu env "
    "mcp_servers skills_dir healthcheck workdir network_mode allow_internet allowed_hosts",
    "healthcheck": "command interval_sec timeout_sec start_period_sec start_interval_sec retries",
    "metadata": "",
    "solution": "env",
    "steps": "name agent verifier min_reward healthcheck artifacts",
    "task": "name version description authors keywords",
    "verifier": "timeout_sec user network_mode allowed_hosts env environment_mode environment collect",
}
"""The keys of each table of task.toml; a table without them has any."""
_NEEDS = {
    "GPUs or TPUs": "environment.gpus environment.tpu",
    "MCP servers": "environment.mcp_servers",
    "a health check of a step": "steps.healthcheck",
    "an image of the verifier": "verifier.environment verifier.environment_mode tests/Dockerfile",
    "another system than Linux": "environment.os",
    "artifacts of a service": "artifacts.service",
    "docker-compose": "environment/docker-compose.yaml environment/docker-compose.yml environment/compose.yaml",
    "verifier.collect": "verifier.collect",
}
"""Features that no box has, by the keys and files that need them, unless these are empty or one of _HARMLESS."""
_HARMLESS = ("linux", "main", "shared")
_CANARIES = re.compile(r"\A(?:(?:<!--.*canary.*-->|#.*canary.*)\s*)+", re.IGNORECASE)
"""First lines of an instruction that are no part of it."""
_WITHOUT_EFFECT = ("", "LABEL", "MAINTAINER", "EXPOSE", "CMD", "ENTRYPOINT", "SHELL", "STOPSIGNAL")
"""Instructions that change no file: a task's container runs nothing but the agent's and the verifier's commands."""


class TaskRefusedError(Exception):
    """A task that cannot be done; ``kind`` is the reason by which such tasks are counted."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def _mebibytes(size: Any) -> int:
    """Return a number of MiB, or a text of older schemas such as "2G", in MiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", str(size), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{size!r} is not a size; write such as 2G")
    return math.ceil(float(match[1]) * 1024.0 ** ("KMGT".index(match[2].upper() or "M") - 1))


def _without_host(variables: dict[str, str]) -> dict[str, str]:
    """Replace ``${NAME:-default}`` by its default, because a task reads no variable of a service."""
    for name, text in variables.items():
        if missing := re.search(r"\$\{\w+\}", text):
            advice = f"{missing[0]} is a variable of the host, which no box gets; write its value or a default"
            raise TaskRefusedError("a variable of the host", f"task.toml, env, {name}: {advice}")
    return {name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text) for name, text in variables.items()}


def _in_toml(*keys: str) -> AliasChoices:
    """Return the place of a field in task.toml: a key with its tables, and older spellings of it."""
    return AliasChoices(*(AliasPath(*key.split(".")) for key in keys))


_Size = Annotated[int, BeforeValidator(_mebibytes), Field(gt=0)]
_Text = Annotated[str, BeforeValidator(str)]
_Variables = Annotated[dict[str, str], AfterValidator(_without_host)]
_Rewards = Annotated[
    dict[str, float], BeforeValidator(lambda least: least if isinstance(least, dict) else {"reward": least})
]


class Step(BaseModel, frozen=True):
    """A step of a task: its instruction, its limits, and where its tests and its solution are."""

    name: str = Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")
    instruction: str
    agent_seconds: float | None = Field(None, gt=0, validation_alias=_in_toml("agent.timeout_sec"))
    verifier_seconds: float = Field(600.0, gt=0, validation_alias=_in_toml("verifier.timeout_sec"))
    verifier_environment: _Variables = Field({}, validation_alias=_in_toml("verifier.env"))
    tests: tuple[Path, ...]
    """Directories that are laid over each other as /tests."""
    solution: Path
    workdir: Path
    """The files that the working directory gets before the step, if it exists."""
    min_reward: _Rewards = {}
    """The least of each name with which the next step begins."""


class Task(BaseModel, frozen=True):
    """A task that a box can do."""

    schema_version: str = Field("1.4", pattern=r"^1\.\d+$", validation_alias=_in_toml("schema_version", "version"))
    name: str = Field(validation_alias=_in_toml("task.name", "folder"))
    path: Path
    digest: str
    """The digest of the names, contents and modes of all of its files."""
    image: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._/:-]*(:\w[\w.-]*)?(@sha256:[0-9a-f]{64})?$",
        validation_alias=_in_toml("environment.docker_image", "image"),
    )
    """The image that has its programs: docker_image, or else what its Dockerfile begins with."""
    is_built: bool
    """True if somebody has built the image, which so has all that its Dockerfile says."""
    workdir: str
    environment: _Variables = Field(validation_alias=_in_toml("environment.env"))
    copies: Mapping[str, Path]
    """Files of this machine by their paths in the box."""
    places: tuple[str, ...]
    """The directories that its programs may write to, the working directory first."""
    steps: tuple[Step, ...]
    reward_strategy: Literal["mean", "final"] = Field("mean", validation_alias=_in_toml("multi_step_reward_strategy"))
    """The reward is the mean over the steps, or that of the last one."""
    solution_environment: _Variables = Field({}, validation_alias=_in_toml("solution.env"))
    memory_mb: _Size | None = Field(None, validation_alias=_in_toml("environment.memory_mb", "environment.memory"))
    disk_mb: _Size | None = Field(None, validation_alias=_in_toml("environment.storage_mb", "environment.storage"))
    server: _Text = Field("", validation_alias=_in_toml("metadata.server_command"))
    """The command that starts the server which its tests ask; empty without one."""
    health_command: str = Field("", validation_alias=_in_toml("environment.healthcheck.command"))
    category: _Text | None = Field(None, validation_alias=_in_toml("metadata.category", "metadata.difficulty"))
    notes: tuple[str, ...]
    """The parts of the task that a box leaves out, and the keys that the format does not have."""

    @property
    def own_places(self) -> tuple[str, ...]:
        """The working directory, and those of COPY and artifacts: not the places that every task has."""
        return tuple(place for place in self.places if place not in _WRITABLE)

    @property
    def number(self) -> int:
        """The seed that begins an episode of this task, and of no other one."""
        return FIRST_NUMBER + int(self.digest[:12], 16) % (2**31 - FIRST_NUMBER)


def read_task(path: Path) -> Task:
    """Read the task in a directory.

    Raises:
        TaskRefusedError: it is not a task, or a box cannot do it; the message says why.
    """
    digest = _digest(path)
    try:
        toml = tomllib.loads(_text(path / "task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise TaskRefusedError("task.toml", f"task.toml: {error}") from error
    keys = [*_keys(toml)]
    box = toml.get("environment", {})
    image = _read_image(path / "environment", is_built="docker_image" in box)
    if not image.base and "docker_image" not in box:
        text = "neither a FROM of environment/Dockerfile nor [environment] docker_image names its image"
        raise TaskRefusedError("no image", text)
    workdir = str(PurePosixPath("/", _resolved(str(box.get("workdir") or image.workdir), image.environment)))
    values = toml | {
        "folder": path.name,
        "path": path,
        "digest": digest,
        "image": image.base,
        "is_built": "docker_image" in box,
        "workdir": workdir,
        "environment": box | {"env": image.environment | box.get("env", {})},
        "copies": image.copies,
        "places": _places(workdir, image.copies, [str(value) for _, name, value in keys if name == "artifacts.source"]),
        "steps": [*_steps(path, toml)],
        "notes": [*_notes(path, keys, box, image)],
    }
    try:
        task = Task.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        text = f"task.toml, {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise TaskRefusedError("task.toml", text) from error
    if "healthcheck" in box and not task.server:
        advice = "name the command that starts it, as [metadata] server_command"
        raise TaskRefusedError("needs a server", f"task.toml, environment.healthcheck: it needs a server; {advice}")
    return task


def _keys(table: Mapping[str, Any], kind: str = "", where: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the place, the name in _KEYS ("" for none) and the value of each key of a table and of those below it."""
    known = _KEYS[kind].split()
    for key, value in table.items():
        name, place = f"{kind}.{key}" if key in known or not known else "", f"{where}{key}"
        if value and value not in _HARMLESS:
            _check(name, f"task.toml, {place}")
        yield place, name, value
        if key in known and key in _KEYS:
            is_list = key in ("artifacts", "steps")
            for part in value if is_list and isinstance(value, list) else [value]:
                below = {"source": part} if key == "artifacts" and isinstance(part, str) else part
                if not isinstance(below, dict) or (is_list and part is value):
                    raise TaskRefusedError("task.toml", f"task.toml, {place}: it is not a table")
                yield from _keys(below, key, f"{place}.")


def _check(name: str, place: str) -> None:
    """Refuse a key or a file that needs what no box has."""
    for need, names in _NEEDS.items():
        if name in names.split():
            text = f"{place}: it needs {need}, which no box has; remove it if the task works without"
            raise TaskRefusedError(need, text)


def _steps(path: Path, toml: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the fields of the steps; those of a task without steps are in its own tables."""
    for table in toml.get("steps") or [{"name": ""}]:
        folder = path / "steps" / str(table.get("name")) if toml.get("steps") else path
        tests = [part for part in dict.fromkeys((path / "tests", folder / "tests")) if part.is_dir()]
        if not any((part / "test.sh").is_file() for part in tests):
            raise TaskRefusedError("no tests/test.sh", f"{folder / 'tests/test.sh'}: there is no such file")
        shared, own = toml.get("verifier", {}), table.get("verifier", {})
        yield table | {
            "agent": toml.get("agent", {}) | table.get("agent", {}),
            "verifier": shared | own | {"env": shared.get("env", {}) | own.get("env", {})},
            "instruction": _CANARIES.sub("", _text(folder / "instruction.md").strip()),
            "tests": tests,
            "solution": folder / "solution",
            "workdir": folder / "workdir",
        }


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskRefusedError(path.name, f"{path}: {error}") from error


def _digest(path: Path) -> str:
    """Return the digest of a task; refuse links, which could lead to another one's files, and too many bytes."""
    digest, left = hashlib.blake2b(digest_size=16), LARGEST_TASK
    for file in sorted(path.rglob("*"), key=lambda file: (file.parent.parts, file.name)):
        name, status = str(file.relative_to(path)), file.lstat()
        _check(name, name)
        if stat.S_ISREG(status.st_mode):
            left -= status.st_size
            if left < 0:
                raise TaskRefusedError("size", f"{name}: with it the task has more than {LARGEST_TASK >> 20} MiB")
            head = [name, bool(status.st_mode & 0o100), status.st_size]
            digest.update(json.dumps(head).encode() + file.read_bytes())
        elif not stat.S_ISDIR(status.st_mode):
            raise TaskRefusedError("a link", f"{name}: it is a link or no regular file; put the file itself there")
    return digest.hexdigest()


def _places(workdir: str, copies: Iterable[str], artifacts: Iterable[str]) -> list[str]:
    """Return the directories that programs may write to: each is memory of its own, so none is the root."""
    paths = [PurePosixPath("/", workdir, source) for source in artifacts]
    folders = [PurePosixPath(place).parent for place in copies] + [p.parent if p.suffix else p for p in paths]
    places: list[PurePosixPath] = []
    for place in (PurePosixPath(workdir), *sorted(folders)):
        if places and any(place.is_relative_to(other) for other in (*map(str, places), *_WRITABLE)):
            continue
        if _is_read_only(str(place)):
            advice = "use another one, such as /app, as working directory, in COPY and as artifacts"
            raise TaskRefusedError("a directory that is read-only", f"no box can write to {place}; {advice}")
        places.append(place)
    return [*dict.fromkeys((*map(str, places), *_WRITABLE))]


def _is_read_only(place: str) -> bool:
    top, *_ = [*PurePosixPath(place).parts[1:], ""]
    return not top or top in _READ_ONLY


def _notes(path: Path, keys: Sequence[tuple[str, str, Any]], box: Mapping[str, Any], image: _Image) -> Iterator[str]:
    """Yield what a box leaves out of a task, and the keys that the format does not have."""
    if unknown := [place for place, name, _ in keys if not name]:
        yield f"unknown keys: {', '.join(unknown)}"
    network = box.get("network_mode", "public" if box.get("allow_internet", True) else "no-network")
    if network != "no-network":
        yield f"network_mode {network}: there is no network"
    if box.get("skills_dir"):
        yield "skills_dir is not read"
    if any(path.rglob("trajectory.json")):
        yield "trajectory.json, an earlier conversation, is not read"
    if image.needs_build:
        yield f"what environment/Dockerfile builds is in {box['docker_image']} alone"
    users = {image.user, *(str(value) for _, name, value in keys if name in ("agent.user", "verifier.user"))} - {""}
    if users:
        yield f"user {', '.join(sorted(users))}: programs run as the box's user"


# --- a Dockerfile -----------------------------------------------------------------------------------------------------


@dataclass
class _Image:
    """The image that a Dockerfile describes, as far as a box has it."""

    base: str = ""
    workdir: str = "/"
    user: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    needs_build: bool = False


def _read_image(context: Path, *, is_built: bool) -> _Image:
    """Read a Dockerfile, if there is one, of an image that is built already or not.

    Raises:
        TaskRefusedError: a line needs a build, or cannot be read; of an image that is built, such lines are left out.
    """
    image, arguments, stages, needs_build = _Image(), dict[str, str](), dict[str, _Image](), False
    if not (context / "Dockerfile").is_file():
        return image
    text = re.sub(r"^\s*#.*\n?", "", _text(context / "Dockerfile"), flags=re.MULTILINE)
    for line in re.sub(r"\\[ \t]*\n", " ", text).splitlines():
        name, _, text = line.strip().partition(" ")
        name, text, known = name.upper(), text.strip(), arguments | image.environment
        try:
            if name == "FROM" and (is_built or not image.base):
                [base, *alias] = _words(_resolved(text, known))
                image = deepcopy(stages.get(base, _Image(base)))
                stages |= {alias[1]: image} if alias[1:] else {}
            elif name == "ENV":
                image.environment |= {key: _resolved(value, known) for key, value in _pairs(text)}
            elif name == "ARG":
                arguments |= {key: _resolved(value, known) or known.get(key, "") for key, value in _pairs(text)}
            elif name == "WORKDIR":
                image.workdir = str(PurePosixPath(image.workdir, _resolved(text.strip("'\""), known)))
            elif name == "COPY" and "--from" not in text:
                copies = _copies(context, _words(_resolved(text, known)), image.workdir)
                image.copies |= {
                    n: f for n, f in copies.items() if not (is_built and _is_read_only(n.rpartition("/")[0]))
                }
            elif name == "USER":
                image.user = text
            elif name not in _WITHOUT_EFFECT:
                remedy = "build it and name it as docker_image, or make its files in environment/ or SANDBOX_TREES"
                raise ValueError(f"it needs a build; {remedy}")
        except ValueError as error:
            if is_built:
                needs_build = True
                continue
            kind = "a Dockerfile of several stages" if name == "FROM" and image.base else f"{name} in its Dockerfile"
            raise TaskRefusedError(kind, f"environment/Dockerfile, `{name} {text[:80]}`: {error}") from error
    return replace(image, needs_build=needs_build)


def _resolved(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with the values of its variables; an unknown one is empty, as in Docker."""
    pattern = r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})"
    return re.sub(pattern, lambda match: variables.get(match[1] or match[2], match[3] or ""), text)


def _words(text: str) -> list[str]:
    words = map(str, json.loads(text)) if text.startswith("[") else text.split()
    return [word for word in words if not word.startswith("--")]


def _pairs(text: str) -> list[tuple[str, str]]:
    """Return variables: ``NAME=value ...``, or in an older form ``NAME value``."""
    first, *others = shlex.split(text)
    if "=" not in first:
        return [(first, " ".join(others))]
    return [(name, value) for name, _, value in (word.partition("=") for word in (first, *others))]


def _copies(context: Path, words: Sequence[str], workdir: str) -> dict[str, Path]:
    """Return the files that a COPY names by their paths in the box, without those that .dockerignore names."""
    files = {path.relative_to(context): path for path in sorted(context.rglob("*")) if path.is_file()}
    ignore = context / ".dockerignore"
    for line in _text(ignore).splitlines() if ignore.is_file() else ():
        pattern = line.strip("/ ")
        if pattern.startswith("!"):
            raise ValueError(f"environment/.dockerignore has {pattern}, and lines with `!` are not read")
        if pattern and not pattern.startswith("#"):
            files = {n: f for n, f in files.items() if not any(fnmatch(str(part), pattern) for part in (n, *n.parents))}
    *sources, target = words
    into, copies = PurePosixPath(workdir, target), dict[str, Path]()
    for source in sources:
        parts = PurePosixPath(source.lstrip("/")).parts
        found = {name: f for name, f in files.items() if sum(map(fnmatchcase, name.parts, parts)) == len(parts)}
        if not found:
            raise ValueError(f"environment/ has no {source}")
        is_folder = target.endswith(("/", ".")) or len(sources) > 1 or len(found) > 1 or str(into) == workdir
        for name, file in found.items():
            below = name.parts[len(parts) :] or ((name.name,) if is_folder else ())
            copies[str(into.joinpath(*below))] = file
    return copies
