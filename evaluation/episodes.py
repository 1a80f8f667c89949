"""Plays an episode for each of many seeds, in this process or on environment servers that it starts.

An episode that its environment or its server loses is played again.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from services.clients.environment import EnvironmentClient
from services.clients.play import Arena, Decision, Episode, Step, play_at_once
from services.core.endpoints import Endpoint
from services.core.errors import ConfigurationError
from services.core.machine import THREADS_VARIABLE, threads
from services.core.processes import Command
from services.core.supervisor import SupervisedProcess
from services.core.tasks import run_until_first_ends
from services.environment_server.catalogue import Environment, MakeEnvironment, describe, open_with_trial
from services.environment_server.environments import ActionRefusedError, result_of, why_failed
from services.environment_server.settings import EnvironmentSettings
from services.evaluation_head.policies import Policy, keep_fresh, make_policy
from services.evaluation_head.settings import HeadSettings
from services.http.client import RequestRefusedError
from services.http.server import listen
from services.protocol.evaluation import Action, EnvironmentInfo, StateKind, StepResult, StepStatus

TRIES = 3
"""An episode that its environment or server loses is played again from the beginning, this often in all."""
START_SECONDS = 300.0
HANG_SECONDS = 60.0
MAX_RESTARTS = 100
"""Restarts of a server in ten minutes: many seeds may kill the server of their episode, each of them three times."""


class OpenArena(NamedTuple):
    """An arena, and the environment of its episodes."""

    info: EnvironmentInfo
    arena: Arena[Any]


@dataclass(eq=False, kw_only=True)
class LocalEpisode(Episode):
    """An episode in this process."""

    environment: Environment


class LocalArena:
    """Environments in this process."""

    def __init__(self, info: EnvironmentInfo, make: MakeEnvironment) -> None:
        self._info = info
        self._make = make

    async def begin(self, seeds: Sequence[int]) -> list[Episode]:
        """See Arena."""
        return [await self._begin(seed) for seed in seeds]

    async def _begin(self, seed: int) -> Episode:
        try:
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


@asynccontextmanager
async def open_arena(environment: str | None) -> AsyncIterator[OpenArena]:
    """Yield an environment in this process.

    Raises:
        ConfigurationError: it cannot be made.
    """
    settings = EnvironmentSettings.load(environment=environment)
    async with AsyncExitStack() as stack:
        make, trial = await open_with_trial(settings, stack, "--environment")
        trial.close()
        info = describe(settings.environment, make, trial, settings.most_steps)
        yield OpenArena(info, LocalArena(info, make))


class Servers(EnvironmentClient):
    """Environment servers; see Arena."""

    def __init__(self, servers: Sequence[Endpoint], token: str | None) -> None:
        super().__init__(servers, token)
        # One worker begins after the other, so that the second sees the first one's episodes and takes another server.
        self._beginning = asyncio.Lock()

    async def begin(self, seeds: Sequence[int], split: str | None = None, source: str = "") -> list[Any]:
        """See Arena. Episodes that are refused together are lost, and can be begun one by one."""
        async with self._beginning:
            try:
                return [*await super().begin(seeds, split, source)]
            except RequestRefusedError as error:
                return [Episode.not_begun(seed, error.detail) for seed in seeds]


async def play_on_workers(
    environment: str, count: int, token: str | None, play: Callable[[Servers], Awaitable[object]]
) -> list[SupervisedProcess]:
    """Start environment servers, await ``play`` once all answer or START_SECONDS have passed, and end them.

    The servers ``worker-0`` and so on have equal shares of the cores, and write to this process's standard error.

    Returns:
        The servers' processes.

    Raises:
        ConfigurationError: a server cannot run with its settings, or never answered.
        DependencyLostError: no server answers after START_SECONDS, or one ended too often.
    """
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(listen("127.0.0.1", 0)) for _ in range(count)]
        addresses = [Endpoint("127.0.0.1", probe.getsockname()[1]) for probe in probes]
    own_threads = str(threads(processes=count))
    async with Servers(addresses, token) as servers:
        processes = [
            _worker(f"worker-{number}", environment, address, own_threads, servers)
            for number, address in enumerate(addresses)
        ]

        async def work() -> None:
            ready = [asyncio.ensure_future(process.wait_until_healthy(0)) for process in processes]
            _, late = await asyncio.wait(ready, timeout=START_SECONDS)
            for waiting in late:
                waiting.cancel()
            await servers.wait_healthy(0.0)
            await play(servers)

        await run_until_first_ends(work(), *(process.run() for process in processes))
    return processes


def _worker(name: str, environment: str, address: Endpoint, own_threads: str, servers: Servers) -> SupervisedProcess:
    async def is_healthy() -> bool:
        return await (await servers.connect(address.url)).is_healthy()

    variables = {"ENVIRONMENT": environment, THREADS_VARIABLE: own_threads}
    command = Command(
        name,
        sys.executable,
        "services.environment_server",
        ["--host", address.host, "--port", str(address.port)],
        variables | {"LOG_LEVEL": os.environ.get("LOG_LEVEL") or "warning"},
        withheld=("EVAL_HEAD_ENDPOINT", "SOURCES"),
    )
    limits: dict[str, Any] = {"max_restarts": MAX_RESTARTS, "start_seconds": START_SECONDS}
    return SupervisedProcess(command, is_healthy, **limits, hang_seconds=HANG_SECONDS)


class Play(Protocol):
    """The policies that play, and the record of their episodes."""

    async def ask(self, episodes: Sequence[Any]) -> Sequence[Decision]:
        """Return a decision for each of some episodes; see services.clients.play."""

    def add(self, steps: Sequence[Step]) -> None:
        """Take one step of each of some episodes."""

    def end(self, episode: Any) -> None:
        """Take an episode that the environment has ended."""


async def play_seeds(
    place: OpenArena, seeds: Iterable[int], record: Play, *, at_once: int, workers: int = 1
) -> dict[int, str]:
    """Play an episode for each seed; return why seeds have none that ended.

    An episode that is lost is played again after all others and alone, since it may have taken others with it. One
    that is refused is not, since the same action would be refused again.

    Args:
        place: the arena.
        seeds: different seeds.
        record: the policies and the record.
        at_once: episodes that one worker plays together; conversations are played each alone.
        workers: workers that play at once, each at its own pace.
    """
    todo = deque(seeds)
    refused: dict[int, str] = {}
    lost: dict[int, str] = {}

    def next_seeds(room: int) -> Sequence[int]:
        return [todo.popleft() for _ in range(min(room, len(todo)))]

    async def settle(episode: Episode) -> None:
        if episode.has_ended:
            record.end(episode)
        else:
            (refused if episode.status is StepStatus.REFUSED else lost)[episode.seed] = str(episode.detail)

    is_text = place.info.state.kind is StateKind.MESSAGES
    workers = min(workers, len(todo))
    size = min(at_once, -(-len(todo) // max(workers, 1)))
    sizes = [1] * (size * workers) if is_text else [size] * workers
    for _ in range(TRIES):
        todo.extend(sorted(lost))
        lost.clear()
        await play_at_once(sizes, place.arena, next_seeds, record.ask, settle, record.add)
        if not lost:
            break
        sizes = [1]
    return refused | lost


async def open_policies(
    stack: AsyncExitStack, text: str, info: EnvironmentInfo, at_once: int, **settings: Any
) -> tuple[dict[str, Policy], dict[str, str]]:
    """Open the policies of ``--policies`` until ``stack`` closes; return them and their targets by name.

    Raises:
        ConfigurationError: a policy cannot be loaded, or does not fit the environment.
    """
    settings["head_batch_size"] = os.environ.get("HEAD_BATCH_SIZE") or at_once
    head = HeadSettings.load(head_policies=text.replace(",", " "), head_llm_concurrency=at_once, **settings)
    if not head.policies:
        raise ConfigurationError("--policies is empty; name policies, as a=policies/cartpole,b=http://127.0.0.1:30000")
    policies = {
        name: await stack.enter_async_context(make_policy(name, target, head)) for name, target in head.policies.items()
    }
    if misfits := [why for policy in policies.values() if (why := policy.misfit(info))]:
        raise ConfigurationError("; ".join(misfits))
    for policy in policies.values():
        # A version in a directory stays the one that was loaded; those of models that others serve are followed.
        if "file" not in policy.stats():
            stack.callback(asyncio.create_task(keep_fresh(policy)).cancel)
    return policies, head.policies
