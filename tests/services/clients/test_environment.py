"""The client of environment-servers against real servers in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest

from services.clients import environment
from services.clients.environment import EnvironmentClient, find_servers
from services.core.endpoints import Endpoint
from services.core.errors import DependencyLostError
from services.environment_server.app import create_app
from services.environment_server.settings import EnvironmentSettings
from services.http.client import RequestRefusedError
from services.protocol.evaluation import StepStatus
from tests.fake_service import fake_service
from tests.services.clients.playing import begun, step
from tests.services.run_page.serving import served_ready

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
        await client.wait_healthy(5)
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
    assert [found.host for found in await find_servers(0)] == ["environment-server-0.grpo"]
    resolvable.add("environment-server-1.grpo")
    assert len(await find_servers(1)) == 3
    resolvable.remove("environment-server-1.grpo")
    assert len(await find_servers(3)) == 3, "a node that was found before comes back under its name"
    listed = {f"environment-server-{rank}:8081": f"127.0.0.{rank}:1" for rank in range(2)}
    monkeypatch.setenv("JOBGROUP_ENDPOINTS", json.dumps(listed | {"gateway-0:8005": "127.0.0.9:1"}))
    assert [found.host for found in await find_servers(0)] == ["127.0.0.0", "127.0.0.1"]
