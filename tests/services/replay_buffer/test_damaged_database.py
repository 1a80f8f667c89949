"""A damaged database ends the replay buffer as a configuration that cannot work; it never answers 500 for ever."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.core.errors import ConfigurationError
from services.protocol.groups import Group
from services.replay_buffer.app import create_app
from services.replay_buffer.settings import ReplaySettings
from tests.services.gateway.test_damaged_database import punch
from tests.waiting import eventually

ASK = {"batch_size": 40}


@pytest.fixture
async def directory(serving: Any, group: Callable[..., Group], tmp_path: Path) -> Path:
    """The directory of a replay buffer that held some groups and ended."""
    where = tmp_path / "replay"
    async with serving(create_app(ReplaySettings(replay_dir=where))) as client:
        for number in range(40):
            made = group(f"g{number}", tokens=2000).model_dump(mode="json")
            route = "/groups" if number % 2 else "/queue"
            assert (await client.post(route, json={"groups": [made]})).status_code == 200
    return where


@pytest.mark.parametrize("seed", range(3))
async def test_a_buffer_that_cannot_read_its_groups_is_unhealthy(directory: Path, seed: int) -> None:
    punch(directory / "replay-buffer.sqlite", random.Random(seed), holes=30)
    app = create_app(ReplaySettings(replay_dir=directory))
    lifecycle = app.state.lifecycle
    async with app.router.lifespan_context(app):
        await eventually(lambda: lifecycle.ready.is_set() or lifecycle.failure is not None)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replay") as client:
            asked = [("/groups/sample", ASK), ("/queue/lease", {"max_groups": 40})]
            statuses = {(await client.post(route, json=body)).status_code for route, body in asked}
            health = await client.get("/health")
    # A hole in a page that nothing uses shows nowhere; one in a group's bytes shows by their checksum.
    if statuses == {200}:
        assert health.status_code == 200
    else:
        assert (health.status_code, health.json()["status"]) == (503, "unhealthy")
        assert isinstance(lifecycle.failure, ConfigurationError)
        assert "damaged" in str(lifecycle.failure) or "not a database" in str(lifecycle.failure)


async def test_half_a_database_fails_the_service_once_it_shows(directory: Path) -> None:
    file = directory / "replay-buffer.sqlite"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    app = create_app(ReplaySettings(replay_dir=directory))
    lifecycle = app.state.lifecycle
    async with app.router.lifespan_context(app):
        await eventually(lambda: lifecycle.ready.is_set() or lifecycle.failure is not None)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replay") as client:
            await client.post("/groups/sample", json=ASK)
    assert isinstance(lifecycle.failure, ConfigurationError)
    assert str(directory) in str(lifecycle.failure)
