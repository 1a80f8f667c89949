"""The program inside a box: forks a process for every piece of code, watches it, and says how it ended.

It has imported what answers usually import, so a fork costs milliseconds where an interpreter costs thirty. The forked
process takes its own rights away (``kernel.confine``) before it runs anything. Requests and replies are JSON with their
length before them, over standard input and output; when the input ends, everything in the box ends. Standard library
only, because an interpreter without this project's packages may run it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import importlib
import json
import os
import random
import selectors
import shutil
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from services.sandbox import harness, kernel

TICK_SECONDS = 0.05
DISK_TICKS = 5
"""Ticks between two measurements of a box that is on a disk."""
EXIT_MEMORY = 77
_GRACE_SECONDS = 0.5
"""The time for an answer's process to end by itself once its tests have ended."""
_REQUESTS, _REPLIES, _COPIES = 100, 101, 200
"""File descriptors out of the way of those that a piece of code gets."""
_STDOUT, _STDERR, _REPLY, _LINK = 1, 2, 3, 4


def main() -> None:
    """Serve requests until the input ends."""
    os.dup2(0, _REQUESTS, inheritable=False)
    os.dup2(1, _REPLIES, inheritable=False)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for name in harness.USUAL_MODULES:
        importlib.import_module(name)
    sys.set_int_max_str_digits(0)
    description = _receive()
    if description is None:
        return
    box = Box(**description)
    gc.freeze()
    _send({"ready": True})
    while (request := _receive()) is not None:
        _send(box.run(**request))


def _receive() -> Any:
    head = _read_exactly(4)
    body = _read_exactly(*struct.unpack(">I", head)) if head else b""
    return json.loads(body) if body else None


def _read_exactly(size: int) -> bytes:
    """Return ``size`` bytes of a request; nothing where the input ends."""
    content = b""
    while len(content) < size:
        chunk = os.read(_REQUESTS, min(size - len(content), 2**20))
        if not chunk:
            return b""
        content += chunk
    return content


def _send(reply: dict[str, Any]) -> None:
    body = json.dumps(reply).encode()
    content = memoryview(struct.pack(">I", len(body)) + body)
    while content:
        content = content[os.write(_REPLIES, content) :]


class Box:
    """What all pieces of code in a box have in common."""

    def __init__(self, uid: int | None, readable: list[str], box: str | None, isolation: str) -> None:
        """Begin a box.

        Args:
            uid: the user as whom code runs; None: this one.
            readable: files and directories that code may read.
            box: the directory that code may write to; None: no directory.
            isolation: the backend: ``bwrap``, ``landlock`` or ``seatbelt``.
        """
        self.uid, self.readable, self.directory, self.isolation = uid, readable, box, isolation
        self.answers_uid = uid if uid is None or _can_read_library(uid) else None
        if isolation == "bwrap" and os.getppid() != 1:
            raise RuntimeError("a bubblewrap box has processes of its own only, of which the first is the parent")
        if sys.platform == "linux":
            kernel.adopt_orphans()
        if box is not None and uid is not None and isolation == "landlock":
            os.chown(box, uid, uid)
        receiver, sender = socket.socketpair()
        receiver.setblocking(False)
        sender.setblocking(False)
        self.signals = (receiver, sender)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)

    def run(self, deed: str, limits: dict[str, Any], stdin: str = "", **what: Any) -> dict[str, Any]:
        """Do one of DEEDS in a process of its own, and return its outcome with all that it printed and replied."""
        run = Run(self, kernel.Limits(**limits), stdin.encode("latin-1"))
        if deed == "asserts":
            # The answer's process comes first and has no reply; the process of the tests is the one that counts.
            link = socket.socketpair()
            null = os.open(os.devnull, os.O_WRONLY)
            ends = [run.ends[0], null, run.ends[_STDERR], null]
            run.fork("serve", {"source": what.pop("source")}, [*ends, link[0].fileno()])
            run.fork(deed, what, [*run.ends, link[1].fileno()])
            os.close(null)
            for end in link:
                end.close()
        else:
            run.fork(deed, what, run.ends[:_REPLY] if deed == "exec" else run.ends)
        return run.watch()

    def become(self, deed: str, limits: kernel.Limits, ends: list[int]) -> None:
        """Turn this forked process into one that may do ``deed``, with the file descriptors ``ends`` as 0, 1, ..."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for number, copy in enumerate([fcntl.fcntl(end, fcntl.F_DUPFD, _COPIES) for end in ends]):
            os.dup2(copy, number)
        os.closerange(len(ends), os.sysconf("SC_OPEN_MAX"))
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (
            open(number, "w", encoding="utf-8", errors="replace", closefd=False) for number in (_STDOUT, _STDERR)  # noqa: SIM115
        )
        random.seed(0)
        is_answer = deed != "exec"
        writes = deed in ("exec", "read", "write")
        kernel.confine(
            limits,
            uid=self.uid if writes else self.answers_uid,
            readable=self.readable,
            box=self.directory if writes else None,
            is_answer=is_answer,
            needs_landlock=self.isolation == "landlock",
            shared=self._tasks() if not is_answer else 0,
        )
        if self.directory is not None and writes:
            os.chdir(self.directory)

    def _tasks(self) -> int:
        """Return how many threads outside this box count towards the limit of processes that code in it has."""
        if self.uid is not None or self.isolation != "landlock":
            return 4
        mine, count = os.getuid(), 0
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}").st_uid == mine:
                    count += len(os.listdir(f"/proc/{pid}/task"))
        return count

    def end_all(self, main: int) -> None:
        """Kill all processes of the box but this one, and wait until none is left."""
        if self.isolation == "bwrap":
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        elif self.isolation == "seatbelt":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(main, signal.SIGKILL)
        else:
            _kill_descendants()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()


def _kill_descendants() -> None:
    """Stop all descendants until there is no new one, so that none forks any more, and kill them."""
    stopped: set[int] = set()
    while new := set(_descendants(os.getpid())) - stopped:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _can_read_library(uid: int) -> bool:
    """Return whether a user can read Python's library, as an answer must that imports one more module."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os._exit(0 if os.access(os.__file__, os.R_OK) else 1)
        os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


class Run:
    """One piece of code: its processes, its pipes, and the watch over what it takes."""

    def __init__(self, box: Box, limits: kernel.Limits, stdin: bytes) -> None:
        self._box, self._limits, self._stdin = box, limits, stdin
        pipes = [os.pipe() for _ in range(4)]
        self.ends = [pipes[0][0], *(writer for _, writer in pipes[1:])]
        """The code's standard input, output and error, and the pipe for its reply."""
        self._input = pipes[0][1]
        self._texts = {reader: bytearray() for reader, _ in pipes[1:]}
        self._started = time.monotonic()
        self._executes, self._measured = False, 0.0
        self._children: list[int] = []
        self._ended: dict[int, tuple[int, float]] = {}
        """Exit codes and processor seconds of the processes that have ended by themselves."""

    def fork(self, deed: str, what: dict[str, Any], ends: list[int]) -> None:
        """Start a process that does ``deed``."""
        self._executes = deed == "exec"
        pid = os.fork()
        if pid:
            self._children.append(pid)
            return
        code = 1
        try:
            self._box.become(deed, self._limits, ends)
            DEEDS[deed](**what)
            code = 0
        except MemoryError:
            code = EXIT_MEMORY
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:  # noqa: BLE001  # the code's own
            with contextlib.suppress(BaseException):
                traceback.print_exc(limit=-3)
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code & 255)

    def watch(self) -> dict[str, Any]:
        """Wait until the code ends or takes too much, end all of its processes, and return the outcome."""
        for end in self.ends:
            os.close(end)
        main, cause, clock, last, ticks, main_ended = self._children[-1], None, 0.0, self._started, 0, 0.0
        with self._selector() as selector:
            while cause is None and len(self._ended) < len(self._children):
                for key, _ in selector.select(TICK_SECONDS):
                    cause = key.data(selector) or cause
                now = time.monotonic()
                # A pause of the machine is not the code's.
                clock += min(now - last, 2 * TICK_SECONDS)
                last, ticks = now, ticks + 1
                self._reap()
                if main in self._ended:
                    main_ended = main_ended or clock
                    if clock > main_ended + _GRACE_SECONDS:
                        break
                cause = cause or self._over_limit(clock, ticks)
        self._box.end_all(main)
        for reader in self._texts:
            while self._read(reader) > 0:
                pass
            os.close(reader)
        self._close_input()
        return self._describe(cause or self._too_long())

    def _selector(self) -> selectors.BaseSelector:
        selector = selectors.DefaultSelector()
        for reader in self._texts:
            os.set_blocking(reader, False)
            selector.register(reader, selectors.EVENT_READ, self._reading(reader))
        os.set_blocking(self._input, False)
        selector.register(self._input, selectors.EVENT_WRITE, self._feed)
        selector.register(self._box.signals[0], selectors.EVENT_READ, self._woken)
        selector.register(_REQUESTS, selectors.EVENT_READ, self._hung_up)
        return selector

    def _reading(self, reader: int) -> Callable[[selectors.BaseSelector], str | None]:
        def read(selector: selectors.BaseSelector) -> str | None:
            if self._read(reader) == 0:
                selector.unregister(reader)
            return self._too_long()

        return read

    def _read(self, reader: int) -> int:
        """Keep what a pipe has, as far as it may be long; return the bytes read: 0 at its end, -1 if it has none now."""
        try:
            chunk = os.read(reader, 2**16)
        except BlockingIOError:
            return -1
        text = self._texts[reader]
        text += chunk[: self._limits.output_bytes + 1 - len(text)]
        return len(chunk)

    def _too_long(self) -> str | None:
        return "output" if any(len(text) > self._limits.output_bytes for text in self._texts.values()) else None

    def _feed(self, selector: selectors.BaseSelector) -> None:
        try:
            self._stdin = self._stdin[os.write(self._input, self._stdin) :] if self._stdin else b""
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            self._stdin = b""
        if not self._stdin:
            selector.unregister(self._input)
            self._close_input()

    def _close_input(self) -> None:
        if self._input >= 0:
            os.close(self._input)
        self._input = -1

    def _woken(self, _selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(BlockingIOError):
            self._box.signals[0].recv(4096)

    def _hung_up(self, _selector: selectors.BaseSelector) -> None:
        """End everything: no request comes before the reply to the last, so the server has gone."""
        self._box.end_all(self._children[-1])
        os._exit(0)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._children:
                    code = os.waitstatus_to_exitcode(status)
                    self._ended[pid] = (code, usage.ru_utime + usage.ru_stime)

    def _over_limit(self, clock: float, ticks: int) -> str | None:
        self._measured = self._cpu_seconds()
        if clock > self._limits.seconds or self._measured > self._limits.cpu_seconds:
            return "timeout"
        is_on_disk = self._box.directory is not None and self._box.isolation != "bwrap"
        if is_on_disk and ticks % DISK_TICKS == 0 and _disk_bytes(self._box.directory) > self._limits.disk_mb * 2**20:
            return "output"
        return None

    def _cpu_seconds(self) -> float:
        total = sum(seconds for _, seconds in self._ended.values())
        for pid in self._children:
            if pid not in self._ended:
                with contextlib.suppress(OSError):
                    # The clock of another process's processor time; see clock_getcpuclockid(3).
                    total += time.clock_gettime((~pid << 3) | 2)
        return total

    def _describe(self, cause: str | None) -> dict[str, Any]:
        codes = [code for code, _ in self._ended.values()]
        cpu_seconds = max(self._measured, sum(seconds for _, seconds in self._ended.values()))
        if cause is None and cpu_seconds > self._limits.cpu_seconds:
            cause = "timeout"
        if cause is None and EXIT_MEMORY in codes:
            cause = "memory"
        # An answer can send no signal: the machine ran out of memory, or somebody killed it.
        if cause is None and -signal.SIGKILL in codes and not self._executes:
            cause = "infrastructure"
        code = self._ended.get(self._children[-1], (None, 0.0))[0]
        most = self._limits.output_bytes
        texts = [bytes(text[:most]).decode("latin-1") for text in self._texts.values()]
        return {
            "outcome": cause or ("ok" if code == 0 else "failed"),
            "exit_code": code,
            "seconds": time.monotonic() - self._started,
            "cpu_seconds": cpu_seconds,
            **dict(zip(("stdout", "stderr", "reply"), texts, strict=True)),
        }


def _disk_bytes(directory: str) -> int:
    """Return what the files below a directory take, whatever happens to them meanwhile."""
    total = 0
    for path, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total


def _serve(source: str) -> None:
    harness.serve_answer(source, *_link())


def _asserts(tests: list[str], own: list[str], setup: str, nonce: str) -> None:
    with _open_reply() as reply:
        harness.run_asserts(tests, own, setup, nonce, _link(), reply)


def _calls(source: str, name: str | None, inputs: list[list[Any]]) -> None:
    with _open_reply() as reply:
        harness.run_calls(source, name, inputs, reply)


def _execute(argv: list[str], environment: dict[str, str]) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvpe(argv[0], argv, environment)


def _write(path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)


def _read(path: str) -> None:
    with open(path, "rb") as file:
        shutil.copyfileobj(file, sys.stdout.buffer)


def _open_reply() -> TextIO:
    return open(_REPLY, "w", encoding="utf-8")


def _link() -> tuple[TextIO, TextIO]:
    return open(_LINK, encoding="utf-8"), open(os.dup(_LINK), "w", encoding="utf-8")  # noqa: SIM115


DEEDS: dict[str, Callable[..., None]] = {
    "script": harness.run_script,
    "calls": _calls,
    "serve": _serve,
    "asserts": _asserts,
    "exec": _execute,
    "write": _write,
    "read": _read,
}
