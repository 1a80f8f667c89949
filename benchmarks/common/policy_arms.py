"""The two sides of ``benchmarks.policy``, played and compared."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch

from benchmarks.common import policy_workers
from benchmarks.common.policy_workers import Played, WorkerFailedError
from benchmarks.common.serving import running


@dataclass(frozen=True)
class Arm:
    """One way of playing, measured. The times are in seconds unless their name says otherwise."""

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


def measure(options: argparse.Namespace, policy: Path) -> dict[str, Any]:
    """Plays both sides and compares them."""
    batched, head_played = _with_head(options, policy)
    own, own_played = _with_own_models(options, policy)
    returns, own_returns = _by_seed(head_played, "returns"), _by_seed(own_played, "returns")
    actions, own_actions = _by_seed(head_played, "actions"), _by_seed(own_played, "actions")
    differing = sorted(seed for seed in returns if returns[seed] != own_returns.get(seed))
    cores = _cores()
    return {
        "settings": {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()},
        "machine": {"cores": cores, "device": options.device, "torch": torch.__version__},
        "batched_head": asdict(batched),
        "one_model_per_worker": asdict(own),
        "speed_up": batched.steps_per_second / own.steps_per_second,
        "memory_ratio": own.memory_mb / batched.memory_mb,
        "bound": bound(batched, options.num_workers, options.batch_size, options.timeout_ms, cores),
        "equal_returns": not differing and returns.keys() == own_returns.keys(),
        "differing_seeds": differing,
        "equal_actions": sum(actions[seed] == own_actions.get(seed) for seed in actions),
        "returns": {str(seed): value for seed, value in sorted(returns.items())},
    }


def _with_head(options: argparse.Namespace, policy: Path) -> tuple[Arm, list[Played]]:
    variables = {
        "HEAD_POLICIES": f"policy={policy.resolve()}",
        "HEAD_BATCH_SIZE": str(options.batch_size),
        "HEAD_TIMEOUT_MS": str(options.timeout_ms),
        "HEAD_DEVICE": options.device,
        "JOBGROUP_TOKEN": "",
    }
    with running("evaluation_head", **variables) as (service, start_seconds):
        process = psutil.Process(service.process.pid)
        cpu_before = sum(process.cpu_times()[:2])
        played, ready_seconds = policy_workers.run(_works(options, policy, service.port))
        cpu = sum(process.cpu_times()[:2]) - cpu_before
        stats = httpx.get(f"http://127.0.0.1:{service.port}/stats", trust_env=False).json()
        memory = service.memory_mb()
    counted = stats["episodes"]["finished"]
    if counted != options.total_battles:
        raise WorkerFailedError(f"the head counts {counted} battles, {options.total_battles} were played")
    about = stats["policies"][0]
    head = {
        "cpu_seconds": cpu,
        "memory_mb": memory,
        "compute_seconds": about["compute_seconds"],
        "batches": about["batches"],
        "mean_batch": about["states"] / about["batches"],
        "batch_sizes": about["batch_sizes"],
        "battles_counted": counted,
        "refused_as_overloaded": stats["overloaded"],
    }
    return _arm(played, 1, start_seconds + ready_seconds, head), played


def _with_own_models(options: argparse.Namespace, policy: Path) -> tuple[Arm, list[Played]]:
    played, ready_seconds = policy_workers.run(_works(options, policy, None))
    return _arm(played, options.num_workers, ready_seconds, None), played


def _works(options: argparse.Namespace, policy: Path, port: int | None) -> list[policy_workers.Work]:
    seeds = range(options.seed, options.seed + options.total_battles)
    return [
        policy_workers.Work(
            number=number,
            environment=options.environment,
            seeds=list(seeds[number :: options.num_workers]),
            policy=policy,
            device=options.device,
            threads=max(1, _cores() // options.num_workers),
            head=port,
            deadline_seconds=options.deadline,
        )
        for number in range(options.num_workers)
    ]


def _arm(played: Sequence[Played], models: int, start_seconds: float, head: dict[str, Any] | None) -> Arm:
    seconds = max(one.ended for one in played) - min(one.began for one in played)
    battles, steps = sum(len(one.returns) for one in played), sum(one.steps for one in played)
    waits = 1000 * np.concatenate([one.decision_seconds for one in played])
    return Arm(
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


def _by_seed(played: Sequence[Played], name: str) -> dict[int, Any]:
    return {seed: value for one in played for seed, value in getattr(one, name).items()}


def _cores() -> int:
    # Those that this process may use, where the system tells.
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def bound(batched: Arm, num_workers: int, batch_size: int, timeout_ms: float, cores: int) -> str:
    """What keeps the batched side from being faster, from where its time went."""
    assert batched.head is not None
    computing = batched.head["compute_seconds"] / batched.seconds
    head_cpu = batched.head["cpu_seconds"] / batched.seconds
    used = head_cpu + batched.worker_cpu_seconds / batched.seconds
    if computing > 0.7:
        return f"the policy: batches compute {computing:.0%} of the time; a larger batch costs little more, a GPU less"
    if used > 0.9 * cores:
        return (
            f"processor time: head and workers use {used:.1f} of {cores} cores, and batches compute {computing:.0%} of "
            "the time; the rest is environments and HTTP"
        )
    if head_cpu - computing > 0.8:
        return f"the head's one event loop, which is busy {head_cpu - computing:.0%} of the time with HTTP and JSON"
    if batch_size > num_workers:
        return f"the timeout: {num_workers} workers never fill a batch of {batch_size}, so each waits {timeout_ms:g} ms"
    return (
        f"round trips: a worker waits {batched.decision_ms['p50']:.1f} ms for an action, batches have "
        f"{batched.head['mean_batch']:.1f} states; more workers make larger batches"
    )
