"""A policy that plays CartPole-v1, to try the evaluation head with: ``python -m toys.cartpole DIR``.

It imitates a linear controller that balances the pole: a network of random features whose last layer is fitted
by ridge regression, in one pass and the same for the same seed. Its width and its layers make it as costly to run as
a policy of your own.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch

from services.evaluation_head.torch_policy import publish_policy
from services.protocol.evaluation import ActionKind, ActionSpec, StateKind, StateSpec

STATE = StateSpec(kind=StateKind.NUMBERS, shape=[4])
ACTION = ActionSpec(kind=ActionKind.INDEX, count=2)
CONTROLLER = torch.tensor([0.05, 0.15, 1.0, 0.35])
"""Weights of position, speed, angle and angular speed that balance the pole and keep the cart near the middle."""
SPREAD = torch.tensor([1.0, 1.0, 0.1, 1.0])
EXAMPLES = 4096


class CartPolePolicy(torch.nn.Module):
    """A network from the state to the scores of the two actions."""

    def __init__(self, width: int, layers: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        sizes = [4, *[width] * layers]
        blocks: list[torch.nn.Module] = []
        for inputs, outputs in itertools.pairwise(sizes):
            linear = torch.nn.Linear(inputs, outputs)
            torch.nn.init.normal_(linear.weight, std=(2 / inputs) ** 0.5, generator=generator)
            torch.nn.init.normal_(linear.bias, std=0.1, generator=generator)
            blocks += [linear, torch.nn.ReLU()]
        self.trunk = torch.nn.Sequential(*blocks)
        self.scores = torch.nn.Linear(width, 2)
        self._fit(generator)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the scores [batch, 2] of the states [batch, 4]."""
        scores: torch.Tensor = self.scores(self.trunk(states / SPREAD.to(states.device)))
        return scores

    @torch.no_grad()
    def _fit(self, generator: torch.Generator) -> None:
        states = torch.randn(EXAMPLES, 4, generator=generator) * SPREAD
        wanted = states @ CONTROLLER
        features = self.trunk(states / SPREAD).double()
        features = torch.cat([features, torch.ones(EXAMPLES, 1, dtype=torch.float64)], dim=1)
        # The dual form, because there may be more features than examples.
        kernel = features @ features.T + 1e-3 * features.square().mean() * torch.eye(EXAMPLES, dtype=torch.float64)
        weights = (features.T @ torch.linalg.solve(kernel, wanted.double())).float()
        self.scores.weight.copy_(torch.stack([-weights[:-1], weights[:-1]]))
        self.scores.bias.copy_(torch.stack([-weights[-1], weights[-1]]))


def main() -> None:
    """Write one version."""
    parser = argparse.ArgumentParser(
        prog="python -m toys.cartpole", description="Write a policy that plays CartPole-v1."
    )
    parser.add_argument("directory", type=Path, help="where versions lie; give it to the head as a policy")
    parser.add_argument("--version", type=int, default=1, help="default 1; a running head takes up a higher one")
    parser.add_argument("--width", type=int, default=64, help="default 64; a wider one costs as much as yours")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    policy = CartPolePolicy(options.width, options.layers, options.seed)
    print(publish_policy(policy, options.directory, options.version, STATE, ACTION))


if __name__ == "__main__":
    main()
