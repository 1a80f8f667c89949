"""The replay buffer's settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.core.settings import Settings


class ReplaySettings(Settings):
    """Settings that the replay buffer reads from its environment."""

    replay_dir: Path | None = None
    """Where the groups are kept, on a disk of this machine; default `replay` in the run directory. [advanced]"""
    replay_capacity: int = Field(100_000, ge=1, le=10_000_000)
    """Groups kept for replay; beyond it the oldest are evicted. [advanced]"""
    replay_fsync: bool = True
    """Keep acknowledged groups through a loss of power too, at the cost of waiting for the disk. The death of the
    process loses nothing either way. [advanced]"""
    replay_max_gb: float = Field(64.0, gt=0)
    """Disk that the groups may take; beyond it additions are refused with 507. [advanced]"""

    @property
    def directory(self) -> Path:
        """The directory of the groups."""
        return self.run_dir / "replay" if self.replay_dir is None else self.replay_dir
