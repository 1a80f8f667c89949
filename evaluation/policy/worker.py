"""A worker process, which plays episodes: ``python -m evaluation.policy.worker WORK``.

It is started by ``evaluation.policy.workers``. WORK is JSON, see Work. The process writes ``{}`` when it is ready. Then
it reads a line with a list of seeds, plays their episodes step by step together, and writes each PlayedEpisode as a
line of JSON when it ends. When its input ends, it writes Costs and ends. It blocks while it waits for actions, because
it has nothing else to do. It sends a request for each step of its episodes, so it uses the standard library's HTTP
client, which takes a fraction of httpx's processor time.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol, TextIO
from urllib.parse import urlsplit

import orjson
import psutil

from evaluation.trajectories.arenas import open_arena
from services.clients.play import Arena, Decision, Episode, NoActionError, Step, play
from services.core.errors import ConfigurationError, DependencyLostError, exit_code_of
from services.environment_server.settings import EnvironmentSettings
from services.protocol.evaluation import EpisodePosition, EvaluateRequest, FinishedEpisode, State

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
class PlayedEpisode:
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

    def act(self, positions: Sequence[EpisodePosition], states: Sequence[State]) -> list[Decision]:
        """Return a decision for each state."""

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

    def act(self, positions: Sequence[EpisodePosition], states: Sequence[State]) -> list[Decision]:
        """Return a decision for each state.

        Raises:
            NoActionError: the head has no action for one of the states.
            ConfigurationError: the head refuses this worker.
            DependencyLostError: the head does not answer within the worker's patience.
        """
        reply = self._ask(states=states, episodes=positions)
        return list(map(Decision, reply["actions"], reply["policy_versions"]))

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
                # The next request opens a new connection.
                self._connection.close()
                reason = f"{type(error).__name__}: {error}"
            else:
                if response.status == 200:
                    return orjson.loads(content)
                reason = f"{response.status} {content[:300].decode(errors='replace')}"
                if response.status in _OF_THE_EPISODE:
                    raise NoActionError(f"the head at {self._url} answers {reason}")
                if response.status not in _LATER:
                    raise ConfigurationError(f"the head at {self._url} answers {reason}")
                after = response.headers.get("Retry-After", "")
                pause = max(pause, float(after)) if after.isdecimal() else pause
            if time.monotonic() + pause > end:
                raise DependencyLostError(
                    f"the head at {self._url} gave no action within {self._patience:g} s: {reason}"
                )
            time.sleep(pause)


@contextmanager
def limited_to(seconds: float) -> Iterator[None]:
    """End the process by SIGALRM if the context takes longer, even where the environment's code never returns."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class WorkerPlay:
    """The play of some seeds' episodes with an actor; ``write`` gets the record of each that ends or fails."""

    def __init__(self, actor: Actor, seeds: Sequence[int], write: Callable[[PlayedEpisode], None]) -> None:
        self._actor = actor
        self._write = write
        self._todo = list(seeds)
        self._records = {seed: PlayedEpisode(seed) for seed in seeds}
        self._actions = {seed: hashlib.sha256() for seed in seeds}
        self._began: dict[int, float] = {}

    async def run(self, arena: Arena[Episode]) -> None:
        """Play all episodes together.

        Raises:
            ConfigurationError: the head refuses this worker.
            DependencyLostError: the head does not answer.
        """
        await play(len(self._todo), arena, self._seeds, self._ask, self._end, self._record)

    def _seeds(self, room: int) -> Sequence[int]:
        seeds, self._todo = self._todo, []
        return seeds

    async def _ask(self, episodes: Sequence[Episode]) -> list[Decision]:
        began = time.perf_counter()
        for episode in episodes:
            self._began.setdefault(episode.seed, time.monotonic())
        decisions = self._actor.act([e.position for e in episodes], [e.state for e in episodes])
        seconds = time.perf_counter() - began
        for episode in episodes:
            self._records[episode.seed].decision_seconds.append(seconds)
        return decisions

    def _record(self, steps: Sequence[Step]) -> None:
        for episode, decision, _ in steps:
            self._actions[episode.seed].update(orjson.dumps(decision.action))
            versions = self._records[episode.seed].versions
            if decision.version not in versions:
                versions.append(decision.version)

    async def _end(self, episode: Episode) -> None:
        record = self._records[episode.seed]
        failed = None if episode.has_ended else str(episode.detail)
        if failed is None:
            record.episode_return, record.steps = episode.episode_return, episode.steps
            record.seconds = time.monotonic() - self._began[episode.seed]
            record.versions.sort(key=lambda version: -1 if version is None else version)
            record.actions = self._actions[episode.seed].hexdigest()[:16]
            try:
                self._actor.finish(episode.report)
            except NoActionError as error:
                failed = error.detail
        self._write(record if failed is None else PlayedEpisode(episode.seed, failed=failed))


async def serve(work: Work, make_actor: Callable[[Work], Actor], wire: TextIO) -> None:
    """Play the episodes whose seeds come on standard input."""

    def write(content: object) -> None:
        wire.write(json.dumps(content) + "\n")
        wire.flush()

    limit = partial(limited_to, EnvironmentSettings.load().environment_step_seconds)
    async with open_arena(work.environment, None, None, limit) as (_, arena):
        actor = make_actor(work)
        write({})
        cpu_before = time.process_time()
        for line in sys.stdin:
            await WorkerPlay(actor, json.loads(line), lambda episode: write(asdict(episode))).run(arena)
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
