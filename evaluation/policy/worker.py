"""A worker process, which plays episodes: ``python -m evaluation.policy.worker WORK``.

It is started by ``evaluation.policy.workers``. WORK is JSON, see Work. The process writes ``{}`` when it is ready. Then
it reads a line with a list of seeds, plays their episodes step by step together, and writes each Episode as a line of
JSON when it ends. When its input ends, it writes Costs and ends. It blocks while it waits for actions, because it has
nothing else to do.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol, TextIO

import orjson
import psutil

from evaluation.policy.head_actor import HeadActor
from evaluation.policy.records import Costs, Episode, Work
from evaluation.trajectories.arenas import Arena, Step, open_arena
from services.core.errors import exit_code_of
from services.environment_server.environments import Transition, why_failed
from services.environment_server.settings import EnvironmentSettings
from services.protocol.evaluation import Action, EpisodePosition, FinishedEpisode, State


class Actor(Protocol):
    """The source of a worker's actions."""

    def act(self, positions: Sequence[EpisodePosition], states: Sequence[State]) -> list[tuple[Action, int | None]]:
        """Return for each state the action, and the version of the policy that chose it."""

    def finish(self, report: FinishedEpisode) -> None:
        """Take the report of an episode that has ended."""


class _Open:
    """An episode under way."""

    def __init__(self, seed: int, handle: Any, state: State) -> None:
        self.episode = Episode(seed)
        self.handle = handle
        self.state = state
        self.name = f"seed-{seed}"
        self._began = time.monotonic()
        self._actions = hashlib.sha256()
        self._versions: set[int | None] = set()

    @property
    def position(self) -> EpisodePosition:
        """The place in the episode at which the next action is asked for."""
        steps, total = self.episode.steps, self.episode.episode_return
        return EpisodePosition.model_construct(episode=self.name, step=steps, episode_return=total)

    def decided(self, action: Action, version: int | None, seconds: float) -> Step:
        """Record an action that came after ``seconds``; return the step to take."""
        self.episode.decision_seconds.append(seconds)
        self._actions.update(orjson.dumps(action))
        self._versions.add(version)
        return Step(self.handle, self.episode.steps, action)

    def follow(self, outcome: Transition, max_steps: int) -> bool:
        """Record what a step led to; return True at the end of the episode."""
        self.episode.episode_return += outcome.reward
        self.episode.steps += 1
        self.state = outcome.state
        return outcome.terminated or outcome.truncated or self.episode.steps >= max_steps

    def ended(self) -> Episode:
        """Return the record of the episode."""
        self.episode.seconds = time.monotonic() - self._began
        self.episode.versions = sorted(self._versions, key=lambda version: -1 if version is None else version)
        self.episode.actions = self._actions.hexdigest()[:16]
        return self.episode


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """End the process by SIGALRM if the context takes longer, even where the environment's code never returns."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


async def play(arena: Arena, actor: Actor, seeds: Sequence[int], step_seconds: float) -> AsyncIterator[Episode]:
    """Play episodes together and yield each when it ends.

    A step of all of them that takes longer than ``step_seconds`` for each ends the process by SIGALRM.

    Raises:
        ConfigurationError: the head refuses this worker.
        DependencyLostError: the head does not answer.
    """
    playing: list[_Open] = []
    for seed in seeds:
        with _limit(step_seconds):
            [begun] = await arena.begin([seed])
        if isinstance(begun, Exception):
            yield _failed(Episode(seed), begun)
        else:
            playing.append(_Open(seed, *begun))
    while playing:
        asked = time.perf_counter()
        decisions = _decisions(actor, playing)
        seconds = time.perf_counter() - asked
        going = [(one, made) for one, made in zip(playing, decisions, strict=True) if not isinstance(made, Exception)]
        steps = [one.decided(*made, seconds) for one, made in going]
        with _limit(step_seconds * max(1, len(steps))):
            outcomes = dict(zip((one for one, _ in going), await arena.step(steps), strict=True))
        for one, decision in zip(list(playing), decisions, strict=True):
            outcome = decision if isinstance(decision, Exception) else outcomes[one]
            if isinstance(outcome, Exception) or one.follow(outcome, arena.info.max_steps):
                playing.remove(one)
                await arena.end([one.handle])
                yield _failed(one.episode, outcome) if isinstance(outcome, Exception) else _finish(one, actor)


def _decisions(actor: Actor, playing: Sequence[_Open]) -> list[tuple[Action, int | None] | Exception]:
    """Return for each episode the action and the version of the policy, or the reason why there is none."""
    try:
        return [*actor.act([one.position for one in playing], [one.state for one in playing])]
    except RuntimeError as error:
        # The policy refuses a whole request because of one of its states.
        return [error] if len(playing) == 1 else [made for one in playing for made in _decisions(actor, [one])]


def _finish(one: _Open, actor: Actor) -> Episode:
    episode = one.ended()
    report = FinishedEpisode.model_construct(
        episode=one.name, steps=episode.steps, episode_return=episode.episode_return, seed=episode.seed
    )
    try:
        actor.finish(report)
    except RuntimeError as error:
        return _failed(episode, error)
    return episode


def _failed(episode: Episode, error: Exception) -> Episode:
    return Episode(episode.seed, failed=why_failed(error))


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
            async for episode in play(arena, actor, json.loads(line), step_seconds):
                write(asdict(episode))
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
