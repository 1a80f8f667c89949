"""An episode as whoever chooses its actions sees it: the evaluation head, or an environment server that pushes."""

from __future__ import annotations

from dataclasses import dataclass

from services.protocol.evaluation import State


@dataclass
class Play:
    """An episode under way, and the state that an action is to follow."""

    episode: str
    seed: int
    state: State
    steps: int = 0
    episode_return: float = 0.0
