"""Published policy versions on the shared volume: one directory a version, written under a hidden name and renamed.

A version's directory, ``v000012``, is a Hugging Face model directory. What has a plain name is complete; versions
increase. What a reader holds is not pruned while it reads.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"v(\d{6,})")
_HOLD = re.compile(r"\.v(\d{6,})\.held-[0-9a-f]+")


@dataclass(frozen=True)
class PublishedPolicy:
    """A policy version and its model directory."""

    version: int
    path: Path


class PolicyStore:
    """The versions below one directory. One writer, any number of readers on any node."""

    def __init__(self, policy_dir: Path) -> None:
        self.policy_dir = policy_dir

    def path(self, version: int) -> Path:
        """The model directory of a version, published or not."""
        return self.policy_dir / f"v{version:06d}"

    def published(self) -> list[PublishedPolicy]:
        """All complete versions, the oldest first; empty when the directory does not exist (yet)."""
        if not self.policy_dir.is_dir():
            return []
        found = [(match, path) for path in self.policy_dir.iterdir() if (match := _NAME.fullmatch(path.name))]
        return sorted((PublishedPolicy(int(m[1]), path) for m, path in found), key=lambda policy: policy.version)

    def newest(self) -> PublishedPolicy | None:
        """The newest complete version; None when nothing was published."""
        return next(reversed(self.published()), None)

    def begin(self, version: int) -> Path:
        """An empty hidden directory to write ``version`` into; ``commit`` makes it visible."""
        hidden = self._hidden(version)
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        return hidden

    def commit(self, version: int) -> Path:
        """Makes what was written since ``begin`` visible as ``version``; one of that number is replaced."""
        final = self.path(version)
        if final.exists():
            # A rename cannot replace a directory that is not empty: move the old one out of the way first.
            replaced = final.with_name(f".{final.name}.replaced")
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
            self._hidden(version).rename(final)
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            self._hidden(version).rename(final)
        return final

    def hold(self, version: int) -> Path:
        """Keeps ``prune`` from removing a version until the file that is returned is given to ``release``.

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
        """Ends a hold."""
        hold.unlink(missing_ok=True)

    def prune(self, keep: int, hold_seconds: float) -> None:
        """Removes all but the ``keep`` newest versions and those that are held.

        A hold that is older than ``hold_seconds`` was left by a reader that died, and counts no more.
        """
        superfluous = self.published()[:-keep]
        held = self._held(hold_seconds) if superfluous else set()
        for policy in superfluous:
            if policy.version not in held:
                self._remove(policy)

    def discard_after(self, version: int) -> None:
        """Removes versions newer than ``version``: what a run published after the checkpoint it resumes from."""
        for policy in self.published():
            if policy.version > version:
                self._remove(policy)

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
        # Renamed first, so that no reader takes a half-removed directory for a whole one.
        doomed = policy.path.with_name(f".{policy.path.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        policy.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
