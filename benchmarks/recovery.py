"""The cost of a death: a job group runs on this machine, and one node after the other is killed."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks import harness, models
from benchmarks.harness import Benchmark, Given, Option, Side
from benchmarks.job import JOB_GROUP, Job, Steps, kill, running
from services.core import endpoints
from services.core.endpoints import Task

START_SECONDS = 300.0
RECOVERY_SECONDS = 180.0

ENGINE = "services.embedded_engine"
"""A part of the command line of an engine."""

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


class Death(NamedTuple):
    """A kind of death."""

    node: str
    port: int
    """The port at which the node answers /health."""
    only: str = ""
    """A part of the command lines of the processes to kill; by default all processes of the node are killed."""


ROUTER, WORKER = f"{Task.ROLLOUT_SERVER}-0", f"{Task.ROLLOUT_SERVER}-1"
DEATHS = {
    "data-server": Death(f"{Task.DATA_SERVER}-0", endpoints.DATA_PORT),
    "reward-server": Death(f"{Task.REWARD_SERVER}-0", endpoints.REWARD_PORT),
    "replay-buffer": Death(f"{Task.REPLAY_BUFFER}-0", endpoints.REPLAY_PORT),
    "one of two engines": Death(WORKER, endpoints.ENGINE_PORT, only=ENGINE),
    "one of two rollout nodes": Death(WORKER, endpoints.ENGINE_PORT),
    "the rollout node with the router": Death(ROUTER, endpoints.ROUTER_PORT),
    "ppo-trainer": Death(f"{Task.TRAINER}-0", endpoints.STATUS_PORT),
}
"""All kinds of death, in the order in which they happen."""


def replay_size(job: Job) -> int:
    """Return the number of groups in the replay buffer."""
    reply = job.get(f"{Task.REPLAY_BUFFER}-0", endpoints.REPLAY_PORT, "/stats")
    assert reply is not None, "the replay buffer is healthy before and after each death"
    return int(reply.json()["size"])


def wait_for_step(job: Job, step: int, seconds: float = RECOVERY_SECONDS) -> Steps:
    """Wait until a step is done, and return all steps."""
    job.wait(lambda: any(done["step"] >= step for done in job.steps()[-1:]), seconds)
    return job.steps()


def step_seconds(steps: Sequence[dict[str, Any]]) -> float:
    """Return the median time from the end of a step to the end of the next."""
    return statistics.median(float(b["time"]) - float(a["time"]) for a, b in itertools.pairwise(steps))


def lost(killed: float, after: Sequence[dict[str, Any]], usual: float) -> float:
    """Return the seconds from the kill to the end of the last of some steps, less their usual time; at least 0."""
    return max(0.0, float(after[-1]["time"]) - killed - len(after) * usual)


def kill_and_wait(job: Job, death: Death, given: Given, _round: int) -> dict[str, float]:
    """Kill a node after undisturbed steps and wait until further steps are done; return the costs."""
    steps, every = given.steps, given.checkpoint_every
    healthy = job.steps()[-1]["step"] + steps + 1
    # Half-way between two checkpoints, a death costs what deaths at random times cost on average.
    healthy += (every // 2 - healthy) % every
    before = wait_for_step(job, healthy)
    usual = step_seconds([step for step in before if step["step"] >= healthy - steps])
    size = replay_size(job)
    killed, began = time.time(), time.monotonic()
    kill(job, death.node, death.only)
    done = before[-1]["step"]
    job.wait(lambda: job.get(death.node, death.port, "/health"), RECOVERY_SECONDS)
    back = time.monotonic() - began
    # A trainer that resumes cuts metrics.jsonl back to its checkpoint, so later steps are new.
    new = [step for step in wait_for_step(job, done + steps) if step["time"] > killed]
    batch = int(SETTINGS["BATCH_SIZE"])
    return {
        "lost": lost(killed, [step for step in new if step["step"] > done], usual),
        "back": back,
        "trained_again": batch * max(0, done + 1 - new[0]["step"]),
        "left_out": sum(batch - step["groups"] for step in new),
        "replay_gone": max(0, size - replay_size(job)),
    }


def measure(given: Given) -> list[Side]:
    """Measure what a death costs: a job group runs on this machine, and one node after the other is killed.

    The tiny model trains with the replay buffer on and a checkpoint every --checkpoint-every steps. All processes of a
    node (or its engine alone) get SIGKILL at once. Then the local runner restarts all nodes of the task, as SkyPilot's
    controller would on the same machines; an engine alone is restarted by its node, while the other nodes continue.
    Each round is a job group in which every kind of death happens once.

    Seconds lost run from the kill until --steps further steps are done, less the time of as many undisturbed steps.
    Groups trained again belong to the steps since the checkpoint from which a new trainer resumes. Groups left out are
    missing in the steps after the death. Groups gone from replay are missing in the replay buffer then. "Back" is when
    the node answers /health again. On Kubernetes the start of a pod comes on top.
    """
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in DEATHS}
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            model = models.directory("tiny", directory / "model")
            settings = SETTINGS | {"MODEL_NAME": str(model), "CHECKPOINT_EVERY": str(given.checkpoint_every)}
            with running(directory, JOB_GROUP, settings, {"ppo-trainer": 1, "rollout-server": 2}) as job:
                wait_for_step(job, 1, START_SECONDS)
                for side in harness.in_turn(
                    [Side(name, partial(kill_and_wait, job, death, given)) for name, death in DEATHS.items()], 1
                ):
                    rounds[side.name] += side.rounds
    return [Side(name, lambda _: {}, measured) for name, measured in rounds.items()]


def tables(given: Given, sides: Sequence[Side]) -> list[Table]:
    """Return medians and spreads."""
    columns: harness.Columns = {
        "killed": harness.name_of,
        "seconds lost": lambda side: side.spread("lost", 1),
        "back after s": lambda side: side.spread("back", 1),
        "trained again": lambda side: side.spread("trained_again", 0),
        "left out": lambda side: side.spread("left_out", 0),
        "gone from replay": lambda side: side.spread("replay_gone", 0),
    }
    title = (
        f"steps of {SETTINGS['BATCH_SIZE']} groups, a checkpoint every {given.checkpoint_every} steps; seconds lost "
        f"over {given.steps} steps, groups; median (least to most)"
    )
    return [harness.table(title, sides, columns)]


RECOVERY = Benchmark(
    measure=measure,
    tables=tables,
    rounds=2,
    options={
        "steps": Option(8, "steps before and after a death that are timed"),
        "checkpoint-every": Option(10, "steps"),
    },
)
