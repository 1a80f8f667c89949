"""A supervisor of a child process: restarts with a bound, and the error that the bound ends with."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from services.core import supervisor
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.processes import Command
from services.core.supervisor import ChildRefusedError, SupervisedProcess
from tests.waiting import IDLE_SECONDS, eventually

CHILD = """
import signal, sys
code = int(sys.argv[1])
if code < 0:
    signal.pause()
sys.exit(code)
"""
RUNS = -1


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_PAUSE_SECONDS", "START_POLL_SECONDS", "POLL_SECONDS"):
        monkeypatch.setattr(supervisor, name, 0.01)


@pytest.fixture
def supervise(tmp_path: Path) -> Callable[..., SupervisedProcess]:
    """Returns a supervisor of a child that exits with a code, or runs until it is ended."""
    (tmp_path / "a_child.py").write_text(CHILD)

    def make(code: int, is_healthy: Callable[[], Awaitable[bool]], **options: Any) -> SupervisedProcess:
        command = Command("engine", sys.executable, "a_child", [str(code)], {"PYTHONPATH": str(tmp_path)})
        limits = {"max_restarts": 2, "start_seconds": IDLE_SECONDS, "hang_seconds": IDLE_SECONDS}
        return SupervisedProcess(command, is_healthy, **(limits | options))

    return make


async def never() -> bool:
    return False


async def always() -> bool:
    return True


@asynccontextmanager
async def running(child: SupervisedProcess) -> AsyncIterator[None]:
    task = asyncio.create_task(child.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize(
    ("code", "options", "error", "starts", "how"),
    [
        (78, {}, ChildRefusedError, 1, "cannot run"),
        (0, {}, ConfigurationError, 3, "exited with code 0"),
        (RUNS, {"start_seconds": 0.05}, ConfigurationError, 3, "SIGKILL"),
        (RUNS, {"start_seconds": 0.05, "max_restarts": 0}, ConfigurationError, 1, "SIGKILL"),
    ],
)
async def test_a_child_that_was_never_healthy_is_started_a_bounded_number_of_times(
    supervise: Callable[..., SupervisedProcess],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    options: dict[str, Any],
    error: type[Exception],
    starts: int,
    how: str,
) -> None:
    # An engine that hangs at its start takes longer to end than the window.
    monkeypatch.setattr(supervisor, "RESTART_WINDOW_SECONDS", 0.0)
    child = supervise(code, never, **options)
    with pytest.raises(error, match=how):
        await child.run()
    assert child.starts == starts


async def test_a_child_that_was_healthy_is_restarted_and_then_lost(supervise: Callable[..., SupervisedProcess]) -> None:
    child = supervise(RUNS, always, max_restarts=1)
    told: list[int] = []

    async def before_restart() -> None:
        told.append(child.starts)

    child.before_restart = before_restart
    task = asyncio.create_task(child.run())
    for start in (1, 2):
        assert await child.wait_until_healthy(after=start - 1) == start
        assert child.is_running(start)
        child.kill()
    with pytest.raises(DependencyLostError, match="SIGKILL after 1 restart in 10 minutes"):
        await task
    assert (told, child.starts, child.is_running(2)) == ([1], 2, False)


async def test_a_child_that_no_longer_answers_is_killed_and_started_again(
    supervise: Callable[..., SupervisedProcess],
) -> None:
    answers = [True]

    async def is_healthy() -> bool:
        return answers[0]

    child = supervise(RUNS, is_healthy, hang_seconds=0.05)
    async with running(child):
        await child.wait_until_healthy(after=0)
        answers[0] = False
        await eventually(lambda: child.starts == 2, "another start")
        assert not child.is_running(1)
        answers[0] = True
        assert await child.wait_until_healthy(after=1) == 2
    assert not child.is_running(2), "the end of the supervisor ends its child"
