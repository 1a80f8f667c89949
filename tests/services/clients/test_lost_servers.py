"""Episodes whose servers are killed continue elsewhere, with the returns of an undisturbed run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY

from services.clients import environment
from services.clients.environment import EnvironmentClient
from services.core.endpoints import Endpoint
from services.core.errors import DependencyLostError
from services.environment_server.app import create_app
from services.environment_server.games import GuessingGame
from services.environment_server.settings import EnvironmentSettings
from services.protocol.evaluation import StepStatus
from tests.services.clients.playing import begun, guess, step
from tests.services.environment_server import odd_environments
from tests.services.run_page.serving import served
from tests.waiting import IDLE_SECONDS, wait_until

ODD = "tests.services.environment_server.odd_environments:"
TURNS = 6
AT_ONCE = 8


def replays() -> float:
    """Return how many episodes of this process have begun again elsewhere."""
    return REGISTRY.get_sample_value("client_episodes_replayed_total") or 0.0


async def undisturbed(seed: int) -> tuple[float, Any]:
    """Return return and last state of the episode of a seed, played in this process."""
    game = GuessingGame(TURNS)
    state: Any = await game.reset(seed)
    while True:
        reached = await game.step(guess(state))
        state = reached.state
        if reached.terminated or reached.truncated:
            return reached.reward, state


async def play(client: EnvironmentClient, seed: int, pause: float) -> tuple[float, Any]:
    async with begun(client, seed) as episode:
        while not episode.has_ended:
            await asyncio.sleep(pause)
            await step(client, episode, guess(episode.state))  # type: ignore[arg-type]
        return episode.episode_return, episode.state


async def play_until(client: EnvironmentClient, is_over: Callable[[], bool], pause: float) -> int:
    """Play episodes of all seeds in turn, AT_ONCE at a time, and compare each with the undisturbed one."""
    seeds = iter(range(10**6))

    async def keep_playing() -> int:
        played = 0
        while not is_over():
            seed = next(seeds)
            assert await play(client, seed, pause) == await undisturbed(seed)
            played += 1
        return played

    return sum(await asyncio.gather(*(keep_playing() for _ in range(AT_ONCE))))


class Server:
    """An environment-server in this process, which forgets its episodes when it is killed."""

    def __init__(self, name: str = "guessing", turns: int = TURNS) -> None:
        most = turns if name == "guessing" else None
        self._settings = EnvironmentSettings(environment=name, environment_max_steps=most, environment_server_name="a")
        self._running = ExitStack()
        self.port = 0

    def start(self) -> None:
        url = self._running.enter_context(served(create_app(self._settings), self.port))
        self.port = int(url.rpartition(":")[2])
        wait_until(lambda: httpx.get(f"{url}/health", timeout=IDLE_SECONDS, trust_env=False).is_success, "health")

    def kill(self) -> None:
        self._running.close()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """Starts servers, for which the client waits no longer than a moment."""
    for name, seconds in (("PAUSE_SECONDS", 0.02), ("ANSWER_SECONDS", 0.5), ("WAIT_SECONDS", 1.0)):
        monkeypatch.setattr(environment, name, seconds)
    started: list[Server] = []

    def start(*arguments: Any) -> Server:
        started.append(Server(*arguments))
        started[-1].start()
        return started[-1]

    yield start
    for server in started:
        server.kill()


@asynccontextmanager
async def client_of(*servers: Any, deadline: float = 60) -> AsyncIterator[EnvironmentClient]:
    async with EnvironmentClient([Endpoint("127.0.0.1", s.port) for s in servers], deadline=deadline) as client:
        yield client


async def wait_for_episodes(client: EnvironmentClient, place: int) -> None:
    while not client.active_on((await client.servers())[place]):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_run_whose_servers_stop_again_and_again_has_the_returns_of_an_undisturbed_run(
    start: Callable[..., Server],
) -> None:
    servers = [start(), start()]
    before = replays()

    async def restart() -> None:
        for place in (0, 1, 0):
            await wait_for_episodes(client, place)
            await asyncio.to_thread(servers[place].kill)
            await asyncio.to_thread(servers[place].start)

    async with client_of(*servers) as client:
        restarting = asyncio.create_task(restart())
        assert await play_until(client, restarting.done, 0.01) > AT_ONCE
        await restarting
    assert replays() - before >= 3, "each end has an episode that begins again"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"{ODD}Choosy", "does not declare that it is deterministic"),
        (f"{ODD}Dice", "reached another state after 0 actions"),
    ],
)
async def test_an_episode_that_cannot_begin_again_elsewhere_is_lost(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    # Each of the dice's beginnings is as of another process.
    monkeypatch.setattr(odd_environments, "os", SimpleNamespace(getpid=itertools.count().__next__))
    servers = [start(name), start(name)]
    async with client_of(*servers) as client, begun(client, 1) as episode:
        await step(client, episode, "perhaps")
        await asyncio.to_thread(servers[0].kill)
        lost = await step(client, episode, "yes")
    assert lost.status is StepStatus.LOST
    assert reason in str(lost.detail)


async def test_a_server_with_another_version_is_refused_with_both_versions(start: Callable[..., Server]) -> None:
    servers = [start(), start("guessing", 3)]
    async with client_of(*servers, deadline=3) as client:
        for seed in range(3):
            async with begun(client, seed) as episode:
                assert "6 guesses" in episode.state[0]["content"]  # type: ignore[index,call-overload]
        await asyncio.to_thread(servers[0].kill)
        with pytest.raises(DependencyLostError) as refused:
            await client.begin(4)
    assert "version '1, 3 guesses up to 100' instead of '1, 6 guesses up to 100'" in str(refused.value)
