"""A worker process, which plays episodes: ``python -m evaluation.policy.worker WORK``.

It is started by ``evaluation.policy.workers``. WORK is JSON, see Work. The process writes ``{}`` when it is ready. Then
it reads a line with a list of seeds, plays their episodes step by step together, and writes each Episode as a line of
JSON when it ends. When its input ends, it writes Costs and ends. It blocks while it waits for actions, because it has
nothing else to do. It sends a request for each step of its episodes, so it uses the standard library's HTTP client,
which takes a fraction of httpx's processor time.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TextIO
from urllib.parse import urlsplit

import orjson
import psutil

from evaluation.trajectories.arenas import Arena, Step, open_arena
from services.core.errors import ConfigurationError, DependencyLostError, exit_code_of
from services.environment_server.environments import Transition, why_failed
from services.environment_server.settings import EnvironmentSettings
from services.protocol.evaluation import Action, EpisodePosition, EvaluateRequest, FinishedEpisode, State

CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
ATTEMPT_SECONDS = 60.0
PAUSE_SECONDS = 0.5
_LATER = (429, 502, 503, 504)
_OF_THE_EPISODE = (400, 422, 500)
"""The policy does not take this state, or gives no action for it."""


@dataclass(frozen=True)
class Work:
    """The work of one worker process."""

    name: str
    """The worker's name on the head's dashboard."""
    environment: str
    head: str = ""
    """The head's URL."""
    policy: str | None = None
    """The head's policy; None: its first one."""
    patience_seconds: float = 120.0
    """Longest wait for one action, while the head may restart."""


@dataclass
class Episode:
    """An episode that came to its end, or in ``failed`` the reason why it did not."""

    seed: int
    episode_return: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    versions: list[int | None] = field(default_factory=list)
    """The versions of the policy that acted."""
    actions: str = ""
    """A hash of the actions."""
    failed: str = ""
    decision_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Costs:
    """Time and memory that a worker process took for its episodes."""

    cpu_seconds: float
    memory_mb: float


class Actor(Protocol):
    """The source of a worker's actions."""

    def act(self, positions: Sequence[EpisodePosition], states: Sequence[State]) -> list[tuple[Action, int | None]]:
        """Return for each state the action, and the version of the policy that chose it."""

    def finish(self, report: FinishedEpisode) -> None:
        """Take the report of an episode that has ended."""


class HeadActor:
    """The policy of an evaluation head; see Actor. Repeating a request does no harm at the head."""

    def __init__(self, work: Work) -> None:
        self._url = work.head
        self._patience = work.patience_seconds
        self._about: dict[str, Any] = {"server": work.name, "environment": work.environment, "policy": work.policy}
        parts = urlsplit(work.head)
        self._path = f"{parts.path.rstrip('/')}/evaluate"
        self._connection = CONNECTIONS[parts.scheme](parts.netloc, timeout=ATTEMPT_SECONDS)
        self._headers = {"Content-Type": "application/json"}
        if token := os.environ.get("JOBGROUP_TOKEN"):
            self._headers["Authorization"] = f"Bearer {token}"

    def act(self, positions: Sequence[EpisodePosition], states: Sequence[State]) -> list[tuple[Action, int | None]]:
        """Return for each state the action, and the version of the policy that chose it.

        Raises:
            RuntimeError: the head has no action for one of the states.
            ConfigurationError: the head refuses this worker.
            DependencyLostError: the head does not answer within the worker's patience.
        """
        reply = self._ask(states=states, episodes=positions)
        return list(zip(reply["actions"], reply["policy_versions"], strict=True))

    def finish(self, report: FinishedEpisode) -> None:
        """Tell the head that an episode has ended; raises as ``act`` does."""
        self._ask(finished=[report])

    def _ask(self, **fields: Any) -> Any:
        request = EvaluateRequest.model_construct(**self._about, **fields)
        body = request.__pydantic_serializer__.to_json(request, exclude_unset=True)
        end = time.monotonic() + self._patience
        while True:
            pause = PAUSE_SECONDS
            try:
                self._connection.request("POST", self._path, body, self._headers)
                response = self._connection.getresponse()
                content = response.read()
            except (OSError, http.client.HTTPException) as error:
                # The next request opens the connection anew.
                self._connection.close()
                reason = f"{type(error).__name__}: {error}"
            else:
                if response.status == 200:
                    return orjson.loads(content)
                reason = f"{response.status} {content[:300].decode(errors='replace')}"
                if response.status in _OF_THE_EPISODE:
                    raise RuntimeError(f"the head at {self._url} answers {reason}")
                if response.status not in _LATER:
                    raise ConfigurationError(f"the head at {self._url} answers {reason}")
                after = response.headers.get("Retry-After", "")
                pause = max(pause, float(after)) if after.isdecimal() else pause
            if time.monotonic() + pause > end:
                raise DependencyLostError(
                    f"the head at {self._url} gave no action within {self._patience:g} s: {reason}"
                )
            time.sleep(pause)


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
