from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.protocol.groups import pack
from services.protocol.replay import GROUPS_TYPE, SampleGroupsReply, framed, unframed
from services.replay_buffer.app import create_app
from services.replay_buffer.settings import ReplaySettings
from tests.sequences import changed
from tests.waiting import IDLE_SECONDS


@pytest.fixture
def app(tmp_path: Path) -> Any:
    return create_app(ReplaySettings(replay_dir=tmp_path / "replay"))


def body(group: Any, *names: str) -> dict[str, Any]:
    return {"groups": [group(name).model_dump(mode="json") for name in names]}


async def test_a_lease_waits_for_groups_and_ends_when_enough_have_come(serving: Any, app: Any, group: Any) -> None:
    async with serving(app) as client:
        request = {"max_groups": 4, "min_groups": 2, "wait_seconds": 30}
        lease = asyncio.create_task(client.post("/queue/lease", json=request, timeout=IDLE_SECONDS))
        await client.post("/queue", json=body(group, "a"))
        await asyncio.sleep(0.05)
        assert not lease.done()
        await client.post("/queue", json=body(group, "b", "c"))
        async with asyncio.timeout(IDLE_SECONDS):
            reply = (await lease).json()
        assert [g["group_id"] for g in reply["groups"]] == ["a", "b", "c"]


async def test_a_lease_gets_groups_whose_former_lease_runs_out_meanwhile(serving: Any, app: Any, group: Any) -> None:
    async with serving(app) as client:
        await client.post("/queue", json=body(group, "a"))
        await client.post("/queue/lease", json={"max_groups": 1, "lease_seconds": 0.3})
        reply = await client.post("/queue/lease", json={"max_groups": 1, "wait_seconds": 20}, timeout=IDLE_SECONDS)
        assert [g["group_id"] for g in reply.json()["groups"]] == ["a"]


async def test_a_repeated_request_ends_its_prompts_once(serving: Any, app: Any, group: Any) -> None:
    asked = {"collector": "c", "in_flight": 3, "most": 0, "batch_size": 4, "max_staleness": 1, "wait_seconds": 0}
    async with serving(app) as client:
        await client.post("/queue/admission", json=asked)
        for _ in range(2):
            await client.post("/queue?collector=c", json=body(group, "a", "b"))
        assert (await client.get("/stats")).json()["in_flight"] == {"c": 1}


REFUSED = [
    ("/groups", {"priorities": [1.0]}),
    ("/groups", {"priorities": [-1.0, 1.0]}),
    ("/groups", {"priority": [1.0, 1.0]}),
    ("/groups", {"groups": [{"group_id": "a"}]}),
    ("/queue", {"groups": "all"}),
    ("/groups/sample", {"batch_size": 0}),
    ("/groups/sample", {"batch_size": 4, "exponent": -1}),
    ("/groups/priorities", {"priorities": {"a": -1}}),
    ("/queue/lease", {"max_groups": 0}),
    ("/queue/lease", {"max_groups": 1, "lease_seconds": 0}),
    ("/queue/acknowledge", {}),
    ("/snapshots", {"label": "../escape"}),
    ("/snapshots", {"label": ""}),
    ("/add", {"experiences": [{"prompt": "a", "response": "b"}]}),
]
DAMAGES = [
    {"logprobs": [-0.1]},
    {"logprobs": [-0.1, -0.2, 0.5]},
    {"completion_ids": [1, 2, -3]},
    {"completion_ids": [1, 2, 2**31]},
    {"policy_versions": []},
    {"policy_versions": [1] * 2},
    {"policy_versions": [1, 1, -1]},
    {"loss_mask": [1, 0, 1]},
    {"finish_reason": "tired"},
    {"result": {"reward": None, "status": "scored"}},
    {"result": {"reward": 1.0, "status": "timeout"}},
]


async def test_a_request_that_does_not_fit_is_refused_and_changes_nothing(serving: Any, app: Any, group: Any) -> None:
    async with serving(app) as client:
        before = (await client.get("/stats")).json()
        for path, change in REFUSED:
            request = {**(body(group, "a", "b") if path == "/groups" else {}), **change}
            response = await client.post(path, json=request)
            assert response.status_code == 422, (path, change)
            assert response.json()["errors"]
        for damage in DAMAGES:
            request = body(group, "good", "bad")
            request["groups"][1]["sequences"][1].update(damage)
            response = await client.post("/groups", json=request)
            assert response.status_code == 422, damage
            assert "groups.1.sequences.1" in response.json()["detail"]
        assert (await client.get("/stats")).json() == before


async def test_metrics_tell_what_the_buffer_holds(serving: Any, app: Any, group: Any) -> None:
    async with serving(app) as client:
        await client.post("/groups", json=body(group, "a", "b"))
        await client.post("/queue", json=body(group, "c"))
        metrics = (await client.get("/metrics")).text
        assert "replay_groups 2.0" in metrics
        assert 'replay_queue_groups{place="waiting"} 1.0' in metrics


def ask(name: str, most: int = 2, **options: Any) -> dict[str, Any]:
    return {"collector": name, "in_flight": 0, "most": most, "batch_size": 2, "max_staleness": 1} | options


async def test_without_staleness_room_comes_with_the_acknowledgement(serving: Any, app: Any, group: Any) -> None:
    async with serving(app) as client:
        await client.post("/queue", json=body(group, "g0", "g1"))
        lease = (await client.post("/queue/lease", json={"max_groups": 2})).json()
        request = ask("a", max_staleness=0, wait_seconds=30)
        waiting = asyncio.create_task(client.post("/queue/admission", json=request, timeout=IDLE_SECONDS))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await client.post("/queue/acknowledge", json={"lease_id": lease["lease_id"]})
        async with asyncio.timeout(IDLE_SECONDS):
            assert (await waiting).json() == {"places": 2}


async def test_waiting_for_room_or_groups_ends_with_nothing_and_when_the_service_ends(serving: Any, app: Any) -> None:
    async with serving(app) as client:
        await client.post("/queue/admission", json=ask("a"))
        assert (await client.post("/queue/admission", json=ask("b", wait_seconds=0.1))).json() == {"places": 0}
        request = ask("b", wait_seconds=60)
        waiting = asyncio.create_task(client.post("/queue/admission", json=request, timeout=IDLE_SECONDS))
        request = {"max_groups": 1, "wait_seconds": 60}
        lease = asyncio.create_task(client.post("/queue/lease", json=request, timeout=IDLE_SECONDS))
        await asyncio.sleep(0.05)
        app.state.lifecycle.draining.set()
        async with asyncio.timeout(IDLE_SECONDS):
            assert (await waiting).json() == {"places": 0}
            assert (await lease).json()["lease_id"] is None


def packed(group: Any, *names: str) -> bytes:
    return framed({"priorities": None}, [pack(group(name)) for name in names])


async def test_groups_travel_packed_or_as_json_and_come_back_the_same(serving: Any, app: Any, group: Any) -> None:
    async with serving(app) as client:
        headers = {"Content-Type": GROUPS_TYPE}
        assert (await client.post("/groups", content=packed(group, "a", "b"), headers=headers)).json()["added"] == 2
        assert (await client.post("/groups", json=body(group, "b", "c"))).json()["duplicates"] == 1
        ask = {"batch_size": 3, "seed": 0}
        plain = (await client.post("/groups/sample", json=ask)).json()
        reply = await client.post("/groups/sample", json=ask, headers={"Accept": GROUPS_TYPE})
        assert reply.headers["content-type"] == GROUPS_TYPE
        drawn = SampleGroupsReply.model_validate(unframed(reply.content))
        assert drawn == SampleGroupsReply.model_validate(plain)
        assert {one.group.group_id for one in drawn.groups} == {"a", "b", "c"}
        assert drawn.groups[0].group == group(drawn.groups[0].group.group_id)


async def test_packed_groups_are_checked_where_they_arrive(serving: Any, app: Any, group: Any) -> None:
    async with serving(app) as client:
        headers = {"Content-Type": GROUPS_TYPE}
        whole = packed(group, "a")
        cut = await client.post("/groups", content=whole[:-1], headers=headers)
        assert cut.status_code == 400
        flipped = await client.post("/groups", content=whole[:-1] + bytes([whole[-1] ^ 1]), headers=headers)
        assert flipped.status_code == 400
        good = group("bad")
        bad = good.model_copy(update={"sequences": [changed(good.sequences[0], completion_ids=[1, 2, -3])]})
        refused = await client.post("/queue", content=framed({}, [pack(bad)]), headers=headers)
        assert refused.status_code == 422
        assert "groups.0.sequences.0.completion_ids" in refused.json()["detail"]
        assert (await client.post("/groups", content=whole, headers={"Content-Type": "text/plain"})).status_code == 415
        stats = (await client.get("/stats")).json()
        assert (stats["groups"], stats["waiting"]) == (0, 0)
