"""The evaluation head's batches: workers that ask the head, against workers with their own models."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.table import Table

from benchmarks import harness, own_model_worker
from benchmarks.harness import Benchmark, Given, Option, Side
from benchmarks.own_model_worker import DEVICE
from benchmarks.service import running
from evaluation.policy.worker import PlayedEpisode, Work
from evaluation.policy.workers import MODULE, Coordinator, Crew, Worker
from services.core.errors import DependencyLostError, NeverReadyError
from services.core.machine import cores
from services.evaluation_head import checkpoint
from toys.cartpole import ACTION, STATE, CartPolePolicy

DEADLINE_SECONDS = 1800.0
SIZES = ("64x2", "1024x4", "3072x4")
"""Policies of 5 thousand, 3 million and 28 million parameters."""
SIDES = ("batched_head", "one_model_per_worker")


@dataclass(frozen=True)
class Played:
    """The episodes of a side and its workers; times are in seconds."""

    episodes: list[PlayedEpisode]
    workers: list[Worker]
    ready_seconds: float
    """From the first start to the last worker that was ready."""
    seconds: float
    """From then to the end of the last episode."""


def play(options: Given, work: Work, module: str) -> Played:
    """Play all battles in workers that begin together.

    Raises:
        SystemExit: a worker failed, or was not done after DEADLINE_SECONDS.
    """
    episodes: list[PlayedEpisode] = []
    at_once = options.episodes_at_once
    crew = Crew(options.num_workers, work, module, restarts=0, is_together=True, episodes_at_once=at_once)
    coordinator = Coordinator(crew, range(options.total_battles), episodes.append)

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
    if failed := [episode.failed for episode in episodes if episode.failed]:
        raise SystemExit(f"error: a battle was lost: {failed[0]}")
    assert coordinator.ready_at is not None
    return Played(episodes, coordinator.workers, coordinator.ready_at - started, ended - coordinator.ready_at)


def play_with_head(options: Given, policy: Path) -> dict[str, Any]:
    """Play with actions from the evaluation head."""
    variables = {
        "HEAD_POLICIES": f"policy={policy.resolve()}",
        "HEAD_BATCH_SIZE": str(options.batch_size or options.num_workers * options.episodes_at_once),
        "HEAD_TIMEOUT_MS": str(options.timeout_ms),
        "HEAD_DEVICE": DEVICE,
        "JOBGROUP_TOKEN": "",
    }
    with running("evaluation_head", **variables) as service:
        cpu_before = service.cpu_seconds()
        work = Work("", options.environment, f"http://127.0.0.1:{service.port}")
        played = play(options, work, MODULE)
        cpu = service.cpu_seconds() - cpu_before
        stats = httpx.get(f"http://127.0.0.1:{service.port}/stats", trust_env=False).json()
        memory = service.memory_mb()
    side = summary(played, 1, service.start_seconds + played.ready_seconds)
    side["memory_mb"] += memory
    about = stats["policies"][0]
    return side | {
        "head_cpu_seconds": cpu,
        "compute_seconds": about["compute_seconds"],
        "mean_batch": about["states"] / about["batches"],
        "batch_sizes": about["batch_sizes"],
        "battles_counted": stats["episodes"]["finished"],
    }


def summary(played: Played, models: int, start_seconds: float) -> dict[str, Any]:
    """Add up what the workers of a side measured."""
    seconds = played.seconds
    returns = {str(one.seed): one.episode_return for one in played.episodes}
    steps = sum(one.steps for one in played.episodes)
    costs = [worker.costs for worker in played.workers if worker.costs is not None]
    waits = 1000 * np.concatenate([one.decision_seconds for one in played.episodes])
    return {
        "models": models,
        "start_seconds": start_seconds,
        "seconds": seconds,
        "battles": len(returns),
        "steps": steps,
        "battles_per_second": len(returns) / seconds,
        "steps_per_second": steps / seconds,
        "decision_ms": {f"p{q}": float(np.percentile(waits, q)) for q in (50, 95, 99)},
        "worker_cpu_seconds": sum(one.cpu_seconds for one in costs),
        "memory_mb": sum(one.memory_mb for one in costs),
        "returns": returns,
        "actions": {str(one.seed): one.actions for one in played.episodes},
    }


def measure(options: Given, policy: Path) -> dict[str, Any]:
    """Play both sides and compare them; return the content of results.json."""
    head = play_with_head(options, policy)
    played = play(options, Work("", options.environment, policy=str(policy)), own_model_worker.__name__)
    own = summary(played, options.num_workers, played.ready_seconds)
    return {
        "policy": policy.stem,
        "settings": {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()},
        SIDES[0]: head,
        SIDES[1]: own,
        "speed_up": head["steps_per_second"] / own["steps_per_second"],
        "memory_ratio": own["memory_mb"] / head["memory_mb"],
        "differing_returns": [seed for seed, value in head["returns"].items() if own["returns"][seed] != value],
        "differing_actions": [seed for seed, value in head["actions"].items() if own["actions"][seed] != value],
    }


def tables(_given: Given, sides: Sequence[Side]) -> list[Table]:
    """Return both sides of each policy."""
    rows = []
    for found in (measured for side in sides for measured in side.rounds):
        for name in SIDES:
            side = found[name]
            speed = (f"{side['steps_per_second']:.0f}", f"{side['battles_per_second']:.2f}")
            waits = (f"{side['decision_ms']['p50']:.2f}", f"{side['decision_ms']['p95']:.2f}")
            costs = (str(side["models"]), f"{side['memory_mb']:.0f}", f"{side['start_seconds']:.1f}")
            ratio = f"{found['speed_up']:.2f}" if name == SIDES[0] else ""
            rows.append((found["policy"] if ratio else "", name, *speed, ratio, *waits, *costs))
    columns = ("policy", "", "steps/s", "battles/s", "speed-up", "p50 ms", "p95 ms", "models", "MB", "start s")
    return [harness.table_of_rows("actions from one head, and from a model in every worker", columns, rows)]


def conclusions(found: dict[str, Any]) -> str:
    """Return where the head's time went, and whether both sides played alike."""
    head = found[SIDES[0]]
    computing, head_cpu = head["compute_seconds"] / head["seconds"], head["head_cpu_seconds"] / head["seconds"]
    used = head_cpu + head["worker_cpu_seconds"] / head["seconds"]
    values, total = sorted(head["returns"].values()), head["battles"]
    return (
        f"{found['policy']}: batches of {head['mean_batch']:.1f} states compute {computing:.0%} of the time; the head "
        f"uses {head_cpu:.1f} cores, with its workers {used:.1f} of {cores()}; memory {found['memory_ratio']:.1f} "
        f"times less; equal returns for {total - len(found['differing_returns'])} of {total} seeds ({values[0]:g} to "
        f"{values[-1]:g}), the very same actions for {total - len(found['differing_actions'])}"
    )


def measure_all(given: Given) -> list[Side]:
    """Measure the gain of the evaluation head's batches: N workers that ask the head, against N with their own models.

    Both sides play the same episodes ("battles") with the same seeds in equally many processes, on this machine and in
    one run. The policy is a file or directory that the head can serve, or, without --policy, a new policy for
    CartPole-v1 of each of --sizes. Times begin when all workers are ready; starting is measured apart. The exit code is
    1 if a seed gives different returns.

    Raises:
        SystemExit: there are more workers than battles.
    """
    if not 1 <= given.num_workers <= given.total_battles:
        raise SystemExit(
            f"error: --num-workers is {given.num_workers}; allowed is 1 to {given.total_battles}, the battles"
        )
    given.save_dir = Path(given.save_dir)
    given.save_dir.mkdir(parents=True, exist_ok=True)
    return [Side(policy.stem, lambda _: {}, [measure(given, policy)]) for policy in _policies(given)]


def _policies(given: Given) -> Iterator[Path]:
    """Yield the files of the policies; make those of --sizes."""
    if given.policy:
        yield Path(given.policy)
        return
    for size in given.sizes:
        path = given.save_dir / f"cartpole-{size}.pt2"
        width, layers = map(int, size.split("x"))
        checkpoint.save_policy(CartPolePolicy(width, layers, 0), path, STATE, ACTION)
        yield path


def conclude(given: Given, sides: Sequence[Side]) -> int:
    """Write results.json, and return 1 if a seed gives different returns."""
    found = [measured for side in sides for measured in side.rounds]
    path = given.save_dir / "results.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join([*map(conclusions, found), f"written to {path}"]))
    return int(any(one["differing_returns"] for one in found))


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
