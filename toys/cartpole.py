"""A policy that plays CartPole-v1, to try the evaluation head with: ``python -m toys.cartpole DIR``.

It is a linear controller that balances the pole, as a network of one layer without anything to learn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from services.evaluation_head.torch_policy import publish_policy
from services.protocol.evaluation import ActionKind, ActionSpec, StateKind, StateSpec

STATE = StateSpec(kind=StateKind.NUMBERS, shape=[4])
ACTION = ActionSpec(kind=ActionKind.INDEX, count=2)
CONTROLLER = torch.tensor([0.05, 0.15, 1.0, 0.35])
"""Weights of position, speed, angle and angular speed that balance the pole and keep the cart near the middle."""


def controller() -> torch.nn.Linear:
    """Return the layer from states [batch, 4] to the scores [batch, 2] of the two actions."""
    layer = torch.nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.stack([-CONTROLLER, CONTROLLER]))
    return layer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m toys.cartpole", description="Write a policy that plays CartPole-v1."
    )
    parser.add_argument("directory", type=Path, help="where versions lie; give it to the head as a policy")
    parser.add_argument("--version", type=int, default=1, help="default 1; a running head takes up a higher one")
    options = parser.parse_args()
    print(publish_policy(controller(), options.directory, options.version, STATE, ACTION))
