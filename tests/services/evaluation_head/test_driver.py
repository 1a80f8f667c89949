"""The driver on real environment servers, which restart, break the protocol, hang, or push."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from services.environment_server.app import create_app as create_environment_app
from services.environment_server.settings import EnvironmentSettings
from tests.ports import free_port
from tests.services.evaluation_head.policies import publish_wobbles
from tests.services.run_page.serving import served, served_ready
from tests.waiting import IDLE_SECONDS, stats_show


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
    """Return the returns of the wobbling policy when gymnasium runs in this process."""
    returns = []
    for seed in seeds:
        environment = gymnasium.make("CartPole-v1")
        state, _ = environment.reset(seed=seed)
        total, done = 0.0, False
        while not done:
            action = int(np.float32(state[2]) > 0)
            state, reward, terminated, truncated, _ = environment.step(action)
            total, done = total + reward, terminated or truncated
        returns.append(total)
    return returns


async def test_returns_on_a_discovered_server_equal_those_of_gymnasium(
    serving: Any, head: Any, environment_server: Any, tmp_path: Path
) -> None:
    publish_wobbles(tmp_path)
    options = {"head_policies": f"wobbles={tmp_path}", "head_drive_total": 6, "head_drive_episodes": 4}
    async with serving(head(game_server_addresses=environment_server(), **options)) as client:
        stats = await stats_show(client, lambda stats: stats["episodes"]["finished"] == 6)
        server = row(stats)
        assert server["returns"]["mean"] == pytest.approx(np.mean(gymnasium_returns(range(6))))
        assert (server["state"], server["lost"], server["active"]) == ("connected", 0, 0)
        assert server["states"] == sum(gymnasium_returns(range(6)))
        assert max(int(size) for size in stats["policies"][0]["batch_sizes"]) == 4


async def test_a_server_that_pushes_is_not_driven_and_counts_once(
    serving: Any, head: Any, environment_server: Any, lean: Path
) -> None:
    port = free_port()
    url = environment_server(eval_head_endpoint=f"http://127.0.0.1:{port}", environment_push_total=2)
    app = head(head_policies=f"lean={lean}", game_server_addresses=url, PROBE_INTERVAL_SECONDS=0.1)
    with served_ready(app, port) as base_url:
        async with httpx.AsyncClient(base_url=base_url, timeout=IDLE_SECONDS, trust_env=False) as client:
            address = url.removeprefix("http://")
            stats = await stats_show(
                client,
                lambda stats: stats["episodes"]["finished"] == 2 and "plays by itself" in row(stats, address)["detail"],
            )
            played = await stats_of(url)
            assert played["episodes"]["begun"] == 2
            assert (row(stats, "env")["mode"], row(stats, "env")["states"]) == ("pushing", played["episodes"]["steps"])
            found = row(stats, address)
            assert (found["mode"], found["states"]) == ("idle", 0)
            assert found["detail"] == "plays by itself, as env"


@contextlib.asynccontextmanager
async def ended_within(app: FastAPI) -> AsyncIterator[tuple[str, Callable[[], Awaitable[None]]]]:
    """Serve an application; give its URL and a function that ends it."""
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(served(app)), partial(asyncio.to_thread, stack.close)


async def test_a_restarted_server_loses_its_episodes_and_is_driven_again(serving: Any, head: Any, lean: Path) -> None:
    async with ended_within(create_environment_app(EnvironmentSettings())) as (url, end):
        options = {"head_policies": f"lean={lean}", "PROBE_INTERVAL_SECONDS": 0.2}
        async with serving(head(game_server_addresses=url, **options)) as client:
            # Well before the end of the eight episodes, which all end at step 500.
            await stats_show(client, lambda stats: 80 <= stats["states"] % 4000 <= 2000)
            await end()
            with served(create_environment_app(EnvironmentSettings()), int(url.rpartition(":")[2])):
                lost = await stats_show(client, lambda stats: stats["episodes"]["lost"] >= 8)
                assert lost["episodes"]["lost"] == 8
                before = lost["episodes"]["finished"]
                await stats_show(client, lambda stats: stats["episodes"]["finished"] > before)
                assert (await stats_of(url))["episodes"]["begun"] >= 8


@pytest.mark.parametrize(
    ("name", "says"),
    [("Pendulum-v1", "takes numbers of shape [4], Pendulum-v1 gives numbers of shape [3]"), ("nim", "2 seats")],
)
async def test_a_server_that_no_policy_fits_is_reported(
    serving: Any, head: Any, environment_server: Any, lean: Path, name: str, says: str
) -> None:
    url = environment_server(environment=name)
    async with serving(head(game_server_addresses=url, head_policies=f"lean={lean}")) as client:
        stats = await stats_show(client, lambda stats: bool(stats["servers"] and row(stats)["detail"]))
        assert says in row(stats)["detail"]
        assert (await stats_of(url))["active"] == 0
