"""Measure how long publishing weights takes, and for how long it stops generation, by transport and model size.

    python -m benchmarks.publishing [--sizes tiny 135m 0.5b] [--rounds 3] [--quick] [--json FILE]

The trainer's own publishers, on one rank, publish to real rollout nodes (router, embedded engines); every round
publishes once by each transport. The total is the time of ``Publisher.publish``, for which training waits. The pause is
the trainer's ``pause_seconds``, the longest of a worker. "On the volume" is when a worker that restarts could load the
version; ``broadcast`` writes it there during the next step. No prompts are in flight; running prompts would end first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.common import harness, models
from benchmarks.common.harness import spread
from benchmarks.common.job import running, write_job_group
from services.core.files import atomic_write
from services.core.machine import cores
from services.weights.policy_store import PolicyStore
from trainer.config import TrainerSettings, Transport
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks
from trainer.publishing.publisher import Publisher, VersionWriter
from trainer.service_thread import ServiceThread

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
            chosen = settings.model_copy(update={"publish_transport": transport})
            publishers[transport] = Publisher(chosen, thread, VersionWriter(chosen, policy, ranks))
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
        found = directory / "publications.json"
        command = f"exec python -m benchmarks.publishing --rounds {rounds} --trainer {found}"
        path = write_job_group(
            directory, "jobgroup.yaml", {"ppo-trainer": command}, only=["rollout-server", "ppo-trainer"]
        )
        with running(directory, path, settings, {"rollout-server": WORKERS, "ppo-trainer": 1}) as job:
            job.wait(found.exists, CASE_SECONDS)
        publications = [{"size": size, **publication} for publication in json.loads(found.read_text())]
    return sorted(publications, key=itemgetter("transport"))


def show(measured: Sequence[dict[str, Any]]) -> Table:
    """Return medians and spreads as a table."""
    rows = []
    for (size, transport), group in itertools.groupby(measured, key=itemgetter("size", "transport")):
        publications = list(group)
        times = [spread([one[name] for one in publications]) for name in ("total", "pause", "volume")]
        rows.append((size, f"{publications[0]['megabytes']:.0f}", transport, *times))
    return harness.table(
        f"{WORKERS} workers, one trainer rank, {cores()} cores for all; seconds: median (least to most)",
        ("model", "MB", "transport", "total s", "pause s", "on the volume s"),
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    parser = harness.CommandLine("publishing", rounds=3, quick="the tiny model, one round")
    parser.add_argument("--sizes", nargs="+", choices=models.SIZES, default=list(models.SIZES))
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    given = parser.parse(arguments)
    if given.trainer:
        atomic_write(given.trainer, json.dumps(publish_rounds(given.rounds)))
        # The library threads of a broadcast group would delay a normal exit.
        os._exit(0)
    measured = []
    for size in ["tiny"] if given.quick else given.sizes:
        measured += measure(size, given.rounds)
        harness.say(f"{size}: done")
    harness.finish(given, [show(measured)], measured)


if __name__ == "__main__":
    main()
