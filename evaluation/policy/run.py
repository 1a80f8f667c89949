"""A run of grpo evaluate-policy: the checks, the episodes that are missing, and the results."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from evaluation.identity import check_identity, held, whole_lines
from evaluation.metrics import bootstrap
from evaluation.policy.head import HeadAt, check_head, running_head, started_head
from evaluation.policy.records import Episode, Work
from evaluation.policy.workers import Coordinator, Crew, Worker
from evaluation.trajectories.arenas import open_arena
from services.core.errors import ConfigurationError
from services.core.files import atomic_write
from services.core.settings import Settings
from services.core.tasks import run_until_first_ends
from services.environment_server.settings import default_name
from services.evaluation_head.settings import MAX_BATCH, HeadSettings

EPISODES = "episodes.jsonl"
IDENTITY = "evaluation.json"
RESULTS = "results.json"

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
    """A head that runs."""
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
        self.episodes: dict[int, Episode] = {}
        self._file = file
        for number, line in enumerate(whole_lines(file), start=1):
            try:
                episode = Episode(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise ConfigurationError(
                    f"{file.name}, line {number}, is not an episode ({error}); give another --save-to"
                ) from error
            self.episodes[episode.seed] = episode

    def add(self, episode: Episode) -> None:
        """Keep an episode. Those left out are played again by the next command."""
        if not episode.failed:
            self._file.write(json.dumps(_stored(episode)).encode() + b"\n")
            self._file.flush()
        self.episodes[episode.seed] = episode


def _stored(episode: Episode) -> dict[str, Any]:
    """Return the fields that files have: all but those that only a measurement needs."""
    names = {field.name for field in fields(Episode)} - {"decision_seconds", "failed"}
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
    async with open_arena(options.environment, None, None) as arena, _head(options) as head:
        policy = await check_head(head, options.policy, arena, token)
        with held(options.save_to / EPISODES, "--save-to") as file:
            store = EpisodeFile(file)
            check_identity(
                options.save_to / IDENTITY,
                {
                    "head": options.policies or head.url,
                    "policy": policy,
                    **_file_of(options, policy),
                    **{f"environment.{name}": value for name, value in arena.info.model_dump(mode="json").items()},
                },
                is_used=bool(store.episodes),
                holds="the episodes of another evaluation",
                option="--save-to",
            )
            missing = [seed for seed in seeds if seed not in store.episodes]
            if len(missing) < len(seeds):
                say(f"{options.save_to} has {len(seeds) - len(missing)} of {len(seeds)} episodes already")
            # Two commands at one head have different names.
            name = f"{default_name()[:60]}-{os.getpid()}/"
            work = Work(name, options.environment, head.url, policy)
            # With few episodes every worker has some.
            at_once = min(options.episodes_at_once, -(-len(missing) // options.workers))
            workers = min(options.workers, len(missing))
            crew = Crew(workers, work, logs=options.save_to, episodes_at_once=at_once)
            coordinator = Coordinator(crew, missing, store.add)
            began = time.monotonic()
            await run_until_first_ends(coordinator.run(), head.watch())
            results = results_of(
                options.environment,
                policy,
                [store.episodes[seed] for seed in seeds],
                coordinator.workers,
                time.monotonic() - began,
            )
            os.fsync(file.fileno())
            atomic_write(options.save_to / RESULTS, json.dumps(results, indent=1) + "\n")
    return results


def _head(options: Options) -> AbstractAsyncContextManager[HeadAt]:
    if (options.url is None) == (options.policies is None):
        raise ConfigurationError("give either --eval-head-url, of a head that runs, or --policies, for one of our own")
    if options.url is not None:
        return contextlib.nullcontext(running_head(options.url))
    assert options.policies is not None
    states = min(options.workers * options.episodes_at_once, MAX_BATCH)
    return started_head(_named(options.policies), options.port, states)


def _named(policies: str) -> str:
    """Return ``--policies`` as HEAD_POLICIES has it."""
    return policies.replace(",", " ")


def _file_of(options: Options, policy: str) -> dict[str, str]:
    """Return the digest of the file that the policy of a head of our own is; nothing for any other policy.

    A directory's versions are not in it, because the episodes have them.
    """
    if options.policies is None:
        return {}
    target = Path(HeadSettings.load(head_policies=_named(options.policies)).policies[policy])
    return {"policy.sha256": hashlib.sha256(target.read_bytes()).hexdigest()} if target.is_file() else {}


def results_of(
    environment: str, policy: str, episodes: Sequence[Episode], workers: Sequence[Worker], seconds: float
) -> dict[str, Any]:
    """Return the results: the mean return with its bootstrap interval, each episode, and each worker.

    ``seconds`` and the workers are of this command alone; the episodes may be of several.

    Raises:
        ConfigurationError: no episode came to its end.
    """
    ended = [episode for episode in episodes if not episode.failed]
    failed = {str(episode.seed): episode.failed for episode in episodes if episode.failed}
    if not ended:
        raise ConfigurationError(f"no episode comes to its end: {next(iter(failed.values()))}")
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
