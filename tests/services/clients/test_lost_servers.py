"""Episodes whose servers are killed continue elsewhere, with the returns of an undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.clients import environment
from services.clients.environment import EnvironmentClient, ServedEpisode
from services.core.endpoints import Endpoint
from services.core.errors import DependencyLostError
from services.environment_server.games import GuessingGame
from services.protocol.evaluation import StepStatus
from tests.services.clients.playing import begun, step
from tests.services.conftest import RunningService, StartService

ODD = "tests.services.environment_server.odd_environments:"
TURNS = 6
AT_ONCE = 8


def replays() -> float:
    """Return how many episodes of this process have begun again elsewhere."""
    return REGISTRY.get_sample_value("client_episodes_replayed_total") or 0.0


def guess(messages: list[dict[str, Any]]) -> str:
    """Bisect the numbers from 1 to 100, beginning at a place that depends on the conversation alone."""
    low, high = 1, 100
    for number, answer in zip(messages[1::2], messages[2::2], strict=True):
        value = int(number["content"])
        low, high = (value + 1, high) if answer["content"] == "Higher." else (low, value - 1)
    return str((low + high) // 2)


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


def start(
    start_service: StartService, name: str = "guessing", port: int | None = None, **options: Any
) -> RunningService:
    variables = {"ENVIRONMENT": name, "ENVIRONMENT_TEXT_TURNS": str(TURNS)}
    return start_service("services.environment_server", port=port, **(variables | options))


@asynccontextmanager
async def client_of(*servers: RunningService, deadline: float = 60) -> AsyncIterator[EnvironmentClient]:
    async with EnvironmentClient([Endpoint("127.0.0.1", s.port) for s in servers], deadline=deadline) as client:
        yield client


async def kill_and_start(
    start_service: StartService, client: EnvironmentClient, servers: list[RunningService], place: int
) -> None:
    """Kill a server while it has episodes, and start it again at its port."""
    while not client.active_on((await client.servers())[place]):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    servers[place].kill()
    servers[place] = await asyncio.to_thread(start, start_service, port=servers[place].port)


async def test_a_run_whose_servers_are_killed_again_and_again_has_the_returns_of_an_undisturbed_run(
    start_service: StartService,
) -> None:
    servers = [start(start_service), start(start_service)]
    before = replays()
    kills = 0

    async def kill() -> None:
        nonlocal kills
        for place in (0, 1, 0):
            await kill_and_start(start_service, client, servers, place)
            kills += 1

    async with client_of(*servers) as client:
        killing = asyncio.create_task(kill())
        assert await play_until(client, killing.done, 0.05) > AT_ONCE
        await killing
    assert kills == 3
    assert replays() - before >= kills, "each kill has an episode that begins again"


@pytest.mark.slow
async def test_a_server_killed_every_30_seconds_nine_times_loses_no_episode(start_service: StartService) -> None:
    servers = [start(start_service)]
    before = replays()
    kills = 0

    async def kill() -> None:
        nonlocal kills
        while kills < 9:
            await asyncio.sleep(30)
            await kill_and_start(start_service, client, servers, 0)
            kills += 1

    async with client_of(*servers) as client:
        killing = asyncio.create_task(kill())
        played = await play_until(client, killing.done, 0.2)
        await killing
    replayed = replays() - before
    assert replayed >= kills, f"{kills} kills, {replayed:.0f} of {played} episodes continued after one"
    assert played > replayed, "episodes also end between two kills"


async def lose(
    client: EnvironmentClient, episode: ServedEpisode, server: RunningService, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Kill the server of an episode and return why the episode cannot continue."""
    await step(client, episode, "perhaps")
    kill(server, monkeypatch)
    lost = await step(client, episode, "yes")
    assert lost.status is StepStatus.LOST
    return str(lost.detail)


def kill(server: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a server, for which the client waits no longer than half a second from now on."""
    monkeypatch.setattr(environment, "ANSWER_SECONDS", 0.5)
    server.kill()


async def test_an_episode_that_is_not_declared_deterministic_is_lost(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [start(start_service, f"{ODD}Choosy") for _ in range(2)]
    monkeypatch.setattr(environment, "WAIT_SECONDS", 1)
    async with client_of(*servers) as client, begun(client, 1) as episode:
        assert "does not declare that it is deterministic" in await lose(client, episode, servers[0], monkeypatch)


async def test_an_episode_that_begins_otherwise_elsewhere_is_lost(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [start(start_service, f"{ODD}Dice") for _ in range(2)]
    async with client_of(*servers) as client, begun(client, 1) as episode:
        assert "reached another state after 0 actions" in await lose(client, episode, servers[0], monkeypatch)


async def test_a_server_with_another_version_is_refused_with_both_versions(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [start(start_service), start(start_service, ENVIRONMENT_TEXT_TURNS="3")]
    async with client_of(*servers, deadline=3) as client:
        for seed in range(3):
            async with begun(client, seed) as episode:
                assert "6 guesses" in episode.state[0]["content"]  # type: ignore[index,call-overload]
        kill(servers[0], monkeypatch)
        with pytest.raises(DependencyLostError) as refused:
            await client.begin([4])
    assert "version '1, 3 guesses up to 100' instead of '1, 6 guesses up to 100'" in str(refused.value)
