"""A runner of environments' calls beside the event loop, with a time limit for each."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from services.core.tasks import in_background
from services.environment_server.environments import EnvironmentBrokenError, EnvironmentHungError


class Runner:
    """Runs jobs, each of which may take ``seconds``.

    The jobs of one call run in one thread, one after another. A job that takes longer is given up: its thread is left
    alone, because nothing can end a thread, and another thread goes on with the jobs behind it.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.stuck = 0
        """Threads that were given up and have not come back since."""

    async def run(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return the results of ``jobs`` in order, with the exception of a job that failed in its result's place.

        Results that are awaitable, such as those of coroutine functions, are awaited on the event loop, all at once.
        """
        results: list[Any] = []
        while len(results) < len(jobs):
            if inspect.iscoroutinefunction(jobs[len(results)]):
                # A call makes the coroutine and does not block.
                results.append(jobs[len(results)]())
            else:
                results += await self._run_until_stuck(jobs[len(results) :])
        awaited = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
        for i, result in zip(awaited, await asyncio.gather(*(self._await(results[i]) for i in awaited)), strict=True):
            results[i] = result
        return results

    async def _await(self, result: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._seconds):
                return await result
        except TimeoutError:
            # Cancelled, so that nothing uses the environment any longer; what hangs in a thread still does.
            return EnvironmentBrokenError(self._too_slow)
        # Environments are other people's code and may raise anything; it becomes the end of their episode.
        except Exception as error:  # noqa: BLE001
            return error

    async def _run_until_stuck(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        results: list[Any] = []
        given_up = False

        def work() -> None:
            for job in jobs:
                try:
                    result = job()
                # As above.
                except Exception as error:  # noqa: BLE001
                    result = error
                if given_up:
                    return
                results.append(result)

        thread = asyncio.ensure_future(in_background(work))
        while not thread.done():
            before = len(results)
            await asyncio.wait({thread}, timeout=self._seconds)
            if not thread.done() and len(results) == before:
                given_up = True
                self.stuck += 1
                thread.add_done_callback(self._come_back)
                return [*results[:before], EnvironmentHungError(self._too_slow)]
        thread.result()
        return results

    def _come_back(self, _thread: asyncio.Future[None]) -> None:
        self.stuck -= 1

    @property
    def _too_slow(self) -> str:
        return f"the environment took more than {self._seconds:g} s; raise ENVIRONMENT_STEP_SECONDS if it needs longer"
