"""A worker process, which plays one episode after another: ``python -m evaluation.policy.worker WORK``.

It is started by ``evaluation.policy.workers``. WORK is JSON, see Work. The process writes ``{}`` when it is ready. Then
it reads a line with a seed for each episode, and writes each Episode as a line of JSON. When its input ends, it writes
Costs and ends. It blocks while it waits for an action, because it has nothing else to do.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Protocol, TextIO

import orjson
import psutil

from evaluation.policy.head_actor import HeadActor
from evaluation.policy.records import Costs, Episode, Work
from evaluation.trajectories.arenas import Arena, Step, open_arena
from services.core.errors import ConfigurationError, DependencyLostError, exit_code_of
from services.environment_server.settings import EnvironmentSettings
from services.protocol.evaluation import Action, EpisodePosition, FinishedEpisode, State


class Actor(Protocol):
    """The source of a worker's actions."""

    def act(self, position: EpisodePosition, state: State) -> tuple[Action, int | None]:
        """Return the action for a state, and the version of the policy that chose it."""

    def finish(self, report: FinishedEpisode) -> None:
        """Take the report of an episode that has ended."""


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """End the process by SIGALRM if the context takes longer, even where the environment's code never returns."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


async def play(arena: Arena, actor: Actor, seed: int, step_seconds: float) -> Episode:
    """Play an episode; a step that takes longer than ``step_seconds`` ends the process by SIGALRM.

    Raises:
        ConfigurationError: the head refuses this worker.
        DependencyLostError: the head does not answer.
    """
    try:
        return await _play(arena, actor, seed, step_seconds)
    except (ConfigurationError, DependencyLostError):
        raise
    # Environments are other people's code and may raise anything; it is the end of their episode.
    except Exception as error:  # noqa: BLE001
        return Episode(seed, failed=f"{type(error).__name__}: {error}")


async def _play(arena: Arena, actor: Actor, seed: int, step_seconds: float) -> Episode:
    began = time.monotonic()
    episode, actions, versions = Episode(seed), hashlib.sha256(), set()
    name, is_over = f"seed-{seed}", False
    with _limit(step_seconds):
        [(handle, state)] = await arena.begin([seed])
    try:
        while not is_over:
            asked = time.perf_counter()
            position = EpisodePosition.model_construct(
                episode=name, step=episode.steps, episode_return=episode.episode_return
            )
            action, version = actor.act(position, state)
            episode.decision_seconds.append(time.perf_counter() - asked)
            actions.update(orjson.dumps(action))
            versions.add(version)
            with _limit(step_seconds):
                [outcome] = await arena.step([Step(handle, episode.steps, action)])
            if isinstance(outcome, Exception):
                raise outcome
            episode.episode_return += outcome.reward
            episode.steps += 1
            state = outcome.state
            is_over = outcome.terminated or outcome.truncated or episode.steps >= arena.info.max_steps
    finally:
        await arena.end([handle])
    total, steps = episode.episode_return, episode.steps
    actor.finish(FinishedEpisode.model_construct(episode=name, steps=steps, episode_return=total, seed=seed))
    episode.seconds = time.monotonic() - began
    episode.versions = sorted(versions, key=lambda version: -1 if version is None else version)
    episode.actions = actions.hexdigest()[:16]
    return episode


async def serve(work: Work, make_actor: Callable[[Work], Actor], wire: TextIO) -> None:
    """Play the episodes whose seeds come on standard input."""

    def write(content: object) -> None:
        wire.write(json.dumps(content) + "\n")
        wire.flush()

    step_seconds = EnvironmentSettings.load().environment_step_seconds
    async with open_arena(work.environment, None, None) as arena:
        actor = make_actor(work)
        write({})
        cpu_before = time.process_time()
        for line in sys.stdin:
            write(asdict(await play(arena, actor, int(line), step_seconds)))
        cpu = time.process_time() - cpu_before
        write(asdict(Costs(cpu, psutil.Process().memory_info().rss / 1e6)))


def main(make_actor: Callable[[Work], Actor] = HeadActor) -> int:
    """Do the work of the command line; return the exit code."""
    # The environment's own output must not come between the lines for the coordinator.
    wire = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    work = Work(**json.loads(sys.argv[1]))
    return exit_code_of(lambda: asyncio.run(serve(work, make_actor, wire)))


if __name__ == "__main__":
    sys.exit(main())
