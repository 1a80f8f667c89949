"""Policy versions as what has changed since the version before (PUBLISH_DELTA), and a node's copy that follows them.

A version is then an anchor, which is a whole model directory, or a delta: for each tensor that has changed, the places
of the 16-bit words that differ from the version before, and their new bits. So a delta is exact. Its record
(``DeltaRecord``) names the versions to read, and has a checksum of each whole tensor of the result. A node that has one
of these versions reads the deltas after it only.
"""

from __future__ import annotations

import json
import shutil
import threading
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from services.core.errors import ConfigurationError
from services.core.files import CHANGES_FILE
from services.core.logs import get_logger
from services.core.machine import cores
from services.weights.policy_store import DeltaRecord, PolicyStore

log = get_logger(__name__)

Words = npt.NDArray[np.uint16]
"""The bytes of a tensor as 16-bit words, [N]."""

GAPS, VALUES = ".gaps", ".values"
"""The ends of the names of a delta's arrays, [M] uint16 each: the words between a changed word and the one before it,
and the new words."""
FARTHEST = 1 << 16
"""Every so many words one counts as changed, so that each gap fits into 16 bits."""

DAMAGE = (ValueError, TypeError, AttributeError, LookupError, SafetensorError)
"""Errors of files that were cut off or have other bytes than were written."""


def checksums(tensors: Mapping[str, Words]) -> dict[str, int]:
    """Return the CRC-32 of each tensor's bytes."""
    with ThreadPoolExecutor(cores()) as pool:  # zlib and numpy compute without Python's lock
        return dict(zip(tensors, pool.map(zlib.crc32, tensors.values()), strict=True))


def changes(before: Mapping[str, Words], after: Mapping[str, Words]) -> dict[str, Words]:
    """Return the arrays of a delta: GAPS and VALUES of each tensor that has changed."""

    def of(name: str) -> dict[str, Words]:
        differs = after[name] != before[name]
        if not differs.any():
            return {}
        differs[FARTHEST - 1 :: FARTHEST] = True
        places = np.flatnonzero(differs)
        gaps = (np.diff(places, prepend=-1) - 1).astype(np.uint16)
        return {name + GAPS: gaps, name + VALUES: after[name][places]}

    with ThreadPoolExecutor(cores()) as pool:
        return {key: array for arrays in pool.map(of, after) for key, array in arrays.items()}


def apply(tensors: Mapping[str, Words], arrays: Mapping[str, Any]) -> None:
    """Write a delta's words into the tensors of the version before.

    Raises:
        KeyError, IndexError, ValueError: the delta does not fit these tensors.
    """
    for key in arrays:
        if key.endswith(GAPS):
            name = key.removesuffix(GAPS)
            tensors[name][np.cumsum(arrays[key].astype(np.int64) + 1) - 1] = arrays[name + VALUES]


def mapped(directory: Path) -> dict[str, Words]:
    """Return the tensors of a model directory in its safetensors files: what is written to them changes the files.

    Raises:
        ValueError: a file was cut off, or has a tensor of an odd number of bytes.
        KeyError: a file has another form.
    """
    tensors: dict[str, Words] = {}
    for path in sorted(directory.glob("*.safetensors")):
        file = np.memmap(path, np.uint8, "r+")
        first = 8 + int.from_bytes(file[:8].tobytes(), "little")
        for name, entry in json.loads(file[8:first].tobytes()).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                tensors[name] = file[first + begin : first + end].view(np.uint16)
    return tensors


class ModelCopy:
    """A model directory in a node's memory that becomes one version after the other.

    A delta is written into the files of the copy, whose weights are read from the volume once an anchor at most.
    """

    def __init__(self, store: PolicyStore, path: Path) -> None:
        """Begin without a copy; remove that of a process that died."""
        self.path = path
        self.identity = ""
        """The identity of the version that the copy is; empty while it is none."""
        self._store = store
        self._lock = threading.Lock()
        self.remove()

    def remove(self) -> None:
        """Remove the copy."""
        shutil.rmtree(self.path, ignore_errors=True)

    def become(self, record: DeltaRecord) -> None:
        """Make the copy the version of a record, and compare it with the record's checksums. Blocks.

        Raises:
            OSError: the volume has lost a file of the version.
            DAMAGE: a file of the version has other bytes than were written.
            ConfigurationError: the node has no room for a copy.
        """
        with self._lock:
            identities = [identity for _, identity in record.chain]
            if self.identity in identities:
                try:
                    self._follow(record, identities.index(self.identity) + 1)
                    return
                except DAMAGE as error:
                    log.warning("copy of a policy version read again from its anchor", reason=str(error))
            self.identity = ""
            self.remove()
            anchor = self._store.path(record.chain[0][0])
            check_room(self.path.parent, sum(file.stat().st_size for file in anchor.iterdir()))
            shutil.copytree(anchor, self.path)
            self.path.chmod(0o700)
            self._follow(record, 1)

    def _follow(self, record: DeltaRecord, done: int) -> None:
        """Apply the deltas of a record after the first ``done`` versions of its chain, and check the result."""
        if self.identity == record.identity:
            return
        self.identity = ""
        tensors = mapped(self.path)
        for version, _ in record.chain[done:]:
            apply(tensors, load_file(self._store.path(version) / CHANGES_FILE))
        sums = checksums(tensors)
        if wrong := [name for name in {*sums, *record.sums} if sums.get(name) != record.sums.get(name)]:
            raise ValueError(f"{len(wrong)} tensors have another checksum, such as {min(wrong)}")
        self.identity = record.identity


def check_room(directory: Path, size: int) -> None:
    """Check that a directory has room for a node's copy of a version.

    Raises:
        ConfigurationError: it has not.
    """
    free = shutil.disk_usage(directory).free
    if size > free:
        raise ConfigurationError(
            f"PUBLISH_DELTA: {directory} has no room for this node's copy of a policy version of {size / 1e9:.2f} GB, "
            f"{free / 1e9:.2f} GB are free; give it more (--shm-size of docker, a memory volume on Kubernetes), or "
            "unset PUBLISH_DELTA"
        )
