"""Measures how long publishing takes, and for how long it stops generation, by transport and model size.

    python -m benchmarks.publishing [--sizes tiny 135m 0.5b] [--workers 2] [--rounds 3] [--quick] [--json FILE]

Real rollout nodes (router, embedded engines) stand opposite to the trainer's own publishers on one rank; every round
publishes once by each transport. The total is the time of ``Publisher.publish``, for which training waits; the pause is
the trainer's ``pause_seconds``, the longest of a worker. A version is on the volume once a worker that restarts can
load it, which ``broadcast`` sees to beside the next step. No prompts are in flight: with some, those end first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import models
from benchmarks.common.ending import end_in_order
from benchmarks.common.figures import spread
from benchmarks.common.nodes import output_of, started
from local_runner.environment import cores
from services.weights.policy_store import PolicyStore
from trainer.config import TrainerSettings, Transport
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks
from trainer.publishing import make_publisher
from trainer.service_thread import ServiceThread

CASE_SECONDS = 500.0
POLL_SECONDS = 0.02


@dataclass
class Measured:
    """What was measured of one transport and size, by round."""

    size: str
    transport: str
    megabytes: float = 0.0
    """Of the published weights."""
    total_seconds: list[float] = field(default_factory=list)
    pause_seconds: list[float] = field(default_factory=list)
    volume_seconds: list[float] = field(default_factory=list)
    """From the start until the version was on the volume."""

    def row(self) -> list[str]:
        """Its line of the table."""
        return [
            self.size,
            f"{self.megabytes:.0f}",
            self.transport,
            *map(spread, (self.total_seconds, self.pause_seconds, self.volume_seconds)),
        ]


def publish_rounds(rounds: int, workers: int) -> list[dict[str, Any]]:
    """What the trainer does; its settings are in the environment. The first version of each transport warms up."""
    measured = []
    with join_ranks() as ranks, ServiceThread() as thread:
        settings = TrainerSettings.load()
        store = PolicyStore(settings.policy_dir)
        policy = load_policy(settings, ranks)
        publishers = {
            transport: make_publisher(
                settings.model_copy(update={"publish_transport": transport}), policy, ranks, thread
            )
            for transport in Transport
        }
        version = 0
        for number in range(rounds + 1):
            for transport, publisher in publishers.items():
                version += 1
                began = time.perf_counter()
                metrics = publisher.publish(version)
                total = time.perf_counter() - began
                path = _wait_for_version(store, version)
                written = time.perf_counter() - began
                if metrics["workers"] != workers:
                    raise SystemExit(
                        f"error: {metrics['workers']:.0f} of {workers} workers took version {version} by {transport}"
                    )
                if number:
                    file = path / "model.safetensors"
                    times = {"total": total, "pause": metrics["pause_seconds"], "volume": written}
                    measured.append({"transport": transport.value, "bytes": file.stat().st_size, **times})
        for publisher in publishers.values():
            publisher.close()
    return measured


def _wait_for_version(store: PolicyStore, version: int) -> Path:
    end = time.monotonic() + CASE_SECONDS
    while (newest := store.newest()) is None or newest.version < version:
        if time.monotonic() > end:
            raise SystemExit(f"error: version {version} is not on the volume after {CASE_SECONDS:g} s")
        time.sleep(POLL_SECONDS)
    return newest.path


def measure(size: str, rounds: int, workers: int) -> list[Measured]:
    """Both transports with one model, in turn."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        settings = {
            "MODEL_NAME": models.directory(size, directory / "model"),
            "MIN_WORKERS": workers,
            "ENGINE_DTYPE": "float32",
            "ROLLOUT_ENGINE": "embedded",
            "PUBLISH_DEADLINE_SECONDS": CASE_SECONDS / 2,
        }
        with started(directory, ["rollout-server"], settings, {"rollout-server": workers, "ppo-trainer": 1}) as group:
            command = [sys.executable, "-m", "benchmarks.publishing", "--trainer"]
            command += ["--rounds", str(rounds), "--workers", str(workers)]
            logs = [group.log("rollout-server", rank) for rank in range(workers)]
            output = output_of(command, group.environment("ppo-trainer"), CASE_SECONDS, logs)
    found = {transport.value: Measured(size, transport.value) for transport in Transport}
    for record in json.loads(output.splitlines()[-1]):
        into = found[record["transport"]]
        into.megabytes = record["bytes"] / 1e6
        into.total_seconds.append(record["total"])
        into.pause_seconds.append(record["pause"])
        into.volume_seconds.append(record["volume"])
    return list(found.values())


def show(measured: Sequence[Measured], workers: int) -> Table:
    """Medians and spreads."""
    table = Table(
        title=f"{workers} workers, one trainer rank, {cores()} cores for all; seconds: median (least to most)"
    )
    for name in ("model", "MB", "transport", "total s", "pause s", "on the volume s"):
        table.add_column(name, justify="right")
    for one in measured:
        table.add_row(*one.row())
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publishing")
    parser.add_argument("--sizes", nargs="+", choices=models.SIZES, default=list(models.SIZES))
    parser.add_argument("--workers", type=int, default=2, help="rollout nodes")
    parser.add_argument("--rounds", type=int, default=3, help="publications by each transport")
    parser.add_argument("--quick", action="store_true", help="the tiny model, one round")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    parser.add_argument("--trainer", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    end_in_order()
    if given.trainer:
        print(json.dumps(publish_rounds(given.rounds, given.workers)), flush=True)
        # The library threads of a broadcast group are not to hold up the end.
        os._exit(0)
    sizes, rounds = (["tiny"], 1) if given.quick else (given.sizes, given.rounds)
    measured = []
    for size in sizes:
        measured += measure(size, rounds, given.workers)
        print(f"{size}: done", file=sys.stderr)
    Console().print(show(measured, given.workers))
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in measured], indent=2))


if __name__ == "__main__":
    main()
