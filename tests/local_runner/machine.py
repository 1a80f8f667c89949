"""Nodes without processes, and a clock that jumps to the next event: a run of hours takes milliseconds."""

from __future__ import annotations

import asyncio
import selectors
import signal
import threading
from collections.abc import Callable, Coroutine
from itertools import count
from pathlib import Path
from typing import IO, Any, TypeVar

from local_runner.processes import MARK
from local_runner.spec import TaskSpec

T = TypeVar("T")


class Node:
    """A start of a task's node, whose command is a coroutine."""

    _pids = count(1)

    def __init__(self, task: str, rank: int, attempt: int, log: IO[bytes], environment: dict[str, str]) -> None:
        self.task, self.rank, self.attempt, self.environment = task, rank, attempt, environment
        self.pid = next(self._pids)
        self._log = Path(log.name)
        self.failure: BaseException | None = None
        """What the command raised, such as a failed assertion."""
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def begin(self, command: Command) -> Node:
        self._job = asyncio.ensure_future(command(self))
        self._job.add_done_callback(self._end)
        return self

    def _end(self, job: asyncio.Future[int | None]) -> None:
        # What does not catch SIGTERM ends of it.
        self.failure = None if job.cancelled() else job.exception()
        if self.is_running:
            self._code.set_result(-signal.SIGTERM if job.cancelled() else 1 if self.failure else job.result() or 0)

    def say(self, text: str) -> None:
        """Write a line into the node's log."""
        with self._log.open("a") as file:
            file.write(text + "\n")

    @property
    def is_running(self) -> bool:
        return not self._code.done()

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def terminate(self) -> None:
        self._job.cancel()

    def kill(self) -> None:
        if self.is_running:
            self._code.set_result(-signal.SIGKILL)
        self._job.cancel()


Command = Callable[[Node], Coroutine[Any, Any, int | None]]
"""The command of a node, which returns its exit code. SIGTERM is a CancelledError, which it may catch."""


class Machine:
    """The nodes of a run, by the commands of its tasks."""

    def __init__(self, commands: dict[str, Command]) -> None:
        self._commands = commands
        self.nodes: list[Node] = []
        self.times: dict[str, list[float]] = {}
        """The times at which each node was started."""

    async def start(self, task: TaskSpec, rank: int, log: IO[bytes], environment: dict[str, str]) -> Node:
        times = self.times.setdefault(f"{task.name}-{rank}", [])
        node = Node(task.name, rank, len(times), log, environment)
        times.append(asyncio.get_running_loop().time())
        self.nodes.append(node)
        return node.begin(self._commands[task.name])

    async def end(self, marks: list[str], grace_seconds: float, hurry: threading.Event) -> None:
        loop = asyncio.get_running_loop()
        nodes = [node for node in self.nodes if node.is_running and _is_below(node.environment[MARK], marks)]
        if grace_seconds:
            for node in nodes:
                node.terminate()
            until = loop.time() + grace_seconds
            while any(node.is_running for node in nodes) and loop.time() < until and not hurry.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        for node in filter(lambda node: node.is_running, nodes):
            node.kill()
            await asyncio.sleep(0.05)  # as long as ``processes.end`` takes to see that it is gone


def _is_below(mark: str, marks: list[str]) -> bool:
    return any(f"{mark}/".startswith(f"{one}/") for one in marks)


def exits(*codes: int, after: float = 0.0) -> Command:
    """Return a command that ends with the first code at its first start, and with the last one when they are used."""

    async def command(node: Node) -> int:
        await asyncio.sleep(after)
        return codes[min(node.attempt, len(codes) - 1)]

    return command


async def stays(node: Node) -> None:
    """Run until a signal ends the node."""
    await asyncio.Future()


def traps(seconds: float, code: int = 0, *, done: Callable[[], object] = lambda: None) -> Command:
    """Return a command that ends ``seconds`` after SIGTERM with ``code``, upon which ``done`` is called."""

    async def command(node: Node) -> int:
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            await asyncio.sleep(seconds)
            done()
        return code

    return command


class _Jumps(selectors.SelectSelector):
    """A selector for which time passes at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is left that could happen"
        self.now += max(timeout, 0.0)
        return super().select(0)


def in_no_time(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop whose clock jumps."""
    clock = _Jumps()

    def loop() -> asyncio.AbstractEventLoop:
        made = asyncio.SelectorEventLoop(clock)
        made.time = lambda: clock.now  # type: ignore[method-assign]
        return made

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main)
