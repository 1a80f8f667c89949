"""Measure what a death costs: a job group runs on this machine, and one node after the other is killed.

    python -m benchmarks.recovery [--rounds 2] [--quick] [--json FILE]

The tiny model trains with the replay buffer on and a checkpoint every ``--checkpoint-every`` steps. All processes of a
node (or its engine alone) get SIGKILL at once. Then the local runner restarts all nodes of the task, as SkyPilot's
controller would on the same machines; an engine alone is restarted by its node, while the other nodes go on. Each round
is a job group in which every kind of death happens once.

Seconds lost run from the kill until ``--steps`` further steps are done, less the time of as many undisturbed steps.
Groups trained again belong to the steps since the checkpoint from which a new trainer resumes. Groups left out are
missing in the steps after the death. Groups gone from replay are missing in the replay buffer then. "Back" is when the
node answers /health again. On Kubernetes the start of a pod comes on top.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.common import harness, models
from benchmarks.common.harness import spread
from benchmarks.common.job import JOB_GROUP, Job, Steps, kill, running
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


@dataclass
class Death:
    """A kind of death, and the costs of each round."""

    name: str
    node: str
    port: int
    """The port at which the node answers /health."""
    only: str = ""
    """A part of the command lines of the processes to kill; by default all processes of the node are killed."""
    seconds_lost: list[float] = field(default_factory=list)
    back_seconds: list[float] = field(default_factory=list)
    trained_again: list[float] = field(default_factory=list)
    left_out: list[float] = field(default_factory=list)
    replay_gone: list[float] = field(default_factory=list)


def kinds() -> list[Death]:
    """Return all kinds of death, in the order in which they happen."""
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


def kill_and_wait(job: Job, death: Death, steps: int, checkpoint_every: int) -> str:
    """Kill a node after undisturbed steps and wait until further steps are done; return what to print of it."""
    healthy = job.steps()[-1]["step"] + steps + 1
    # Half-way between two checkpoints, a death costs what deaths at random times cost on average.
    healthy += (checkpoint_every // 2 - healthy) % checkpoint_every
    before = wait_for_step(job, healthy)
    usual = step_seconds([step for step in before if step["step"] >= healthy - steps])
    size = replay_size(job)
    killed, began = time.time(), time.monotonic()
    kill(job, death.node, death.only)
    done = before[-1]["step"]
    job.wait(lambda: job.get(death.node, death.port, "/health"), RECOVERY_SECONDS)
    death.back_seconds.append(time.monotonic() - began)
    # A trainer that resumes cuts metrics.jsonl back to its checkpoint, so later steps are new.
    new = [step for step in wait_for_step(job, done + steps) if step["time"] > killed]
    batch = int(SETTINGS["BATCH_SIZE"])
    death.seconds_lost.append(lost(killed, [step for step in new if step["step"] > done], usual))
    death.trained_again.append(batch * max(0, done + 1 - new[0]["step"]))
    death.left_out.append(sum(batch - step["groups"] for step in new))
    death.replay_gone.append(max(0, size - replay_size(job)))
    return f"{death.seconds_lost[-1]:.1f} s lost"


def show(deaths: Sequence[Death], steps: int, checkpoint_every: int) -> Table:
    """Return medians and spreads as a table."""
    rows = []
    for death in deaths:
        groups = [spread(values, 0) for values in (death.trained_again, death.left_out, death.replay_gone)]
        rows.append((death.name, spread(death.seconds_lost, 1), spread(death.back_seconds, 1), *groups))
    return harness.table(
        f"steps of {SETTINGS['BATCH_SIZE']} groups, a checkpoint every {checkpoint_every} steps; seconds lost over "
        f"{steps} steps, groups; median (least to most)",
        ("killed", "seconds lost", "back after s", "trained again", "left out", "gone from replay"),
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    parser = harness.CommandLine("recovery", rounds=2, quick="one round")
    parser.add_argument("--steps", type=int, default=8, help="steps before and after a death that are timed")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    given = parser.parse(arguments)
    deaths = kinds()
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            model = models.directory("tiny", directory / "model")
            settings = SETTINGS | {"MODEL_NAME": str(model), "CHECKPOINT_EVERY": str(given.checkpoint_every)}
            with running(directory, JOB_GROUP, settings, {"ppo-trainer": 1, "rollout-server": 2}) as job:
                wait_for_step(job, 1, START_SECONDS)
                harness.in_turn(deaths, 1, lambda death: kill_and_wait(job, death, given.steps, given.checkpoint_every))
    harness.finish(given, [show(deaths, given.steps, given.checkpoint_every)], deaths)


if __name__ == "__main__":
    main()
