"""Write a policy that plays CartPole-v1, to try the evaluation head with: ``python -m scripts.cartpole_policy DIR``."""

from __future__ import annotations

import argparse
from pathlib import Path

from services.evaluation_head.checkpoint import publish_policy
from toys.cartpole import ACTION, STATE, CartPolePolicy


def main() -> None:
    """Write one version."""
    parser = argparse.ArgumentParser(prog="python -m scripts.cartpole_policy", description=__doc__)
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
