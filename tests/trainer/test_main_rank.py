"""While groups are made, the conductor sees that the shared volume has lost the version that a worker would load."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from trainer import main_rank
from trainer.config import TrainerSettings
from trainer.main_rank import Conductor
from trainer.rollouts.sources import Batch, GroupSource


class SlowSource:
    """Gives its batch when it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.is_cancelled = False
        self.may_end = asyncio.Event()

    async def next(self, _policy_version: int) -> Batch:
        self.asked += 1
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        return Batch([])


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Conductor, SlowSource]:
    monkeypatch.setattr(main_rank, "VERSION_POLL_SECONDS", 0.01)
    made = Conductor(TrainerSettings.load(shared_dir=tmp_path), vocab_size=17)
    source = SlowSource()
    made.source = cast(GroupSource, source)
    return made, source


async def test_a_version_that_goes_is_told_and_the_same_groups_are_waited_for(
    waiting: tuple[Conductor, SlowSource],
) -> None:
    made, source = waiting
    seen: list[bool] = []

    def goes() -> bool:
        seen.append(len(seen) < 2)
        return seen[-1]

    assert await made.next_batch(1, goes) is None
    assert seen == [True, True, False]
    source.may_end.set()
    assert await made.next_batch(1, lambda: True) == Batch([])
    assert source.asked == 1


async def test_a_wait_that_is_given_up_ends_the_making_of_groups(waiting: tuple[Conductor, SlowSource]) -> None:
    made, source = waiting
    call: asyncio.Task[Any] = asyncio.create_task(made.next_batch(1, lambda: True))
    async with asyncio.timeout(30):
        while not source.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while not source.is_cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
