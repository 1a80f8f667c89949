"""Published policy versions on the shared volume: one directory a version, written under a hidden name and renamed.

A version's directory, such as ``v000012``, is a Hugging Face model directory. A directory without a leading dot is
complete. Versions increase. A version that a reader holds is not pruned while it reads.

With LORA_RANK a version is a LoRA adapter: PEFT's configuration and tensors, which PEFT and every engine load.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from services.core.files import replace_directory

FIRST_VERSION = 0
"""The policy version of MODEL_NAME itself."""
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

    def newest(self) -> PublishedPolicy | None:
        """Return the newest complete version; None if nothing was published."""
        return next(reversed(self.published()), None)

    def newest_begun(self) -> int | None:
        """Return the number of the newest version that is complete or being written; None if there is none."""
        names = [path.name for path in self.policy_dir.iterdir()] if self.policy_dir.is_dir() else []
        return max((int(match[1] or match[2]) for name in names if (match := _BEGUN.fullmatch(name))), default=None)

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
        """Remove all versions except the ``keep`` newest and the held ones.

        A hold older than ``hold_seconds`` belongs to a reader that died, and is ignored.
        """
        if superfluous := self.published()[:-keep]:
            held = self._held(hold_seconds)
            for policy in superfluous:
                if policy.version not in held:
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
