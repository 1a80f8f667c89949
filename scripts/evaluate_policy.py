"""``grpo evaluate-policy``: the returns of a policy in an environment.

Environment servers play one episode for each seed with the actions of a policy that this command loads (``--policies``)
or that a running head serves (``--eval-head-url``). A server that dies is started again and loses only its open
episodes, which are played again. A killed command continues when it is repeated; see docs/evaluation_head.md.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from evaluation.policy import RESULTS, Options, evaluate
from services.core import logs
from services.core.tasks import run_until_signal

SaveTo = Annotated[Path, Option(help="Directory of episodes, results and logs. Resumes what is there.")]
Url = Annotated[str | None, Option("--eval-head-url", help="A head that runs, such as http://127.0.0.1:8080.")]
Policies = Annotated[str | None, Option(help="Policies to load, as HEAD_POLICIES: name=target, with commas between.")]
Policy = Annotated[str | None, Option(help="The policy that plays; default the first.")]
Environment = Annotated[str, Option(help="As ENVIRONMENT of an environment server.")]
Episodes = Annotated[int, Option(min=1, help="Episodes to play.")]
Workers = Annotated[
    int, Option(min=0, max=1024, help="Environment servers to start; 0: play in this process, the fastest way.")
]
AtOnce = Annotated[
    int, Option(min=1, max=1024, help="Episodes that a worker plays at a time, with one request a step.")
]
Seed = Annotated[int, Option(min=0, max=2**31 - 1, help="Seed of the first episode; the next has the next seed.")]


def main(
    save_to: SaveTo,
    eval_head_url: Url = None,
    policies: Policies = None,
    policy: Policy = None,
    environment: Environment = "CartPole-v1",
    episodes: Episodes = 100,
    workers: Workers = 4,
    episodes_at_once: AtOnce = 1,
    seed: Seed = 0,
) -> None:
    """Play episodes of a policy and write returns, their mean and its interval to results.json."""
    logs.configure("evaluate_policy", "warning")
    options = Options(environment, episodes, workers, seed, save_to, eval_head_url, policies, policy, episodes_at_once)

    async def work() -> None:
        _show(await evaluate(options, lambda line: print(line, file=sys.stderr, flush=True)), save_to)

    stopped = f"evaluate-policy: stopped by {{}}; the same command continues from {save_to}"
    raise typer.Exit(asyncio.run(run_until_signal(work(), stopped)))


def _show(results: dict[str, Any], save_to: Path) -> None:
    table = Table(title=f"{results['policy']} in {results['environment']}")
    for place, column in enumerate(("worker", "episodes", "steps", "playing s", "restarts")):
        table.add_column(column, justify="right" if place else "left")
    for worker in results["workers"]:
        numbers = (worker["episodes"], worker["steps"], f"{worker['playing_seconds']:.1f}", worker["restarts"])
        table.add_row(Text(worker["name"]), *map(str, numbers))
    Console().print(table)
    for worker in results["workers"]:
        for death in worker["deaths"]:
            print(death)
    for seed, reason in list(results["left_out"].items())[:5]:
        print(f"the episode of seed {seed} is left out: {reason}")
    if len(versions := results["policy_versions"]) > 1:
        print(f"the episodes were played by versions {versions} of the policy")
    mean = results["mean_return"]
    print(
        f"mean return {mean['value']:.2f} ({mean['low']:.2f} to {mean['high']:.2f}) over {len(results['episodes'])} "
        f"episodes in {results['seconds']:.1f} s; results in {save_to / RESULTS}"
    )
