"""The directory of results that a resumed run continues: one process writes to it, with one set of settings."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from services.core.errors import ConfigurationError, DependencyLostError
from services.core.files import atomic_write


@contextlib.contextmanager
def locked_file(path: Path, option: str) -> Iterator[BinaryIO]:
    """Create a file with its directory, and yield it open for reading and appending, locked against other processes.

    Raises:
        ConfigurationError: the directory, which ``option`` names, cannot be written, or another process holds the file.
        DependencyLostError: the disk became full within the context.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise ConfigurationError(f"{option} {path.parent}: {error}; give a directory to write to") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"another process writes to {path.parent}; wait for it, end it, or give another {option}"
            ) from error
        yield file
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DependencyLostError(f"{option} {path.parent}: {error.strerror}; make room there") from error
    finally:
        # What could not be written has been an error already.
        with contextlib.suppress(OSError):
            file.close()


def whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a locked file, and remove a last line that a kill cut off, before more are appended."""
    file.seek(0)
    position = 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        yield line
        position += len(line)
    file.truncate(position)
    file.seek(0, os.SEEK_END)


def sha256_of(path: Path) -> str:
    """Return the digest of a file, of a policy for example."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_identity(path: Path, identity: Mapping[str, Any], *, is_used: bool, results: str, option: str) -> None:
    """Write ``identity`` to ``path``, unless that file has other values and ``is_used`` says that there are results.

    Args:
        path: a JSON file in the directory.
        identity: everything that the results in the directory depend on, by name.
        is_used: whether the directory has results.
        results: a name for results of other settings, such as "the samples of another evaluation".
        option: the option that names the directory.

    Raises:
        ConfigurationError: a value differs; the message has its name and both values.
    """
    content = json.dumps(identity, indent=2) + "\n"
    # Through JSON, so that tuples compare equal to the lists that were written.
    now: dict[str, Any] = json.loads(content)
    before = json.loads(path.read_text(encoding="utf-8")) if is_used and path.exists() else now
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise ConfigurationError(
                f"{path.parent} holds {results}: {name} was {before.get(name)!r} and is {now.get(name)!r}; give "
                f"another {option}, or remove that directory"
            )
    atomic_write(path, content)
