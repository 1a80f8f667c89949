"""A buffer killed with SIGKILL under load still has everything that it acknowledged."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.clients.replay import ReplayClient
from services.core.endpoints import Endpoint
from services.core.errors import DependencyLostError
from services.protocol.groups import Group
from services.protocol.replay import AcknowledgeRequest, LeaseRequest, SampleGroupsRequest
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, LoopClock


async def test_what_was_acknowledged_survives_sigkill(
    start_service: Any, tmp_path: Path, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LoopClock(monkeypatch, asyncio.get_running_loop())
    environment = {"REPLAY_DIR": str(tmp_path / "replay"), "LOG_LEVEL": "warning"}
    service = start_service("services.replay_buffer", **environment)
    stored: dict[str, Group] = {}
    queued: dict[str, Group] = {}
    taken: set[str] = set()
    in_doubt: set[str] = set()
    asked: list[LeaseRequest] = []

    async def add(worker: int, replay: ReplayClient) -> None:
        for number in range(10_000):
            name = f"{'q' if worker % 2 else 's'}{worker}-{number}"
            made = group(name, version=number, tokens=50 + number % 50, completions=4)
            in_doubt.add(name)
            await (replay.enqueue if worker % 2 else replay.add)([made])
            (queued if worker % 2 else stored)[name] = made
            in_doubt.discard(name)

    async def take(replay: ReplayClient) -> None:
        for number in range(10_000):
            asked.append(LeaseRequest(max_groups=2, wait_seconds=1, request_id=f"taker-{number}"))
            lease = await replay.lease(asked[-1])
            if lease.lease_id is not None:
                names = {g.group_id for g in lease.groups}
                in_doubt.update(names)
                await replay.acknowledge(AcknowledgeRequest(lease_id=lease.lease_id, keep=False))
                taken.update(names)
                in_doubt.difference_update(names)

    async with ReplayClient(Endpoint("127.0.0.1", service.port), deadline=IDLE_SECONDS) as replay:
        load = [asyncio.create_task(add(worker, replay)) for worker in range(4)]
        load.append(asyncio.create_task(take(replay)))
        async with asyncio.timeout(LIMIT_SECONDS):
            while len(stored) < 60 or len(taken) < 20:  # noqa: ASYNC110  # the load itself sets no event
                await asyncio.sleep(0.01)
        service.kill()
        while not all(worker.done() for worker in load):
            clock.pass_by(IDLE_SECONDS)
            await asyncio.sleep(0.01)
        ends = await asyncio.gather(*load, return_exceptions=True)
        assert all(isinstance(end, DependencyLostError) for end in ends), ends

    service = start_service("services.replay_buffer", **environment)
    async with ReplayClient(Endpoint("127.0.0.1", service.port)) as replay:
        kept = await replay.sample(SampleGroupsRequest(batch_size=4096, exponent=0.0))
        assert stored.items() <= {drawn.group.group_id: drawn.group for drawn in kept}.items()
        waiting = set()
        # First the lease whose reply may have been lost: asking for it again gives it, or another.
        lease = await replay.lease(asked[-1])
        while lease.lease_id is not None:
            for found in lease.groups:
                waiting.add(found.group_id)
                assert found.group_id in in_doubt or found == queued[found.group_id]
            lease = await replay.lease(LeaseRequest(max_groups=500))
        # Nothing acknowledged is handed out again, and nothing queued is lost.
        assert waiting.isdisjoint(taken)
        assert set(queued) - taken - in_doubt <= waiting
        # Whoever was cut off can ask again.
        assert (await replay.add([stored[next(iter(stored))]])).duplicates == 1
