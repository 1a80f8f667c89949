"""Small policies whose actions reveal the version that chose them."""

from __future__ import annotations

from pathlib import Path

import torch

from services.evaluation_head.torch_policy import publish_policy
from services.protocol.evaluation import ActionKind, ActionSpec, StateKind, StateSpec

PAIR = StateSpec(kind=StateKind.NUMBERS, shape=[2])
NUMBERS = ActionSpec(kind=ActionKind.NUMBERS, shape=[2])
THREE = ActionSpec(kind=ActionKind.INDEX, count=3, start=10)
CARTPOLE = StateSpec(kind=StateKind.NUMBERS, shape=[4])
LEFT_RIGHT = ActionSpec(kind=ActionKind.INDEX, count=2)


class Times(torch.nn.Module):
    """A policy that multiplies the state by a factor. A state that begins with -1 gives NaN."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.where(states[:, :1] == -1, torch.nan, states * self.factor)


class Lean(torch.nn.Module):
    """A policy that pushes the cart to the side where the pole leans."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            self.scores.weight.copy_(torch.tensor([[0.0, 0.0, -1.0, -0.3], [0.0, 0.0, 1.0, 0.3]]))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.scores(states)


class Wobbles(torch.nn.Module):
    """A policy that ignores the pole's speed, so that the pole falls after a time that depends on the seed."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            self.scores.weight.copy_(torch.tensor([[0.0, 0.0, -1.0, 0.0], [0.0, 0.0, 1.0, 0.0]]))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.scores(states)


def publish_times(directory: Path, version: int) -> Path:
    """Publish a version that multiplies by its own number."""
    return publish_policy(Times(float(version)), directory, version, PAIR, NUMBERS)


def publish_lean(directory: Path, version: int = 1) -> Path:
    return publish_policy(Lean(), directory, version, CARTPOLE, LEFT_RIGHT)


def publish_wobbles(directory: Path, version: int = 1) -> Path:
    return publish_policy(Wobbles(), directory, version, CARTPOLE, LEFT_RIGHT)
