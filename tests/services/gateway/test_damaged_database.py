"""A damaged database ends the gateway with words and exit code 78; it never answers 500 for ever."""

from __future__ import annotations

import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.core.errors import ConfigurationError
from services.gateway.app import create_app
from services.gateway.settings import GatewaySettings
from services.gateway.store import Store
from tests.services.gateway.conftest import StartGateway
from tests.waiting import eventually

HELLO = [{"role": "user", "content": "Hello"}]


def punch(file: Path, draw: random.Random, holes: int = 40, size: int = 512) -> None:
    """Write zeros over random parts of a file."""
    with file.open("r+b") as opened:
        for _ in range(holes):
            opened.seek(draw.randrange(file.stat().st_size))
            opened.write(bytes(size))


async def test_holes_cost_their_session_or_end_the_gateway(gateway: StartGateway, models: Any, tmp_path: Path) -> None:
    async with gateway(answers=["Hi."]) as running:
        for number in range(12):
            path = await running.open(f"s{number}")
            for turn in range(2):
                await running.chat(path, [{"role": "user", "content": f"{number} {turn} " + "long " * 100}])
    draw = random.Random(1)
    ends = {"open": 0, "failed": 0}
    for number, holes in enumerate([1, 3, 40] * 5):
        damaged = tmp_path / f"damaged{number}"
        shutil.copytree(tmp_path / "gateway", damaged)
        punch(damaged / "gateway.sqlite", draw, holes)
        app = create_app(GatewaySettings(model_name=str(models("qwen2.5")), gateway_dir=damaged))
        lifecycle = app.state.lifecycle
        async with app.router.lifespan_context(app):
            await eventually(lambda lifecycle=lifecycle: lifecycle.ready.is_set() or lifecycle.failure is not None)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                statuses = {(await client.post(f"/sessions/s{n}/finish")).status_code for n in range(12)}
                health = (await client.get("/health")).status_code
        failure = lifecycle.failure
        ends["open" if failure is None else "failed"] += 1
        if failure is None:
            assert health == 200
            assert statuses <= {200, 404, 500}
        else:
            # The process ends with 78 and these words.
            assert health == 503
            assert isinstance(failure, ConfigurationError)
            assert any(words in str(failure) for words in ("gateway.sqlite' is damaged", "file is not a database"))
    assert all(ends.values()), ends


async def test_damage_that_shows_while_it_runs_makes_the_gateway_unhealthy(
    gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(answers=["Hi."]) as running:
        path = await running.open()

        def fail(*_: Any) -> None:
            raise sqlite3.DatabaseError("database disk image is malformed")

        monkeypatch.setattr(Store, "_commit", fail)
        reply = await running.client.post(path, json={"messages": HELLO})
        assert reply.status_code == 500
        health = await running.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "unhealthy")
        monkeypatch.undo()
