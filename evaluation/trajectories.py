"""``grpo trajectories``: episodes of policies, with every step kept.

Policies are named as the evaluation head names them, and environments as an environment server does. Each policy plays
the same seeds; in a game, policies play each other in every order of seats. A killed run continues when the same
command is repeated. docs/evaluation_head.md describes the columns of the files.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from evaluation.episodes import OpenArena, open_arena, open_policies, play_seeds
from evaluation.identity import check_identity, locked_file, sha256_of
from evaluation.shards import Rows, Shard, lineups_of, read_summary, shards_of
from services.core import logs
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.files import write_json
from services.core.settings import Settings
from services.core.tasks import run_until_signal
from services.evaluation_head.policy import Policy
from services.http.client import RequestRefusedError
from services.http.problems import ProblemError
from services.protocol.evaluation import EnvironmentInfo

MANIFEST = "manifest.json"
LOCK = ".lock"
RESULTS = "results.json"

METHOD = "Bradley-Terry on the Elo scale, mean 1500"
PRIOR_WINS = 0.5
"""Wins that each side of every pair is given beforehand, so that a policy that always wins has a finite rating."""
ITERATIONS = 1000


@dataclass(frozen=True)
class Options:
    """The options of a run."""

    environment: str | None
    server: str | None
    policies: str
    episodes: int
    seed: int
    shard_episodes: int
    at_once: int
    save_to: Path


async def generate(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Play the shards that ``options.save_to`` lacks and return the results; ``say`` gets a line for each shard.

    Raises:
        ConfigurationError: an option is wrong, or the directory holds another run.
        DependencyLostError: the environment server does not answer.
        ProblemError: a policy gives no actions.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(locked_file(options.save_to / LOCK, "--save-to"))
        token = Settings.load().token
        place = await stack.enter_async_context(open_arena(options.environment, options.server, token))
        policies, targets = await open_policies(
            stack, options.policies, place.info, options.at_once, head_timeout_ms=0.0
        )
        _check_manifest(options, place.info, targets, policies)
        lineups = lineups_of(list(policies), place.info.seats)
        shards = list(
            shards_of(lineups, episodes=options.episodes, seed=options.seed, shard_episodes=options.shard_episodes)
        )
        for shard in shards:
            if not (options.save_to / shard.name).exists():
                await _play(shard, len(shards), options, place, policies, say)
    results = results_of(options.save_to, shards, place.info.seats)
    write_json(options.save_to / RESULTS, results)
    return results


def _check_manifest(
    options: Options, info: EnvironmentInfo, targets: Mapping[str, str], policies: Mapping[str, Policy]
) -> None:
    """Write everything that the episodes depend on to the manifest, or compare it with the manifest that is there."""
    manifest: dict[str, Any] = {"episodes": options.episodes, "seed": options.seed}
    manifest |= {"shard_episodes": options.shard_episodes}
    manifest |= {f"environment.{name}": value for name, value in info.model_dump(mode="json").items()}
    manifest["policies"] = list(policies)
    for name, policy in policies.items():
        manifest[f"policies.{name}"] = targets[name]
        stats = policy.stats()
        if "file" in stats:
            manifest[f"policies.{name}.version"] = stats["version"]
            manifest[f"policies.{name}.sha256"] = sha256_of(Path(stats["file"]))
    path, is_used = options.save_to / MANIFEST, any(options.save_to.glob("shard-*.parquet"))
    if is_used and not path.exists():
        raise ConfigurationError(f"{options.save_to} has shards without {MANIFEST}; give another --save-to")
    check_identity(
        path,
        manifest,
        is_used=is_used,
        results="episodes of other settings",
        option="--save-to",
    )


async def _play(
    shard: Shard,
    count: int,
    options: Options,
    place: OpenArena,
    policies: Mapping[str, Policy],
    say: Callable[[str], None],
) -> None:
    """Play a shard, one of ``count``, and write its file.

    Raises:
        ConfigurationError: no episode ended.
    """
    started = time.monotonic()
    rows = Rows(place.info, shard, policies)
    left_out = await play_seeds(place, shard.seeds, rows, at_once=options.at_once)
    ended = len(shard.seeds) - len(left_out)
    if not ended:
        raise ConfigurationError(f"no episode of {shard.name} comes to its end: {next(iter(left_out.values()))}")
    steps = rows.write(options.save_to / shard.name, left_out)
    lost = f", {len(left_out)} left out" if left_out else ""
    say(
        f"{shard.name} of {count}: {' against '.join(shard.lineup)}, {ended} episodes{lost}, "
        f"{steps} steps, {steps / (time.monotonic() - started):.0f} steps/s"
    )


def results_of(directory: Path, shards: Sequence[Shard], seats: int) -> dict[str, Any]:
    """Return the results of all shards: the method, a row a policy, and the episodes that were left out.

    Raises:
        ConfigurationError: a file is not a shard.
    """
    games: dict[tuple[str, ...], list[list[float]]] = {shard.lineup: [] for shard in shards}
    steps: Counter[tuple[str, ...]] = Counter()
    left_out: dict[str, str] = {}
    for shard in shards:
        try:
            summary = read_summary(directory / shard.name)
        except ValueError as error:
            raise ConfigurationError(f"{error}; remove it, and the same command plays its episodes again") from error
        games[shard.lineup] += summary["returns"]
        steps[shard.lineup] += summary["steps"]
        left_out |= summary["left_out"]
    return {
        "method": "mean return" if seats == 1 else METHOD,
        "episodes": sum(map(len, games.values())),
        "steps": steps.total(),
        "policies": mean_returns(games, steps) if seats == 1 else ratings(games),
        "left_out": left_out,
    }


Games = Mapping[tuple[str, ...], Sequence[Sequence[float]]]
"""By lineup, the return of each seat in each episode."""


def mean_returns(games: Games, steps: Mapping[tuple[str, ...], int]) -> list[dict[str, Any]]:
    """Return a row a policy: episodes, steps, mean return and its standard error; for environments of one seat."""
    rows = []
    for lineup, returns in games.items():
        values = np.asarray(returns, float).reshape(-1)
        error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
        mean = float(values.mean()) if len(values) else None
        rows.append({"policy": lineup[0], "episodes": len(values), "steps": steps[lineup]})
        rows[-1] |= {"mean_return": mean, "standard_error": error}
    return rows


def ratings(games: Games) -> list[dict[str, Any]]:
    """Return a row a policy, the best first: rating, its standard error, games, wins, draws, losses, mean return.

    In each game every pair of seats is compared: the higher return wins, and equal returns share the win. The ratings
    are the maximum of the Bradley-Terry likelihood with PRIOR_WINS, found by Hunter's minorization-maximization
    (2004, equation 3); the errors are those of its Fisher information.
    """
    names = sorted({name for lineup in games for name in lineup})
    wins = np.zeros((len(names), len(names)))
    records: dict[str, list[float]] = {name: [] for name in names}
    results: dict[str, list[float]] = {name: [] for name in names}
    for lineup, episodes in games.items():
        for returns in episodes:
            for name, value in zip(lineup, returns, strict=True):
                records[name].append(value)
            for a, b in itertools.permutations(range(len(lineup)), 2):
                score = 0.5 + 0.5 * float(np.sign(returns[a] - returns[b]))
                results[lineup[a]].append(score)
                if lineup[a] != lineup[b]:
                    wins[names.index(lineup[a]), names.index(lineup[b])] += score
    elo, errors = bradley_terry(wins)
    rows = [
        {
            "policy": name,
            "rating": float(elo[place]),
            "standard_error": float(errors[place]),
            "games": len(results[name]),
            "wins": results[name].count(1.0),
            "draws": results[name].count(0.5),
            "losses": results[name].count(0.0),
            "mean_return": float(np.mean(records[name])) if records[name] else None,
        }
        for place, name in enumerate(names)
    ]
    return sorted(rows, key=lambda row: -row["rating"])


def bradley_terry(wins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ratings and their standard errors [players] from ``wins`` [players, players], of rows over columns."""
    wins = wins + PRIOR_WINS * ((wins + wins.T) > 0)
    games = wins + wins.T
    strength = np.ones(len(wins))
    for _ in range(ITERATIONS):
        expected = games / (strength[:, None] + strength[None, :])
        strength = np.where(expected.sum(1) > 0, wins.sum(1) / np.maximum(expected.sum(1), 1e-300), 1.0)
        strength /= np.exp(np.log(strength).mean())
    information = games * np.outer(strength, strength) / (strength[:, None] + strength[None, :]) ** 2
    laplacian = np.diag(information.sum(1)) - information
    scale = 400 / np.log(10)
    return 1500 + scale * np.log(strength), scale * np.sqrt(np.diag(np.linalg.pinv(laplacian)))


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
