"""The replay buffer's settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.core.settings import Settings


class ReplaySettings(Settings):
    """Settings that the replay buffer reads from its environment."""

    replay_dir: Path | None = Field(
        default=None,
        description="Where the groups are kept, on a disk of this machine; default `replay` in the run directory.",
    )
    replay_capacity: int = Field(
        default=100_000, ge=1, le=10_000_000, description="Groups kept for replay; beyond it the oldest are evicted."
    )
    replay_max_age_seconds: float | None = Field(
        default=None, gt=0, description="Groups kept for replay longer than this are evicted. Unset: never."
    )
    replay_evict_staleness: int | None = Field(
        default=None,
        ge=0,
        description="Groups whose oldest token is more policy versions behind the newest are evicted. Unset: never.",
    )
    replay_fsync: bool = Field(
        default=True,
        description="Whether acknowledged groups survive a loss of power too, at the cost of waiting for the disk. "
        "The death of the process loses nothing either way.",
    )
    replay_max_gb: float = Field(
        default=64.0, gt=0, description="Disk that the groups may take; beyond it additions are refused with 507."
    )

    @property
    def directory(self) -> Path:
        """The directory of the groups."""
        return self.run_dir / "replay" if self.replay_dir is None else self.replay_dir
