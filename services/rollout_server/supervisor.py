"""Child processes that are started again when they end, a bounded number of times."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable

from services.core.errors import EXIT_CONFIGURATION, ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.rollout_server.child import LAUNCHER_VARIABLE
from services.rollout_server.engines import Command

log = get_logger(__name__)

RESTART_WINDOW_SECONDS = 600.0
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 8.0
"""Before the first restart within the window, and doubled for each further one up to the longest."""
GRACE_SECONDS = 4.0
"""Between SIGTERM and SIGKILL; those who end us allow ten seconds."""


class Supervised:
    """One child process, which leads a process group of its own with all that it starts."""

    def __init__(
        self, command: Command, max_restarts: int, before_restart: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Makes a child that is not started yet.

        Args:
            command: what to run.
            max_restarts: allowed within RESTART_WINDOW_SECONDS, and in all before it is healthy for the first time.
            before_restart: awaited between an end and the next start.
        """
        self.command = command
        self.starts = 0
        """How often the child was started: tells one incarnation from the next."""
        self.was_healthy = False
        """Whether it has ever answered; set by those who ask it."""
        self._max_restarts = max_restarts
        self._before_restart = before_restart
        self._restarts: deque[float] = deque()
        self._process: asyncio.subprocess.Process | None = None
        self._started = asyncio.Condition()

    @property
    def is_running(self) -> bool:
        """Whether the child runs now."""
        return self._process is not None and self._process.returncode is None

    async def wait_for_start(self, after: int) -> None:
        """Returns when the child was started more than ``after`` times; that this comes is the business of ``run``."""
        async with self._started:
            await self._started.wait_for(lambda: self.starts > after)

    async def run(self) -> None:
        """Runs the child, again and again, until cancelled; then the child is ended.

        Raises:
            DependencyLostError: it ended once more than allowed.
            ConfigurationError: it says that it cannot run with these settings, or was never healthy.
        """
        try:
            while True:
                await self._start()
                assert self._process is not None
                code = await self._process.wait()
                self._kill_group()
                log.warning("child ended", child=self.command.name, how=describe_exit(code))
                if code == EXIT_CONFIGURATION:
                    raise ConfigurationError(
                        f"the {self.command.name} cannot run with these settings; it says why above"
                    )
                self._count_restart(code)
                pause = FIRST_PAUSE_SECONDS * 2 ** (len(self._restarts) - 1)
                await asyncio.sleep(min(pause, LONGEST_PAUSE_SECONDS))
                if self._before_restart is not None:
                    await self._before_restart()
        finally:
            await self._stop()

    def kill(self) -> None:
        """Kills the child, which is then started again if that is still allowed."""
        self._kill_group()

    async def _start(self) -> None:
        environment = {**os.environ, **self.command.environment, LAUNCHER_VARIABLE: str(os.getpid())}
        self._process = await asyncio.create_subprocess_exec(
            *self.command.line, env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        async with self._started:
            self.starts += 1
            self._started.notify_all()
        log.info("child started", child=self.command.name, pid=self._process.pid, start=self.starts)

    async def _stop(self) -> None:
        if self._process is None:
            return
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), GRACE_SECONDS)
        self._kill_group()
        await self._process.wait()

    def _kill_group(self) -> None:
        """Ends what is left of the group: an engine's own children may outlive it."""
        if self._process is not None:
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # macOS says the latter of a group of zombies
                os.killpg(self._process.pid, signal.SIGKILL)

    def _count_restart(self, code: int) -> None:
        if not self.was_healthy and self.starts > self._max_restarts:
            raise ConfigurationError(
                f"the {self.command.name} ({self.command.module}) never answered in {self.starts} starts and "
                f"{describe_exit(code)}; see its own messages above, and its settings"
            )
        now = time.monotonic()
        self._restarts.append(now)
        while self._restarts[0] < now - RESTART_WINDOW_SECONDS:
            self._restarts.popleft()
        if len(self._restarts) > self._max_restarts:
            raise DependencyLostError(
                f"the {self.command.name} ({self.command.module}) {describe_exit(code)}, for the "
                f"{len(self._restarts)}. time within {RESTART_WINDOW_SECONDS / 60:g} minutes; ROLLOUT_MAX_RESTARTS is "
                f"{self._max_restarts}; its own messages are above"
            )


def describe_exit(code: int) -> str:
    """A return code in words."""
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
