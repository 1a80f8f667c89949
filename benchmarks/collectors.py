"""Measure an asynchronous job group with few and with many collectors.

    python -m benchmarks.collectors [--collectors 2 24] [--steps 40] [--rounds 2] [--json FILE]

The tiny model trains by ``jobgroups/async.yaml`` under the local runner, with one rollout node and one trainer node.
All collectors of a run start at once. A collector has started when it first asks the replay-buffer for places. Services
are asked for their counts of requests twice a second, which is part of the rates. After each run the prompts that the
data-server gave are compared with the groups that the replay-buffer got and with the files in which collectors keep
what they have in flight.
"""

from __future__ import annotations

import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import psutil
from rich.table import Table

from benchmarks.common import harness, models
from benchmarks.common.account import Account, account
from benchmarks.common.harness import ROOT, spread
from benchmarks.common.job import POLL_SECONDS, Job, running
from local_runner.processes import MARK
from services.core.endpoints import PORTS, Task
from services.core.machine import cores

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


@dataclass(frozen=True)
class Round:
    """The measurements of a run."""

    account: Account
    wait_seconds: float
    """Seconds of a step in which the trainer waits for groups, without the first step."""
    step_seconds: float
    """Median seconds from the end of a step to the end of the next."""
    staleness: float
    dropped: float
    """Groups that were too stale."""
    first_seconds: float
    """From the start of the run to the end of its first step."""
    start_seconds: list[float]
    """From each collector's start to its first request for places."""
    cpu_seconds: list[float]
    """Processor time of each collector once all have started."""
    prompt_seconds: float
    """Processor time of all collectors a prompt, once all have started."""
    megabytes: list[float]
    """Resident memory of each collector once all have started."""
    start_rates: dict[str, float]
    """Most requests a second at each service until the first step is done."""
    usual_rates: dict[str, float]
    """Requests a second at each service from then on."""


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
        """Note what there is to see now, twice a second at most."""
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


@dataclass
class Collectors:
    """A number of collectors, and the rounds with it."""

    count: int
    rounds: list[Round] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The number in words."""
        return f"{self.count} collectors"

    def measure(self, settings: Mapping[str, object]) -> str:
        """Run a round; return what to print of it."""
        nodes = {"rollout-server": 1, "ppo-trainer": 1, "collector": self.count}
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
            self.rounds.append(
                Round(
                    counted,
                    statistics.fmean(step["seconds_wait"] for step in steps[1:]),
                    statistics.median(b["time"] - a["time"] for a, b in itertools.pairwise(steps)),
                    statistics.fmean(step["staleness_mean"] for step in steps[1:]),
                    sum(step["groups_dropped_stale"] for step in steps),
                    steps[0]["time"] - began,
                    list(watch.started.values()),
                    watch.cpu_seconds,
                    watch.spent_seconds / counted.taken,
                    watch.megabytes,
                    watch.most_a_second(first_step),
                    watch.usual(first_step),
                )
            )
        last = self.rounds[-1]
        return f"{last.wait_seconds:.3f} s waited a step, {last.account.taken} prompts"

    def median(self, measurement: str) -> float:
        """Return the median of a measurement over the rounds."""
        return float(statistics.median(getattr(one, measurement) for one in self.rounds))

    def total(self, count: str) -> int:
        """Return the sum of a count of prompts over the rounds."""
        return sum(getattr(one.account, count) for one in self.rounds)


def show(sides: Sequence[Collectors]) -> list[Table]:
    """Return tables of prompts and waits, of what starting and running costs, and of requests at the services."""
    prompts = [
        (
            *(side.count, side.total("taken"), side.total("doubled"), side.total("left_out")),
            *(f"{side.median('wait_seconds'):.3f}", f"{side.median('step_seconds'):.2f}"),
            *(f"{side.median('staleness'):.2f}", f"{sum(one.dropped for one in side.rounds):.0f}"),
        )
        for side in sides
    ]
    columns = ("collectors", "taken", "doubled", "left out", "waits s a step", "step s", "staleness", "dropped")
    costs = [
        (
            side.count,
            f"{side.median('first_seconds'):.0f}",
            spread([seconds for one in side.rounds for seconds in one.start_seconds], 1),
            spread([seconds for one in side.rounds for seconds in one.cpu_seconds], 1),
            f"{1000 * side.median('prompt_seconds'):.0f}",
            spread([megabytes for one in side.rounds for megabytes in one.megabytes], 0),
        )
        for side in sides
    ]
    rates = [
        (
            side.count,
            *(f"{max(one.start_rates[task] for one in side.rounds):.0f}" for task in SERVICES),
            *(f"{statistics.median(one.usual_rates[task] for one in side.rounds):.0f}" for task in SERVICES),
        )
        for side in sides
    ]
    short = [task.value.partition("-")[0] for task in SERVICES]
    services = (*(f"{name} at start" for name in short), *(f"{name} later" for name in short))
    return [
        harness.table("prompts of all rounds, and the trainer's waiting", columns, prompts),
        harness.table(
            "a collector's start and cost",
            ("collectors", "first step s", "start s", "cpu s", "ms a prompt", "MB"),
            costs,
        ),
        harness.table("requests a second at each service", ("collectors", *services), rates),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    parser = harness.CommandLine("collectors", rounds=2, quick="one round of ten steps")
    parser.add_argument("--collectors", type=int, nargs="+", default=[2, 24], help="numbers of collectors")
    parser.add_argument("--steps", type=int, default=40, help="steps of a round")
    given = parser.parse(arguments)
    if given.quick:
        given.steps = 10
    sides = [Collectors(count) for count in given.collectors]
    with tempfile.TemporaryDirectory() as directory:
        model = models.directory("tiny", Path(directory) / "model")
        settings = {**SETTINGS, "MODEL_NAME": model, "MAX_STEPS": given.steps, "OMP_NUM_THREADS": 1}
        harness.in_turn(sides, given.rounds, lambda side: side.measure(settings))
    harness.finish(given, show(sides), {"settings": settings, "cores": cores(), "sides": sides})


if __name__ == "__main__":
    main()
