"""The manifest of a checkpoint: the size and the checksum of each of its files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

MANIFEST = "manifest.json"


def write_manifest(directory: Path) -> None:
    """Write the manifest of all files below a directory."""
    files = [file for file in sorted(directory.rglob("*")) if file.is_file()]
    manifest = {
        str(file.relative_to(directory)): {"bytes": file.stat().st_size, "blake2b": checksum}
        for file, checksum in zip(files, _checksums(files), strict=True)
    }
    (directory / MANIFEST).write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))


def damaged_file(directory: Path) -> str | None:
    """Return the name of the first file that differs from the manifest; None when all are as they were written.

    Raises:
        OSError, ValueError, KeyError: the manifest or a file cannot be read.
    """
    manifest: dict[str, dict[str, Any]] = orjson.loads((directory / MANIFEST).read_bytes())
    files = {name: directory / name for name in manifest}
    # The sizes first, because they take no time.
    for name, file in files.items():
        if file.stat().st_size != manifest[name]["bytes"]:
            return name
    for name, checksum in zip(files, _checksums(list(files.values())), strict=True):
        if checksum != manifest[name]["blake2b"]:
            return name
    return None


def _checksums(files: Sequence[Path]) -> Iterator[str]:
    """Yield the checksum of each file, computed by as many threads as there are cores."""
    with ThreadPoolExecutor(os.cpu_count(), "checksum") as threads:
        yield from threads.map(_checksum, files)


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16))
    return digest.hexdigest()
