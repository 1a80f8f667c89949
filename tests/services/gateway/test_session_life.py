"""The life of sessions: none stays for ever, and the account of their tokens adds up, also after a restart."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.gateway.app import create_app
from services.gateway.gateway import GRACE_SECONDS, Gateway
from services.protocol.sessions import GatewayStats
from tests.services.gateway.conftest import Running, StartGateway
from tests.waiting import eventually

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def gateways(monkeypatch: pytest.MonkeyPatch) -> list[Gateway]:
    """The gateways that the test starts, for what no route does."""
    made: list[Gateway] = []

    class Kept(Gateway):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(create_app.__module__ + ".Gateway", Kept)
    return made


async def stats_of(running: Running) -> GatewayStats:
    """Return the account, which must add up at any time."""
    stats = GatewayStats.model_validate((await running.client.get("/stats")).json())
    assert stats.engine_tokens == stats.trace_tokens + stats.open_tokens + sum(stats.lost_tokens.values())
    return stats


def has_asked(running: Running, times: int) -> bool:
    return len(running.engine.requests) == times


def expired() -> float:
    return REGISTRY.get_sample_value("gateway_sessions_expired_total") or 0.0


async def test_sessions_whose_owner_died_are_removed_after_their_deadline(
    gateway: StartGateway, gateways: list[Gateway]
) -> None:
    before, now = expired(), time.time()
    async with gateway(answers=["Hi."]) as running:
        for name, seconds in (("left", 50.0), ("finished", 50.0), ("long", 5000.0)):
            await running.chat(await running.open(name, deadline_seconds=seconds), HELLO)
        await running.finish("finished")
        turn = running.engine.completion_tokens // 3
        await gateways[0].expire(now + 40 + GRACE_SECONDS)
        assert (await stats_of(running)).open_sessions == 2
        await gateways[0].expire(now + 4000 + GRACE_SECONDS)
        gone = [(await running.client.get(f"/sessions/{name}")).status_code for name in ("left", "finished", "long")]
        assert gone == [404, 404, 200]
        stats = await stats_of(running)
        assert (stats.engine_tokens, stats.trace_tokens, stats.open_tokens) == (3 * turn, turn, turn)
        assert stats.lost_tokens == {"expired": turn}
    assert expired() == before + 2


async def test_a_damaged_session_keeps_no_other_from_being_removed(
    gateway: StartGateway, gateways: list[Gateway], tmp_path: Path
) -> None:
    async with gateway(answers=["Hi."]) as running:
        for name in ("damaged", "late"):
            await running.open(name, deadline_seconds=50.0)
    with closing(sqlite3.connect(tmp_path / "gateway/gateway.sqlite")) as database, database:
        database.execute("UPDATE sessions SET request = substr(request, 1, 20) WHERE id = 'damaged'")
    async with gateway(answers=["Hi."]) as running:
        await gateways[-1].expire(time.time() + 60 + GRACE_SECONDS)
        seen = [(await running.client.get(f"/sessions/{name}")).status_code for name in ("damaged", "late")]
    assert seen == [500, 404], "what is left of the damaged one is its owner's to delete"


async def test_the_same_episode_begun_anew_takes_the_place_of_the_one_whose_owner_died(gateway: StartGateway) -> None:
    episode = {"group_id": "run-0-3", "index": 2, "seed": 5}
    async with gateway(answers=["Hi."]) as running:
        await running.chat(await running.open("left", **episode), HELLO)
        turn = running.engine.completion_tokens
        others = [
            episode | {"index": 3},
            episode | {"seed": 6},
            episode | {"temperature": 0.5},
            {"seed": 5},
            {"seed": 5},
        ]
        for number, other in enumerate(others):
            await running.open(f"other-{number}", **other)
        assert (await stats_of(running)).open_sessions == 6
        for _ in range(2):  # Repeating the request changes nothing.
            await running.open("successor", **episode)
        stats = await stats_of(running)
        assert (stats.open_sessions, stats.lost_tokens) == (6, {"abandoned": turn})
        assert (await running.client.get("/sessions/left")).status_code == 404
        assert (await running.client.get("/sessions/successor")).status_code == 200


async def test_the_account_has_every_token_that_the_engine_sampled_also_after_a_restart(gateway: StartGateway) -> None:
    sampled = 0
    for life in range(2):
        async with gateway(answers=["one two", "three", "four five six"]) as running:
            for name in ("kept", "dropped", "open"):
                await running.chat(await running.open(f"{name}-{life}"), HELLO)
            running.engine.troubles = [2]
            await running.chat(f"/sessions/kept-{life}/v1/chat/completions", [*HELLO, *HELLO])
            await running.finish(f"kept-{life}")
            await running.client.delete(f"/sessions/kept-{life}")
            await running.client.delete(f"/sessions/dropped-{life}")
            running.engine.may_answer.clear()
            late = asyncio.create_task(running.chat(f"/sessions/open-{life}/v1/chat/completions", [*HELLO, *HELLO]))
            await eventually(partial(has_asked, running, 6))
            await running.finish(f"open-{life}")
            running.engine.may_answer.set()
            with pytest.raises(AssertionError, match="session_finished"):
                await late
            sampled += running.engine.completion_tokens
            stats = await stats_of(running)
            assert stats.engine_tokens == sampled
            assert set(stats.lost_tokens) == {"aborted", "deleted", "finished"}
            assert stats.open_sessions == stats.open_tokens == 0


async def test_sessions_that_come_and_go_leave_the_disk_as_it_is(gateway: StartGateway, tmp_path: Path) -> None:
    path = tmp_path / "gateway" / "gateway.sqlite"
    sizes, wals = [], []
    async with gateway(answers=["word " * 300]) as running:
        for number in range(100):
            await running.chat(await running.open(f"s{number}"), HELLO)
            await running.finish(f"s{number}")
            await running.client.delete(f"/sessions/s{number}")
            if number % 25 == 24:
                sizes.append(path.stat().st_size)
                wals.append(path.with_name(path.name + "-wal").stat().st_size)
    assert max(wals) < 6e6, "SQLite copies its log of 1000 pages into the file"
    assert path.stat().st_size < 2e5, "what is deleted makes room"
    assert sizes[-1] < 2e5
    with sqlite3.connect(path) as db:
        assert [db.execute(f"SELECT COUNT(*) FROM {table}").fetchone() for table in ("sessions", "calls", "lost")] == [
            (0,),
            (0,),
            (0,),
        ]
