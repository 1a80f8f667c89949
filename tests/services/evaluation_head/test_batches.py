"""The batches of a torch policy: what they wait for."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from services.evaluation_head.settings import HeadSettings
from services.evaluation_head.torch_policy import KEPT_BATCHES, Loaded, TorchPolicy

STATE = [[1.0, 1.0]]


def policy(times: Path, size: int, milliseconds: float) -> TorchPolicy:
    return TorchPolicy("times", times, HeadSettings(head_batch_size=size, head_timeout_ms=milliseconds))


async def test_clients_that_come_one_after_the_other_soon_share_their_batches(times: Path) -> None:
    sizes: list[int] = []
    decide = Loaded.decide

    def slow(loaded: Loaded, states: Any) -> Any:
        sizes.append(len(states))
        time.sleep(0.08)
        return decide(loaded, states)

    async def play(policy: TorchPolicy) -> None:
        for _ in range(12):
            await policy.act(STATE)

    # A state waits for 0.05 s, less than a batch computes: whoever comes while one computes has waited enough.
    with patch.object(Loaded, "decide", slow):
        async with policy(times, 4, 50) as shared, asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(play(shared))
                await asyncio.sleep(0.06)
    assert sizes[0] < 4
    assert sizes.count(4) >= 6


async def test_a_client_alone_is_soon_answered_without_a_wait_for_others(times: Path) -> None:
    async with policy(times, 32, 300) as alone:
        for _ in range(KEPT_BATCHES):
            await alone.act(STATE)
        started = time.monotonic()
        for _ in range(100):
            await alone.act(STATE)
        assert time.monotonic() - started < 100 * 0.3 / 2
