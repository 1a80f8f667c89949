"""A run of grpo evaluate-policy: the checks, the head, the episodes that are missing, and the results."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import numpy as np

from evaluation.identity import check_identity, locked_file, whole_lines
from evaluation.metrics import bootstrap
from evaluation.policy.worker import PlayedEpisode, Work
from evaluation.policy.workers import Coordinator, Crew, Worker
from evaluation.trajectories.arenas import OpenArena, open_arena
from services.clients.evaluation_head import EvaluationHeadClient
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.files import atomic_write
from services.core.processes import Command
from services.core.settings import Settings
from services.core.supervisor import SupervisedProcess
from services.core.tasks import run_until_first_ends
from services.environment_server.settings import default_name
from services.evaluation_head.settings import MAX_BATCH, HeadSettings
from services.http.client import HttpClient, RequestRefusedError, problem_detail
from services.http.server import listen
from services.protocol.evaluation import StepStatus

EPISODES = "episodes.jsonl"
IDENTITY = "evaluation.json"
RESULTS = "results.json"

SERVICE = "evaluation-head"
MAX_RESTARTS = 3
START_SECONDS = 300.0
"""A head loads torch and its policies."""
HANG_SECONDS = 60.0
PROBE_SECONDS = 10.0
ACTION_SECONDS = 120.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """The options of a run."""

    environment: str
    episodes: int
    workers: int
    seed: int
    save_to: Path
    url: str | None = None
    """A running head."""
    policies: str | None = None
    """The policies of a head to start, as HEAD_POLICIES."""
    policy: str | None = None
    port: int = 0
    episodes_at_once: int = 1
    """Episodes that a worker plays together."""


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
        """Keep an episode. Those left out are played again by the next command."""
        if not episode.failed:
            self._file.write(json.dumps(_stored(episode)).encode() + b"\n")
            self._file.flush()
        self.episodes[episode.seed] = episode


def _stored(episode: PlayedEpisode) -> dict[str, Any]:
    """Return the fields that are written to files; the others are for measurements."""
    names = {field.name for field in fields(PlayedEpisode)} - {"decision_seconds", "failed"}
    return {name: value for name, value in asdict(episode).items() if name in names}


async def evaluate(options: Options, say: Say) -> dict[str, Any]:
    """Play the episodes that are missing in ``options.save_to``, write the results there, and return them.

    Raises:
        ConfigurationError: an option is wrong, head, policy and environment do not fit, or the directory holds another
            evaluation.
        DependencyLostError: the head does not answer, or all workers died too often. Finished episodes are kept.
        NeverReadyError: no worker could be started.
    """
    token = Settings.load().token
    seeds = range(options.seed, options.seed + options.episodes)
    async with open_arena(options.environment, None, None) as place, _head(options) as head:
        policy = await check_head(head, options.policy, place, token)
        with locked_file(options.save_to / EPISODES, "--save-to") as file:
            store = EpisodeFile(file)
            check_identity(
                options.save_to / IDENTITY,
                {
                    "head": options.policies or head.url,
                    "policy": policy,
                    **_file_of(options, policy),
                    **{f"environment.{name}": value for name, value in place.info.model_dump(mode="json").items()},
                },
                is_used=bool(store.episodes),
                results="the episodes of another evaluation",
                option="--save-to",
            )
            missing = [seed for seed in seeds if seed not in store.episodes]
            if len(missing) < len(seeds):
                say(f"{options.save_to} has {len(seeds) - len(missing)} of {len(seeds)} episodes already")
            coordinator = Coordinator(_crew(options, head, policy, len(missing)), missing, store.add)
            began = time.monotonic()
            await run_until_first_ends(coordinator.run(), head.watch())
            seconds = time.monotonic() - began
            episodes = [store.episodes[seed] for seed in seeds]
            results = results_of(options.environment, policy, episodes, coordinator.workers, seconds)
            os.fsync(file.fileno())
            atomic_write(options.save_to / RESULTS, json.dumps(results, indent=1) + "\n")
    return results


def _crew(options: Options, head: HeadAt, policy: str, episodes: int) -> Crew:
    """Return the workers for a number of episodes, so that also with few of them every worker has some."""
    # Two commands at one head have different names.
    name = f"{default_name()[:60]}-{os.getpid()}/"
    work = Work(name, options.environment, head.url, policy)
    at_once = min(options.episodes_at_once, -(-episodes // options.workers))
    return Crew(min(options.workers, episodes), work, logs=options.save_to, episodes_at_once=at_once)


def _head(options: Options) -> AbstractAsyncContextManager[HeadAt]:
    if (options.url is None) == (options.policies is None):
        raise ConfigurationError("give either --eval-head-url, of a running head, or --policies, of a head to start")
    if options.url is not None:
        return contextlib.nullcontext(running_head(options.url))
    assert options.policies is not None
    states = min(options.workers * options.episodes_at_once, MAX_BATCH)
    return started_head(_named(options.policies), options.port, states)


def _named(policies: str) -> str:
    """Return ``--policies`` as HEAD_POLICIES has it."""
    return policies.replace(",", " ")


def _file_of(options: Options, policy: str) -> dict[str, str]:
    """Return the digest of the policy's file, if this command starts the head and the policy is one file.

    The versions of a directory are not in it, because the episodes have them.
    """
    if options.policies is None:
        return {}
    target = Path(HeadSettings.load(head_policies=_named(options.policies)).policies[policy])
    return {"policy.sha256": hashlib.sha256(target.read_bytes()).hexdigest()} if target.is_file() else {}


def results_of(
    environment: str, policy: str, episodes: Sequence[PlayedEpisode], workers: Sequence[Worker], seconds: float
) -> dict[str, Any]:
    """Return the results: the mean return with its bootstrap interval, each episode, and each worker.

    ``seconds`` and the workers are of this command alone; the episodes may be of several.

    Raises:
        ConfigurationError: no episode ended.
    """
    ended = [episode for episode in episodes if not episode.failed]
    failed = {str(episode.seed): episode.failed for episode in episodes if episode.failed}
    if not ended:
        raise ConfigurationError(f"no episode ended: {next(iter(failed.values()))}")
    mean = bootstrap([episode.episode_return for episode in ended]).model_dump(exclude={"prompts"})
    waits = 1000 * np.asarray([wait for episode in ended for wait in episode.decision_seconds])
    versions = {version for episode in ended for version in episode.versions}
    return {
        "environment": environment,
        "policy": policy,
        "policy_versions": sorted(versions, key=lambda version: -1 if version is None else version),
        "mean_return": mean,
        "steps": sum(episode.steps for episode in ended),
        "seconds": seconds,
        "decision_ms": {f"p{q}": float(np.percentile(waits, q)) for q in (50, 95, 99)} if len(waits) else {},
        "workers": [asdict(worker) for worker in workers],
        "left_out": failed,
        "episodes": [_stored(episode) for episode in ended],
    }


@dataclass(frozen=True)
class HeadAt:
    """A head's address, and a watch that must run while the head is used."""

    url: str
    watch: Callable[[], Awaitable[None]]
    """Raises an error once a head that was started here has failed for good."""


async def _forever() -> None:
    await asyncio.Event().wait()


def running_head(url: str) -> HeadAt:
    """Return the head at an address.

    Raises:
        ConfigurationError: it is not the URL of a server.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"--eval-head-url is {url!r}; needed is a URL such as http://127.0.0.1:8080")
    return HeadAt(url.rstrip("/"), _forever)


@asynccontextmanager
async def started_head(policies: str, port: int, batch_size: int) -> AsyncIterator[HeadAt]:
    """Start a head with policies on a port of this machine (0: any free one); end it with the context.

    Raises:
        ConfigurationError: the port is taken, or the head cannot start.
    """
    with listen("127.0.0.1", port) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    variables = {"HEAD_BATCH_SIZE": os.environ.get("HEAD_BATCH_SIZE") or str(batch_size)}
    variables |= {"LOG_LEVEL": os.environ.get("LOG_LEVEL") or "warning"}
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--policies", policies]
    command = Command(SERVICE, sys.executable, "services.evaluation_head", arguments, variables)
    async with HttpClient(url) as client:
        head = SupervisedProcess(
            command,
            client.is_healthy,
            max_restarts=MAX_RESTARTS,
            start_seconds=START_SECONDS,
            hang_seconds=HANG_SECONDS,
        )
        running = asyncio.create_task(head.run())
        try:
            healthy = asyncio.create_task(head.wait_until_healthy(0))
            await asyncio.wait({running, healthy}, return_when=asyncio.FIRST_COMPLETED)
            healthy.cancel()
            if running.done():
                await running
            yield HeadAt(url, lambda: asyncio.shield(running))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def check_head(head: HeadAt, policy: str | None, place: OpenArena, token: str | None) -> str:
    """Check that a head has the policy, and that policy and environment fit; return the policy's name.

    The check plays the first step of an episode, since only this shows for every kind of policy that both fit.

    Raises:
        ConfigurationError: something does not fit; the message says what, in one line.
    """
    info, arena = place
    async with EvaluationHeadClient(
        head.url, policy=policy, environment=info.id, token=token, deadline=ACTION_SECONDS
    ) as client:
        names = await _policies(client)
        if policy is not None and policy not in names:
            raise ConfigurationError(f"--policy is {policy!r}; the head at {head.url} has {', '.join(names)}")
        if info.seats > 1:
            raise ConfigurationError(f"{info.id} has {info.seats} seats; the head plays those of one")
        [episode] = await arena.begin([0])
        if episode.status is StepStatus.LOST:
            raise ConfigurationError(f"{info.id} cannot be reset: {episode.detail}")
        try:
            reply = await client.act([episode.state])
            [result] = await arena.step([(episode, reply.actions[0])])
        except RequestRefusedError as error:
            raise ConfigurationError(f"{info.id} does not fit: {error.detail}") from error
        except DependencyLostError as error:
            raise ConfigurationError(f"the policy gives no action for {info.id}: {error}") from error
        finally:
            await arena.end([episode])
        if result.status is StepStatus.REFUSED:
            raise ConfigurationError(f"policy {reply.policy!r} does not fit {info.id}: {result.detail}")
        return reply.policy


async def _policies(client: EvaluationHeadClient) -> list[str]:
    """Return the names of a head's policies.

    Raises:
        ConfigurationError: no head answers there, or it does not take the token.
    """
    try:
        # A head that loads its policies answers 503.
        health = await client.send_once("GET", "/health", seconds=PROBE_SECONDS)
        if health.status_code == 503:
            await client.wait_healthy(START_SECONDS)
        stats = await client.send_once("GET", "/stats", seconds=PROBE_SECONDS)
    except DependencyLostError as error:
        raise ConfigurationError(f"{error}; start a head there, or give another --eval-head-url") from error
    if stats.status_code != 200:
        raise ConfigurationError(
            f"--eval-head-url {client.url}: /stats answers {stats.status_code} {problem_detail(stats)}"
        )
    content: Any = {}
    try:
        content = stats.json()
        if content["service"] == SERVICE:
            return [policy["name"] for policy in content["policies"]]
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigurationError(
        f"--eval-head-url {client.url} is not an evaluation head: /stats answers {stats.text[:100]!r}"
    )
