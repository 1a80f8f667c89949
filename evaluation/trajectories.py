"""``grpo trajectories`` and ``grpo evaluate-policy``: episodes of policies, with every step kept.

Policies are named as the evaluation head names them, and environments as an environment server does. Each policy plays
the same seeds; in a game, policies play each other in every order of seats. A killed run continues when the same
command is repeated. docs/evaluation_head.md describes the columns of the files.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import pyarrow.parquet as pq
import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from evaluation.episodes import LocalArena, Rows, Shard, open_arena, open_policies, summary_of
from evaluation.store import check_identity, locked_file
from services.core import logs
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.files import write_json
from services.core.tasks import run_until_signal
from services.evaluation_head.policies import Policy
from services.http.problems import ProblemError
from services.protocol.accuracy import Z, standard_error
from services.protocol.evaluation import EnvironmentInfo

SEEDS = 2**31
MANIFEST = "manifest.json"
LOCK = ".lock"
RESULTS = "results.json"

METHOD = "Bradley-Terry on the Elo scale, mean 1500"
PRIOR_WINS = 0.5
"""Wins that each side of every pair is given beforehand, so that a policy that always wins has a finite rating."""
ITERATIONS = 1000


@dataclass(frozen=True)
class Options:
    """The options of a run; see ``main``."""

    environment: str | None
    policies: str
    episodes: int
    seed: int
    shard_episodes: int
    at_once: int
    save_to: Path
    is_single: bool = False
    """True for one policy alone, in an environment of one seat."""


def shards_of(lineups: Sequence[tuple[str, ...]], episodes: int, seed: int, shard_episodes: int) -> Iterator[Shard]:
    """Yield all shards in order, which depend on nothing else; episodes are numbered over all of them.

    Every lineup plays ``episodes`` episodes with the same seeds: ``seed``, ``seed`` + 1 and so on.
    """
    number = itertools.count()
    for place, lineup in enumerate(lineups):
        for start in range(0, episodes, shard_episodes):
            seeds = [(seed + index) % SEEDS for index in range(start, min(start + shard_episodes, episodes))]
            yield Shard(next(number), lineup, place * episodes + start, seeds)


def lineups_of(policies: Sequence[str], seats: int) -> list[tuple[str, ...]]:
    """Return who sits where: each policy alone, or with several seats each ordered choice of different policies.

    If there are fewer policies than seats, policies also sit in several seats.
    """
    if len(policies) >= seats:
        return list(itertools.permutations(policies, seats))
    return list(itertools.product(policies, repeat=seats))


async def generate(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Play the shards that ``options.save_to`` lacks, write the results there, and return them.

    ``say`` gets a line for each shard. The shards that are whole are kept.

    Raises:
        ConfigurationError: an option is wrong, policies and environment do not fit, or the directory holds another run.
        ProblemError: a policy gives no actions.
    """
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        stack.enter_context(locked_file(options.save_to / LOCK, "--save-to"))
        arena = await stack.enter_async_context(open_arena(options.environment))
        info = arena.info
        policies, targets = await open_policies(stack, options.policies, info, options.at_once)
        _check_manifest(options, info, targets, policies)
        if options.is_single and (len(policies) > 1 or info.seats > 1):
            problem = f"{info.id} has {info.seats} seats, and --policies {', '.join(policies)}"
            raise ConfigurationError(f"{problem}; needed is one of each: grpo trajectories compares several")
        lineups = lineups_of(list(policies), info.seats)
        shards = list(shards_of(lineups, options.episodes, options.seed, options.shard_episodes))
        for shard in shards:
            if not (options.save_to / shard.name).exists():
                say(f"of {len(shards)} files, {await _play(shard, options, arena, policies)}")
    if options.is_single:
        results = {"environment": info.id, **_results_alone(options, shards), "seconds": time.monotonic() - began}
    else:
        results = results_of(options.save_to, shards, info.seats)
    write_json(options.save_to / RESULTS, results)
    return results


def _check_manifest(
    options: Options, info: EnvironmentInfo, targets: Mapping[str, str], policies: Mapping[str, Policy]
) -> None:
    """Write everything that the episodes depend on to the manifest, or compare it with the manifest that is there."""
    manifest = {name: getattr(options, name) for name in ("episodes", "seed", "shard_episodes")}
    manifest |= {f"environment.{name}": value for name, value in info.model_dump(mode="json").items()}
    manifest["policies"] = list(policies)
    for name, policy in policies.items():
        manifest[f"policies.{name}"] = targets[name]
        stats = policy.stats()
        if "file" in stats:
            manifest[f"policies.{name}.version"] = stats["version"]
            manifest[f"policies.{name}.sha256"] = hashlib.sha256(Path(stats["file"]).read_bytes()).hexdigest()
    path, is_used = options.save_to / MANIFEST, any(options.save_to.glob("shard-*.parquet"))
    if is_used and not path.exists():
        raise ConfigurationError(f"{options.save_to} has shards without {MANIFEST}; give another --save-to")
    check_identity(path, manifest, is_used=is_used, option="--save-to")


async def _play(shard: Shard, options: Options, arena: LocalArena, policies: Mapping[str, Policy]) -> str:
    """Play a shard, write its file, and return a line about it.

    Raises:
        ConfigurationError: no episode ended.
    """
    started = time.monotonic()
    rows = Rows(arena.info, shard, policies)
    await rows.play(arena, options.at_once)
    ended, lost = len(shard.seeds) - len(rows.left_out), [*rows.left_out.values()]
    if not ended:
        raise ConfigurationError(f"no episode of {shard.name} comes to its end: {lost[0]}")
    steps = rows.write(options.save_to / shard.name)
    rate = f"{steps} steps, {steps / (time.monotonic() - started):.0f} steps/s"
    return f"{shard.name}: {' against '.join(shard.lineup)}, {ended} episodes, {len(lost)} left out, {rate}"


def results_of(directory: Path, shards: Sequence[Shard], seats: int) -> dict[str, Any]:
    """Return the results of all shards: the method, a row a policy, and the episodes that were left out."""
    games: dict[tuple[str, ...], list[list[float]]] = {shard.lineup: [] for shard in shards}
    steps: Counter[tuple[str, ...]] = Counter()
    left_out: dict[str, str] = {}
    for shard in shards:
        summary = summary_of(directory / shard.name)
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


def _results_alone(options: Options, shards: Sequence[Shard]) -> dict[str, Any]:
    """Return the results of all files of one policy."""
    episodes: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for shard in shards:
        path = options.save_to / shard.name
        summary, steps = summary_of(path), pq.read_table(path, columns=["seed", "version"]).to_pylist()
        versions = defaultdict(list)
        for step in steps:
            versions[step["seed"]].append(step["version"])
        episodes += [
            {"seed": seed, "episode_return": returns[0], "steps": len(of_seed), "versions": _in_order(of_seed)}
            for (seed, of_seed), returns in zip(versions.items(), summary["returns"], strict=True)
        ]
        left_out |= {str((options.seed + int(number)) % SEEDS): why for number, why in summary["left_out"].items()}
    returns = [episode["episode_return"] for episode in episodes]
    mean, error = statistics.fmean(returns), standard_error(returns)
    return {
        "policy": shards[0].lineup[0],
        "policy_versions": _in_order(version for episode in episodes for version in episode["versions"]),
        "mean_return": {"value": mean, "stderr": error, "low": mean - Z * error, "high": mean + Z * error},
        "steps": sum(episode["steps"] for episode in episodes),
        "left_out": left_out,
        "episodes": episodes,
    }


def _in_order(versions: Iterable[int | None]) -> list[int | None]:
    return sorted(set(versions), key=lambda version: -1 if version is None else version)


Games = Mapping[tuple[str, ...], Sequence[Sequence[float]]]
"""By lineup, the return of each seat in each episode."""


def mean_returns(games: Games, steps: Mapping[tuple[str, ...], int]) -> list[dict[str, Any]]:
    """Return a row a policy: episodes, steps, mean return and its standard error; for environments of one seat."""
    rows = []
    for lineup, returns in games.items():
        values = np.asarray(returns, float).reshape(-1)
        row: dict[str, Any] = {"policy": lineup[0], "episodes": len(values), "steps": steps[lineup]}
        row["mean_return"] = float(values.mean()) if len(values) else None
        row["standard_error"] = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
        rows.append(row)
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
    scores: dict[str, list[float]] = {name: [] for name in names}
    for lineup, episodes in games.items():
        seats = list(zip(lineup, np.asarray(episodes, float).reshape(-1, len(lineup)).T, strict=True))
        for name, returns in seats:
            records[name] += returns.tolist()
        for (a, returns), (b, others) in itertools.permutations(seats, 2):
            pair = 0.5 + 0.5 * np.sign(returns - others)
            scores[a] += pair.tolist()
            if a != b:
                wins[names.index(a), names.index(b)] += pair.sum()
    elo, errors = bradley_terry(wins)
    rows = []
    for name, rating, error in zip(names, elo.tolist(), errors.tolist(), strict=True):
        counts = Counter(scores[name])
        row = {"policy": name, "rating": rating, "standard_error": error, "games": counts.total()}
        row |= {"wins": counts[1.0], "draws": counts[0.5], "losses": counts[0.0]}
        rows.append(row | {"mean_return": float(np.mean(records[name])) if records[name] else None})
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


POLICIES = "name=target,...: a .pt2 file, a directory of versions, a rollout server's URL, or module:function."
ENVIRONMENT = "As ENVIRONMENT of an environment server; default CartPole-v1."
Seed = Annotated[int, Option(min=0, max=2**31 - 1, help="Seed of the first episode; the next has the next seed.")]
ShardEpisodes = Annotated[int, Option(min=1, help="Episodes in a file. A kill loses the unfinished file.")]
AtOnce = Annotated[int, Option(min=1, max=1024, help="Episodes played at once.")]


def main(
    policies: Annotated[str, Option(help=POLICIES)],
    save_to: Annotated[Path, Option(help="Directory of the Parquet files. Resumes what is there.")],
    environment: Annotated[str | None, Option(help=ENVIRONMENT)] = None,
    episodes: Annotated[int, Option(min=1, help="Episodes of each policy; in a game, of each order of seats.")] = 100,
    seed: Seed = 0,
    shard_episodes: ShardEpisodes = 256,
    at_once: AtOnce = 256,
) -> None:
    """Play episodes of policies in an environment and write every step to Parquet files."""
    _run(Options(environment, policies, episodes, seed, shard_episodes, at_once, save_to))


def evaluate_policy(
    save_to: Annotated[Path, Option(help="Directory of episodes and results. Resumes what is there.")],
    policies: Annotated[str, Option(help="The policy to load, name=target as in HEAD_POLICIES.")],
    environment: Annotated[str, Option(help="As ENVIRONMENT of an environment server.")] = "CartPole-v1",
    episodes: Annotated[int, Option(min=1, help="Episodes to play.")] = 100,
    at_once: AtOnce = 256,
    shard_episodes: ShardEpisodes = 256,
    seed: Seed = 0,
) -> None:
    """Play episodes of a policy and write returns, their mean and its interval to results.json."""
    _run(Options(environment, policies, episodes, seed, shard_episodes, at_once, save_to, is_single=True))


def _run(options: Options) -> NoReturn:
    """Generate what is missing, show the results, and exit.

    Raises:
        DependencyLostError: the work was interrupted; the message says how to continue.
    """
    command = "evaluate-policy" if options.is_single else "trajectories"
    logs.configure(command, "warning")

    async def resumable() -> None:
        try:
            results = await generate(options, lambda line: print(line, file=sys.stderr, flush=True))
            (_show_alone if options.is_single else _show)(results, options.save_to)
        except (DependencyLostError, ProblemError) as error:
            reason = error.detail if isinstance(error, ProblemError) else str(error)
            raise DependencyLostError(f"{reason}; the same command continues from what is done") from error

    stopped = f"{command}: stopped by {{}}; the same command continues from {options.save_to}"
    raise typer.Exit(asyncio.run(run_until_signal(resumable(), stopped)))


def _show(results: dict[str, Any], save_to: Path) -> None:
    table = Table(title=results["method"])
    for place, column in enumerate(results["policies"][0]):
        table.add_column(column.replace("_", " "), justify="right" if place else "left")
    for row in results["policies"]:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    for episode, reason in list(results["left_out"].items())[:5]:
        print(f"episode {episode} is left out: {reason}")
    print(f"{results['episodes']} episodes, {results['steps']} steps in {save_to}; results in {save_to / RESULTS}")


def _show_alone(results: dict[str, Any], save_to: Path) -> None:
    for seed, reason in list(results["left_out"].items())[:5]:
        print(f"the episode of seed {seed} is left out: {reason}")
    mean = results["mean_return"]
    what = f"{results['policy']} in {results['environment']}: mean return {mean['value']:.2f}"
    over = f"over {len(results['episodes'])} episodes in {results['seconds']:.1f} s"
    print(f"{what} ({mean['low']:.2f} to {mean['high']:.2f}) {over}; results in {save_to / RESULTS}")
