"""Measure the gain of the evaluation head's batches: N workers that ask the head, against N with their own models.

    python -m benchmarks.policy --total-battles 64 --num-workers 8 --save-dir runs/policy-benchmark

Both sides play the same episodes ("battles") with the same seeds, one at a time in each worker, on this machine and in
one run. The policy is a file or directory that the head can serve, or, without --policy, a new policy for CartPole-v1
of --width and --layers. Times begin when all workers are ready; starting is measured apart. The exit code is 1 if a
seed gives different returns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import harness
from benchmarks.common.policy_worker import Played, Work
from benchmarks.common.service import running
from local_runner.environment import cores
from scripts.cartpole_policy import ACTION, STATE, CartPolePolicy
from services.core.errors import EXIT_CONFIGURATION, ConfigurationError, say_error
from services.evaluation_head import checkpoint

QUICK_BATTLES = 8


@dataclass(frozen=True)
class Side:
    """The measurements of one side; times are in seconds unless their names say otherwise."""

    models: int
    start_seconds: float
    seconds: float
    battles: int
    steps: int
    battles_per_second: float
    steps_per_second: float
    decision_ms: dict[str, float]
    worker_cpu_seconds: float
    memory_mb: float
    head: dict[str, Any] | None


def prepare(options: argparse.Namespace) -> Path:
    """Fill in the options that depend on others, and return the path of the policy.

    Raises:
        ConfigurationError: an option is wrong, or the policy cannot be loaded.
    """
    if not 1 <= options.num_workers <= options.total_battles:
        raise ConfigurationError(
            f"--num-workers is {options.num_workers}; allowed is 1 to --total-battles, {options.total_battles}"
        )
    options.batch_size = options.batch_size or options.num_workers
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        options.save_dir.mkdir(parents=True, exist_ok=True)
        policy: Path = options.policy or options.save_dir / f"cartpole-{options.width}x{options.layers}.pt2"
        if not options.policy and not policy.exists():
            checkpoint.save_policy(CartPolePolicy(options.width, options.layers, 0), policy, STATE, ACTION)
        checkpoint.load(checkpoint.find(policy), torch.device(options.device))
    except OSError as error:
        raise ConfigurationError(f"--save-dir {options.save_dir} cannot be written to: {error.strerror}") from error
    except (checkpoint.CheckpointError, RuntimeError) as error:
        raise ConfigurationError(f"--policy, --device: {error}") from error
    return policy


def play(options: argparse.Namespace, policy: Path, head: int | None) -> tuple[list[Played], float]:
    """Play all battles in workers that begin together; return what each played, and the seconds until all were ready.

    Raises:
        SystemExit: a worker failed, or was not done after --deadline.
    """
    seeds = range(options.seed, options.seed + options.total_battles)
    works = [
        Work(
            f"worker-{i}", options.environment, list(seeds[i :: options.num_workers]), str(policy), options.device, head
        )
        for i in range(options.num_workers)
    ]
    command = [sys.executable, "-m", "benchmarks.common.policy_worker"]
    # Otherwise the threads of all workers would contend for the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores() // options.num_workers))}
    started = time.monotonic()
    with harness.programs(
        [[*command, json.dumps(asdict(work))] for work in works], [environment] * len(works), options.deadline
    ) as processes:
        for work, process in zip(works, processes, strict=True):
            assert process.stdout is not None
            # A worker that fails closes its output; output_of then says so.
            if process.stdout.readline() != "ready\n":
                harness.output_of(process, work.name)
                raise SystemExit(f"error: {work.name} printed something else than that it is ready")
        ready_seconds = time.monotonic() - started
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("begin\n")
            process.stdin.flush()
        outputs = [harness.output_of(process, work.name) for work, process in zip(works, processes, strict=True)]
    return [Played(**json.loads(output.splitlines()[-1])) for output in outputs], ready_seconds


def play_with_head(options: argparse.Namespace, policy: Path) -> tuple[Side, list[Played]]:
    """Play with actions from the evaluation head."""
    variables = {
        "HEAD_POLICIES": f"policy={policy.resolve()}",
        "HEAD_BATCH_SIZE": str(options.batch_size),
        "HEAD_TIMEOUT_MS": str(options.timeout_ms),
        "HEAD_DEVICE": options.device,
        "JOBGROUP_TOKEN": "",
    }
    with running("evaluation_head", **variables) as service:
        process = psutil.Process(service.pid)
        cpu_before = sum(process.cpu_times()[:2])
        played, ready_seconds = play(options, policy, service.port)
        cpu = sum(process.cpu_times()[:2]) - cpu_before
        stats = httpx.get(f"http://127.0.0.1:{service.port}/stats", trust_env=False).json()
        memory = service.memory_mb()
    about = stats["policies"][0]
    head = {
        "cpu_seconds": cpu,
        "memory_mb": memory,
        "compute_seconds": about["compute_seconds"],
        "batches": about["batches"],
        "mean_batch": about["states"] / about["batches"],
        "batch_sizes": about["batch_sizes"],
        "battles_counted": stats["episodes"]["finished"],
        "refused_as_overloaded": stats["overloaded"],
    }
    return summary(played, 1, service.start_seconds + ready_seconds, head), played


def summary(played: Sequence[Played], models: int, start_seconds: float, head: dict[str, Any] | None) -> Side:
    """Add up what the workers of a side measured."""
    seconds = max(one.ended for one in played) - min(one.began for one in played)
    battles, steps = sum(len(one.returns) for one in played), sum(one.steps for one in played)
    waits = 1000 * np.concatenate([one.decision_seconds for one in played])
    return Side(
        models=models,
        start_seconds=start_seconds,
        seconds=seconds,
        battles=battles,
        steps=steps,
        battles_per_second=battles / seconds,
        steps_per_second=steps / seconds,
        decision_ms={f"p{q}": float(np.percentile(waits, q)) for q in (50, 95, 99)},
        worker_cpu_seconds=sum(one.cpu_seconds for one in played),
        memory_mb=sum(one.memory_mb for one in played) + (head["memory_mb"] if head else 0.0),
        head=head,
    )


def bound(side: Side, options: argparse.Namespace, cores: int) -> str:
    """Return what limits the speed of the side with the head, by where its time went."""
    assert side.head is not None
    computing = side.head["compute_seconds"] / side.seconds
    head_cpu = side.head["cpu_seconds"] / side.seconds
    used = head_cpu + side.worker_cpu_seconds / side.seconds
    if computing > 0.7:
        return f"the policy: batches compute {computing:.0%} of the time; a larger batch costs little more, a GPU less"
    if used > 0.9 * cores:
        return (
            f"processor time: head and workers use {used:.1f} of {cores} cores, and batches compute {computing:.0%} of "
            "the time; the rest is environments and HTTP"
        )
    if head_cpu - computing > 0.8:
        return f"the head's one event loop, which is busy {head_cpu - computing:.0%} of the time with HTTP and JSON"
    if options.batch_size > options.num_workers:
        return (
            f"the timeout: {options.num_workers} workers never fill a batch of {options.batch_size}, so each waits "
            f"{options.timeout_ms:g} ms"
        )
    return (
        f"round trips: a worker waits {side.decision_ms['p50']:.1f} ms for an action, batches have "
        f"{side.head['mean_batch']:.1f} states; more workers make larger batches"
    )


def measure(options: argparse.Namespace, policy: Path) -> dict[str, Any]:
    """Play both sides and compare them; return the content of results.json."""
    batched, played = play_with_head(options, policy)
    own_played, ready_seconds = play(options, policy, None)
    own = summary(own_played, options.num_workers, ready_seconds, None)
    returns, own_returns, actions, own_actions = (
        {seed: value for one in side for seed, value in getattr(one, name).items()}
        for name in ("returns", "actions")
        for side in (played, own_played)
    )
    differing = sorted(seed for seed in returns if returns[seed] != own_returns.get(seed))
    return {
        "settings": {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()},
        "machine": {"cores": cores(), "device": options.device, "torch": torch.__version__},
        "batched_head": asdict(batched),
        "one_model_per_worker": asdict(own),
        "speed_up": batched.steps_per_second / own.steps_per_second,
        "memory_ratio": own.memory_mb / batched.memory_mb,
        "bound": bound(batched, options, cores()),
        "equal_returns": not differing,
        "differing_seeds": differing,
        "equal_actions": sum(actions[seed] == own_actions.get(seed) for seed in actions),
        "returns": returns,
    }


def show(found: dict[str, Any]) -> Table:
    """Return the sides as a table."""
    rows = []
    for name in ("batched_head", "one_model_per_worker"):
        side = found[name]
        speed = (f"{side['steps_per_second']:.0f}", f"{side['battles_per_second']:.2f}")
        waits = (f"{side['decision_ms']['p50']:.2f}", f"{side['decision_ms']['p95']:.2f}")
        rows.append((name, *speed, *waits, side["models"], f"{side['memory_mb']:.0f}", f"{side['start_seconds']:.1f}"))
    columns = ("", "steps/s", "battles/s", "p50 ms", "p95 ms", "models", "MB", "start s")
    return harness.table("actions from one head, and from a model in every worker", columns, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and measure; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policy")
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
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_BATTLES} battles")
    options = parser.parse_args(arguments)
    if options.quick:
        options.total_battles = QUICK_BATTLES
    harness.end_in_order()
    try:
        policy = prepare(options)
    except ConfigurationError as error:
        say_error(error)
        return EXIT_CONFIGURATION
    found = measure(options, policy)
    path = options.save_dir / "results.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    Console().print(show(found))
    total, values = len(found["returns"]), sorted(found["returns"].values())
    print(f"speed-up {found['speed_up']:.2f}, memory {found['memory_ratio']:.1f} times less")
    print(f"bound by {found['bound']}")
    print(
        f"equal returns for {total - len(found['differing_seeds'])} of {total} seeds ({values[0]:g} to "
        f"{values[-1]:g}), the very same actions for {found['equal_actions']}"
    )
    print(f"written to {path}")
    return 0 if found["equal_returns"] else 1


if __name__ == "__main__":
    sys.exit(main())
