"""Faults of the gateway's disk: every call is answered, and what was acknowledged is there after a restart.

A damaged database ends the gateway with words and exit code 78; it never answers 500 for ever.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.core.errors import ConfigurationError
from services.gateway.app import create_app
from services.gateway.settings import GatewaySettings
from services.gateway.store import Store
from services.http.problems import ProblemError
from tests.services.gateway.conftest import Running, StartGateway
from tests.waiting import eventually

SECONDS = 60
INSERT = "INSERT INTO lost VALUES (?, ?, ?)"


def said(number: int, length: int = 5) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"{number} " + "long " * length}]}


async def post(running: Running, path: str, body: dict[str, Any], key: str = "") -> tuple[int, str]:
    """Return the status of the reply, and its detail if it is a refusal."""
    headers = {"Idempotency-Key": key} if key else None
    reply = await asyncio.wait_for(running.client.post(path, json=body, headers=headers), SECONDS)
    return reply.status_code, reply.json().get("detail", "")


@contextmanager
def full_disk(file: Path) -> Iterator[None]:
    """Let no file of this process grow beyond the size of ``file``."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.stat(file).st_size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_a_full_disk_answers_507_and_what_was_acknowledged_is_there(
    gateway: StartGateway, tmp_path: Path
) -> None:
    async with gateway(answers=["Hi."]) as running:
        path = await running.open()
        assert (await post(running, path, said(0), "first"))[0] == 200
        with full_disk(tmp_path / "gateway/gateway.sqlite-wal"):
            bodies = [said(number, length=200) for number in range(1, 5)]
            replies = await asyncio.gather(*(post(running, path, body) for body in bodies))
            assert {status for status, _ in replies} == {507}
            assert "free" in replies[0][1]
            assert (await post(running, path, said(0), "first"))[0] == 200
        assert (await post(running, path, bodies[0]))[0] == 200
        before = (await running.client.get("/sessions/s/trace")).json()
    async with gateway(answers=["Hi."]) as running:
        after = await running.finish()
        assert after["sequences"] == before["sequences"]
        assert after["turns"] == 2


async def test_a_removed_directory_or_a_replaced_database_answers_507(gateway: StartGateway, tmp_path: Path) -> None:
    async with gateway(answers=["Hi."]) as running:
        path = await running.open()
        (tmp_path / "gateway/gateway.sqlite").rename(tmp_path / "gateway/other")
        (tmp_path / "gateway/gateway.sqlite").touch()
        status, detail = await post(running, path, said(1))
        assert (status, "took the place" in detail) == (507, True)
        shutil.rmtree(tmp_path / "gateway")
        for number in range(3):
            status, detail = await post(running, path, said(number))
            assert (status, "No such file" in detail) == (507, True)


async def test_a_write_that_cannot_be_executed_costs_the_others_nothing(tmp_path: Path) -> None:
    made = Store(tmp_path)
    await made.open()
    rows = [("s", "x", 1), ("s", "too large", 2**70), ("s", "y", 2), ("s", object(), 3)]
    writes = [made.write((INSERT, row)) for row in rows]
    results = await asyncio.wait_for(asyncio.gather(*writes, return_exceptions=True), SECONDS)
    refused = [result.status_code if isinstance(result, ProblemError) else None for result in results]
    assert refused == [None, 500, None, 500]
    assert await made.read("SELECT reason FROM lost") == [("x",), ("y",)]
    await made.close()


async def test_a_damaged_record_costs_its_session_alone(gateway: StartGateway, tmp_path: Path) -> None:
    async with gateway(answers=["Hi."]) as running:
        for name in ("good", "bad"):
            assert (await post(running, await running.open(name), said(1)))[0] == 200
    with closing(sqlite3.connect(tmp_path / "gateway/gateway.sqlite")) as database, database:
        database.execute("UPDATE calls SET record = substr(record, 1, 40) WHERE session = 'bad'")
    async with gateway(answers=["Hi."]) as running:
        assert (await running.finish("good"))["turns"] == 1
        for path, body in (("finish", {"reward": 1.0}), ("v1/chat/completions", said(1))):
            status, detail = await post(running, f"/sessions/bad/{path}", body)
            assert (status, "session bad is damaged" in detail) == (500, True)
        assert (await running.client.delete("/sessions/bad")).status_code == 204
        assert (await running.client.get("/sessions/bad")).status_code == 404


# --- a damaged database ----------------------------------------------------------------------------------------------


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
