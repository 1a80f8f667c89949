"""Waits go on as long as something moves, however slowly, and end with what was waited for when nothing does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import waiting
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, bytes_in, eventually, wait_until


class Clock:
    """A clock that sleeping moves, and nothing else."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(waiting, "time", made)
    return made


def test_a_wait_outlasts_its_idle_time_while_there_is_progress(clock: Clock) -> None:
    slow = IDLE_SECONDS * 0.9
    found = wait_until(lambda: clock.now > 4 * slow and "done", "work", every=1, progress=lambda: clock.now // slow)
    assert found == "done"
    assert clock.now > 3 * IDLE_SECONDS


def test_a_wait_ends_when_nothing_moves_and_says_what_it_was_for(clock: Clock) -> None:
    with pytest.raises(AssertionError, match=r"the first step: not within 122 s, the last 122 of them idle\nthe log"):
        wait_until(lambda: False, "the first step", every=2, told=lambda: "the log")


def test_a_wait_ends_at_its_limit_whatever_moves(clock: Clock) -> None:
    with pytest.raises(AssertionError, match="the last 0 of them idle"):
        wait_until(lambda: False, "a run", every=10, progress=clock.monotonic)
    assert clock.now == pytest.approx(LIMIT_SECONDS, abs=10)


async def test_conditions_may_be_awaited(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep(seconds: float) -> None:
        clock.sleep(seconds)

    async def later() -> bool:
        return clock.now > 5

    monkeypatch.setattr(waiting, "asyncio", SimpleNamespace(sleep=sleep))
    assert await eventually(later, every=1)
    with pytest.raises(AssertionError, match="not within 12"):
        await eventually(lambda: False, every=1)


def test_what_is_written_is_progress(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_text("12345")
    assert bytes_in(tmp_path) == bytes_in(tmp_path / "logs" / "a.log") == 5
    assert bytes_in(tmp_path, tmp_path / "not there") == 5
