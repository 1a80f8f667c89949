"""``grpo trajectories``: episodes of policies, with every step kept.

Policies are named as the evaluation head names them, and environments as an environment server does. Each policy plays
the same seeds; in a game, policies play each other in every order of seats. A killed run continues when the same
command is repeated. docs/evaluation_head.md describes the columns of the files.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from evaluation.trajectories import RESULTS, Options, generate
from services.core import logs
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.tasks import run_until_signal
from services.http.client import RequestRefusedError
from services.http.problems import ProblemError

Policies = Annotated[
    str,
    Option(
        help="name=target with commas between. A target is a .pt2 file, a directory of versions, a rollout server's "
        "URL, module:function, or head+http://host:8080#name for a policy of a head."
    ),
]
SaveTo = Annotated[Path, Option(help="Directory of the Parquet files. Resumes what is there.")]
Environment = Annotated[
    str | None, Option(help="As ENVIRONMENT of an environment server; default CartPole-v1, or the server's own.")
]
Server = Annotated[str | None, Option(help="URL of an environment server to play on; default in this process.")]
Episodes = Annotated[int, Option(min=1, help="Episodes of each policy; in a game, of each order of seats.")]
Seed = Annotated[int, Option(min=0, max=2**31 - 1, help="Seed of the first episode; the next has the next seed.")]
ShardEpisodes = Annotated[int, Option(min=1, help="Episodes in a file. A kill loses the unfinished file.")]
AtOnce = Annotated[int, Option(min=1, max=1024, help="Episodes played at once.")]


def main(
    policies: Policies,
    save_to: SaveTo,
    environment: Environment = None,
    server: Server = None,
    episodes: Episodes = 100,
    seed: Seed = 0,
    shard_episodes: ShardEpisodes = 256,
    at_once: AtOnce = 256,
) -> None:
    """Play episodes of policies in an environment and write every step to Parquet files."""
    logs.configure("generate_trajectories", "warning")
    options = Options(environment, server, policies, episodes, seed, shard_episodes, at_once, save_to)
    results: dict[str, Any] = {}

    async def work() -> None:
        results.update(await generate(options, lambda line: print(line, file=sys.stderr, flush=True)))

    stopped = f"trajectories: stopped by {{}}; the same command continues from {save_to}"
    try:
        code = asyncio.run(run_until_signal(work(), stopped))
    except RequestRefusedError as error:
        raise ConfigurationError(str(error)) from error
    except (DependencyLostError, ProblemError) as error:
        reason = error.detail if isinstance(error, ProblemError) else str(error)
        raise DependencyLostError(f"{reason}; the same command continues from what is done") from error
    if code:
        raise typer.Exit(code)
    Console().print(_table(results))
    for episode, reason in list(results["left_out"].items())[:5]:
        print(f"episode {episode} is left out: {reason}")
    print(f"{results['episodes']} episodes, {results['steps']} steps in {save_to}; results in {save_to / RESULTS}")


def _table(results: dict[str, Any]) -> Table:
    table = Table(title=results["method"])
    for place, column in enumerate(results["policies"][0]):
        table.add_column(column.replace("_", " "), justify="right" if place else "left")
    for row in results["policies"]:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    return table
