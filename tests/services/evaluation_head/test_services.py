"""A SkyServe service: its replicas are played on, and its load balancer gets a request for each episode."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from services.environment_server.app import create_app as create_environment_app
from services.environment_server.settings import EnvironmentSettings
from tests.services.evaluation_head.fake_skypilot import FakeSkyPilot, ReplicaStatus
from tests.services.run_page.serving import served
from tests.waiting import stats_show

TOKEN = SecretStr("a-token")


@pytest.fixture
def replicas() -> Iterator[list[str]]:
    """The URLs of two environment servers whose episodes end after five steps."""
    settings = EnvironmentSettings(environment_max_steps=5, jobgroup_token=TOKEN)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(served(create_environment_app(settings))) for _ in range(2)]


@pytest.fixture
def service_head(head: Any, lean: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``service_head(entrance, replicas)``: a head that finds the replicas of a service."""

    def make(entrance: str, replicas: list[str], **options: Any) -> FastAPI:
        sky = FakeSkyPilot()
        found = [
            {"replica_id": number, "status": ReplicaStatus.READY, "endpoint": url}
            for number, url in enumerate(replicas, 1)
        ]
        sky.services, sky.service_endpoints = {"game-server": found}, {"game-server": entrance}
        monkeypatch.setitem(sys.modules, "sky", sky)
        options = {"head_policies": f"lean={lean}", "head_drive_episodes": 4, "PROBE_INTERVAL_SECONDS": 0.1, **options}
        return head(skypilot_api_server_endpoint="http://127.0.0.1:9", jobgroup_token=TOKEN, **options)

    return make


def headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKEN.get_secret_value()}"}


def load_balancer(paths: list[str]) -> FastAPI:
    """Return an application that records the paths of its requests."""
    app = FastAPI()

    @app.get("/{path:path}")
    async def count(path: str) -> None:
        paths.append(path)

    return app


async def test_each_episode_on_a_replica_is_announced_to_the_load_balancer(
    serving: Any, service_head: Any, replicas: list[str]
) -> None:
    paths: list[str] = []
    with served(load_balancer(paths)) as entrance:
        async with serving(service_head(entrance, replicas, head_drive_episodes=3, head_drive_total=12)) as client:
            client.headers.update(headers())
            stats = await stats_show(client, lambda stats: stats["episodes"]["finished"] == 24)
    assert [server["finished"] for server in stats["servers"]] == [12, 12]
    assert paths == ["health"] * 24
    assert stats["episodes"]["lost"] == 0


async def test_without_its_load_balancer_a_service_is_played_on(
    serving: Any, service_head: Any, replicas: list[str]
) -> None:
    closed = "http://127.0.0.1:9"
    async with serving(service_head(closed, replicas, ENTRANCE_SECONDS=0.2)) as client:
        client.headers.update(headers())
        await stats_show(client, lambda stats: [s["finished"] > 5 for s in stats["servers"]] == [True, True])
