"""The demos with an agent and with an environment, each run with several seeds."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table

from benchmarks import harness
from benchmarks.harness import ROOT, Benchmark, Given, Option, Side
from benchmarks.job import Job, running
from evaluation.metrics import GREEDY
from local_runner import spec

AGENT_JOB_GROUP, ENVIRONMENT_JOB_GROUP = ROOT / "jobgroups/agent.yaml", ROOT / "jobgroups/environment.yaml"
AGENT_SETTINGS = spec.env_file(ROOT / "examples/demo-agent.env")
"""The settings of `make demo-agent`."""
ENVIRONMENT_SETTINGS = spec.env_file(ROOT / "examples/demo-environment.env")
"""The settings of `make demo-environment`."""
WITHOUT_TOKENS = 64
"""Longest answer without the tool: room to reason before it."""

Result = dict[str, Any]
"""The run of a seed; pairs are of the first and of the last step or evaluation."""


def measure(
    given: Given,
    job_group: Path,
    settings: Mapping[str, str],
    result_of: Callable[[Job], Result],
) -> list[Side]:
    """Train with each seed; a side is a seed's run."""
    changes = {"MAX_STEPS": str(given.steps)} if given.steps else {}

    def train(seed: int, _round: int) -> Result:
        with tempfile.TemporaryDirectory() as name:
            started = time.monotonic()
            with running(Path(name), job_group, {**settings, "SEED": str(seed)} | changes, {}) as job:
                job.wait(lambda: False)
            seconds = time.monotonic() - started
            return {"seconds": seconds, **result_of(job)}

    return harness.in_turn([Side(str(seed), partial(train, seed)) for seed in range(given.rounds)], 1)


def result_of(job: Job) -> Result:
    """Return the result of a run that has succeeded."""
    steps, summary = job.steps(), orjson.loads((job.run_dir / "summary.json").read_bytes())
    ends = (steps[0], steps[-1])
    return {
        "steps": len(steps),
        "reward": [step["reward_mean"] for step in ends],
        "turns": [step.get("turns_mean", 1.0) for step in ends],
        "calls": [parsed_calls(step) for step in ends],
        "accuracy": [summary["accuracy_before"], summary["accuracy_after"]],
    }


def parsed_calls(step: Mapping[str, Any]) -> float:
    """Return the parsed tool calls an episode of a step."""
    calls: float = step.get("tool_calls_mean", 0.0) * step.get("tool_calls_parsed", 0.0)
    return calls


def agents_result(job: Job) -> Result:
    """Return the result of a run of the agent, with the trained model's accuracy without the tool."""
    return result_of(job) | {"accuracy_without": without_tool(job.run_dir / "model", job.run_dir.parent)}


def without_tool(model: Path, directory: Path) -> float:
    """Return a model's greedy accuracy on the run's held-out questions, each answered by one completion."""
    output = directory / "without"
    command = [sys.executable, "-m", "scripts.grpo", "evaluate", "--model", str(model), "--output", str(output)]
    command += ["--workflow", "single-turn", "--limit", AGENT_SETTINGS["EVAL_PROMPTS"]]
    command += ["--env-file", "examples/demo-agent.env", "--max-new-tokens", str(WITHOUT_TOKENS)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout[-3000:]}\nerror: the evaluation ended with {done.returncode}")
    [results] = output.rglob("results.json")
    accuracy: float = orjson.loads(results.read_bytes())["metrics"][GREEDY]["value"]
    return accuracy


def change(name: str) -> Callable[[Side], str]:
    """Return a column of a measurement's first and last value."""
    return lambda side: "{:.2f} to {:.2f}".format(*side.values(name))


COSTS: harness.Columns = {
    "steps": lambda side: side.rounds[0]["steps"],
    "seconds": lambda side: f"{side.rounds[0]['seconds']:.0f}",
}


def agent_tables(_given: Given, sides: Sequence[Side]) -> list[Table]:
    """Return the table of all seeds."""
    columns: harness.Columns = {
        "seed": harness.name_of,
        "reward": change("reward"),
        "calls an episode": change("calls"),
        "accuracy with the tool": change("accuracy"),
        "without": lambda side: f"{side.rounds[0]['accuracy_without']:.2f}",
        **COSTS,
    }
    questions = f"{AGENT_SETTINGS['EVAL_PROMPTS']} held-out questions"
    return [harness.table(f"make demo-agent: first to last step; accuracy on {questions}", sides, columns)]


def environment_tables(_given: Given, sides: Sequence[Side]) -> list[Table]:
    """Return the table of all seeds."""
    columns: harness.Columns = {
        "seed": harness.name_of,
        "reward": change("reward"),
        "turns an episode": change("turns"),
        "won": change("accuracy"),
        **COSTS,
    }
    episodes = f"{ENVIRONMENT_SETTINGS['EVAL_PROMPTS']} held-out episodes"
    return [harness.table(f"make demo-environment: first to last step; {episodes}", sides, columns)]


STEPS = Option(0, "steps of a run; default: the demo's")


def measure_agent(given: Given) -> list[Side]:
    """Run `make demo-agent` with several seeds, and evaluate what each one learnt, with the agent's tool and without.

    Each round has a seed of its own. "With the tool" is the greedy accuracy on held-out questions of the run's own
    first and last evaluation, in which the agent plays. "Calls" are the parsed tool calls an episode in the first and
    in the last training step, at temperature 1; one is needed. "Without" is the trained model's greedy accuracy on
    held-out questions that it gets without agent and tool. The seconds are those of the whole run, from start to end.
    """
    return measure(given, AGENT_JOB_GROUP, AGENT_SETTINGS, agents_result)


AGENT = Benchmark(
    measure=measure_agent,
    tables=agent_tables,
    rounds=3,
    quick={"steps": 2},
    options={"steps": STEPS},
)


def measure_environment(given: Given) -> list[Side]:
    """Run `make demo-environment` with several seeds.

    Each round has a seed of its own. "Reward" is the mean return of the episodes of the first and of the last training
    step, at temperature 1. "Won" is the share of held-out episodes that the model wins by greedy answers in the run's
    own first and last evaluation; good guesses win all of them. "Turns" are the model's turns an episode in the first
    and in the last training step. The seconds are those of the whole run, from start to end.
    """
    return measure(given, ENVIRONMENT_JOB_GROUP, ENVIRONMENT_SETTINGS, result_of)


ENVIRONMENT = Benchmark(
    measure=measure_environment,
    tables=environment_tables,
    rounds=3,
    quick={"steps": 2},
    options={"steps": STEPS},
)
