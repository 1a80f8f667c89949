"""``grpo evaluate-policy``: the returns of a policy in an environment.

Environment servers play one episode for each seed with the actions of a policy that this command loads (``--policies``)
or that a running head serves (``--eval-head-url``). A server that dies is started again and loses only its open
episodes, which are played again. A killed command continues when it is repeated; see docs/evaluation_head.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import urlsplit

import numpy as np
import orjson
import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from evaluation.episodes import OpenArena, StartedServers, open_arena, open_policies, play_seeds
from evaluation.identity import check_identity, locked_file, sha256_of, whole_lines
from evaluation.metrics import bootstrap
from services.clients.environment import ServedEpisode
from services.clients.evaluation_head import EvaluationHeadClient
from services.clients.play import Decision, Episode, NoActionError, Step
from services.core import logs
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.files import atomic_write
from services.core.settings import Settings
from services.core.tasks import run_until_signal
from services.environment_server.settings import default_name
from services.evaluation_head.policies import RemotePolicy
from services.evaluation_head.policy import MAX_WAITING, Policy, PolicyFailedError
from services.evaluation_head.settings import MAX_BATCH
from services.http.client import RequestRefusedError
from services.protocol.evaluation import EnvironmentInfo

EPISODES = "episodes.jsonl"
IDENTITY = "evaluation.json"
RESULTS = "results.json"

START_SECONDS = 30.0
"""Longest wait for a head that starts."""
ACTION_SECONDS = 120.0
"""Longest wait for an action, while a head may restart."""


@dataclass(frozen=True)
class Options:
    """The options of a run."""

    environment: str
    episodes: int
    workers: int
    """Environment servers to start; 0 plays in this process."""
    seed: int
    save_to: Path
    url: str | None = None
    """A running head."""
    policies: str | None = None
    """The policies to load, as HEAD_POLICIES."""
    policy: str | None = None
    episodes_at_once: int = 1
    """Episodes that a worker plays together."""


@dataclass
class PlayedEpisode:
    """An episode that came to its end."""

    seed: int
    episode_return: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    versions: list[int | None] = field(default_factory=list)
    """The versions of the policy that acted."""
    actions: str = ""
    """A hash of the actions."""


class EpisodeFile:
    """The episodes of a run by seed, and the file that keeps them as they come."""

    def __init__(self, file: BinaryIO) -> None:
        """Read ``file``; a last line that a kill cut off is removed.

        Raises:
            ConfigurationError: the file does not hold episodes.
        """
        self.episodes: dict[int, PlayedEpisode] = {}
        self._file = file
        for number, line in enumerate(whole_lines(file), start=1):
            try:
                episode = PlayedEpisode(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise ConfigurationError(
                    f"{file.name}, line {number}, is not an episode ({error}); give another --save-to"
                ) from error
            self.episodes[episode.seed] = episode

    def add(self, episode: PlayedEpisode) -> None:
        """Keep an episode."""
        self._file.write(json.dumps(asdict(episode)).encode() + b"\n")
        self._file.flush()
        self.episodes[episode.seed] = episode


class Recorder:
    """Keeps the record of each episode that ends, and the time of each decision; see Play."""

    def __init__(self, policy: Policy, store: EpisodeFile) -> None:
        self._policy = policy
        self._store = store
        self._began: dict[Episode, float] = {}
        self._actions: defaultdict[Episode, Any] = defaultdict(hashlib.sha256)
        self._versions: defaultdict[Episode, set[int | None]] = defaultdict(set)
        self._played: list[tuple[PlayedEpisode, str]] = []
        self.decision_seconds: list[float] = []

    async def ask(self, episodes: Sequence[Episode]) -> Sequence[Decision]:
        """See Play."""
        began = time.monotonic()
        for episode in episodes:
            self._began.setdefault(episode, began)
        try:
            decisions = await self._policy.ask(episodes)
        except PolicyFailedError as error:
            raise NoActionError(error.detail) from error
        self.decision_seconds += [time.monotonic() - began] * len(episodes)
        return decisions

    def add(self, steps: Sequence[Step]) -> None:
        """See Play."""
        for episode, decision, _ in steps:
            self._actions[episode].update(orjson.dumps(decision.action))
            self._versions[episode].add(decision.version)

    def end(self, episode: Episode) -> None:
        """See Play."""
        seconds = time.monotonic() - self._began.pop(episode)
        versions, actions = _in_order(self._versions.pop(episode)), self._actions.pop(episode).hexdigest()[:16]
        played = PlayedEpisode(episode.seed, episode.episode_return, episode.steps, seconds, versions, actions)
        self._store.add(played)
        self._played.append((played, episode.server.url if isinstance(episode, ServedEpisode) else ""))
        self._policy.report(episode)

    def workers(self, servers: StartedServers) -> list[dict[str, Any]]:
        """Return for each server its episodes, restarts and deaths."""
        rows = []
        for url, process in servers.processes.items():
            own = [played for played, place in self._played if place == url]
            row = {"name": process.command.name, "episodes": len(own), "steps": sum(played.steps for played in own)}
            row |= {"playing_seconds": sum(played.seconds for played in own), "restarts": process.starts - 1}
            rows.append(row | {"deaths": process.ends})
        return rows


def _in_order(versions: Iterable[int | None]) -> list[int | None]:
    return sorted(versions, key=lambda version: -1 if version is None else version)


async def evaluate(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Play the episodes that are missing in ``options.save_to``, write the results there, and return them.

    Raises:
        ConfigurationError: an option is wrong, policy and environment do not fit, or the directory holds another
            evaluation.
        DependencyLostError: the head does not answer, or a worker died too often. Finished episodes are kept.
    """
    token = Settings.load().token
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(open_arena(options.environment, None, None))
        policy, identity = await _open_policy(options, place.info, token, stack)
        with locked_file(options.save_to / EPISODES, "--save-to") as file:
            store = EpisodeFile(file)
            check_identity(
                options.save_to / IDENTITY,
                {
                    "head": options.policies or str(options.url).rstrip("/"),
                    "policy": policy.name,
                    **identity,
                    **{f"environment.{name}": value for name, value in place.info.model_dump(mode="json").items()},
                },
                is_used=bool(store.episodes),
                results="the episodes of another evaluation",
                option="--save-to",
            )
            if store.episodes:
                say(f"{options.save_to} has {len(store.episodes)} episodes already, of {options.episodes} wanted")
            results = await _play_missing(options, place, policy, store, token)
            os.fsync(file.fileno())
            atomic_write(options.save_to / RESULTS, json.dumps(results, indent=1) + "\n")
    return results


async def _play_missing(
    options: Options, place: OpenArena, policy: Policy, store: EpisodeFile, token: str | None
) -> dict[str, Any]:
    """Play the seeds that ``store`` lacks; return the results of all."""
    seeds = range(options.seed, options.seed + options.episodes)
    missing = [seed for seed in seeds if seed not in store.episodes]
    count = min(options.workers, len(missing))
    servers = StartedServers(place.info.id, count, token) if count else None
    recorder = Recorder(policy, store)
    left_out: dict[int, str] = {}

    async def play() -> None:
        arena = place if servers is None else OpenArena(place.info, servers)
        at_once, workers = options.episodes_at_once, max(count, 1)
        left_out.update(await play_seeds(arena, missing, recorder, at_once=at_once, workers=workers))
        # The last reports.
        await policy.ask([])

    began = time.monotonic()
    await (play() if servers is None else servers.run(play))
    return {
        "environment": options.environment,
        "policy": policy.name,
        **results_of([store.episodes[seed] for seed in seeds if seed in store.episodes], left_out),
        "seconds": time.monotonic() - began,
        "decision_ms": percentiles(recorder.decision_seconds),
        "workers": [] if servers is None else recorder.workers(servers),
    }


def results_of(episodes: Sequence[PlayedEpisode], left_out: Mapping[int, str]) -> dict[str, Any]:
    """Return the results of episodes: the mean return with its bootstrap interval, and each episode.

    Raises:
        ConfigurationError: no episode ended.
    """
    if not episodes:
        raise ConfigurationError(f"no episode ended: {next(iter(left_out.values()))}")
    return {
        "policy_versions": _in_order({version for episode in episodes for version in episode.versions}),
        "mean_return": bootstrap([episode.episode_return for episode in episodes]).model_dump(exclude={"prompts"}),
        "steps": sum(episode.steps for episode in episodes),
        "left_out": {str(seed): why for seed, why in sorted(left_out.items())},
        "episodes": [asdict(episode) for episode in episodes],
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles of times in milliseconds; none of no times."""
    return {f"p{q}": 1000 * float(np.percentile(seconds, q)) for q in (50, 95, 99)} if seconds else {}


async def _open_policy(
    options: Options, info: EnvironmentInfo, token: str | None, stack: AsyncExitStack
) -> tuple[Policy, dict[str, str]]:
    """Open the policy that plays until ``stack`` closes; return it, and what tells it from others of its name.

    Raises:
        ConfigurationError: there is no such policy, or it does not fit the environment.
    """
    url, wanted = options.url, options.policy
    if (url is None) == (options.policies is None):
        raise ConfigurationError(
            "give either --eval-head-url, of a running head, or --policies, which this command loads"
        )
    if info.seats > 1:
        raise ConfigurationError(f"{info.id} has {info.seats} seats; the policies here play those of one")
    if url is not None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"--eval-head-url is {url!r}; needed is a URL such as http://127.0.0.1:8080")
        # Two commands at one head have different names.
        player = f"{default_name()[:60]}-{os.getpid()}"
        client = EvaluationHeadClient(
            url, policy=wanted, server=player, environment=info.id, token=token, deadline=ACTION_SECONDS
        )
        policy = await stack.enter_async_context(RemotePolicy(wanted or "", client))
        policy.name = _chosen(wanted, await _policies_of(client), f"the head at {url}")
        return policy, {}
    at_once = max(options.workers, 1) * options.episodes_at_once
    if at_once > MAX_WAITING:
        raise ConfigurationError(f"--workers and --episodes-at-once make {at_once} episodes; allowed are {MAX_WAITING}")
    policies, targets = await open_policies(stack, str(options.policies), info, min(at_once, MAX_BATCH))
    name = _chosen(wanted, list(policies), "--policies")
    return policies[name], _digest_of(Path(targets[name]))


def _digest_of(target: Path) -> dict[str, str]:
    """Return the digest of a policy that is one file; the versions of a directory are in the episodes."""
    return {"policy.sha256": sha256_of(target)} if target.is_file() else {}


def _chosen(policy: str | None, names: Sequence[str], where: str) -> str:
    if policy is not None and policy not in names:
        raise ConfigurationError(f"--policy is {policy!r}; {where} has {', '.join(names)}")
    return policy or names[0]


class HeadStats(BaseModel):
    """The part of a head's GET /stats that this command reads."""

    service: Literal["evaluation-head"]
    policies: list[dict[str, Any]]


async def _policies_of(client: EvaluationHeadClient) -> list[str]:
    """Return the names of a head's policies.

    Raises:
        ConfigurationError: no head answers there, or it does not take the token.
    """
    try:
        stats = await client.call("GET", "/stats", HeadStats, deadline=START_SECONDS)
    except (DependencyLostError, RequestRefusedError) as error:
        raise ConfigurationError(f"--eval-head-url {client.url} gives no policies: {error}") from error
    return [policy["name"] for policy in stats.policies]


SaveTo = Annotated[Path, Option(help="Directory of episodes and results. Resumes what is there.")]
Url = Annotated[str | None, Option("--eval-head-url", help="A head that runs, such as http://127.0.0.1:8080.")]
Policies = Annotated[str | None, Option(help="Policies to load, as HEAD_POLICIES: name=target, with commas between.")]
PolicyName = Annotated[str | None, Option(help="The policy that plays; default the first.")]
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
    policy: PolicyName = None,
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
