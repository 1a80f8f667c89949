"""Files and directories: atomic replacement, full disks, and models' directories."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from services.core.errors import ConfigurationError, DamagedFileError

PROJECT = Path(__file__).parents[2]
DEMO_MODEL = "smollm2-135m"
"""The name of the directory of the demo's model."""
FULL_BELOW_BYTES = 64 * 2**20
"""A disk counts as full below this: a failed write may leave some space, and others may have freed some since."""


def atomic_write(path: Path, content: bytes | str | Iterable[bytes]) -> None:
    """Write a file that readers see whole: the old content or the new, never a part. Pieces are written as they come.

    The content goes to ``.{name}.partial`` in the same directory, which must exist, and is renamed into place. A failed
    write leaves the old file and no partial one. Nothing is synced to the disk.

    Raises:
        OSError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        whole = content.encode() if isinstance(content, str) else content
        with partial.open("wb") as file:
            file.writelines([whole] if isinstance(whole, bytes) else whole)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


SIGNATURE_BYTES = 32


def write_signed(path: Path, content: bytes, token: str) -> None:
    """Write a file that begins with its HMAC by JOBGROUP_TOKEN, so that a reader may run the code that is in it.

    Raises:
        OSError: the file cannot be written.
    """
    atomic_write(path, [hmac.digest(token.encode(), content, "sha256"), content])


def read_signed(path: Path, token: str) -> bytes:
    """Return the content of a file that ``write_signed`` wrote with the same token.

    Raises:
        OSError: the file cannot be read.
        ValueError: the content is not what was written.
    """
    whole = path.read_bytes()
    signature, content = whole[:SIGNATURE_BYTES], whole[SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, hmac.digest(token.encode(), content, "sha256")):
        raise ValueError("it is damaged, or was written with another JOBGROUP_TOKEN")
    return content


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON by ``atomic_write``."""
    atomic_write(path, json.dumps(content, indent=2) + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object a line, without a last line that is still being written.

    A file that does not exist has none.

    Raises:
        DamagedFileError: a line is not a JSON object.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [_object(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.endswith(b"\n")]


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no such file.

    Raises:
        DamagedFileError: the file is not a JSON object.
    """
    try:
        return _object(path.read_bytes(), str(path))
    except FileNotFoundError:
        return {}


def _object(content: bytes, where: str) -> dict[str, Any]:
    try:
        value = orjson.loads(content)
    except ValueError as error:
        raise DamagedFileError(f"{where} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise DamagedFileError(f"{where} is damaged: it has no JSON object")
    return value


@contextlib.contextmanager
def read_from(path: Path) -> Iterator[None]:
    """Turn the errors that unexpected content causes within the context into a DamagedFileError that names the file."""
    try:
        yield
    except DamagedFileError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, sqlite3.DatabaseError) as error:
        raise DamagedFileError(
            f"{path} is damaged, or another version of this program wrote it ({type(error).__name__}: {error})"
        ) from error


def saved_steps(directory: Path) -> list[int]:
    """Return the numbers of the directories and files ``step-NNNNNN`` in ``directory``, in order."""
    names = (re.fullmatch(r"step-(\d{6,})", path.name) for path in directory.glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def replace_directory(new: Path, old: Path) -> None:
    """Rename the directory ``new`` to ``old``, in place of a directory, or of a link, that is there."""
    # A rename cannot replace a directory that is not empty: move the old one out of the way first.
    replaced = old.with_name(f".{old.name}.replaced")
    remove_directory(replaced)
    if os.path.lexists(old):
        old.rename(replaced)
    new.rename(old)
    remove_directory(replaced)


def remove_directory(path: Path) -> None:
    """Remove as much of a directory as can be removed, or a link in its place; do nothing where there is neither."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def check_model_directory(model: str, setting: str = "MODEL_NAME") -> None:
    """Check that a setting's model exists if it is a path: with ``.``, ``/`` or ``~`` first, or more than one ``/``.

    Raises:
        ConfigurationError: it is a path that does not exist, or has a file that cannot be read.
    """
    is_path, path = model.startswith((".", "/", "~")) or model.count("/") > 1, Path(model).expanduser()
    try:
        for file in path.iterdir() if path.is_dir() else ():
            if file.is_file():
                file.open("rb").close()
        if not is_path or path.exists():
            return
    except OSError as error:
        reason = f"{error.filename} cannot be read ({error.strerror}); let this user read it, or give another directory"
        raise ConfigurationError(f"{setting}={model}: {reason}") from error
    remedy = "give a directory that has the model, or a Hugging Face name"
    if Path(model).name == DEMO_MODEL:
        remedy = f"`make demo` makes it, or `grpo demo-model {model}`"
        if (demo := PROJECT / ".cache/models" / DEMO_MODEL).is_dir():
            remedy += f"; it is there as --env MODEL_NAME={demo}"
    raise ConfigurationError(f"{setting}={model}: the directory does not exist, seen from {Path.cwd()}; {remedy}")


def check_model(model: str, setting: str = "MODEL_NAME") -> None:
    """Check that a setting has a model's directory, or a name that may be on the hub.

    Raises:
        ConfigurationError: it is a path that does not exist or cannot be read, or has no config.json.
    """
    check_model_directory(model, setting)
    path = Path(model).expanduser()
    if path.exists() and not (path / "config.json").exists():
        remedy = "give one, such as the model/ of a run, or a Hugging Face name"
        if (path / "model" / "config.json").exists():
            remedy = f"it is a run; give {path / 'model'}"
        elif (path / "adapter_config.json").exists():
            remedy = f"it is an adapter; `grpo merge-adapter {path} merged` makes a model of it"
        raise ConfigurationError(f"{setting}={model}: {path.resolve()} has no config.json; {remedy}")


def is_full(directory: Path) -> bool:
    """Return whether a write to the disk of ``directory`` may have failed for lack of space."""
    return shutil.disk_usage(directory).free < FULL_BELOW_BYTES


def free_space(directory: Path) -> str:
    """Return a phrase that says how much of the disk of ``directory`` is free."""
    usage = shutil.disk_usage(directory)
    return f"{usage.free / 2**20:.1f} MiB of {usage.total / 2**20:.0f} MiB are free in {directory}"
