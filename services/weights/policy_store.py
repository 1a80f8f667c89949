"""Published policy versions on the shared volume: one directory a version, written under a hidden name and renamed.

A version's directory, such as ``v000012``, is a Hugging Face model directory. A directory without a leading dot is
complete. Versions increase. A version that a reader holds is not pruned while it reads.

With LORA_RANK a version is a LoRA adapter: PEFT's configuration and tensors, which PEFT and every engine load. With
PUBLISH_DELTA a version may be a delta, which is read together with the versions before it (``deltas.py``).
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from services.core.files import CHANGES_FILE, RECORD_FILE, replace_directory
from services.core.logs import get_logger
from services.protocol.base import StrictModel

log = get_logger(__name__)

ADAPTER_NAME = "policy"
"""The name of the trained adapter on every rollout worker; a request gives it as ``lora_path``."""
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_NAME = re.compile(r"v(\d{6,})")
_BEGUN = re.compile(r"v(\d{6,})|\.v(\d{6,})\.partial")
_HOLD = re.compile(r"\.v(\d{6,})\.held-[0-9a-f]+")


@dataclass(frozen=True)
class PublishedPolicy:
    """A policy version and its model directory."""

    version: int
    path: Path


class DeltaRecord(StrictModel):
    """The record of a version with PUBLISH_DELTA."""

    chain: list[tuple[int, str]] = Field(min_length=1)
    """The versions that make it, each with its identity: the anchor, then deltas, of which the last is the version."""
    sums: dict[str, int]
    """The CRC-32 of each of its tensors."""

    @property
    def identity(self) -> str:
        """The identity of the version: equal weights have equal ones."""
        return self.chain[-1][1]


class PolicyStore:
    """The versions in one directory, with one writer and any number of readers on any node."""

    def __init__(self, policy_dir: Path) -> None:
        self.policy_dir = policy_dir

    def path(self, version: int) -> Path:
        """Return the model directory of a version, published or not."""
        return self.policy_dir / f"v{version:06d}"

    def published(self) -> list[PublishedPolicy]:
        """Return all complete versions, the oldest first; empty if the directory does not exist."""
        if not self.policy_dir.is_dir():
            return []
        names = [(match, path) for path in self.policy_dir.iterdir() if (match := _NAME.fullmatch(path.name))]
        return sorted((PublishedPolicy(int(m[1]), path) for m, path in names), key=lambda policy: policy.version)

    def newest(self, *, is_whole: bool = False) -> PublishedPolicy | None:
        """Return the newest complete version, or the newest that is not a delta; None if nothing was published."""
        newest_first = reversed(self.published())
        return next((policy for policy in newest_first if not (is_whole and is_delta(policy.path))), None)

    def newest_begun(self) -> int | None:
        """Return the number of the newest version that is complete or being written; None if there is none."""
        names = [path.name for path in self.policy_dir.iterdir()] if self.policy_dir.is_dir() else []
        return max((int(match[1] or match[2]) for name in names if (match := _BEGUN.fullmatch(name))), default=None)

    def record(self, version: int) -> DeltaRecord:
        """Return the record of a version that was written with PUBLISH_DELTA.

        Raises:
            OSError: the version is gone.
            ValueError: the record is damaged.
        """
        return DeltaRecord.model_validate_json((self.path(version) / RECORD_FILE).read_bytes())

    def chain(self, version: int) -> list[int]:
        """Return the versions whose directories make a version, the oldest first.

        A whole version without a record, one that is gone, and one whose record is damaged have themselves alone.

        Raises:
            OSError: the volume does not give the record.
        """
        try:
            return [link for link, _ in self.record(version).chain]
        except (FileNotFoundError, ValueError):
            return [version]

    def is_complete(self, version: int) -> bool:
        """Return whether the volume has everything that makes a version.

        Raises:
            OSError: the volume does not give the version's record.
        """
        return all(self.path(link).is_dir() for link in self.chain(version))

    def remove(self, version: int) -> None:
        """Remove a version that a reader found damaged, so that its writer writes it again."""
        with contextlib.suppress(OSError):  # a version that stays is found damaged again
            self._remove(PublishedPolicy(version, self.path(version)))

    def mark(self, version: int) -> None:
        """Count ``version`` as begun, because workers get it before it is written, or without being written at all."""
        self._hidden(version).mkdir(parents=True, exist_ok=True)

    def begin(self, version: int) -> Path:
        """Return an empty hidden directory to write ``version`` into; ``commit`` makes it visible.

        Marks of older versions go, because this one supersedes them.
        """
        hidden = self._hidden(version)
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        for path in self.policy_dir.glob(".v*.partial"):
            if (match := _BEGUN.fullmatch(path.name)) and int(match[2]) < version:
                shutil.rmtree(path, ignore_errors=True)
        return hidden

    def commit(self, version: int) -> Path:
        """Make the directory of ``begin`` visible as ``version`` and return its path; replace an existing version."""
        final = self.path(version)
        replace_directory(self._hidden(version), final)
        return final

    def hold(self, version: int) -> Path:
        """Keep ``prune`` from removing a version; return the file to pass to ``release``.

        Raises:
            OSError: the version is gone, or the volume cannot be written.
        """
        hold = self.policy_dir / f".{self.path(version).name}.held-{uuid.uuid4().hex}"
        hold.touch()
        if not self.path(version).exists():
            hold.unlink()
            raise FileNotFoundError(f"policy version {version} was pruned meanwhile")
        return hold

    def release(self, hold: Path) -> None:
        """End a hold."""
        hold.unlink(missing_ok=True)

    def prune(self, keep: int, hold_seconds: float) -> None:
        """Remove all versions except the ``keep`` newest, the held ones, and those with which these are read.

        A hold older than ``hold_seconds`` belongs to a reader that died, and is ignored. Nothing is removed while a
        record cannot be read, because it may name any of the older versions.
        """
        published = self.published()
        superfluous = published[:-keep]
        if not superfluous:
            return
        needed = self._held(hold_seconds) | {policy.version for policy in published[-keep:]}
        try:
            needed |= {link for version in needed for link in self.chain(version)}
        except OSError as error:
            log.warning("old policy versions stay: a record cannot be read", reason=str(error))
            return
        for policy in superfluous:
            if policy.version not in needed:
                self._remove(policy)

    def discard_after(self, version: int) -> None:
        """Remove the versions after ``version``, from whose checkpoint the run resumes, and all unfinished ones.

        What a process left that died while it removed or replaced a version goes, too.
        """
        for policy in self.published():
            if policy.version > version:
                self._remove(policy)
        for ending in ("partial", "removed", "replaced"):
            for left in self.policy_dir.glob(f".v*.{ending}"):
                shutil.rmtree(left, ignore_errors=True)

    def _hidden(self, version: int) -> Path:
        return self.policy_dir / f".v{version:06d}.partial"

    def _held(self, hold_seconds: float) -> set[int]:
        held = set()
        for path in self.policy_dir.iterdir():
            if match := _HOLD.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # released just now
                    if time.time() - path.stat().st_mtime < hold_seconds:
                        held.add(int(match[1]))
                    else:
                        path.unlink()
        return held

    def _remove(self, policy: PublishedPolicy) -> None:
        # Renamed first, so that no reader takes a partly removed directory for a complete one.
        doomed = policy.path.with_name(f".{policy.path.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            policy.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def is_adapter(directory: Path) -> bool:
    """Return whether a directory has a LoRA adapter and not a whole model."""
    return (directory / CONFIG_FILE).is_file()


def is_delta(directory: Path) -> bool:
    """Return whether a directory has what has changed since the version before, and not a whole model."""
    return (directory / CHANGES_FILE).is_file()
