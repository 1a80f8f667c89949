"""The replay buffer's settings."""

from __future__ import annotations

from pathlib import Path

from services.core.settings import Settings


class ReplaySettings(Settings):
    """Settings that the replay buffer reads from its environment."""

    replay_dir: Path | None = None
    """Where the groups are kept, on a disk of this machine; default `replay` in the run directory. [advanced]"""

    @property
    def directory(self) -> Path:
        """The directory of the groups."""
        return self.run_dir / "replay" if self.replay_dir is None else self.replay_dir
