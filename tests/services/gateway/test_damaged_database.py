"""A damaged database ends the gateway with words and exit code 78; it never answers 500 for ever."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.core.endpoints import ENDPOINTS_VARIABLE
from services.core.errors import EXIT_CONFIGURATION, ConfigurationError
from services.gateway.app import create_app
from services.gateway.settings import GatewaySettings
from services.gateway.store import Store
from tests.services.gateway.conftest import StartGateway
from tests.waiting import IDLE_SECONDS, eventually

HELLO = [{"role": "user", "content": "Hello"}]


def punch(file: Path, draw: random.Random, holes: int = 40, size: int = 512) -> None:
    """Write zeros over random parts of a file."""
    with file.open("r+b") as opened:
        for _ in range(holes):
            opened.seek(draw.randrange(file.stat().st_size))
            opened.write(bytes(size))


@pytest.fixture
async def directory(gateway: StartGateway, tmp_path: Path) -> Path:
    """The directory of a gateway that has played some sessions and ended."""
    async with gateway(answers=["Hi."]) as running:
        for number in range(40):
            path = await running.open(f"s{number}")
            for turn in range(2):
                await running.chat(path, [{"role": "user", "content": f"{number} {turn} " + "long " * 30}])
    return tmp_path / "gateway"


@pytest.mark.parametrize("holes", [1, 3, 40])
async def test_holes_cost_their_session_or_end_the_gateway(directory: Path, models: Any, holes: int) -> None:
    draw = random.Random(holes)
    ends = {"open": 0, "failed": 0}
    for number in range(25):
        damaged = directory.with_name(f"damaged{number}")
        shutil.copytree(directory, damaged)
        punch(damaged / "gateway.sqlite", draw, holes)
        app = create_app(GatewaySettings(model_name=str(models("qwen2.5")), gateway_dir=damaged))
        lifecycle = app.state.lifecycle
        async with app.router.lifespan_context(app):
            await eventually(lambda lifecycle=lifecycle: lifecycle.ready.is_set() or lifecycle.failure is not None)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                statuses = {(await client.post(f"/sessions/s{n}/finish")).status_code for n in range(40)}
                health = (await client.get("/health")).status_code
        failure = lifecycle.failure
        ends["open" if failure is None else "failed"] += 1
        if failure is None:
            assert health == 200
            assert statuses <= {200, 404, 500}
        else:
            assert health == 503
            assert isinstance(failure, ConfigurationError)
            assert any(words in str(failure) for words in ("gateway.sqlite' is damaged", "file is not a database"))
    assert ends["failed"] > 0


async def test_a_gateway_whose_database_is_damaged_ends_with_78_and_words(
    directory: Path, models: Any, start_service: Any
) -> None:
    punch(directory / "gateway.sqlite", random.Random(1))
    endpoints = {"rollout-server-0:30000": "127.0.0.1:1", "gateway-0:8005": "127.0.0.1:0"}
    environment = {"MODEL_NAME": str(models("qwen2.5")), ENDPOINTS_VARIABLE: json.dumps(endpoints)}
    service = start_service("services.gateway", healthy=False, GATEWAY_DIR=str(directory), **environment)
    assert service.process.wait(IDLE_SECONDS) == EXIT_CONFIGURATION
    last = service.log.splitlines()[-1]
    assert last.startswith("error: ")
    assert "is damaged" in last
    assert "move its directory away" in last
    assert "Traceback" not in service.log


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


async def test_sessions_of_an_earlier_format_are_refused(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "gateway.sqlite")) as database:
        database.execute("CREATE TABLE sessions (id TEXT PRIMARY KEY)")
    with pytest.raises(ConfigurationError, match=r"its format is 0, this program reads 3.*begin a new run"):
        await Store(tmp_path).open()
