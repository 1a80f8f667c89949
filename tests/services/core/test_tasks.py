"""Work in the background: results, errors, and threads that are used again."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.core.tasks import in_background


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
