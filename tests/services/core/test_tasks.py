"""Work in the background and calls onto the event loop beside the training: results, errors, giving up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from services.core import tasks
from services.core.tasks import InterruptedCallError, ServiceThread, in_background


async def test_work_has_its_result_or_its_error() -> None:
    assert await in_background(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await in_background(lambda: 1 // 0)


async def test_a_thread_is_used_again_and_work_at_once_has_threads_of_its_own() -> None:
    # Two that wait for each other need two threads.
    both = threading.Barrier(2)

    def meet() -> int:
        both.wait(60)
        return threading.get_ident()

    first, second = await asyncio.gather(in_background(meet), in_background(meet))
    assert first != second
    used = {first, second}
    for _ in range(200):
        used.add(await in_background(threading.get_ident))
    # A thread may still be on its way back when the next work comes.
    assert len(used) < 20


# --- calls onto the event loop beside the training -------------------------------------------------------------------


@pytest.fixture
def stop() -> threading.Event:
    return threading.Event()


@pytest.fixture
def thread(stop: threading.Event, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceThread]:
    monkeypatch.setattr(tasks, "MEANWHILE_SECONDS", 0.01)
    with ServiceThread(stop.is_set) as started:
        yield started


def test_a_call_returns_the_result_or_raises_the_error(thread: ServiceThread) -> None:
    async def divide(by: int) -> float:
        return 1 / by

    assert thread.call(divide(2)) == 0.5
    with pytest.raises(ZeroDivisionError):
        thread.call(divide(0))


def test_work_goes_on_while_the_caller_does_something_else_meanwhile(thread: ServiceThread) -> None:
    # Such as writing a policy version again that the shared volume has lost, while groups are generated.
    may_end = asyncio.Event()
    calls: list[int] = []

    async def work() -> str:
        await may_end.wait()
        return "groups"

    def meanwhile() -> None:
        calls.append(1)
        if len(calls) == 3:
            thread.call(set_event(may_end))

    async def set_event(event: asyncio.Event) -> None:
        event.set()

    assert thread.call(work(), meanwhile=meanwhile) == "groups"
    assert len(calls) >= 3


@pytest.mark.parametrize("how", ["stop", "meanwhile fails"])
def test_a_wait_that_is_given_up_cancels_the_work(thread: ServiceThread, stop: threading.Event, how: str) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def meanwhile() -> None:
        begun.wait(30)
        if how == "stop":
            stop.set()
        else:
            raise OSError("the disk")

    with pytest.raises(InterruptedCallError if how == "stop" else OSError):
        thread.call(work(), interruptible=True, meanwhile=meanwhile)
    assert cancelled.wait(30)
