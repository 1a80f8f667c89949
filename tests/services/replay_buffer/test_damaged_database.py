"""A damaged database ends the replay buffer as a configuration that cannot work; it never answers 500 for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.core.errors import ConfigurationError
from services.protocol.groups import Group
from services.replay_buffer.app import create_app
from services.replay_buffer.settings import ReplaySettings
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
