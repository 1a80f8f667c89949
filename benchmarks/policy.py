"""Measures what the evaluation head's batches are worth: N workers that ask it, against N with a model of their own.

    python -m benchmarks.policy --total-battles 64 --num-workers 8 --save-dir runs/policy-benchmark

Both play the same episodes ("battles"), one at a time in each worker, with the same seeds, on this machine and in one
run. The policy is a file or directory that the head would serve, or, without --policy, one for CartPole-v1 of --width
and --layers. Times begin when all workers are ready, so that starting is measured apart. Ends with 1 when a seed gives
different returns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.ending import end_in_order
from services.core.errors import EXIT_CONFIGURATION, ConfigurationError


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    # Each worker imports this file first: torch is to be in those only that use it.
    from benchmarks.common import policy_arms, policy_checks
    from benchmarks.common.policy_workers import WorkerFailedError

    options = _parse(arguments)
    end_in_order()
    try:
        policy = policy_checks.preflight(options)
        found = policy_arms.measure(options, policy)
    except ConfigurationError as error:
        print(f"benchmark_policy: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    except WorkerFailedError as error:
        print(f"benchmark_policy: {error}", file=sys.stderr)
        return 1
    path = options.save_dir / "results.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    _show(found)
    print(f"written to {path}")
    return 0 if found["equal_returns"] else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policy", description=__doc__.split("\n")[0])
    parser.add_argument("--total-battles", type=int, default=64, help="episodes that each side plays")
    parser.add_argument("--num-workers", type=int, default=8, help="processes that play, one episode at a time each")
    parser.add_argument("--batch-size", type=int, help="of the head; default --num-workers")
    parser.add_argument("--timeout-ms", type=float, default=5.0, help="how long the head waits for a batch to fill")
    parser.add_argument("--save-dir", type=Path, default=Path("runs/policy-benchmark"), help="for results.json")
    parser.add_argument("--environment", default="CartPole-v1", help="a gymnasium id, or module:Id")
    parser.add_argument("--policy", type=Path, help="a .pt2 file or a directory of versions")
    parser.add_argument("--width", type=int, default=2048, help="of the policy that is made without --policy")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda: where policies run")
    parser.add_argument("--seed", type=int, default=0, help="of the first battle")
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds that a side may take")
    return parser.parse_args(arguments)


def _show(found: dict[str, Any]) -> None:
    print(f"\n{'':22}{'steps/s':>10}{'battles/s':>11}{'p50 ms':>9}{'p95 ms':>9}{'models':>8}{'MB':>8}{'start s':>9}")
    for name in ("batched_head", "one_model_per_worker"):
        arm = found[name]
        print(
            f"{name:22}{arm['steps_per_second']:>10.0f}{arm['battles_per_second']:>11.2f}{arm['decision_ms']['p50']:>9.2f}"
            f"{arm['decision_ms']['p95']:>9.2f}{arm['models']:>8}{arm['memory_mb']:>8.0f}{arm['start_seconds']:>9.1f}"
        )
    total, spread = len(found["returns"]), sorted(found["returns"].values())
    equal = total - len(found["differing_seeds"])
    print(
        f"\nspeed-up {found['speed_up']:.2f}, memory {found['memory_ratio']:.1f} times less"
        f"\nbound by {found['bound']}"
        f"\nequal returns for {equal} of {total} seeds ({spread[0]:g} to {spread[-1]:g}), "
        f"the very same actions for {found['equal_actions']}"
    )


if __name__ == "__main__":
    sys.exit(main())
