"""A supervisor of child processes: restarts them when they end or hang, a bounded number of times."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable

from services.core.errors import EXIT_CONFIGURATION, ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.core.processes import Command, describe_exit, end_group, signal_group
from services.core.tasks import run_until_first_ends

log = get_logger(__name__)

RESTART_WINDOW_SECONDS = 600.0
FIRST_PAUSE_SECONDS = 0.5
"""The pause before the first restart within the window; it doubles with each further one."""
LONGEST_PAUSE_SECONDS = 8.0
GRACE_SECONDS = 4.0
"""The time between SIGTERM and SIGKILL; SkyPilot allows the launcher ten seconds."""
START_POLL_SECONDS = 0.1
POLL_SECONDS = 0.5
HANG_SECONDS = 60.0
"""An engine or router that does not answer for that long is killed and restarted: longer than any step takes."""


class ChildRefusedError(ConfigurationError):
    """A child that cannot run with its settings, and has written an ``error: `` line that says why."""


class SupervisedProcess:
    """One child process, which leads a process group of its own with everything that it starts."""

    def __init__(
        self,
        command: Command,
        is_healthy: Callable[[], Awaitable[bool]],
        *,
        max_restarts: int,
        start_seconds: float,
        hang_seconds: float = HANG_SECONDS,
    ) -> None:
        """Describe a child; ``run`` starts it.

        Args:
            command: the command to run.
            is_healthy: returns whether the child answers now.
            max_restarts: restarts allowed within RESTART_WINDOW_SECONDS, and in total before the child first answers.
            start_seconds: a child that has not answered that long after its start is killed.
            hang_seconds: a child that has answered and then does not answer for that long is killed.
        """
        self.command = command
        self.starts = 0
        """The number of starts so far, which tells one child from the next."""
        self.before_restart: Callable[[], Awaitable[None]] | None = None
        """Awaited between the end of a child and the next start."""
        self._is_healthy = is_healthy
        self._start_seconds = start_seconds
        self._hang_seconds = hang_seconds
        self._healthy_start = 0
        self._became_healthy = asyncio.Condition()
        self._max_restarts = max_restarts
        self._restarts: deque[float] = deque()
        """The times of the restarts within the window, by time.monotonic."""
        self._process: asyncio.subprocess.Process | None = None

    async def wait_until_healthy(self, after: int) -> int:
        """Wait until a child started after the first ``after`` starts has answered; return the number of its start."""
        async with self._became_healthy:
            await self._became_healthy.wait_for(lambda: self._healthy_start > after)
            return self._healthy_start

    def is_running(self, start: int) -> bool:
        """Return whether the child of that start runs now."""
        return self.starts == start and self._process is not None and self._process.returncode is None

    async def run(self) -> None:
        """Run the child, again and again, until cancelled; then end it.

        Raises:
            DependencyLostError: the child ended more often than allowed.
            ChildRefusedError: the child cannot run with these settings.
            ConfigurationError: the child was never healthy.
        """
        try:
            while True:
                self._process = process = await self.command.start()
                self.starts += 1
                log.info("child started", child=self.command.name, pid=process.pid, start=self.starts)
                await run_until_first_ends(process.wait(), self._kill_if_hung())
                assert process.returncode is not None
                self.kill()
                log.warning("child ended", child=self.command.name, how=describe_exit(process.returncode))
                self._count_restart(process.returncode)
                await asyncio.sleep(min(FIRST_PAUSE_SECONDS * 2 ** (len(self._restarts) - 1), LONGEST_PAUSE_SECONDS))
                if self.before_restart is not None:
                    await self.before_restart()
        finally:
            if self._process is not None:
                # An engine's own children may outlive it.
                await end_group(self._process, GRACE_SECONDS)
                await self._process.wait()

    def kill(self) -> None:
        """Kill the child and its process group; ``run`` starts the child again if that is still allowed."""
        if self._process is not None:
            signal_group(self._process.pid, signal.SIGKILL)

    async def _kill_if_hung(self) -> None:
        """Watch the child of this start until cancelled, and kill it when it does not answer for too long."""
        answered, seconds, poll_seconds = time.monotonic(), self._start_seconds, START_POLL_SECONDS
        while True:
            if await self._is_healthy():
                answered, seconds, poll_seconds = time.monotonic(), self._hang_seconds, POLL_SECONDS
                async with self._became_healthy:
                    self._healthy_start = self.starts
                    self._became_healthy.notify_all()
            elif time.monotonic() - answered > seconds:
                log.error("child does not answer: killed", child=self.command.name, seconds=seconds)
                self.kill()
                answered = time.monotonic()
            await asyncio.sleep(poll_seconds)

    def _count_restart(self, code: int) -> None:
        if code == EXIT_CONFIGURATION:
            raise ChildRefusedError(f"the {self.command.name} cannot run with these settings; it says why above")
        child, most = f"{self.command.name} ({self.command.module})", self._max_restarts
        if not self._healthy_start and self.starts > most:
            never = f"never answered in {self.starts} starts and {describe_exit(code)}"
            raise ConfigurationError(f"the {child} {never}; see its own messages above, and its settings")
        self._restarts.append(time.monotonic())
        while self._restarts[0] < self._restarts[-1] - RESTART_WINDOW_SECONDS:
            self._restarts.popleft()
        if len(self._restarts) > most:
            raise DependencyLostError(
                f"the {child} {describe_exit(code)} after {most} restart{'s'[: most != 1]} in "
                f"{RESTART_WINDOW_SECONDS / 60:g} minutes, the limit (ROLLOUT_MAX_RESTARTS of a rollout-server); its "
                "own messages are above"
            )
