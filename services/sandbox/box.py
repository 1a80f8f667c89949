"""A box: the place where untrusted code runs, with the verbs exec, load, save, run and close; and a pool of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
import tempfile
from asyncio.subprocess import PIPE
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Self, TypeVar

from services.core.errors import DependencyLostError
from services.sandbox.backends import BOX, BackendName, Interpreter, Layout, command, is_open
from services.sandbox.kernel import Confinement, Limits, landlock_version
from services.sandbox.watch import remove

T = TypeVar("T")

START_SECONDS = 300.0
"""A machine whose memory is short takes minutes over what else takes 50 ms."""
QUEUE_SECONDS = 120.0
"""The longest wait for the answers before one, because the trainer waits for a batch no longer than 300 s."""
TRIES = 2
"""A piece of code whose box is lost is run once more in another."""
_FIRST_USER = 61_184
"""The first of the users that systemd gives to services while they run, which own no files."""
_USERS = 4096
_WAIT = (3.0, 30.0)
"""A box that does not answer within 3 times the code's clock and 30 s more is lost: it leaves out pauses."""
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_FIRST_VICTIM = '{ echo 1000 > /proc/self/oom_score_adj; } 2> /dev/null; exec "$@" 9< /proc'
"""When the machine's memory runs out, the kernel ends a box before anything else. Its first process sees the others in
/proc, which bubblewrap leaves out."""


_taken: set[int] = set()
"""The users of this process's boxes."""


def _take_user(pid: int) -> int:
    """Return a user that no other box of this process has, different from those of other processes where possible."""
    users = (_FIRST_USER + (pid + offset) % _USERS for offset in range(_USERS))
    user = next(user for user in users if user not in _taken)
    _taken.add(user)
    return user


class Outcome(StrEnum):
    """The end of a piece of code. ``infrastructure`` says nothing about the code; each other one is its own doing."""

    OK = "ok"
    FAILED = "failed"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT = "output"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True)
class Result:
    """The outcome of a piece of code, what it printed and replied, and the time that it took."""

    outcome: Outcome
    exit_code: int | None = None
    """None where the code did not end by itself."""
    stdout: bytes = b""
    stderr: bytes = b""
    reply: bytes = b""
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def last_line(self) -> str:
        """The last line of the code's errors, such as ``NameError: name 'x' is not defined``."""
        return (self.stderr.decode("utf-8", "replace").strip().splitlines() or [""])[-1][:300]


class Files(dict[str, bytes]):
    """The regular files of a box by path; those in ``executable`` are programs."""

    def __init__(self, files: Mapping[str, bytes] = MappingProxyType({}), executable: Iterable[str] = ()) -> None:
        super().__init__(files)
        self.executable = set(executable)


def require_box(result: T) -> T:
    """Return the result of something in a box, unless the box was lost, so that nothing is known about the code.

    Raises:
        DependencyLostError: the box was lost.
    """
    if isinstance(result, Result) and result.outcome is Outcome.INFRASTRUCTURE:
        raise DependencyLostError(f"the box was lost: {result.last_line or 'its processes were killed'}")
    return result


class SandboxError(Exception):
    """A box cannot be started; the message is the backend's."""


class Box:
    """A box that runs one piece of code at a time."""

    def __init__(
        self,
        backend: BackendName,
        interpreter: Interpreter,
        limits: Limits,
        *,
        writes: bool = False,
        layout: Layout | None = None,
    ) -> None:
        """Describe a box; ``start`` starts it.

        Args:
            backend: what isolates it.
            interpreter: the Python of its code.
            limits: what each piece of code may take, unless it is given limits of its own.
            writes: whether the box has a directory, which ``exec`` and ``load`` may write to.
            layout: paths of its own, which it has in place of that directory.
        """
        self.backend, self._interpreter, self._limits, self._layout = backend, interpreter, limits, layout
        self._writes = writes or layout is not None
        self._directory: str | None = None
        self._user: int | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_alive(self) -> bool:
        """Return whether the box has been started and was not lost since, as far as is known."""
        return self._process is not None

    @property
    def python(self) -> str:
        """The program of Python that the code in the box can execute once it has started."""
        return "python3" if self._interpreter.search else self._interpreter.program

    def as_answer(self, readable: Sequence[str], places: Sequence[str]) -> str:
        """Return the words before a program that writes to ``places`` alone, and reads them, ``readable`` and Python.

        Before Linux 6.12 it can signal others, too. Without Landlock there are no such words.
        """
        if not landlock_version():
            return ""
        script, own = os.path.join(os.path.dirname(__file__), "kernel.py"), self._interpreter
        return f"{own.program} -I {script} {':'.join([*own.readable, *readable])} {':'.join(places)}"

    @property
    def pid(self) -> int:
        """The process that stands for the box on this machine; all others in it end with it."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> Self:
        """Start the box.

        Raises:
            SandboxError: the backend does not work on this machine.
        """
        is_isolated = self.backend is BackendName.BWRAP
        has_users = os.geteuid() == 0
        try:
            if has_users and not is_isolated:
                self._interpreter = await asyncio.to_thread(self._interpreter.for_every_user)
            if self._writes:
                # Another user cannot reach a private directory for temporary files.
                parent = "/var/tmp" if has_users and not is_open(tempfile.gettempdir()) else None
                self._directory = BOX if is_isolated else tempfile.mkdtemp(prefix="grpo-box-", dir=parent)
            if self._layout is not None:
                self._directory = self._layout.places[0]
            disk_mb = self._limits.disk_mb if self._writes else 0
            words = command(self.backend, self._interpreter, disk_mb=disk_mb, layout=self._layout)
            words = ["/bin/sh", "-c", _FIRST_VICTIM, "sh", *words]
            self._process = await asyncio.create_subprocess_exec(
                *words, env=self._environment(), cwd="/", start_new_session=True, stdin=PIPE, stdout=PIPE, stderr=PIPE
            )
            self._user = _take_user(self.pid) if has_users else None
            confinement = Confinement(
                self._user,
                # A box with paths of its own has nothing else.
                ["/"] if self._layout else self._interpreter.readable,
                self._directory,
                self.backend.value,
                self._layout.places if self._layout else None,
                keeps_modes=bool(self._layout and self._layout.pipes and not has_users),
            )
            async with asyncio.timeout(START_SECONDS):
                await self._exchange(confinement._asdict())
        except (OSError, EOFError, TimeoutError) as error:
            message = await self.close()
            raise SandboxError(message or str(error) or type(error).__name__) from error
        except BaseException:  # a cancellation: nobody else would close it
            await asyncio.shield(self.close())
            raise
        return self

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        limits: Limits | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Result:
        """Run a program in the box's directory, with its children, and end what it leaves running.

        Args:
            argv: the program and its arguments.
            stdin: its standard input.
            limits: what it may take; None: the box's limits.
            environment: variables in place of the box's or in addition to them.
        """
        variables = {**self._environment(), "HOME": self._directory or "/", **environment}
        return await self.run("exec", stdin=stdin, limits=limits, argv=list(argv), environment=variables)

    async def load(self, files: Mapping[str, bytes]) -> Result:
        """Write files of the box by their paths below its directory; as code would, so that none leaves the box."""
        texts = {path: b64encode(content).decode() for path, content in files.items()}
        executable = sorted(files.executable) if isinstance(files, Files) else []
        return await self.run("load", stdin=json.dumps(texts).encode(), executable=executable)

    async def save(self, most_bytes: int, places: Sequence[str] = (".",)) -> Files | Result:
        """Return the files of some directories by path, links and pipes left out; the result where they cannot be read.

        Args:
            most_bytes: of the files, above which they cannot.
            places: the directories.
        """
        limits = self._limits._replace(output_bytes=2 * most_bytes)
        result = await self.run("save", limits=limits, places=[*places], most_bytes=most_bytes)
        if result.outcome is not Outcome.OK:
            return result
        files, executable = json.loads(result.reply)
        return Files({path: b64decode(content) for path, content in files.items()}, executable)

    async def run(self, deed: str, *, stdin: bytes = b"", limits: Limits | None = None, **what: Any) -> Result:
        """Do one of zygote's ``DEEDS``; a box that does not answer gives ``infrastructure`` now and ever after."""
        bounds = limits or self._limits
        # The process of an answer is forked before its tests arrive, and so cannot find them in its memory.
        tests = [{name: what.pop(name) for name in [*what] if name != "source"}] if deed == "asserts" else []
        message = {"deed": deed, "limits": bounds._asdict(), "stdin": stdin.decode("latin-1"), **what}
        factor, more = _WAIT
        try:
            async with asyncio.timeout(factor * bounds.seconds + more):
                reply = await self._exchange(message, *tests)
        except (OSError, EOFError, TimeoutError):
            return Result(Outcome.INFRASTRUCTURE, stderr=(await self.close()).encode())
        except asyncio.CancelledError:
            # The answer of a box that nobody waits for would be taken for the next one's.
            await asyncio.shield(self.close())
            raise
        texts = {name: reply.pop(name).encode("latin-1") for name in ("stdout", "stderr", "reply")}
        return Result(**reply | {"outcome": Outcome(reply["outcome"])}, **texts)

    def _environment(self) -> dict[str, str]:
        path = f"{os.path.dirname(self._interpreter.program)}:{_ENVIRONMENT['PATH']}"
        return {**_ENVIRONMENT, **self._interpreter.environment, "PATH": self._interpreter.search or path}

    async def _exchange(self, *messages: Mapping[str, Any]) -> Any:
        if self._process is None:
            raise EOFError("the box has ended")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for message in messages:
            body = json.dumps(message).encode()
            self._process.stdin.write(struct.pack(">I", len(body)) + body)
        await self._process.stdin.drain()
        [size] = struct.unpack(">I", await self._process.stdout.readexactly(4))
        return json.loads(await self._process.stdout.readexactly(size))

    async def close(self) -> str:
        """End everything in the box, remove its directory, and return the last line that it wrote to its own log."""
        process, self._process = self._process, None
        message = ""
        if process is not None:
            assert process.stdin is not None
            assert process.stderr is not None
            # The end of its input has the zygote end what it started, which a signal to it alone would not.
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                # Not asyncio.timeout, which Python 3.11.2 takes for a cancellation of this task that came before.
                said = await asyncio.wait_for(process.stderr.read(), _WAIT[1])
                lines = said.decode("utf-8", "replace").strip().splitlines()
                message = lines[-1][:300] if lines else ""
                await asyncio.wait_for(process.wait(), _WAIT[1])
            if process.returncode is None:
                process.kill()
                await process.wait()
        if self._user is not None:
            _taken.discard(self._user)
            self._user = None
        directory, self._directory = self._directory, None
        if directory is not None and directory != BOX and self._layout is None:
            await asyncio.to_thread(remove, directory)
        return message


class BoxPool:
    """Boxes in which answers run, first come first served; a box that is lost is replaced by a new one."""

    def __init__(
        self,
        backend: BackendName,
        interpreter: Interpreter,
        limits: Limits,
        size: int,
        on_loss: Callable[[], object] = lambda: None,
    ) -> None:
        """Describe a pool of ``size`` boxes; ``start`` starts them. ``on_loss`` is called for each box that is lost."""
        self._limits, self._on_loss = limits, on_loss
        self._boxes = [Box(backend, interpreter, limits) for _ in range(size)]
        self._free: asyncio.Queue[Box] = asyncio.Queue()
        self._stopping = False
        self._waiting = 0

    async def start(self) -> None:
        """Start the boxes; SandboxError where one cannot be started."""
        await asyncio.gather(*(box.start() for box in self._boxes))
        for box in self._boxes:
            self._free.put_nowait(box)

    async def stop(self) -> None:
        """End the boxes, and what runs in them."""
        self._stopping = True
        await asyncio.gather(*(box.close() for box in self._boxes))

    async def run(self, deed: str, *, seconds: float, **what: Any) -> Result:
        """Do a deed as ``Box.run``, once a box is free; twice at most if its box is lost.

        Raises:
            TimeoutError: no box was free for ``seconds``, nor for the time that the answers before this one may take.
        """
        result = Result(Outcome.INFRASTRUCTURE)
        for _ in range(TRIES):
            rounds = self._waiting // len(self._boxes) + 1
            self._waiting += 1
            try:
                longest = max(seconds, min(rounds * self._limits.seconds, QUEUE_SECONDS))
                box = await asyncio.wait_for(self._free.get(), longest)
            finally:
                self._waiting -= 1
            try:
                if not box.is_alive and not self._stopping:
                    await box.start()
                result = await box.run(deed, **what)
            except SandboxError as error:
                result = Result(Outcome.INFRASTRUCTURE, stderr=str(error).encode())
            finally:
                self._free.put_nowait(box)
            if result.outcome is not Outcome.INFRASTRUCTURE:
                break
            self._on_loss()
        return result
