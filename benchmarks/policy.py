"""The evaluation head's batches: workers that ask the head, against workers with their own models."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.table import Table

from benchmarks import harness, own_model_worker
from benchmarks.harness import Args, Benchmark, Option, Side
from benchmarks.own_model_worker import DEVICE
from benchmarks.service import running
from evaluation.policy.worker import PlayedEpisode, Work
from evaluation.policy.workers import MODULE, Coordinator, Crew
from services.core.errors import DependencyLostError, NeverReadyError
from services.core.machine import cores
from services.evaluation_head import checkpoint
from toys.cartpole import ACTION, STATE, CartPolePolicy

DEADLINE_SECONDS = 1800.0
SIZES = ("64x2", "1024x4", "3072x4")
"""Policies of 5 thousand, 3 million and 28 million parameters."""
SIDES = ("batched_head", "one_model_per_worker")


def play(args: Args, work: Work, module: str) -> dict[str, Any]:
    """Play all battles in workers that begin together, and return the measurements.

    ``start_seconds`` are from the first start to the last worker that was ready, ``seconds`` from then to the end of
    the last episode.

    Raises:
        SystemExit: a worker failed, or was not done after DEADLINE_SECONDS.
    """
    episodes: list[PlayedEpisode] = []
    at_once = args.episodes_at_once
    crew = Crew(args.num_workers, work, module, restarts=0, is_together=True, episodes_at_once=at_once)
    coordinator = Coordinator(crew, range(args.total_battles), episodes.append)

    async def run() -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await coordinator.run()

    started = time.monotonic()
    try:
        asyncio.run(run())
    except (DependencyLostError, NeverReadyError, TimeoutError) as error:
        raise SystemExit(f"error: {error or 'the battles took too long'}; its messages are above") from error
    ended = time.monotonic()
    if reasons := [death for worker in coordinator.workers for death in worker.deaths]:
        raise SystemExit(f"error: {reasons[0]}; its messages are above")
    if failures := [episode.failed for episode in episodes if episode.failed]:
        raise SystemExit(f"error: a battle was lost: {failures[0]}")
    assert coordinator.ready_at is not None
    seconds = ended - coordinator.ready_at
    steps = sum(episode.steps for episode in episodes)
    costs = [worker.costs for worker in coordinator.workers if worker.costs is not None]
    waits = 1000 * np.concatenate([episode.decision_seconds for episode in episodes])
    return {
        "models": args.num_workers,
        "start_seconds": coordinator.ready_at - started,
        "seconds": seconds,
        "battles": len(episodes),
        "steps": steps,
        "battles_per_second": len(episodes) / seconds,
        "steps_per_second": steps / seconds,
        "decision_ms": {f"p{q}": float(np.percentile(waits, q)) for q in (50, 95, 99)},
        "worker_cpu_seconds": sum(cost.cpu_seconds for cost in costs),
        "memory_mb": sum(cost.memory_mb for cost in costs),
        "returns": {str(episode.seed): episode.episode_return for episode in episodes},
        "actions": {str(episode.seed): episode.actions for episode in episodes},
    }


def play_with_head(args: Args, policy: Path) -> dict[str, Any]:
    """Play with actions from the evaluation head."""
    variables = {
        "HEAD_POLICIES": f"policy={policy.resolve()}",
        "HEAD_BATCH_SIZE": str(args.batch_size or args.num_workers * args.episodes_at_once),
        "HEAD_TIMEOUT_MS": str(args.timeout_ms),
        "HEAD_DEVICE": DEVICE,
        "JOBGROUP_TOKEN": "",
    }
    with running("evaluation_head", **variables) as service:
        cpu_before = service.cpu_seconds()
        side = play(args, Work("", args.environment, f"http://127.0.0.1:{service.port}"), MODULE)
        cpu = service.cpu_seconds() - cpu_before
        stats = httpx.get(f"http://127.0.0.1:{service.port}/stats", trust_env=False).json()
        memory = service.memory_mb()
    about = stats["policies"][0]
    return side | {
        "models": 1,
        "start_seconds": service.start_seconds + side["start_seconds"],
        "memory_mb": side["memory_mb"] + memory,
        "head_cpu_seconds": cpu,
        "compute_seconds": about["compute_seconds"],
        "mean_batch": about["states"] / about["batches"],
        "batch_sizes": about["batch_sizes"],
        "battles_counted": stats["episodes"]["finished"],
    }


def measure(args: Args, policy: Path) -> dict[str, Any]:
    """Play both sides and compare them; return the content of results.json."""
    head = play_with_head(args, policy)
    apart = play(args, Work("", args.environment, policy=str(policy)), own_model_worker.__name__)
    return {
        "policy": policy.stem,
        "settings": {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()},
        SIDES[0]: head,
        SIDES[1]: apart,
        "speed_up": head["steps_per_second"] / apart["steps_per_second"],
        "memory_ratio": apart["memory_mb"] / head["memory_mb"],
        "differing_returns": [seed for seed, value in head["returns"].items() if apart["returns"][seed] != value],
        "differing_actions": [seed for seed, value in head["actions"].items() if apart["actions"][seed] != value],
    }


def tables(_args: Args, sides: Sequence[Side]) -> list[Table]:
    """Return both sides of each policy."""
    rows = []
    for comparison in (measured for side in sides for measured in side.rounds):
        for name in SIDES:
            side = comparison[name]
            speed = (f"{side['steps_per_second']:.0f}", f"{side['battles_per_second']:.2f}")
            waits = (f"{side['decision_ms']['p50']:.2f}", f"{side['decision_ms']['p95']:.2f}")
            costs = (str(side["models"]), f"{side['memory_mb']:.0f}", f"{side['start_seconds']:.1f}")
            ratio = f"{comparison['speed_up']:.2f}" if name == SIDES[0] else ""
            rows.append((comparison["policy"] if ratio else "", name, *speed, ratio, *waits, *costs))
    columns = ("policy", "", "steps/s", "battles/s", "speed-up", "p50 ms", "p95 ms", "models", "MB", "start s")
    return [harness.table_of_rows("actions from one head, and from a model in every worker", columns, rows)]


def conclusions(comparison: dict[str, Any]) -> str:
    """Return where the head's time went, and whether both sides played alike."""
    head = comparison[SIDES[0]]
    computing, head_cpu = head["compute_seconds"] / head["seconds"], head["head_cpu_seconds"] / head["seconds"]
    used = head_cpu + head["worker_cpu_seconds"] / head["seconds"]
    values, total = sorted(head["returns"].values()), head["battles"]
    returns, actions = (total - len(comparison[f"differing_{name}"]) for name in ("returns", "actions"))
    return (
        f"{comparison['policy']}: batches of {head['mean_batch']:.1f} states compute {computing:.0%} of the time; the "
        f"head uses {head_cpu:.1f} cores, with its workers {used:.1f} of {cores()}; memory "
        f"{comparison['memory_ratio']:.1f} times less; equal returns for {returns} of {total} seeds ({values[0]:g} to "
        f"{values[-1]:g}), the very same actions for {actions}"
    )


def measure_all(args: Args) -> list[Side]:
    """Measure the gain of the evaluation head's batches: N workers that ask the head, against N with their own models.

    Both sides play the same episodes ("battles") with the same seeds in equally many processes, on this machine and in
    one run. The policy is a file or directory that the head can serve, or, without --policy, a new policy for
    CartPole-v1 of each of --sizes. Times begin when all workers are ready; starting is measured apart. The exit code is
    1 if a seed gives different returns.

    Raises:
        SystemExit: there are more workers than battles.
    """
    if not 1 <= args.num_workers <= args.total_battles:
        raise SystemExit(
            f"error: --num-workers is {args.num_workers}; allowed is 1 to {args.total_battles}, the battles"
        )
    args.save_dir = Path(args.save_dir)
    args.save_dir.mkdir(parents=True, exist_ok=True)
    return [Side(policy.stem, lambda _: {}, [measure(args, policy)]) for policy in _policies(args)]


def _policies(args: Args) -> Iterator[Path]:
    """Yield the files of the policies; make those of --sizes."""
    if args.policy:
        yield Path(args.policy)
        return
    for size in args.sizes:
        path = args.save_dir / f"cartpole-{size}.pt2"
        width, layers = map(int, size.split("x"))
        checkpoint.save_policy(CartPolePolicy(width, layers, 0), path, STATE, ACTION)
        yield path


def conclude(args: Args, sides: Sequence[Side]) -> int:
    """Write results.json, and return 1 if a seed gives different returns."""
    comparisons = [measured for side in sides for measured in side.rounds]
    path = args.save_dir / "results.json"
    path.write_text(json.dumps(comparisons, indent=1) + "\n")
    print("\n".join([*map(conclusions, comparisons), f"written to {path}"]))
    return int(any(one["differing_returns"] for one in comparisons))


POLICY = Benchmark(
    measure=measure_all,
    tables=tables,
    rounds=1,
    quick={"total-battles": 8},
    options={
        "total-battles": Option(64, "episodes that each side plays"),
        "num-workers": Option(8, "processes that play"),
        "episodes-at-once": Option(1, "episodes that a worker plays together"),
        "batch-size": Option(0, "of the head; default: the episodes of all workers"),
        "timeout-ms": Option(5.0, "how long the head waits for a batch to fill"),
        "save-dir": Option("runs/policy-benchmark", "for results.json"),
        "environment": Option("CartPole-v1", "a gymnasium id, or module:Id"),
        "policy": Option(None, "a .pt2 file or a directory of versions"),
        "sizes": Option(list(SIZES), "widths x layers of the policies that are made without --policy"),
    },
    conclude=conclude,
)
