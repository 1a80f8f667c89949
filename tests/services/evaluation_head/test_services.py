"""A SkyServe service: episodes begin through its load balancer, whose requests make SkyServe add replicas."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from pydantic import SecretStr

from services.environment_server.app import create_app as create_environment_app
from services.environment_server.settings import EnvironmentSettings
from tests.services.evaluation_head.fake_skypilot import FakeSkyPilot, ReplicaStatus
from tests.services.run_page.serving import served
from tests.skypilot_facts import ROOT, SKYPILOT
from tests.waiting import IDLE_SECONDS, eventually, stats_show

SERVICE_YAML = ROOT / "evaluation/environment_service.yaml"
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


@pytest.fixture
def skyserve(replicas: list[str], tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The URLs of SkyServe's own load balancer and of its controller, for the service of our file."""
    if not SKYPILOT.exists():
        pytest.skip(f"no SkyPilot at {SKYPILOT}; `make test` installs it")
    script = Path(__file__).with_name("skyserve.py")
    command = [SKYPILOT, script, SERVICE_YAML, *replicas]
    environment = {"HOME": str(tmp_path), "PATH": str(SKYPILOT.parent), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            printed = next((line for line in process.stdout if line.startswith("http")), "")
            assert printed, (tmp_path / "log").read_text()
            entrance, controller = printed.split()
            yield entrance, controller
        finally:
            process.kill()


def headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKEN.get_secret_value()}"}


async def test_episodes_through_the_load_balancer_make_skyserves_autoscaler_add_a_replica(
    serving: Any, service_head: Any, skyserve: tuple[str, str], replicas: list[str]
) -> None:
    entrance, controller = skyserve
    async with httpx.AsyncClient(base_url=controller, timeout=IDLE_SECONDS, trust_env=False) as skyserve_controller:

        async def decide() -> dict[str, Any]:
            return (await skyserve_controller.post("/decide")).json()

        before = await decide()
        # Without load SkyServe would rather have the minimum of one replica.
        assert (before["requests"], "scale_up" in before["operators"]) == (0, False)
        async with serving(service_head(entrance, replicas)) as client:
            client.headers.update(headers())
            # More than half an episode a second and replica, in the minute that SkyServe looks at.
            await stats_show(client, lambda stats: stats["episodes"]["finished"] > 100)
            stats = (await client.get("/stats")).json()
        after = await decide()
        assert after["requests"] > 60
        assert "scale_up" in after["operators"]
        assert set((await skyserve_controller.get("/paths")).json()) == {"/reset"}
    assert {server["name"] for server in stats["servers"] if server["finished"]} == {"game-server/1", "game-server/2"}
    assert stats["episodes"]["lost"] == 0


def load_balancer(replicas: list[str], paths: list[str]) -> FastAPI:
    """Return an application that forwards each request to the next replica."""
    app = FastAPI()
    turns = itertools.cycle(replicas)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def forward(path: str, request: Request) -> Response:
        paths.append(path)
        kept = {name: request.headers[name] for name in ("authorization", "content-type") if name in request.headers}
        async with httpx.AsyncClient(trust_env=False, timeout=IDLE_SECONDS) as client:
            reply = await client.request(
                request.method, f"{next(turns)}/{path}", content=await request.body(), headers=kept
            )
        return Response(reply.content, reply.status_code, media_type="application/json")

    return app


async def test_replicas_share_the_episodes_of_their_service(
    serving: Any, service_head: Any, replicas: list[str]
) -> None:
    paths: list[str] = []
    with served(load_balancer(replicas, paths)) as entrance:
        async with serving(service_head(entrance, replicas, head_drive_episodes=3)) as client:
            client.headers.update(headers())

            def all_play(stats: dict[str, Any]) -> bool:
                assert stats["episodes"]["active"] <= 6
                played = [server["finished"] for server in stats["servers"]]
                return len(played) == 2 and min(played) > 5

            stats = await stats_show(client, all_play)
    assert set(paths) == {"reset"}
    assert stats["episodes"]["lost"] == 0


async def test_without_its_load_balancer_a_service_is_played_on(
    serving: Any, service_head: Any, replicas: list[str]
) -> None:
    closed = "http://127.0.0.1:9"
    async with serving(service_head(closed, replicas, ENTRANCE_SECONDS=0.2)) as client:
        client.headers.update(headers())
        await stats_show(client, lambda stats: [s["finished"] > 5 for s in stats["servers"]] == [True, True])


async def test_an_episode_at_a_replica_that_is_not_connected_is_left_to_it(
    serving: Any, service_head: Any, replicas: list[str]
) -> None:
    with served(load_balancer(replicas, [])) as entrance:
        async with serving(service_head(entrance, replicas[:1])) as client:
            client.headers.update(headers())
            stats = await stats_show(client, lambda stats: stats["episodes"]["finished"] > 20)
    assert [server["name"] for server in stats["servers"]] == ["game-server/1"]
    assert stats["episodes"]["lost"] == 0


async def test_servers_report_their_processor_and_memory(serving: Any, service_head: Any, replicas: list[str]) -> None:
    async with serving(service_head("http://127.0.0.1:9", replicas, ENTRANCE_SECONDS=0.2)) as client:
        client.headers.update(headers())

        async def usages_are_there() -> bool:
            servers = (await client.get("/stats")).json()["servers"]
            usages = [server["usage"] for server in servers]
            return bool(usages) and all(u and u["cores"] >= 0 and u["memory_bytes"] > 1e6 for u in usages)

        await eventually(usages_are_there)
