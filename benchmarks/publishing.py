"""Time of a publication of weights, and of the stop of generation in it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import harness, models
from benchmarks.harness import Args, Benchmark, Option, Side
from benchmarks.job import running, write_job_group
from services.core.files import atomic_write
from services.core.machine import cores
from services.core.tasks import ServiceThread
from services.weights.policy_store import PolicyStore
from trainer.config import TrainerSettings, Transport
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks
from trainer.publishing.publisher import Publisher
from trainer.publishing.writer import VersionWriter

CASE_SECONDS = 500.0
"""Longest time that all publications of one model may take."""
POLL_SECONDS = 0.02
WORKERS = 2
"""Rollout nodes."""


def publish_rounds(rounds: int) -> list[dict[str, Any]]:
    """Publish as the trainer does, by the settings in the environment. The first version of each transport warms up."""
    measured = []
    with join_ranks() as ranks, ServiceThread() as thread:
        settings = TrainerSettings.load()
        store = PolicyStore(settings.policy_dir)
        policy = load_policy(settings, ranks)
        publishers = {}
        for transport in Transport:
            of_transport = settings.model_copy(update={"publish_transport": transport})
            publishers[transport] = Publisher(of_transport, thread, VersionWriter(of_transport, policy, ranks))
        version = 0
        for number in range(rounds + 1):
            for transport, publisher in publishers.items():
                version += 1
                began = time.perf_counter()
                metrics = publisher.publish(version)
                total = time.perf_counter() - began
                while (newest := store.newest()) is None or newest.version < version:
                    time.sleep(POLL_SECONDS)
                volume = time.perf_counter() - began
                if metrics["workers"] != WORKERS:
                    raise SystemExit(f"error: {metrics['workers']:.0f} of {WORKERS} workers took version {version}")
                if number:
                    times = {"total": total, "pause": metrics["pause_seconds"], "volume": volume}
                    size = (newest.path / "model.safetensors").stat().st_size
                    measured.append({"transport": transport.value, "megabytes": size / 1e6, **times})
        for publisher in publishers.values():
            publisher.writer.close()
    return measured


def measure(size: str, rounds: int) -> list[dict[str, Any]]:
    """Measure all transports with one model; return each publication's size and seconds."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        settings = {
            "MODEL_NAME": models.directory(size, directory / "model"),
            "MIN_WORKERS": WORKERS,
            "ENGINE_DTYPE": "float32",
            "ROLLOUT_ENGINE": "embedded",
        }
        file = directory / "publications.json"
        command = f"exec python -m benchmarks.publishing {rounds} {file}"
        path = write_job_group(
            directory, "jobgroup.yaml", {"ppo-trainer": command}, only=["rollout-server", "ppo-trainer"]
        )
        with running(directory, path, settings, {"rollout-server": WORKERS, "ppo-trainer": 1}) as job:
            job.wait(file.exists, CASE_SECONDS)
        publications = [{"size": size, **publication} for publication in json.loads(file.read_text("utf-8"))]
    return sorted(publications, key=itemgetter("transport"))


def measure_all(args: Args) -> list[Side]:
    """Measure how long publishing weights takes, and for how long it stops generation, by transport and model size.

    The trainer's own publishers, on one rank, publish to real rollout nodes (router, embedded engines); every round
    publishes once by each transport. The total is the time of `Publisher.publish`, for which training waits. The pause
    is the trainer's `pause_seconds`, the longest of a worker. "On the volume" is when a worker that restarts could load
    the version; `broadcast` writes it there during the next step. No prompts are in flight; running ones would end
    first.
    """
    sides: dict[str, Side] = {}
    for size in args.sizes:
        for publication in measure(size, args.rounds):
            name = f"{size}, {publication['transport']}"
            sides.setdefault(name, Side(name, lambda _: {})).rounds.append(publication)
        harness.say(f"{size}: done")
    return list(sides.values())


def tables(_args: Args, sides: Sequence[Side]) -> list[Table]:
    """Return medians and spreads of each size and transport."""
    columns: harness.Columns = {
        "model": lambda side: side.rounds[0]["size"],
        "MB": lambda side: f"{side.rounds[0]['megabytes']:.0f}",
        "transport": lambda side: side.rounds[0]["transport"],
        "total s": lambda side: side.spread("total"),
        "pause s": lambda side: side.spread("pause"),
        "on the volume s": lambda side: side.spread("volume"),
    }
    title = f"{WORKERS} workers, one trainer rank, {cores()} cores for all; seconds: median (least to most)"
    return [harness.table(title, sides, columns)]


PUBLISHING = Benchmark(
    measure=measure_all,
    tables=tables,
    rounds=3,
    quick={"sizes": ["tiny"]},
    options={"sizes": Option(list(models.SIZES), "of the models", models.SIZES)},
)


if __name__ == "__main__":
    # The program of the job group's trainer.
    rounds, file = sys.argv[1:]
    harness.end_in_order()
    atomic_write(Path(file), json.dumps(publish_rounds(int(rounds))))
    # The library threads of a broadcast group would delay a normal exit.
    os._exit(0)
