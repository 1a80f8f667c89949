"""The driver on real environment servers, which restart, break the protocol, hang, or push."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import httpx
import numpy as np
import pytest
import torch
import uvicorn
from fastapi import FastAPI, Request

from services.clients import environment
from services.environment_server.app import create_app as create_environment_app
from services.environment_server.settings import EnvironmentSettings
from services.evaluation_head.checkpoint import publish_policy
from services.evaluation_head.driver import Driver
from services.evaluation_head.policy import FunctionPolicy
from services.evaluation_head.registry import Meter, Registry
from services.evaluation_head.settings import HeadSettings
from services.protocol.evaluation import ActionKind, ActionSpec, DiscoveredServer, StateKind, StateSpec
from tests.ports import free_port
from tests.services.clients.test_lost_servers import TURNS, guess, undisturbed
from tests.services.environment_server.conftest import ODD
from tests.services.run_page.serving import served
from tests.waiting import IDLE_SECONDS, eventually, stats_show


@pytest.fixture
def environment_server() -> Any:
    """``environment_server(...)``: the URL of an environment server with those settings."""
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> str:
            settings = EnvironmentSettings(**{"environment_server_name": "env", **options})
            return stack.enter_context(served(create_environment_app(settings)))

        yield start


def row(stats: dict[str, Any], name: str | None = None) -> dict[str, Any]:
    rows = [server for server in stats["servers"] if name is None or server["name"] == name]
    assert len(rows) == 1, [server["name"] for server in stats["servers"]]
    return rows[0]


async def stats_of(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=IDLE_SECONDS, trust_env=False) as client:
        return (await client.get("/stats")).json()


def gymnasium_returns(seeds: range) -> list[float]:
    """Return the returns of the leaning policy when gymnasium runs in this process."""
    returns = []
    for seed in seeds:
        environment = gymnasium.make("CartPole-v1")
        state, _ = environment.reset(seed=seed)
        total, done = 0.0, False
        while not done:
            action = int(np.float32(state[2]) + np.float32(0.3) * np.float32(state[3]) > 0)
            state, reward, terminated, truncated, _ = environment.step(action)
            total, done = total + reward, terminated or truncated
        returns.append(total)
    return returns


async def test_returns_on_a_discovered_server_equal_those_of_gymnasium(
    serving: Any, head: Any, environment_server: Any, lean: Path
) -> None:
    options = {"head_policies": f"lean={lean}", "head_drive_total": 6, "head_drive_episodes": 4}
    async with serving(head(game_server_addresses=environment_server(), **options)) as client:
        stats = await stats_show(client, lambda stats: stats["episodes"]["finished"] == 6)
        server = row(stats)
        assert server["returns"]["mean"] == pytest.approx(np.mean(gymnasium_returns(range(6))))
        assert (server["state"], server["lost"], server["active"]) == ("connected", 0, 0)
        assert server["states"] == sum(gymnasium_returns(range(6)))
        assert max(int(size) for size in stats["policies"][0]["batch_sizes"]) == 4


async def test_several_servers_share_batches(serving: Any, head: Any, environment_server: Any, lean: Path) -> None:
    urls = " ".join(environment_server() for _ in range(2))
    options = {"head_policies": f"lean={lean}", "head_drive_episodes": 4}
    async with serving(head(game_server_addresses=urls, head_timeout_ms=30, **options)) as client:
        stats = await stats_show(client, lambda stats: "8" in stats["policies"][0]["batch_sizes"])
        # Both call themselves "env" at /health; the head lists them by their addresses.
        assert {server["name"] for server in stats["servers"]} == set(urls.replace("http://", "").split())


async def test_a_server_that_pushes_is_not_driven_and_counts_once(
    serving: Any, head: Any, environment_server: Any, lean: Path
) -> None:
    port = free_port()
    url = environment_server(eval_head_endpoint=f"http://127.0.0.1:{port}", environment_push_total=5)
    settings = {"head_policies": f"lean={lean}", "game_server_addresses": url, "PROBE_INTERVAL_SECONDS": 0.1}
    app = head(**settings)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        base_url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=base_url, timeout=IDLE_SECONDS, trust_env=False) as client:
            await eventually(lambda: server.started)
            await eventually(lambda: _is_healthy(client))
            stats = await stats_show(client, lambda stats: stats["episodes"]["finished"] == 5)
            played = await stats_of(url)
            assert played["episodes"]["begun"] == 5
            assert (row(stats, "env")["mode"], row(stats, "env")["states"]) == ("pushing", played["episodes"]["steps"])
            found = row(stats, url.removeprefix("http://"))
            assert (found["mode"], found["states"]) == ("idle", 0)
            assert found["detail"] == "plays by itself, as env"
            await stats_show(client, lambda stats: row(stats, url.removeprefix("http://"))["usage"] is not None)
    finally:
        server.should_exit = True
        thread.join(IDLE_SECONDS)


async def _is_healthy(client: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await client.get("/health")).status_code == 200
    return False


async def test_a_restarted_server_loses_its_episodes_and_is_driven_again(
    serving: Any, head: Any, start_service: Any, lean: Path
) -> None:
    first = start_service("services.environment_server", LOG_LEVEL="warning")
    options = {"head_policies": f"lean={lean}", "PROBE_INTERVAL_SECONDS": 0.2}
    async with serving(head(game_server_addresses=first.url, **options)) as client:
        # Well before the end of the eight episodes, which all end at step 500.
        await stats_show(client, lambda stats: 80 <= stats["states"] % 4000 <= 2000)
        first.kill()
        second = start_service("services.environment_server", LOG_LEVEL="warning", port=first.port)
        lost = await stats_show(client, lambda stats: stats["episodes"]["lost"] >= 8)
        assert lost["episodes"]["lost"] == 8
        before = lost["episodes"]["finished"]
        await stats_show(client, lambda stats: stats["episodes"]["finished"] > before)
        assert (await stats_of(second.url))["episodes"]["begun"] >= 8


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_the_episodes_of_a_killed_server_continue_with_equal_returns(
    serving: Any, head: Any, start_service: Any, monkeypatch: pytest.MonkeyPatch, is_restarted: bool
) -> None:
    monkeypatch.setattr(environment, "ANSWER_SECONDS", 0.5)
    variables = {"ENVIRONMENT": "guessing", "ENVIRONMENT_TEXT_TURNS": str(TURNS), "LOG_LEVEL": "warning"}
    servers = [start_service("services.environment_server", **variables) for _ in range(1 if is_restarted else 2)]
    count = 8 * len(servers)
    options = {"head_policies": f"guess={__name__}:guess_slowly", "head_drive_episodes": 8, "head_drive_total": 8}
    options |= {"game_server_addresses": " ".join(server.url for server in servers), "PROBE_INTERVAL_SECONDS": 0.2}
    async with serving(head(**options)) as client:
        await stats_show(client, lambda stats: bool(stats["servers"]) and all(s["states"] for s in stats["servers"]))
        servers[0].kill()
        if is_restarted:
            start_service("services.environment_server", port=servers[0].port, **variables)
        stats = await stats_show(client, lambda stats: stats["episodes"]["finished"] == count)
    assert stats["episodes"] == {"active": 0, "finished": count, "lost": 0}
    returns = [(await undisturbed(seed))[0] for seed in range(8)]
    assert 0 < np.mean(returns) < 1
    assert stats["returns"]["mean"] == pytest.approx(np.mean(returns))
    last = row(stats, servers[-1].url.removeprefix("http://"))
    assert last["finished"] > count - 8, "an episode may have ended before the kill"


async def test_the_episodes_of_a_server_that_discovery_drops_continue_elsewhere(start_service: Any) -> None:
    variables = {"ENVIRONMENT": "guessing", "ENVIRONMENT_TEXT_TURNS": str(TURNS), "LOG_LEVEL": "warning"}
    servers = [start_service("services.environment_server", **variables) for _ in range(2)]
    found = [DiscoveredServer(name=s.url, source="cluster", status="UP", url=s.url) for s in servers]
    settings = HeadSettings(head_drive_episodes=8, head_drive_total=8)
    registry = Registry(Meter())
    async with FunctionPolicy("guess", f"{__name__}:guess_slowly") as policy:
        driver = Driver(settings, {"guess": policy}, registry)
        driver.update(found)
        await eventually(lambda: all(server.states for server in registry.servers.values()))
        servers[0].kill()
        driver.update(found[1:])
        await eventually(lambda: registry.returns.count == 16, progress=lambda: str(registry.returns))
        await driver.close()
    assert (registry.lost, registry.active) == (0, 0)
    returns = [(await undisturbed(seed))[0] for seed in range(8)]
    assert registry.returns.mean == pytest.approx(np.mean(returns))


def guess_slowly(states: list[Any]) -> list[str]:
    """Bisect, and leave time to kill a server between two steps."""
    time.sleep(0.3)
    return [guess(state) for state in states]


async def test_a_server_without_a_fitting_policy_is_reported(
    serving: Any, head: Any, environment_server: Any, lean: Path
) -> None:
    url = environment_server(environment="Pendulum-v1")
    async with serving(head(game_server_addresses=url, head_policies=f"lean={lean}")) as client:
        stats = await stats_show(client, lambda stats: bool(stats["servers"] and row(stats)["detail"]))
        assert "takes numbers of shape [4], Pendulum-v1 gives numbers of shape [3]" in row(stats)["detail"]
        assert (await stats_of(url))["active"] == 0


def liar(**lies: Any) -> FastAPI:
    """Return an environment server that breaks the protocol."""
    app = FastAPI()
    health = {"status": "healthy", "service": "environment-server", "name": "env"}
    health |= {"environment": "CartPole-v1", "pushing": False}
    info = {"id": "CartPole-v1", "max_steps": 500, "state": {"kind": "numbers", "shape": [4]}}
    info |= {"action": {"kind": "index", "count": 2}}

    @app.get("/health")
    async def get_health() -> Any:
        return health | lies.get("health", {})

    @app.post("/reset")
    async def reset(request: Request) -> Any:
        count = (await request.json())["episodes"] + lies.get("more", 0)
        state = lies.get("state", [0.0] * 4)
        episodes = [{"episode": f"e{i}", "seed": i, "state": state} for i in range(count)]
        return {"environment": info, "episodes": episodes}

    @app.post("/step")
    async def step(request: Request) -> Any:
        items = (await request.json())["steps"]
        result = {"status": "running", "state": [0.0] * 4, "reward": 1.0, "steps": 1, "episode_return": 1.0}
        return {"results": [result | {"episode": item["episode"]} | lies.get("step", {}) for item in items]}

    @app.post("/close")
    async def close() -> Any:
        return {"closed": 0, "unknown": 0}

    return app


@pytest.mark.parametrize(
    ("lies", "says"),
    [
        ({"health": {"name": None}}, "is not an environment server"),
        ({"more": 3}, "/reset began other episodes"),
        ({"state": [0.0, 1.0]}, "state 0 does not fit"),
        ({"state": "hello"}, "EpisodeStart|ResetReply"),
        ({"step": {"episode": "somebody-elses"}}, "other episodes than it was asked for"),
        ({"step": {"steps": 40}}, "/step counts 40 steps"),
        ({"step": {"state": None}}, "no state"),
        ({"step": {"reward": "a lot"}}, "StepReply"),
        ({"step": {"status": "refused", "detail": "no"}}, "an episode was given up: no"),
    ],
)
async def test_a_server_that_breaks_the_protocol_is_reported_and_not_counted(
    serving: Any, head: Any, environment_server: Any, lean: Path, lies: Any, says: str
) -> None:
    honest = environment_server()
    with served(liar(**lies)) as url:
        options = {"head_policies": f"lean={lean}", "PROBE_INTERVAL_SECONDS": 60, "REQUEST_SECONDS": 1}
        async with serving(head(game_server_addresses=f"{url} {honest}", **options)) as client:
            name = url.removeprefix("http://")

            def has_the_detail(stats: dict[str, Any]) -> bool:
                details = [s["detail"] or "" for s in stats["servers"] if s["name"] == name]
                return any(word in detail for word in says.split("|") for detail in details)

            stats = await stats_show(client, has_the_detail)
            assert row(stats, name)["finished"] == 0
            honest_name = honest.removeprefix("http://")
            before = row(stats, honest_name)["states"]
            await stats_show(client, lambda stats: row(stats, honest_name)["states"] > before)


async def test_broken_episodes_are_lost_and_replaced(
    serving: Any, head: Any, environment_server: Any, tmp_path: Path
) -> None:
    """Episodes that break on the server are lost, and others are begun in their place."""

    class Breaks(torch.nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            breaks = (states >= 3).float()
            return torch.cat([1 - breaks, breaks, 0 * breaks, 0 * breaks], dim=1)

    spec = StateSpec(kind=StateKind.NUMBERS, shape=[1])
    publish_policy(Breaks(), tmp_path, 1, spec, ActionSpec(kind=ActionKind.INDEX, count=4))
    url = environment_server(environment=f"{ODD}Broken-v0")
    options = {"head_policies": f"p={tmp_path}", "head_drive_total": 12, "head_drive_episodes": 4}
    async with serving(head(game_server_addresses=url, **options)) as client:
        stats = await stats_show(client, lambda stats: stats["episodes"]["lost"] == 12)
        assert "a gear fell off" in row(stats)["detail"]
        assert row(stats)["states"] == 12 * 4


async def test_a_game_of_two_seats_is_refused(serving: Any, head: Any, environment_server: Any, lean: Path) -> None:
    url = environment_server(environment="nim")
    async with serving(head(game_server_addresses=url, head_policies=f"lean={lean}")) as client:
        stats = await stats_show(client, lambda stats: "2 seats" in str(stats["servers"]))
    assert (row(stats)["finished"], row(stats)["active"]) == (0, 0)
