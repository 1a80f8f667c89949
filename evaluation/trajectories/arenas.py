"""The two places where episodes are played: environments in this process, and an environment server."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from services.clients.environment import EnvironmentServer
from services.core.endpoints import Endpoint
from services.core.errors import ConfigurationError, DependencyLostError
from services.environment_server.catalogue import Environment, MakeEnvironment, describe, open_with_trial
from services.environment_server.environments import ActionRefusedError, EnvironmentBrokenError, Transition, why_failed
from services.environment_server.settings import EnvironmentSettings
from services.http.client import RequestRefusedError
from services.protocol.evaluation import (
    Action,
    EnvironmentInfo,
    ResetRequest,
    State,
    StepItem,
    StepStatus,
)

CONTACT_SECONDS = 10.0
"""Longest wait for the first answer of an environment server."""


class Step(NamedTuple):
    """An action to take in an episode after ``steps`` others; ``handle`` is the arena's own name of the episode."""

    handle: Any
    steps: int
    action: Action


class Arena(Protocol):
    """A place to play episodes of one environment."""

    info: EnvironmentInfo

    async def begin(self, seeds: Sequence[int]) -> list[tuple[Any, State] | Exception]:
        """Begin an episode for each seed; return its handle and first state, or the error that keeps it from one."""

    async def step(self, steps: Sequence[Step]) -> list[Transition | Exception]:
        """Take one action in each of some episodes; return what follows, or the error that ends the episode.

        ActionRefusedError stands for an action that the environment does not take.
        """

    async def end(self, handles: Sequence[Any]) -> None:
        """Release episodes; an arena may be told so of any episode."""


class LocalArena:
    """Environments in this process."""

    def __init__(self, info: EnvironmentInfo, make: MakeEnvironment) -> None:
        self.info = info
        self._make = make

    async def begin(self, seeds: Sequence[int]) -> list[tuple[Any, State] | Exception]:
        """See Arena."""
        return [await self._begin(seed) for seed in seeds]

    async def _begin(self, seed: int) -> tuple[Environment, State] | Exception:
        try:
            environment = self._make()
            try:
                state = environment.reset(seed)
                return environment, await state if inspect.isawaitable(state) else state
            except BaseException:
                environment.close()
                raise
        # Environments are other people's code and may raise anything; it is the end of their episode.
        except Exception as error:  # noqa: BLE001
            return EnvironmentBrokenError(why_failed(error))

    async def step(self, steps: Sequence[Step]) -> list[Transition | Exception]:
        """See Arena."""
        taken: list[Transition | Exception] = []
        for environment, _, action in steps:
            try:
                outcome = environment.step(action)
                taken.append(outcome if isinstance(outcome, Transition) else await outcome)
            except ActionRefusedError as error:
                taken.append(error)
            except Exception as error:  # noqa: BLE001 - as above
                taken.append(EnvironmentBrokenError(why_failed(error)))
        return taken

    async def end(self, handles: Sequence[Environment]) -> None:
        """See Arena."""
        for environment in handles:
            environment.close()


class ServerArena:
    """An environment server."""

    def __init__(self, server: EnvironmentServer, info: EnvironmentInfo) -> None:
        self.info = info
        self._server = server

    async def begin(self, seeds: Sequence[int]) -> list[tuple[Any, State] | Exception]:
        """See Arena. The server refuses an environment that cannot begin, which ends the run."""
        begun: list[tuple[Any, State] | Exception] = []
        while len(begun) < len(seeds):
            first = seeds[len(begun)]
            # The server gives the episodes of one request consecutive seeds.
            count = 1
            while len(begun) + count < len(seeds) and seeds[len(begun) + count] == first + count:
                count += 1
            reply = await self._server.reset(ResetRequest(episodes=count, seed=first, request_id=uuid.uuid4().hex))
            begun += [(start.episode, start.state) for start in reply.episodes]
        return begun

    async def step(self, steps: Sequence[Step]) -> list[Transition | Exception]:
        """See Arena."""
        items = [StepItem.model_construct(episode=handle, step=at, action=action) for handle, at, action in steps]
        taken: list[Transition | Exception] = []
        for result in await self._server.step(items):
            if result.status is StepStatus.REFUSED:
                taken.append(ActionRefusedError(result.detail))
            elif result.status is StepStatus.LOST or result.state is None:
                taken.append(EnvironmentBrokenError(result.detail))
            else:
                terminated, truncated = (result.status is s for s in (StepStatus.TERMINATED, StepStatus.TRUNCATED))
                seat, rewards = result.seat or 0, tuple(result.rewards or ())
                taken.append(Transition(result.state, result.reward, terminated, truncated, seat=seat, rewards=rewards))
        return taken

    async def end(self, handles: Sequence[str]) -> None:
        """See Arena."""
        await self._server.end(handles)


def open_arena(environment: str | None, url: str | None, token: str | None) -> AbstractAsyncContextManager[Arena]:
    """Return an environment in this process, or the environment of the server at ``url``, as a context manager.

    Entering it raises ConfigurationError if the environment cannot be made, or is another one than the server's, and
    DependencyLostError if the server does not answer.
    """
    return _local(environment) if url is None else _at_server(environment, url, token)


@asynccontextmanager
async def _local(environment: str | None) -> AsyncIterator[LocalArena]:
    settings = EnvironmentSettings.load(environment=environment)
    async with AsyncExitStack() as stack:
        make, trial = await open_with_trial(settings, stack, "--environment")
        trial.close()
        info = describe(settings.environment, make, trial, settings.environment_max_steps)
        yield LocalArena(info, make)


@asynccontextmanager
async def _at_server(environment: str | None, url: str, token: str | None) -> AsyncIterator[ServerArena]:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        raise ConfigurationError(f"--server is {url!r}; needed is a URL such as http://127.0.0.1:8081")
    async with EnvironmentServer(Endpoint(parts.hostname, parts.port), token) as server:
        try:
            await server.wait_healthy(CONTACT_SECONDS)
        except DependencyLostError as error:
            raise DependencyLostError(
                f"no environment server at {url}: {error}; start one there, or correct --server"
            ) from error
        try:
            reply = await server.reset(ResetRequest())
            await server.end([start.episode for start in reply.episodes])
        except RequestRefusedError as error:
            raise ConfigurationError(f"--server {url}: {error.detail}") from error
        if environment not in (None, reply.environment.id):
            raise ConfigurationError(f"--server {url} has {reply.environment.id!r}, --environment is {environment!r}")
        yield ServerArena(server, reply.environment)
