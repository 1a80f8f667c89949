"""Measures what a death costs: a job group on this machine of which one node after the other is killed.

    python -m benchmarks.recovery [--rounds 2] [--quick] [--json FILE]

The tiny model trains with the replay buffer on and a checkpoint every ``--checkpoint-every`` steps; all processes of a
node (or its engine alone) get SIGKILL at once, and the local runner starts its task anew as SkyPilot's controller would
on the same machines: all of the task's nodes. An engine alone is started anew by its node, while the others go on.
Seconds lost are those from the kill until ``--steps`` further steps are done, less what these take undisturbed. Groups
trained again are those of steps done since the checkpoint that a new trainer resumes from; groups left out are missing
in the steps after the death; replay groups gone are missing in the replay buffer then. "Back" is when the node answers
/health again. On Kubernetes the start of a pod comes on top.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.common import models
from benchmarks.common.ending import end_in_order
from benchmarks.common.figures import spread
from benchmarks.common.job import ROOT
from local_runner.directory import read_nodes
from local_runner.processes import MARK
from services.core import endpoints
from services.core.endpoints import Task

RUN_ID = "recovery"
START_SECONDS = 300.0
RECOVERY_SECONDS = 180.0
END_SECONDS = 60.0
POLL_SECONDS = 0.05

ENGINE = "rollout_server.embedded"
"""In the command line of an engine."""

SETTINGS = {
    "DATASET": "arithmetic",
    "ARITHMETIC_TEMPLATE": "{a}{op}{b}=",
    "PROMPT_STYLE": "plain",
    "REWARD_FN": "exact_match",
    "NUM_EPOCHS": "1000",
    "BATCH_SIZE": "8",
    "GROUP_SIZE": "8",
    "MAX_NEW_TOKENS": "4",
    "MAX_PROMPT_TOKENS": "64",
    "LEARNING_RATE": "1e-5",
    "EVAL_PROMPTS": "0",
}


@dataclass
class Death:
    """A kind of death, and what such deaths cost, by round."""

    name: str
    node: str
    port: int
    """Where the node tells its health."""
    only: str = ""
    """What is in the command lines of the processes that are killed."""
    seconds_lost: list[float] = field(default_factory=list)
    back_seconds: list[float] = field(default_factory=list)
    trained_again: list[float] = field(default_factory=list)
    left_out: list[float] = field(default_factory=list)
    replay_gone: list[float] = field(default_factory=list)

    def row(self) -> list[str]:
        """Its line of the table."""
        groups = (self.trained_again, self.left_out, self.replay_gone)
        return [self.name, spread(self.seconds_lost, 1), spread(self.back_seconds, 1), *(spread(g, 0) for g in groups)]


def kinds() -> list[Death]:
    """All kinds of death, in the order in which they are tried."""
    router, worker = f"{Task.ROLLOUT_SERVER}-0", f"{Task.ROLLOUT_SERVER}-1"
    return [
        Death("data-server", f"{Task.DATA_SERVER}-0", endpoints.DATA_PORT),
        Death("reward-server", f"{Task.REWARD_SERVER}-0", endpoints.REWARD_PORT),
        Death("replay-buffer", f"{Task.REPLAY_BUFFER}-0", endpoints.REPLAY_PORT),
        Death("one of two engines", worker, endpoints.ENGINE_PORT, only=ENGINE),
        Death("one of two rollout nodes", worker, endpoints.ENGINE_PORT),
        Death("the rollout node with the router", router, endpoints.ROUTER_PORT),
        Death("ppo-trainer", f"{Task.TRAINER}-0", endpoints.STATUS_PORT),
    ]


class Job:
    """A job group that runs in the background. A context manager, which ends it."""

    def __init__(self, shared_dir: Path, model: Path, checkpoint_every: int) -> None:
        self.run_dir = shared_dir / "runs" / RUN_ID
        command = [sys.executable, "-m", "scripts.run_local", "jobgroup.yaml", "--plain", "--run-id", RUN_ID]
        command += ["--shared-dir", str(shared_dir), "--num-nodes", "ppo-trainer=1", "--num-nodes", "rollout-server=2"]
        settings = SETTINGS | {"MODEL_NAME": str(model), "CHECKPOINT_EVERY": str(checkpoint_every)}
        for name, value in settings.items():
            command += ["--env", f"{name}={value}"]
        self._output = shared_dir / "runner.txt"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        self._http = httpx.Client(timeout=2, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    def __enter__(self) -> Job:
        """Nothing more: it was started when it was made."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all its processes."""
        self._http.close()
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            # Its watchdog ends the others.
            self._process.kill()
            self._process.wait()

    def steps(self) -> list[dict[str, Any]]:
        """The steps done, those of before the last death that are being done again left out."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [orjson.loads(line) for line in lines if line.endswith(b"\n")]

    def wait_for_step(self, step: int, seconds: float) -> None:
        """Waits until a step is done.

        Raises:
            SystemExit: the run has ended, or it took longer.
        """
        end = time.monotonic() + seconds
        while not (done := self.steps()) or done[-1]["step"] < step:
            if self._process.poll() is not None or time.monotonic() > end:
                why = "the run ended" if self._process.poll() is not None else f"not within {seconds:g} s"
                raise SystemExit(f"{self._output.read_text()[-3000:]}\nerror: step {step}: {why}")
            time.sleep(POLL_SECONDS)

    def kill(self, death: Death) -> None:
        """Kills the processes of a node and waits until they are gone."""
        killed = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            try:
                is_of_node = process.environ().get(MARK, "").endswith(f"/{death.node}")
                if is_of_node and death.only in " ".join(process.cmdline()):
                    process.kill()
                    killed.append(process)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        if not killed:
            raise SystemExit(f"error: there is no process of {death.name} to kill")
        psutil.wait_procs(killed, END_SECONDS)

    def is_healthy(self, node: str, port: int) -> bool:
        """Whether a node answers /health with 200."""
        try:
            return self._http.get(f"{self._url(node, port)}/health").status_code == 200
        except httpx.TransportError:
            return False

    def replay_size(self) -> int:
        """Groups that the replay buffer has."""
        url = self._url(f"{Task.REPLAY_BUFFER}-0", endpoints.REPLAY_PORT)
        size: int = self._http.get(f"{url}/stats").json()["size"]
        return size

    def _url(self, node: str, port: int) -> str:
        nodes = read_nodes(self.run_dir)
        assert nodes is not None, "the runner writes this before it starts a node"
        return f"http://{nodes.endpoints[f'{node}:{port}']}"


def step_seconds(steps: Sequence[dict[str, Any]]) -> float:
    """The median time from the end of a step to the end of the next."""
    return statistics.median(float(b["time"]) - float(a["time"]) for a, b in itertools.pairwise(steps))


def lost(killed: float, after: Sequence[dict[str, Any]], usual: float) -> float:
    """Seconds from the kill to the end of the last of some steps, less what they usually take; at least none."""
    return max(0.0, float(after[-1]["time"]) - killed - len(after) * usual)


def kill_and_wait(job: Job, death: Death, steps: int, checkpoint_every: int) -> None:
    """One death of a node, from undisturbed steps until it has been made up for."""
    healthy = job.steps()[-1]["step"] + steps + 1
    # In the middle between two checkpoints, which is what a death at any time costs on average.
    healthy += (checkpoint_every // 2 - healthy) % checkpoint_every
    job.wait_for_step(healthy, RECOVERY_SECONDS)
    before = job.steps()
    usual = step_seconds([step for step in before if step["step"] >= healthy - steps])
    size = job.replay_size()
    killed, began = time.time(), time.monotonic()
    job.kill(death)
    done = before[-1]["step"]
    while not job.is_healthy(death.node, death.port):
        if time.monotonic() - began > RECOVERY_SECONDS:
            raise SystemExit(f"error: {death.name} is not healthy {RECOVERY_SECONDS:g} s after its death")
        time.sleep(POLL_SECONDS)
    death.back_seconds.append(time.monotonic() - began)
    # A trainer cuts its record back to its checkpoint when it resumes: what comes then is new.
    job.wait_for_step(done + steps, RECOVERY_SECONDS)
    after = job.steps()
    new = [step for step in after if step["time"] > killed]
    again = max(0, done + 1 - new[0]["step"])
    death.seconds_lost.append(lost(killed, [step for step in new if step["step"] > done], usual))
    death.trained_again.append(again * int(SETTINGS["BATCH_SIZE"]))
    death.left_out.append(sum(int(SETTINGS["BATCH_SIZE"]) - step["groups"] for step in new))
    death.replay_gone.append(max(0, size - job.replay_size()))


def show(deaths: Sequence[Death], steps: int, checkpoint_every: int) -> Table:
    """Medians and spreads."""
    batch = SETTINGS["BATCH_SIZE"]
    table = Table(
        title=f"steps of {batch} groups, a checkpoint every {checkpoint_every} steps; seconds lost over {steps} steps, "
        "groups; median (least to most)"
    )
    names = ("killed", "seconds lost", "back after s", "trained again", "left out", "gone from replay")
    for name in names:
        table.add_column(name, justify="left" if name == "killed" else "right")
    for death in deaths:
        table.add_row(*death.row())
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery")
    parser.add_argument(
        "--rounds", type=int, default=2, help="job groups, in each of which every kind of death comes once"
    )
    parser.add_argument("--steps", type=int, default=8, help="steps before and after a death that are timed")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    given = parser.parse_args(arguments)
    end_in_order()
    deaths = kinds()
    for number in range(1 if given.quick else given.rounds):
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            model = models.directory("tiny", directory / "model")
            with Job(directory, model, given.checkpoint_every) as job:
                job.wait_for_step(1, START_SECONDS)
                for death in deaths:
                    kill_and_wait(job, death, given.steps, given.checkpoint_every)
                    told = f"round {number + 1}, {death.name}: {death.seconds_lost[-1]:.1f} s lost"
                    print(told, file=sys.stderr, flush=True)
    Console().print(show(deaths, given.steps, given.checkpoint_every))
    if given.json:
        given.json.write_text(json.dumps([asdict(death) for death in deaths], indent=2))


if __name__ == "__main__":
    main()
