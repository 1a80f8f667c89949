"""Discovery of given addresses, and of SkyPilot's clusters and services through a fake SDK."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from services.environment_server.app import create_app as create_environment_app
from services.environment_server.settings import EnvironmentSettings
from tests.services.evaluation_head.fake_skypilot import (
    ApiServerAuthenticationError,
    ApiServerConnectionError,
    ClusterNotUpError,
    ClusterStatus,
    FakeSkyPilot,
    ReplicaStatus,
)
from tests.services.run_page.serving import served
from tests.skypilot_facts import skypilot_facts
from tests.waiting import IDLE_SECONDS, eventually, stats_show


@pytest.fixture
def sky(monkeypatch: pytest.MonkeyPatch) -> FakeSkyPilot:
    fake = FakeSkyPilot()
    monkeypatch.setitem(sys.modules, "sky", fake)
    fake.clusters = {
        "game-server-1": (ClusterStatus.UP, {8081: "10.0.0.1:8081"}),
        "game-server-2": (ClusterStatus.INIT, {}),
        "game-server-3": (ClusterStatus.UP, {}),
        "game-server-4": (ClusterStatus.UP, ClusterNotUpError("it went down meanwhile")),
        "somebody-elses": (ClusterStatus.UP, {8081: "10.0.0.9:8081"}),
    }
    fake.services = {
        "game-server-pool": [
            {"replica_id": 1, "status": ReplicaStatus.READY, "endpoint": "http://10.1.0.1:8081"},
            {"replica_id": 2, "status": ReplicaStatus.STARTING, "endpoint": None},
        ],
        "other": [{"replica_id": 1, "status": ReplicaStatus.READY, "endpoint": "http://10.1.0.9:8081"}],
    }
    return fake


@pytest.fixture
def skypilot_head(head: Any, sky: FakeSkyPilot) -> Any:
    """``skypilot_head(...)``: a head that asks the fake SDK."""
    return partial(head, skypilot_api_server_endpoint="http://api:46580")


async def discover(client: Any) -> dict[str, Any]:
    response = await client.post("/discover")
    assert response.status_code == 200, response.text
    return response.json()


async def test_clusters_and_replicas_with_the_prefix_are_found(
    serving: Any, skypilot_head: Any, sky: FakeSkyPilot
) -> None:
    async with serving(skypilot_head()) as client:
        found = {server["name"]: server for server in (await discover(client))["servers"]}
        assert {name: (server["status"], server["url"]) for name, server in found.items()} == {
            "game-server-1": ("UP", "http://10.0.0.1:8081"),
            "game-server-2": ("INIT", None),
            "game-server-3": ("UP", None),
            "game-server-4": ("UP", None),
            "game-server-pool/1": ("READY", "http://10.1.0.1:8081"),
            "game-server-pool/2": ("STARTING", None),
        }
        assert (await client.get("/discovered")).json()["servers"] == list(found.values())
        # Concurrent requests share one look.
        sky.passes, sky.seconds = 0, 0.5
        await asyncio.gather(*(discover(client) for _ in range(20)))
        assert sky.passes == 1


async def test_vanished_servers_are_dropped_and_new_ones_connected(
    serving: Any, skypilot_head: Any, sky: FakeSkyPilot
) -> None:
    async with serving(skypilot_head(INTERVAL_SECONDS=0.05)) as client:

        async def shows(name: str, is_there: bool) -> bool:
            servers = (await client.get("/stats")).json()["servers"]
            return (name in [server["name"] for server in servers]) == is_there

        await eventually(lambda: shows("game-server-1", True))
        del sky.clusters["game-server-1"]
        await eventually(lambda: shows("game-server-1", False))
        sky.clusters["game-server-9"] = (ClusterStatus.UP, {8081: "10.0.0.2:8081"})
        await eventually(lambda: shows("game-server-9", True))


async def test_a_failing_source_keeps_its_servers_and_says_why(
    serving: Any, skypilot_head: Any, sky: FakeSkyPilot
) -> None:
    async with serving(skypilot_head()) as client:
        before = [s for s in (await discover(client))["servers"] if s["source"] == "cluster"]
        sky.services["game-server-pool"].pop(0)
        for error, says in (
            (ApiServerConnectionError("http://api:46580"), "SKYPILOT_API_SERVER_ENDPOINT"),
            (ApiServerAuthenticationError("expired"), "SKYPILOT_SERVICE_ACCOUNT_TOKEN"),
            (ValueError("odd"), "ValueError: odd"),
        ):
            sky.status_error = error
            after = await discover(client)
            assert says in after["errors"]["clusters"]
            assert [s for s in after["servers"] if s["source"] == "cluster"] == before
            assert "game-server-pool/1" not in [s["name"] for s in after["servers"]]
        sky.status_error = None
        # Having no services is no error.
        for sky.serve_error in (None, RuntimeError("No live services."), ClusterNotUpError("no controller")):
            reply = await discover(client)
            assert reply["errors"] == {}
        assert {server["source"] for server in reply["servers"]} == {"cluster"}


async def test_a_hanging_api_server_does_not_block_the_head(
    serving: Any, skypilot_head: Any, sky: FakeSkyPilot
) -> None:
    sky.answers.clear()
    async with serving(skypilot_head(TIMEOUT_SECONDS=0.05)) as client:
        reply = await discover(client)
        assert "no answer within 0.05 s" in reply["errors"]["clusters"]
        async with asyncio.timeout(IDLE_SECONDS / 2):
            assert (await client.post("/evaluate", json={"state": [1, 1]})).status_code == 200
        sky.answers.set()


async def test_several_prefixes_are_looked_for_and_a_name_found_twice_counts_once(
    serving: Any, skypilot_head: Any, sky: FakeSkyPilot
) -> None:
    sky.clusters["10.0.0.5:8081"] = (ClusterStatus.UP, {8081: "10.0.0.6:8081"})
    given = {"game_server_addresses": "10.0.0.5:8081", "game_server_prefix": "10.0.0.5, somebody other"}
    async with serving(skypilot_head(**given)) as client:
        reply = await discover(client)
    urls = {server["name"]: server["url"] for server in reply["servers"]}
    assert (set(urls), urls["10.0.0.5:8081"]) == (
        {"10.0.0.5:8081", "somebody-elses", "other/1"},
        "http://10.0.0.5:8081",
    )
    assert reply["prefix"] == "10.0.0.5, somebody, other"


async def test_addresses_need_no_skypilot(serving: Any, head: Any) -> None:
    async with serving(head(game_server_addresses="10.0.0.1:8081, http://b:9/")) as client:
        assert [(s["name"], s["url"]) for s in (await discover(client))["servers"]] == [
            ("10.0.0.1:8081", "http://10.0.0.1:8081"),
            ("b:9", "http://b:9"),
        ]
    async with serving(head()) as client:
        assert (await discover(client))["enabled"] is False


async def test_each_episode_on_a_replica_is_announced_to_the_load_balancer_of_its_service(
    serving: Any, skypilot_head: Any, sky: FakeSkyPilot, lean: Path
) -> None:
    paths: list[str] = []
    balancer = FastAPI()

    @balancer.get("/{path:path}")
    async def count(path: str) -> None:
        paths.append(path)

    token: Any = {"jobgroup_token": SecretStr("a-token")}
    replica = create_environment_app(EnvironmentSettings(environment_max_steps=5, **token))
    with served(balancer) as entrance, served(replica) as url:
        sky.clusters, sky.service_endpoints = {}, {"game-server": entrance}
        sky.services = {"game-server": [{"replica_id": 1, "status": ReplicaStatus.READY, "endpoint": url}]}
        options = {"head_policies": f"lean={lean}", "head_drive_episodes": 3, "head_drive_total": 12, **token}
        async with serving(skypilot_head(**options), token="a-token") as client:
            stats = await stats_show(client, lambda stats: stats["episodes"]["finished"] == 12)
    assert [(server["name"], server["finished"]) for server in stats["servers"]] == [("game-server/1", 12)]
    assert (paths, stats["episodes"]["lost"]) == (["health"] * 12, 0)


def test_addresses_are_checked(head: Any) -> None:
    for text in ("not an address at all://", "http://", "a:b:c"):
        with pytest.raises(ValueError, match="game_server_addresses"):
            head(game_server_addresses=text)


def test_the_real_sdk_has_the_functions_and_fields_in_use() -> None:
    sdk = skypilot_facts()["sdk"]
    parameters = sdk["parameters"]
    assert "all_users" in parameters["status"]
    assert "port" in parameters["endpoints"]
    assert parameters["serve.status"] == ["service_names"]
    assert parameters["get"] == ["request_id"]
    assert len(sdk["runtime_errors"]) == 3
    assert sdk["has_cluster_not_up_error"]
    assert (sdk["up"], sdk["ready"]) == ("UP", "READY")
    assert {"name", "status"} <= set(sdk["status_fields"])
