"""The two places where the commands play episodes: environments in this process, and an environment server."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager as AsyncContext
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from services.clients.environment import EnvironmentClient
from services.clients.play import Arena, Episode
from services.core.endpoints import Endpoint
from services.core.errors import ConfigurationError, DependencyLostError
from services.environment_server.catalogue import Environment, MakeEnvironment, describe, open_with_trial
from services.environment_server.environments import ActionRefusedError, result_of, why_failed
from services.environment_server.settings import EnvironmentSettings
from services.http.client import RequestRefusedError
from services.protocol.evaluation import Action, EnvironmentInfo, StepResult, StepStatus

CONTACT_SECONDS = 10.0
"""Longest wait for the first answer of an environment server."""


class OpenArena(NamedTuple):
    """An arena, and the environment of its episodes."""

    info: EnvironmentInfo
    arena: Arena[Any]


@dataclass(eq=False, kw_only=True)
class LocalEpisode(Episode):
    """An episode in this process."""

    environment: Environment


Limit = Callable[[], AbstractContextManager[None]]
"""Returns a context within which an environment is reset or stepped."""


class LocalArena:
    """Environments in this process."""

    def __init__(self, info: EnvironmentInfo, make: MakeEnvironment, limit: Limit) -> None:
        self._info = info
        self._make = make
        self._limit = limit

    async def begin(self, seeds: Sequence[int]) -> list[Episode]:
        """See Arena."""
        return [await self._begin(seed) for seed in seeds]

    async def _begin(self, seed: int) -> Episode:
        try:
            with self._limit():
                environment = self._make(seed)
                try:
                    state = environment.reset(seed)
                    first = await state if inspect.isawaitable(state) else state
                except BaseException:
                    environment.close()
                    raise
        # Environments are other people's code and may raise anything; it is the end of their episode.
        except Exception as error:  # noqa: BLE001
            return Episode.not_begun(seed, why_failed(error))
        returns = [0.0] * self._info.seats
        return LocalEpisode(f"seed-{seed}", seed, first, returns=returns, environment=environment)

    async def step(self, moves: Sequence[tuple[LocalEpisode, Action]]) -> list[StepResult]:
        """See Arena."""
        return [await self._step(episode, action) for episode, action in moves]

    async def _step(self, episode: LocalEpisode, action: Action) -> StepResult:
        try:
            with self._limit():
                outcome = episode.environment.step(action)
                transition = await outcome if inspect.isawaitable(outcome) else outcome
            return result_of(transition, self._info, episode.id, episode.steps + 1, episode.episode_return)
        except ActionRefusedError as error:
            return StepResult(episode=episode.id, status=StepStatus.REFUSED, detail=str(error))
        except Exception as error:  # noqa: BLE001 - as above
            return StepResult(episode=episode.id, status=StepStatus.LOST, detail=why_failed(error))

    async def end(self, episodes: Sequence[Episode]) -> None:
        """See Arena."""
        for episode in episodes:
            if isinstance(episode, LocalEpisode):
                episode.environment.close()


def open_arena(
    environment: str | None, url: str | None, token: str | None, limit: Limit = nullcontext
) -> AsyncContext[OpenArena]:
    """Return an environment in this process, or the environment of the server at ``url``, as a context manager.

    ``limit`` is for each call of an environment in this process. Entering the context raises ConfigurationError if the
    environment cannot be made or differs from the server's, and DependencyLostError if the server does not answer.
    """
    return _local(environment, limit) if url is None else _at_server(environment, url, token)


@asynccontextmanager
async def _local(environment: str | None, limit: Limit) -> AsyncIterator[OpenArena]:
    settings = EnvironmentSettings.load(environment=environment)
    async with AsyncExitStack() as stack:
        make, trial = await open_with_trial(settings, stack, "--environment")
        trial.close()
        info = describe(settings.environment, make, trial, settings.most_steps)
        yield OpenArena(info, LocalArena(info, make, limit))


@asynccontextmanager
async def _at_server(environment: str | None, url: str, token: str | None) -> AsyncIterator[OpenArena]:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        raise ConfigurationError(f"--server is {url!r}; needed is a URL such as http://127.0.0.1:8081")
    async with EnvironmentClient([Endpoint(parts.hostname, parts.port)], token) as client:
        try:
            await client.wait_healthy(CONTACT_SECONDS)
        except DependencyLostError as error:
            raise DependencyLostError(
                f"no environment server at {url}: {error}; start one there, or correct --server"
            ) from error
        try:
            [trial] = episodes = await client.begin([0])
            await client.end(episodes)
        except RequestRefusedError as error:
            raise ConfigurationError(f"--server {url}: {error.detail}") from error
        if environment not in (None, trial.environment.id):
            raise ConfigurationError(f"--server {url} has {trial.environment.id!r}, --environment is {environment!r}")
        yield OpenArena(trial.environment, client)
