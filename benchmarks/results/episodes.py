"""Runs of the demos with a tool agent and with environments, and of Nim against itself."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from benchmarks.harness import ROOT
from benchmarks.job import Job
from benchmarks.results import job_runs
from benchmarks.results.job_runs import AFTER, Figures
from benchmarks.results.runs import Results
from local_runner.spec import env_file
from services.environment_server.games import draw_heaps, is_optimal
from services.protocol.rewards import GREEDY

AGENT_SETTINGS = env_file(ROOT / "examples/demo-agent.env")
ENVIRONMENT_SETTINGS = env_file(ROOT / "examples/demo-environment.env")
WITHOUT_TOKENS = 64
"""Longest answer without the tool: room to reason before it."""
LEGAL, OPTIMAL = "environment_legal_moves", "environment_optimal_moves"
RANDOM_GAMES = 5_000


def without_tool(job: Job) -> Figures:
    """Return the trained model's greedy accuracy on the held-out questions, each answered without the tool."""
    with TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "scripts.grpo", "evaluate", "--model", str(job.run_dir / "model")]
        command += ["--workflow", "single-turn", "--limit", AGENT_SETTINGS["EVAL_PROMPTS"], "--output", directory]
        command += ["--env-file", "examples/demo-agent.env", "--max-new-tokens", str(WITHOUT_TOKENS)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{done.stdout[-3000:]}\nerror: the evaluation ended with {done.returncode}")
        [results] = Path(directory).rglob("results.json")
        return {f"without_tool{AFTER}": orjson.loads(results.read_bytes())["metrics"][GREEDY]["value"]}


train_agent = partial(
    job_runs.train,
    job_group=ROOT / "jobgroups/agent.yaml",
    columns=("tool_calls_mean", "tool_calls_parsed"),
    more=without_tool,
)
"""Run the agent's job group, and evaluate the trained model without agent and tool, too."""

train_environment = partial(
    job_runs.train,
    job_group=ROOT / "jobgroups/environment.yaml",
    nodes={"environment-server": 1},
    columns=(LEGAL, OPTIMAL),
    # Only the last step has greedy games on held-out deals.
    more=lambda job: job_runs.of_last_step(job, [f"eval_{LEGAL}", f"eval_{OPTIMAL}"]),
)
"""Run the environment's job group."""


@cache
def random_play() -> float:
    """Return the share of optimal moves of random legal ones, as the figure is taken: by seat and game, over games."""
    rng, shares = random.Random(0), []
    for seed in range(RANDOM_GAMES):
        heaps, seat = draw_heaps(seed), 0
        optimal: list[list[bool]] = [[], []]
        while any(heaps):
            heap, stones = rng.choice([(i, n) for i, size in enumerate(heaps) for n in range(1, size + 1)])
            if (is_right := is_optimal(heaps, heap, stones)) is not None:
                optimal[seat].append(is_right)
            heaps[heap] -= stones
            seat = 1 - seat
        shares += [statistics.fmean(moves) for moves in optimal if moves]
    return statistics.fmean(shares)


def below_random(results: Results) -> str:
    """Return in how many runs of Nim the last step's share of optimal moves is below that of random legal moves."""
    last = [run.figures[OPTIMAL + AFTER] for run in results if OPTIMAL + AFTER in run.figures]
    return f"{sum(share < random_play() for share in last)} of {len(last)}"
