"""An asynchronous job group with few and with many collectors."""

from __future__ import annotations

import itertools
import re
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import psutil
from rich.table import Table

from benchmarks import harness, models
from benchmarks.harness import ROOT, Benchmark, Given, Option, Side
from benchmarks.job import POLL_SECONDS, Job, running
from local_runner.processes import MARK
from services.core.endpoints import PORTS, Task
from services.protocol.prompts import Cursor

JOB_GROUP = ROOT / "jobgroups/async.yaml"
SERVICES = (Task.DATA_SERVER, Task.REWARD_SERVER, Task.REPLAY_BUFFER)
LOOK_SECONDS = 0.5
SETTINGS = {
    "DATASET": "arithmetic",
    # 7,000 prompts: a run ends within the first epoch.
    "ARITHMETIC_DIGITS": "2",
    "ARITHMETIC_TEMPLATE": "{a}{op}{b}=",
    "PROMPT_STYLE": "plain",
    "REWARD_FN": "exact_match",
    "NUM_EPOCHS": "1",
    "BATCH_SIZE": "8",
    "GROUP_SIZE": "8",
    "MAX_NEW_TOKENS": "4",
    "MAX_PROMPT_TOKENS": "64",
    "MAX_STALENESS": "2",
    "LEARNING_RATE": "1e-5",
    "REPLAY_GROUPS": "0",
    "EVAL_PROMPTS": "0",
    "CHECKPOINT_EVERY": "0",
}


NOWHERE = 2**31 - 1
"""A position beyond all prompts."""


@dataclass(frozen=True)
class Account:
    """The numbers of prompts of a run that has ended."""

    taken: int
    """Given to a collector by the data-server."""
    doubled: int
    """Taken by two collectors, or a group twice."""
    left_out: int
    """Taken, and neither a group in the replay-buffer nor among what a collector has in flight."""


def account(run_dir: Path) -> Account:
    """Count the prompts of a run by the files that its components left.

    Raises:
        SystemExit: the run has begun its second epoch, in which positions come again.
    """
    records = [orjson.loads(path.read_bytes()) for path in run_dir.glob("collectors/*.json")]
    held = [position for record in records for _, position in record["open"]]
    with closing(sqlite3.connect(run_dir / "replay" / "replay-buffer.sqlite")) as replay:
        queued = [int(group_id.rpartition("-")[2]) for (group_id,) in replay.execute("SELECT group_id FROM known")]
    [data_file] = run_dir.glob("data/*/data-server.sqlite")
    with closing(sqlite3.connect(data_file)) as data:
        last = _cursor(data, "SELECT cursor FROM cursors WHERE consumer = 'collectors/train'")
        if last.epoch:
            raise SystemExit("error: the run went on into a second epoch; give it fewer steps")
        for record in records:
            if record["request_id"] is not None:
                # The reply was lost with the collector, which would ask for it again.
                start = _cursor(data, "SELECT cursor FROM answered WHERE request_id = ?", record["request_id"])
                held += range(start.position, start.position + record["size"]) if start.position < last.position else []
    doubled = len(held) - len(set(held)) + len(queued) - len(set(queued))
    return Account(last.position, doubled, len(set(range(last.position)) - set(queued) - set(held)))


def _cursor(data: sqlite3.Connection, query: str, *values: str) -> Cursor:
    """Return the cursor that a query finds; the end of all prompts if it finds none."""
    found = data.execute(query, values).fetchone()
    return Cursor.model_validate_json(found[0]) if found else Cursor(position=NOWHERE)


class Watch:
    """Observations of a run while it lasts."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.started: dict[str, float] = {}
        """Seconds from a collector's start to its first request for places, by its name."""
        self.cpu_seconds: list[float] = []
        self.spent_seconds = 0.0
        """Processor time of all collectors since all have started."""
        self._started: list[psutil.Process] = []
        self.megabytes: list[float] = []
        self.counts: list[tuple[float, dict[str, float]]] = []
        """Monotonic times, and how many requests each service had answered by then."""

    def look(self) -> None:
        """Record the state of the run now, twice a second at most."""
        if self.counts and time.monotonic() - self.counts[-1][0] < LOOK_SECONDS:
            return
        answered = {task.value: requests_of(self._get(task, "/metrics")) for task in SERVICES}
        self.counts.append((time.monotonic(), answered))
        if self._started:
            with suppress(psutil.NoSuchProcess):
                self.spent_seconds = sum(map(_cpu_seconds, self._started)) - sum(self.cpu_seconds)
            return
        asked = orjson.loads(self._get(Task.REPLAY_BUFFER, "/stats") or b"{}").get("in_flight", {})
        processes = self._collectors()
        for name in asked.keys() - self.started.keys():
            self.started[name] = time.time() - processes[name].create_time()
        if len(self.started) == len(processes) > 0:
            self._started = list(processes.values())
            self.cpu_seconds = list(map(_cpu_seconds, self._started))
            self.megabytes = [process.memory_info().rss / 2**20 for process in self._started]

    def _get(self, task: Task, path: str) -> bytes:
        reply = self._job.get(f"{task.value}-0", PORTS[task][0], path)
        return reply.content if reply else b""

    def _collectors(self) -> dict[str, psutil.Process]:
        """Return the collectors' processes by the names of their consumers."""
        found = {}
        for process in psutil.Process(self._job.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                node = process.environ().get(MARK, "").rpartition("/")[2]
                if node.startswith("collector-"):
                    found[node] = process
        return found

    def most_a_second(self, until: float) -> dict[str, float]:
        """Return the highest rate of requests between two looks before a monotonic time, by service."""
        pairs = [(a, b) for a, b in itertools.pairwise(self.counts) if b[0] <= until]
        return {task.value: max((_rate(a, b, task) for a, b in pairs), default=0.0) for task in SERVICES}

    def usual(self, since: float) -> dict[str, float]:
        """Return the mean rate of requests after a monotonic time, by service."""
        later = [count for count in self.counts if count[0] >= since and all(count[1].values())]
        return {task.value: _rate(later[0], later[-1], task) if len(later) > 1 else 0.0 for task in SERVICES}


def _cpu_seconds(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return spent.user + spent.system


def _rate(before: tuple[float, dict[str, float]], after: tuple[float, dict[str, float]], task: Task) -> float:
    return (after[1][task] - before[1][task]) / (after[0] - before[0])


def requests_of(metrics: bytes) -> float:
    """Return how many requests a service has answered by its metrics, without those for the metrics."""
    lines = re.findall(rb'^http_requests_total\{(?![^}]*route="/metrics")[^}]*\} (\S+)$', metrics, re.MULTILINE)
    return sum(map(float, lines))


def run_round(count: int, settings: Mapping[str, object], _round: int) -> dict[str, Any]:
    """Run the job group with a number of collectors, and return the measurements.

    ``wait`` is the mean time of a step in which the trainer waits for groups, without the first step; ``first`` is from
    the start of the run to the end of its first step; ``start`` from each collector's start to its first request for
    places. ``cpu``, ``prompt`` (processor time of all collectors a prompt) and ``megabytes`` are measured once all
    collectors have started. ``most`` are the highest rates of requests at each service until the first step is done,
    ``usual`` the rates from then on.
    """
    nodes = {"rollout-server": 1, "ppo-trainer": 1, "collector": count}
    with tempfile.TemporaryDirectory() as directory, running(Path(directory), JOB_GROUP, settings, nodes) as job:
        watch, began, first_step = Watch(job), time.time(), 0.0
        while job.process.poll() is None:
            watch.look()
            if not first_step and job.steps():
                first_step = time.monotonic()
            time.sleep(POLL_SECONDS)
        # Raises if the run failed.
        job.wait(lambda: False)
        steps = job.steps()
        counted = account(job.run_dir)
    most, usual = watch.most_a_second(first_step), watch.usual(first_step)
    return {
        **vars(counted),
        "wait": statistics.fmean(step["seconds_wait"] for step in steps[1:]),
        "step": statistics.median(b["time"] - a["time"] for a, b in itertools.pairwise(steps)),
        "staleness": statistics.fmean(step["staleness_mean"] for step in steps[1:]),
        "dropped": sum(step["groups_dropped_stale"] for step in steps),
        "first": steps[0]["time"] - began,
        "start": list(watch.started.values()),
        "cpu": watch.cpu_seconds,
        "prompt": watch.spent_seconds / counted.taken,
        "megabytes": watch.megabytes,
        **{f"most, {task}": most[task] for task in SERVICES},
        **{f"usual, {task}": usual[task] for task in SERVICES},
    }


def measure(given: Given) -> list[Side]:
    """Measure an asynchronous job group with few and with many collectors.

    The tiny model trains by jobgroups/async.yaml under the local runner, with one rollout node and one trainer node.
    All collectors of a run start at once. A collector has started when it first asks the replay-buffer for places.
    Services are asked for their counts of requests twice a second, which is part of the rates. After each run the
    prompts that the data-server gave are compared with the groups that the replay-buffer got and with the files in
    which collectors keep their prompts in flight.
    """
    with tempfile.TemporaryDirectory() as directory:
        model = models.directory("tiny", Path(directory) / "model")
        settings = {**SETTINGS, "MODEL_NAME": model, "MAX_STEPS": given.steps, "OMP_NUM_THREADS": 1}
        sides = [Side(str(count), partial(run_round, count, settings)) for count in given.collectors]
        return harness.in_turn(sides, given.rounds)


def tables(_given: Given, sides: Sequence[Side]) -> list[Table]:
    """Return tables of prompts and waits, of what starting and running costs, and of requests at the services."""
    prompts: harness.Columns = {
        "collectors": harness.name_of,
        "taken": lambda side: sum(side.values("taken")),
        "doubled": lambda side: sum(side.values("doubled")),
        "left out": lambda side: sum(side.values("left_out")),
        "waits s a step": lambda side: f"{side.median('wait'):.3f}",
        "step s": lambda side: f"{side.median('step'):.2f}",
        "staleness": lambda side: f"{side.median('staleness'):.2f}",
        "dropped": lambda side: f"{sum(side.values('dropped')):.0f}",
    }
    costs: harness.Columns = {
        "collectors": harness.name_of,
        "first step s": lambda side: f"{side.median('first'):.0f}",
        "start s": lambda side: side.spread("start", 1),
        "cpu s": lambda side: side.spread("cpu", 1),
        "ms a prompt": lambda side: f"{1000 * side.median('prompt'):.0f}",
        "MB": lambda side: side.spread("megabytes", 0),
    }
    short = {task: task.value.partition("-")[0] for task in SERVICES}
    rates: dict[str, Any] = {"collectors": harness.name_of}
    for task in SERVICES:
        rates[f"{short[task]} at start"] = lambda side, task=task: f"{max(side.values(f'most, {task}')):.0f}"
    for task in SERVICES:
        rates[f"{short[task]} later"] = lambda side, task=task: f"{side.median(f'usual, {task}'):.0f}"
    return [
        harness.table("prompts of all rounds, and the trainer's waiting", sides, prompts),
        harness.table("a collector's start and cost", sides, costs),
        harness.table("requests a second at each service", sides, rates),
    ]


COLLECTORS = Benchmark(
    measure=measure,
    tables=tables,
    rounds=2,
    quick={"steps": 10},
    options={
        "collectors": Option([2, 24], "numbers of collectors"),
        "steps": Option(40, "steps of a round"),
    },
)
