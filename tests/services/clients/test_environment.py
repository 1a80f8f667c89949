"""The client of environment-servers against real servers in this process, also where they are killed."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client import REGISTRY

from services.clients import environment
from services.clients.environment import EnvironmentClient, find_servers
from services.core.endpoints import Endpoint, Task, bind_address
from services.core.errors import DependencyLostError
from services.environment_server.app import create_app
from services.environment_server.games import GuessingGame
from services.environment_server.settings import EnvironmentSettings
from services.http.client import RequestRefusedError
from services.protocol.evaluation import StepStatus
from tests.fake_service import fake_service
from tests.services.clients.playing import begun, guess, step
from tests.services.environment_server import odd_environments
from tests.services.run_page.serving import served, served_ready
from tests.waiting import IDLE_SECONDS, wait_until

ODD = "tests.services.environment_server.odd_environments:"
NOBODY = Endpoint("127.0.0.1", 9)


def address_of(url: str) -> Endpoint:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return Endpoint(parts.hostname, parts.port)


@pytest.fixture
def servers() -> Iterator[list[Endpoint]]:
    """Two servers with the guessing game."""
    with ExitStack() as stack:
        settings = EnvironmentSettings(environment="guessing", environment_max_steps=2, environment_server_name="a")
        yield [address_of(stack.enter_context(served_ready(create_app(settings)))) for _ in range(2)]


async def test_equal_seeds_begin_equal_episodes_on_all_servers_in_turn(servers: list[Endpoint]) -> None:
    async with EnvironmentClient(servers) as client:
        episodes = [await client.begin(3) for _ in range(4)]
        assert [client.active_on(server) for server in await client.servers()] == [2, 2]
        answers = [(await step(client, episode, "50")).state for episode in episodes]
        assert all(answer == answers[0] for answer in answers)
        for episode in episodes:
            await client.end(episode)
        assert [client.active_on(server) for server in await client.servers()] == [0, 0]


async def test_a_server_that_does_not_answer_is_passed_over(
    servers: list[Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ANSWER_SECONDS", 0.3)
    async with EnvironmentClient([NOBODY, servers[0]]) as client:
        await client.wait_healthy(IDLE_SECONDS)
        async with begun(client, 1) as episode:
            assert (await step(client, episode, "1")).status is StepStatus.RUNNING
    async with EnvironmentClient([NOBODY], deadline=0.5) as client:
        with pytest.raises(DependencyLostError, match="no environment-server began an episode"):
            await client.begin(1)
        with pytest.raises(DependencyLostError, match="no environment-server is healthy"):
            await client.wait_healthy(0.1)


async def test_an_environment_that_fails_loses_its_episode() -> None:
    settings = EnvironmentSettings(environment=f"{ODD}Odd/Broken-v0", environment_server_name="a")
    with served_ready(create_app(settings)) as url:
        async with EnvironmentClient([address_of(url)]) as client, begun(client, 1) as episode:
            lost = await step(client, episode, 1)
    assert (lost.status, lost.environment_failed) == (StepStatus.LOST, True)
    assert "a gear fell off" in str(lost.detail)


async def test_a_split_is_that_of_the_environments_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATASET", "arithmetic")
    monkeypatch.setenv("REWARD_WORKERS", "1")
    settings = EnvironmentSettings(environment="gsm8k", environment_server_name="a")
    questions: dict[str | None, set[Any]] = {"train": set(), "test": set(), None: set()}
    with served_ready(create_app(settings)) as url:
        async with EnvironmentClient([address_of(url)]) as client:
            for split, found in questions.items():
                for seed in range(40):
                    async with begun(client, seed, split) as episode:
                        found.add(episode.state[-1]["content"])
            with pytest.raises(RequestRefusedError, match="there are test, train"):
                await client.begin(1, "validation")
    assert not questions["train"] & questions["test"]
    assert questions[None] == questions["test"], "without a split, an episode is that of a held-out question"


@pytest.mark.parametrize("health", [{}, 503], ids=["healthy", "away"])
async def test_the_client_waits_for_the_only_server_that_can_continue_an_episode(
    monkeypatch: pytest.MonkeyPatch, health: Any
) -> None:
    monkeypatch.setattr(environment, "ANSWER_SECONDS", 0.2)
    info = {"id": "e", "state": {"kind": "messages"}, "action": {"kind": "text"}, "max_steps": 9}
    start = {"environment": info, "episodes": [{"episode": "x", "seed": 1, "state": []}]}
    result = {"episode": "x", "status": "terminated", "state": [], "reward": 1.0, "steps": 1, "episode_return": 1.0}
    asked: list[int] = []

    def answer(_: Any) -> Any:
        asked.append(1)
        return 503 if len(asked) < 6 else {"results": [result]}

    with fake_service(
        {"POST /reset": lambda _: start, "POST /step": answer, "GET /health": lambda _: health}
    ) as server:
        async with EnvironmentClient([server.endpoint]) as client, begun(client, 1) as episode:
            assert (await step(client, episode, "1")).reward == 1.0


@pytest.fixture
def resolvable(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names that resolve, in the job group ``grpo``; none at first."""
    hosts: set[str] = set()

    async def resolve(_: Any, host: str, *rest: Any, **options: Any) -> list[Any]:
        if host not in hosts:
            raise OSError("no such name")
        return []

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", resolve)
    monkeypatch.setattr("uvloop.Loop.getaddrinfo", resolve, raising=False)
    monkeypatch.setenv("SKYPILOT_JOBGROUP_NAME", "grpo")
    return hosts


@pytest.mark.usefixtures("resolvable")
async def test_servers_whose_names_do_not_resolve_are_named() -> None:
    async with EnvironmentClient(deadline=0) as client:
        for asked in (client.wait_healthy(0), client.settings(), client.begin(1)):
            with pytest.raises(DependencyLostError, match=r"no server's name resolves, environment-server-0\.grpo"):
                await asked


async def test_servers_are_found_by_name(resolvable: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    resolvable |= {"environment-server-0.grpo", "environment-server-2.grpo"}
    assert [found.host for found in (await find_servers()).values()] == ["environment-server-0.grpo"]
    resolvable.add("environment-server-1.grpo")
    found = await find_servers()
    assert [*found] == [f"environment-server-{rank}" for rank in range(3)]
    resolvable.remove("environment-server-1.grpo")
    assert await find_servers(found) == found, "a node that was found before comes back under its name"
    listed = {f"environment-server-{rank}:8081": f"127.0.0.{rank}:1" for rank in range(2)}
    monkeypatch.setenv("JOBGROUP_ENDPOINTS", json.dumps(listed | {"gateway-0:8005": "127.0.0.9:1"}))
    assert [found.host for found in (await find_servers()).values()] == ["127.0.0.0", "127.0.0.1"]


async def test_servers_of_each_image_are_found(resolvable: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOBGROUP_ENVIRONMENT_SERVERS", "3")
    resolvable |= {f"environment-server{node}.grpo" for node in ("-0", "-1", "-3-0")}
    assert [*await find_servers()] == ["environment-server-0", "environment-server-1", "environment-server-3-0"]
    assert await find_servers(task=Task.GATEWAY) == {}
    nodes = {"environment-server-0": "127.0.0.1", "environment-server-2-0": "127.0.0.2"}
    monkeypatch.setenv("JOBGROUP_ENDPOINTS", json.dumps({f"{node}:8081": f"{host}:1" for node, host in nodes.items()}))
    assert {node: found.host for node, found in (await find_servers()).items()} == nodes
    monkeypatch.setenv("JOBGROUP_TASK", "environment-server-2")
    assert bind_address(Task.ENVIRONMENT_SERVER).host == "127.0.0.2"


async def test_a_run_waits_for_a_server_of_each_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOBGROUP_ENVIRONMENT_SERVERS", "2")
    with fake_service({"GET /health": lambda _: {}}) as server:
        up, away = (f"{address.host}:{address.port}" for address in (server.endpoint, NOBODY))
        for addresses, silent in (
            ((up, away), "environment-server-2"),
            ((away, up), "environment-server"),
            ((up, up), ""),
        ):
            nodes = zip(("environment-server-0:8081", "environment-server-2-0:8081"), addresses, strict=True)
            monkeypatch.setenv("JOBGROUP_ENDPOINTS", json.dumps(dict(nodes)))
            async with EnvironmentClient() as client:
                if not silent:
                    await client.wait_healthy(0.2)
                    continue
                with pytest.raises(DependencyLostError, match=rf"no {silent} is healthy .*:9; "):
                    await client.wait_healthy(0.2)


async def test_a_task_is_played_by_the_server_that_has_its_image() -> None:
    info = {"id": "e", "state": {"kind": "messages"}, "action": {"kind": "text"}, "max_steps": 9}
    asked: list[tuple[str, int]] = []

    def server_of(name: str, *seeds: int) -> Any:
        def reset(request: Any) -> Any:
            asked.append((name, request["seed"]))
            episode = {"episode": f"{name}{len(asked)}", "seed": request["seed"], "state": []}
            return {"environment": info, "episodes": [episode]} if request["seed"] in seeds else 421

        return fake_service({"POST /reset": reset, "POST /close": lambda _: {"closed": 1}})

    with server_of("a", 1) as a, server_of("b", 2) as b:
        async with EnvironmentClient([a.endpoint, b.endpoint], deadline=0.5) as client:
            for seed in (1, 2, 1, 2):
                async with begun(client, seed) as episode:
                    assert episode.server.url == {1: a, 2: b}[seed].endpoint.url
            assert max(map(asked.count, {("a", 2), ("b", 1)})) == 1, "a server is not asked again for another's task"
            with pytest.raises(DependencyLostError):
                await client.begin(3)


# --- servers that are killed -----------------------------------------------------------------------------------------


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
        # A server that is slow to answer is passed over, so that the episode may have begun at either.
        (place,) = [server for server in servers if server.port == address_of(episode.server.url).port]
        await asyncio.to_thread(place.kill)
        lost = await step(client, episode, "yes")
    assert lost.status is StepStatus.LOST
    assert reason in str(lost.detail)


async def test_a_server_with_another_version_is_refused_with_both_versions(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [start(), start("guessing", 3)]
    monkeypatch.setattr(environment, "ANSWER_SECONDS", IDLE_SECONDS)
    async with client_of(*servers) as client:
        for seed in range(3):
            async with begun(client, seed) as episode:
                assert "6 guesses" in episode.state[0]["content"]  # type: ignore[index,call-overload]
        known = client.environments
    # Each look at the clock finds it later, so that the client gives up however long the answers take.
    monkeypatch.setattr(environment, "time", SimpleNamespace(monotonic=itertools.count(0, 40).__next__))
    async with client_of(servers[1]) as client:
        client.environments |= known
        with pytest.raises(DependencyLostError) as refused:
            await client.begin(4)
    assert "version '1, 3 guesses up to 100' instead of '1, 6 guesses up to 100'" in str(refused.value)
