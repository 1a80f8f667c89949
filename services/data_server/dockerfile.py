"""The part of a Dockerfile that a box can do without building an image: FROM, WORKDIR, ENV, ARG, COPY and USER."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")
_WITHOUT_EFFECT = ("LABEL", "MAINTAINER", "EXPOSE", "CMD", "ENTRYPOINT", "SHELL", "STOPSIGNAL")
"""Instructions that change no file: a task's container runs nothing but the agent's and the verifier's commands."""


class TaskRefusedError(Exception):
    """A task that cannot be done; ``kind`` is the reason by which such tasks are counted."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Image:
    """The image that a Dockerfile describes, as far as a box has it."""

    base: str
    workdir: str = "/"
    environment: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    """Files of this machine by their paths in the box."""
    notes: list[str] = field(default_factory=list)


def resolved(text: str, variables: Mapping[str, str]) -> str:
    """Return a text of a Dockerfile with the values of its variables; an unknown one is empty, as there."""
    return _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], match[3] or ""), text)


def read_dockerfile(context: Path, image: str | None) -> Image:
    """Read ``context``/Dockerfile; without one, the image alone.

    Raises:
        TaskRefusedError: it cannot be read, or has an instruction that needs a build, which the message has.
    """
    if not (context / "Dockerfile").is_file():
        if image is None:
            raise TaskRefusedError("no Dockerfile", "it has neither environment/Dockerfile nor docker_image")
        return Image(image)
    found: Image | None = None
    arguments: dict[str, str] = {}
    for name, text in _instructions((context / "Dockerfile").read_text("utf-8", "replace")):
        known = arguments | (found.environment if found else {})
        if name == "ARG":
            argument, _, value = text.partition("=")
            arguments[argument.strip()] = resolved(value.strip().strip("'\""), known)
        elif name == "FROM" and found is None:
            words = [word for word in text.split() if not word.startswith("--")]
            found = Image(image or resolved(words[0] if words else "", known))
        elif found is None or name == "FROM":
            raise TaskRefusedError("a Dockerfile of several stages", f"{name} {text[:80]}: several stages need a build")
        elif name == "WORKDIR":
            found.workdir = str(PurePosixPath(found.workdir, resolved(text.strip("'\""), known)))
        elif name == "ENV":
            found.environment |= {key: resolved(value, known) for key, value in _pairs(text)}
        elif name == "COPY":
            _copy(context, resolved(text, known), found)
        elif name == "USER":
            found.notes.append(f"USER {text}: programs run as the box's user")
        elif name not in _WITHOUT_EFFECT:
            raise TaskRefusedError(f"{name} in its Dockerfile", f"`{name} {text[:80]}` of its Dockerfile needs a build")
    if found is None:
        raise TaskRefusedError("a Dockerfile without FROM", "its Dockerfile has no FROM")
    return found


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\[ \t]*\n", " ", "\n".join(lines)).splitlines():
        name, _, rest = line.strip().partition(" ")
        if name:
            yield name.upper(), rest.strip()


def _pairs(text: str) -> list[tuple[str, str]]:
    """Return the variables of an ENV: ``NAME=value ...``, or in the older form ``NAME value``."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise TaskRefusedError("ENV in its Dockerfile", f"ENV {text[:80]}: {error}") from error
    if words and "=" not in words[0]:
        return [(words[0], " ".join(words[1:]))]
    return [(name, value) for name, _, value in (word.partition("=") for word in words)]


def _copy(context: Path, text: str, image: Image) -> None:
    words = [word for word in text.split() if not word.startswith("--")]
    if any(word.startswith("--from") for word in text.split()):
        raise TaskRefusedError("a Dockerfile of several stages", f"COPY {text[:80]}: other stages need a build")
    if text.lstrip().startswith("["):
        words = json.loads(text)
    if len(words) < 2:
        raise TaskRefusedError("COPY in its Dockerfile", f"COPY {text[:80]} names no source and destination")
    *sources, target = words
    files = _context_files(context)
    into = str(PurePosixPath(image.workdir, target))
    for source in sources:
        pattern = str(PurePosixPath(source.lstrip("/"))) if source.strip("./") else "."
        chosen = {name: path for name, path in files.items() if pattern == "." or name.startswith(f"{pattern}/")}
        if chosen:
            start = 0 if pattern == "." else len(pattern) + 1
            image.copies |= {f"{into}/{name[start:]}": path for name, path in chosen.items()}
            continue
        matched = {name: path for name, path in files.items() if fnmatch(name, pattern)}
        if not matched:
            raise TaskRefusedError("COPY in its Dockerfile", f"COPY {source}: environment/ has no such file")
        is_folder = target.endswith(("/", ".")) or len(sources) > 1 or len(matched) > 1 or into == image.workdir
        names = {path: PurePosixPath(name).name for name, path in matched.items()}
        image.copies |= {f"{into}/{name}" if is_folder else into: path for path, name in names.items()}


def _context_files(context: Path) -> dict[str, Path]:
    """Return the files of a build context by their paths in it, without those that .dockerignore names."""
    ignore = context / ".dockerignore"
    lines = ignore.read_text("utf-8").splitlines() if ignore.is_file() else []
    patterns = [line.strip().strip("/") for line in lines if line.strip() and not line.startswith("#")]
    if any(pattern.startswith("!") for pattern in patterns):
        raise TaskRefusedError(".dockerignore", "its .dockerignore has a line with `!`, which is not read")
    files = {}
    for path in sorted(context.rglob("*")):
        name = str(path.relative_to(context))
        above = [name, *map(str, PurePosixPath(name).parents)]
        if path.is_file() and not any(fnmatch(part, pattern) for part in above for pattern in patterns):
            files[name] = path
    return files
