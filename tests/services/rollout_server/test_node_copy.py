"""The copy of a version that a launcher keeps, and its route; the volume is written by the test."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.core.endpoints import Endpoint
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.files import CHANGES_FILE
from services.engines.settings import RolloutSettings
from services.http.server import serving
from services.rollout_server import node_copy as module
from services.rollout_server.node_copy import NodeCopy, create_app
from services.weights import deltas
from tests.services.weights.test_deltas import Volume, flip_a_bit, is_version, three_versions
from tests.waiting import IDLE_SECONDS

pytestmark = pytest.mark.leaving

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


async def test_a_copy_that_a_trainer_has_not_given_back_is_free_when_its_time_is_over(
    volume: Volume, copy: NodeCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COPY_SECONDS", 1.0)
    async with copy.of(3, lends=True):
        pass
    async with copy.of(2):
        assert is_version(copy.model, volume.states[2])


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


@pytest.fixture
def settings(tiny_model: Path, tmp_path: Path) -> RolloutSettings:
    return RolloutSettings.load(model_name=str(tiny_model), shared_dir=tmp_path, run_id="r", publish_delta=True)


async def test_a_node_without_room_is_refused_before_its_engines_start(
    settings: RolloutSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigurationError, match=r"has no room for this node's copy .* unset PUBLISH_DELTA"):
        async with module.node_copy(settings, Endpoint("127.0.0.1", 0)):
            pass


async def test_who_has_the_launchers_port_is_named_with_what_to_do(settings: RolloutSettings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        named = rf"cannot listen on 127.0.0.1:{port} .*node's copy of the weights .*end the program .*PUBLISH_DELTA"
        with pytest.raises(ConfigurationError, match=named):
            async with module.node_copy(settings, Endpoint("127.0.0.1", port)):
                pass


@pytest.mark.parametrize("slow", ["copytree", "mapped"], ids=["while it reads the anchor", "before it checks the sums"])
async def test_a_launcher_that_ends_leaves_neither_a_copy_nor_a_version_for_damaged(
    settings: RolloutSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    volume = three_versions(settings.policy_dir.parent)
    monkeypatch.setattr(module, "memory_of_run", lambda _, part: tmp_path / part)
    begun, may_continue = threading.Event(), threading.Event()
    holder: Any = deltas.shutil if slow == "copytree" else deltas
    real: Callable[..., Any] = getattr(holder, slow)

    def wait(*arguments: Any) -> Any:
        begun.set()
        assert may_continue.wait(IDLE_SECONDS)
        return real(*arguments)

    monkeypatch.setattr(holder, slow, wait)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = Endpoint("127.0.0.1", free.getsockname()[1])
    async with httpx.AsyncClient(base_url=address.url, trust_env=False, timeout=IDLE_SECONDS) as client:
        async with module.node_copy(settings, address) as copy:
            assert copy is not None
            asked = asyncio.create_task(client.post("/versions/3"))
            while not begun.is_set():  # noqa: ASYNC110  # in another thread
                await asyncio.sleep(0.01)
            asyncio.get_running_loop().call_later(0.2, may_continue.set)  # once the copy was removed
        await asked
    assert not copy.model.path.exists()
    assert volume.versions() == [1, 2, 3]
