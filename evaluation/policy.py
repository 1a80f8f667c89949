"""``grpo evaluate-policy``: the returns of a policy in an environment.

Environment servers play one episode for each seed with the actions of a policy that this command loads. A server that
dies is started again and loses only its open episodes, which are played again. A killed command continues when it is
repeated; see docs/evaluation_head.md.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer
from pydantic import BaseModel
from typer import Option

from evaluation.episodes import OpenArena, open_arena, open_policies, play_on_workers, play_seeds
from evaluation.metrics import bootstrap
from evaluation.store import IDENTITY, append_records, check_identity, locked_file, read_records, sha256_of
from services.clients.environment import ServedEpisode
from services.clients.play import Decision, Episode, NoActionError, Step
from services.core import logs
from services.core.errors import ConfigurationError
from services.core.files import write_json
from services.core.settings import Settings
from services.core.tasks import run_until_signal
from services.evaluation_head.policies import MAX_WAITING, Policy, PolicyFailedError
from services.evaluation_head.settings import MAX_BATCH
from services.protocol.evaluation import EnvironmentInfo

EPISODES = "episodes.jsonl"
RESULTS = "results.json"


@dataclass(frozen=True)
class Options:
    """The options of a run; see ``main``."""

    environment: str
    episodes: int
    workers: int
    seed: int
    save_to: Path
    policies: str
    policy: str | None = None
    episodes_at_once: int = 1


class PlayedEpisode(BaseModel):
    """An episode that came to its end."""

    seed: int
    episode_return: float
    steps: int
    seconds: float
    versions: list[int | None]
    """The versions of the policy that acted."""


class Recorder:
    """The episodes of a run by seed, and the file that keeps them as they end; see Play."""

    def __init__(self, policy: Policy, file: BinaryIO) -> None:
        """Read the episodes of ``file``; a last line that a kill cut off is removed.

        Raises:
            ConfigurationError: the file does not hold episodes.
        """
        self._policy = policy
        self._file = file
        self.episodes = {episode.seed: episode for episode in read_records(file, PlayedEpisode, "--save-to")}
        self._began: dict[Episode, float] = {}
        self._versions: defaultdict[Episode, set[int | None]] = defaultdict(set)
        self.by_server: Counter[str] = Counter()
        """Episodes that ended in this process's time, by the URL of their server."""

    async def ask(self, episodes: Sequence[Episode]) -> Sequence[Decision]:
        """See Play."""
        began = time.monotonic()
        for episode in episodes:
            self._began.setdefault(episode, began)
        try:
            return await self._policy.act([episode.state for episode in episodes])
        except PolicyFailedError as error:
            raise NoActionError(error.detail) from error

    def add(self, steps: Sequence[Step]) -> None:
        """See Play."""
        for episode, decision, _ in steps:
            self._versions[episode].add(decision.version)

    def end(self, episode: Episode) -> None:
        """See Play."""
        played = PlayedEpisode(
            seed=episode.seed,
            episode_return=episode.episode_return,
            steps=episode.steps,
            seconds=time.monotonic() - self._began.pop(episode),
            versions=_in_order(self._versions.pop(episode)),
        )
        append_records(self._file, [played])
        self.episodes[episode.seed] = played
        if isinstance(episode, ServedEpisode):
            self.by_server[episode.server.url] += 1


def _in_order(versions: Iterable[int | None]) -> list[int | None]:
    return sorted(versions, key=lambda version: -1 if version is None else version)


async def evaluate(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Play the episodes that are missing in ``options.save_to``, write the results there, and return them.

    Raises:
        ConfigurationError: an option is wrong, policy and environment do not fit, or the directory holds another
            evaluation.
        DependencyLostError: a worker died too often. Finished episodes are kept.
    """
    token = Settings.load().token
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(open_arena(options.environment, None, None))
        policy, target = await _open_policy(options, place.info, stack)
        file = stack.enter_context(locked_file(options.save_to / EPISODES, "--save-to"))
        recorder = Recorder(policy, file)
        check_identity(
            options.save_to / IDENTITY,
            {
                "policies": options.policies,
                "policy": policy.name,
                # The versions of a directory are in the episodes.
                "sha256": sha256_of(target) if target.is_file() else None,
                **{f"environment.{name}": value for name, value in place.info.model_dump(mode="json").items()},
            },
            is_used=bool(recorder.episodes),
            option="--save-to",
        )
        if recorder.episodes:
            say(f"{options.save_to} has {len(recorder.episodes)} episodes already, of {options.episodes} wanted")
        results = await _play_missing(options, place, policy.name, recorder, token)
        os.fsync(file.fileno())
        write_json(options.save_to / RESULTS, results)
    return results


async def _play_missing(
    options: Options, place: OpenArena, policy: str, recorder: Recorder, token: str | None
) -> dict[str, Any]:
    """Play the seeds that ``recorder`` lacks; return the results of all."""
    seeds = range(options.seed, options.seed + options.episodes)
    missing = [seed for seed in seeds if seed not in recorder.episodes]
    count = min(options.workers, len(missing))
    left_out: dict[int, str] = {}

    async def play(arena: Any) -> None:
        at_once, there = options.episodes_at_once, OpenArena(place.info, arena)
        left_out.update(await play_seeds(there, missing, recorder, at_once=at_once, workers=max(count, 1)))

    began = time.monotonic()
    processes = await play_on_workers(place.info.id, count, token, play) if count else {}
    if not count:
        await play(place.arena)
    episodes = [recorder.episodes[seed] for seed in seeds if seed in recorder.episodes]
    if not episodes:
        raise ConfigurationError(f"no episode ended: {next(iter(left_out.values()))}")
    return {
        "environment": options.environment,
        "policy": policy,
        "policy_versions": _in_order({version for episode in episodes for version in episode.versions}),
        "mean_return": bootstrap([episode.episode_return for episode in episodes]).model_dump(exclude={"prompts"}),
        "steps": sum(episode.steps for episode in episodes),
        "left_out": {str(seed): why for seed, why in sorted(left_out.items())},
        "episodes": [episode.model_dump() for episode in episodes],
        "seconds": time.monotonic() - began,
        "workers": [
            {
                "name": process.command.name,
                "episodes": recorder.by_server[url],
                "restarts": process.starts - 1,
                "deaths": process.ends,
            }
            for url, process in processes.items()
        ],
    }


async def _open_policy(options: Options, info: EnvironmentInfo, stack: AsyncExitStack) -> tuple[Policy, Path]:
    """Open the policy that plays, until ``stack`` closes; return it and its target.

    Raises:
        ConfigurationError: there is no such policy, or it does not fit the environment.
    """
    if info.seats > 1:
        raise ConfigurationError(f"{info.id} has {info.seats} seats; the policies here play those of one")
    at_once = max(options.workers, 1) * options.episodes_at_once
    if at_once > MAX_WAITING:
        raise ConfigurationError(f"--workers and --episodes-at-once make {at_once} episodes; allowed are {MAX_WAITING}")
    policies, targets = await open_policies(stack, options.policies, info, min(at_once, MAX_BATCH))
    name = options.policy or next(iter(policies))
    if name not in policies:
        raise ConfigurationError(f"--policy is {name!r}; --policies has {', '.join(policies)}")
    return policies[name], Path(targets[name])


def main(
    save_to: Annotated[Path, Option(help="Directory of episodes and results. Resumes what is there.")],
    policies: Annotated[str, Option(help="Policies to load, as HEAD_POLICIES: name=target, with commas between.")],
    policy: Annotated[str | None, Option(help="The policy that plays; default the first.")] = None,
    environment: Annotated[str, Option(help="As ENVIRONMENT of an environment server.")] = "CartPole-v1",
    episodes: Annotated[int, Option(min=1, help="Episodes to play.")] = 100,
    workers: Annotated[
        int, Option(min=0, max=1024, help="Environment servers to start; 0: play in this process, the fastest way.")
    ] = 4,
    episodes_at_once: Annotated[
        int, Option(min=1, max=1024, help="Episodes that a worker plays at a time, with one request a step.")
    ] = 1,
    seed: Annotated[
        int, Option(min=0, max=2**31 - 1, help="Seed of the first episode; the next has the next seed.")
    ] = 0,
) -> None:
    """Play episodes of a policy and write returns, their mean and its interval to results.json."""
    logs.configure("evaluate_policy", "warning")
    options = Options(environment, episodes, workers, seed, save_to, policies, policy, episodes_at_once)

    async def work() -> None:
        _show(await evaluate(options, lambda line: print(line, file=sys.stderr, flush=True)), save_to)

    stopped = f"evaluate-policy: stopped by {{}}; the same command continues from {save_to}"
    raise typer.Exit(asyncio.run(run_until_signal(work(), stopped)))


def _show(results: dict[str, Any], save_to: Path) -> None:
    for worker in results["workers"]:
        print(f"{worker['name']}: {worker['episodes']} episodes, {worker['restarts']} restarts", *worker["deaths"])
    for seed, reason in list(results["left_out"].items())[:5]:
        print(f"the episode of seed {seed} is left out: {reason}")
    if len(versions := results["policy_versions"]) > 1:
        print(f"the episodes were played by versions {versions} of the policy")
    mean = results["mean_return"]
    print(
        f"{results['policy']} in {results['environment']}: mean return {mean['value']:.2f} ({mean['low']:.2f} to "
        f"{mean['high']:.2f}) over {len(results['episodes'])} episodes in {results['seconds']:.1f} s; results in "
        f"{save_to / RESULTS}"
    )
