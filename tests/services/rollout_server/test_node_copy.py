"""The copy of a version that a launcher keeps, and its route; the volume is written by the test."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import httpx
import pytest

from services.core.endpoints import Endpoint
from services.core.errors import ConfigurationError, DependencyLostError
from services.engines.settings import RolloutSettings
from services.http.server import serving
from services.rollout_server import node_copy as module
from services.rollout_server.node_copy import NodeCopy, create_app
from services.weights.policy_store import CHANGES_FILE
from tests.services.weights.test_deltas import Volume, flip_a_bit, is_version, three_versions
from tests.waiting import IDLE_SECONDS

TOKEN = "a-token-of-the-tests"


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return three_versions(tmp_path)


@pytest.fixture
def copy(volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeCopy:
    monkeypatch.setattr(module, "memory_of_run", lambda _, part: tmp_path / part)
    return NodeCopy(volume.store.policy_dir)


async def test_the_copy_stays_a_version_while_an_engine_loads_it(volume: Volume, copy: NodeCopy) -> None:
    async def become(version: int) -> None:
        async with copy.of(version) as path:
            assert is_version(copy.model, volume.states[version])
            assert path == copy.model.path

    async with asyncio.timeout(IDLE_SECONDS):
        async with copy.of(2):
            await become(2)  # another engine loads the same version meanwhile
            waiting = asyncio.create_task(become(3))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            assert is_version(copy.model, volume.states[2])
        await waiting


async def test_a_copy_that_is_given_up_waits_for_nobody_later(
    volume: Volume, copy: NodeCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "COPY_SECONDS", 0.2)
        async with copy.of(2):
            with pytest.raises(DependencyLostError, match=r"policy version 3 .* cannot be copied"):
                async with copy.of(3):
                    pass
    async with asyncio.timeout(IDLE_SECONDS), copy.of(3):
        assert is_version(copy.model, volume.states[3])


async def test_the_trainer_gets_the_directory_or_the_reason(volume: Volume, copy: NodeCopy) -> None:
    async with serving(create_app(copy, TOKEN)) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        assert (await client.post("/versions/3")).status_code == 401
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        reply = await client.post("/versions/3")
        assert (reply.status_code, reply.json()) == (200, {"path": str(copy.model.path)})
        reply = await client.post("/versions/7")
        assert reply.status_code == 409
        assert "policy version 7" in reply.json()["detail"]


async def test_the_copy_stays_what_the_trainer_has_engines_load(volume: Volume, copy: NodeCopy) -> None:
    async def become(version: int) -> None:
        async with copy.of(version):
            assert is_version(copy.model, volume.states[version])

    async with (
        asyncio.timeout(IDLE_SECONDS),
        serving(create_app(copy, None)) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
    ):
        await client.post("/versions/3")
        volume.store.remove(3)  # another node has found it damaged, so that version 2 is the newest
        waiting = asyncio.create_task(become(2))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        assert is_version(copy.model, volume.states[3])
        assert (await client.delete("/versions")).status_code == 200
        await waiting
        assert (await client.post("/versions/1")).status_code == 200, "a trainer that came back waits for no other"


async def test_what_is_damaged_is_removed_so_that_the_trainer_writes_it_again(volume: Volume, copy: NodeCopy) -> None:
    flip_a_bit(volume.store.path(3) / CHANGES_FILE)
    with pytest.raises(
        DependencyLostError, match=r"policy version 3 .* is damaged: 1 tensors .* a\.weight; the trainer"
    ):
        async with copy.of(3):
            pass
    assert volume.versions() == [1, 2]
    async with copy.of(2):
        assert is_version(copy.model, volume.states[2])


async def test_a_node_without_room_is_refused_before_its_engines_start(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    settings = RolloutSettings.load(model_name=str(tiny_model), shared_dir=tmp_path, run_id="r", publish_delta=True)
    with pytest.raises(ConfigurationError, match=r"has no room for this node's copy .* unset PUBLISH_DELTA"):
        async with module.node_copy(settings, Endpoint("127.0.0.1", 0)):
            pass
