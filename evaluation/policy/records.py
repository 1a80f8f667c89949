"""The records between coordinator and workers, which cross their pipes as lines of JSON."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Work:
    """The work of one worker process."""

    name: str
    """The worker's name on the head's dashboard."""
    environment: str
    head: str = ""
    """The head's URL."""
    policy: str | None = None
    """The head's policy; None: its first one."""
    patience_seconds: float = 120.0
    """Longest wait for one action, while the head may restart."""


@dataclass
class Episode:
    """An episode that came to its end, or in ``failed`` the reason why it did not."""

    seed: int
    episode_return: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    versions: list[int | None] = field(default_factory=list)
    """The versions of the policy that acted."""
    actions: str = ""
    """A hash of the actions."""
    failed: str = ""
    decision_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Costs:
    """Time and memory that a worker process took for its episodes."""

    cpu_seconds: float
    memory_mb: float
