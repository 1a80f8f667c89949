"""The program inside a box: forks a process for every piece of code, watches it, and says how it ended.

It has imported what answers usually import, so a fork costs milliseconds where an interpreter costs thirty. The forked
process takes its own rights away (``kernel.confine``) before it runs anything. Requests and replies are JSON with their
length before them, over standard input and output; when the input ends, everything in the box ends. Standard library
only, because an interpreter without this project's packages may run it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import signal
import socket
import stat
import struct
import sys
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from services.sandbox import harness, kernel
from services.sandbox.watch import TICK_SECONDS, Processes, Run, remove

_REQUESTS, _REPLIES, _COPIES = 100, 101, 200
"""File descriptors out of the way of those that a piece of code gets."""
_STDOUT, _STDERR, _REPLY, _LINK = 1, 2, 3, 4
MOST_FILES = 10_000
"""Files that are read from a box: empty ones take time, too."""
_RUN_ANSWERS = ("script", "calls", "serve")
WAIT_SECONDS, WAIT_SHARE = 5.0, 0.01
"""An answer may not take less than this share of the processor for so long, or for its limit of processor time."""


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
    os.umask(0o022)
    box = Box(kernel.Confinement(**description))
    gc.freeze()
    _send({"ready": True})
    while (request := _receive()) is not None:
        _send(box.run(**request))
    box.remove()


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
    """The parts that all pieces of code in a box have in common."""

    def __init__(self, confinement: kernel.Confinement) -> None:
        self._confinement, self._directory, uid = confinement, confinement.directory, confinement.uid
        self._processes = Processes(confinement.isolation, _REQUESTS)
        if self._directory is not None and confinement.isolation == "landlock":
            # Answers read it, who may be another user than the programs that wrote there.
            os.chmod(self._directory, 0o755)
            if uid is not None:
                os.chown(self._directory, uid, uid)

    def run(self, deed: str, limits: dict[str, Any], stdin: str = "", **what: Any) -> dict[str, Any]:
        """Do one of DEEDS in a process of its own, and return its outcome with all that it printed and replied."""
        bounds, executes = kernel.Limits(**limits), deed == "exec"
        disk = self._directory if executes and self._confinement.isolation != "bwrap" else None
        kind = _Answer if deed in (*_RUN_ANSWERS, "asserts") else Run
        run = kind(self._processes, bounds, stdin.encode("latin-1"), disk)

        def start(deed: str, what: dict[str, Any], ends: list[int]) -> None:
            run.fork(lambda: self._become(deed, bounds, ends), lambda: DEEDS[deed](**what))

        if deed == "asserts":
            # The answer's process comes first and has no reply; the process of the tests is the one that counts.
            link = socket.socketpair()
            null = os.open(os.devnull, os.O_WRONLY)
            ends = [run.ends[0], null, run.ends[_STDERR], null]
            start("serve", what, [*ends, link[0].fileno()])
            self._start_tests(run, bounds, [*run.ends, link[1].fileno()])
            os.close(null)
            for end in link:
                end.close()
        else:
            start(deed, what, run.ends[:_REPLY] if executes else run.ends)
        return run.watch(may_signal=executes)

    def _start_tests(self, run: Run, bounds: kernel.Limits, ends: list[int]) -> None:
        """Start the process of the tests, which alone receives them: whatever is forked later never had them."""
        received, tells = os.pipe()
        tests: dict[str, Any] = {}

        def become() -> None:
            tests.update(_receive() or {})
            os.close(tells)
            self._become("asserts", bounds, ends)

        run.fork(become, lambda: _asserts(**tests))
        os.close(tells)
        os.read(received, 1)
        os.close(received)

    def remove(self) -> None:
        """Remove the directory, unless it vanishes with the box."""
        if self._directory is not None and self._confinement.isolation != "bwrap":
            remove(self._directory)

    def _become(self, deed: str, limits: kernel.Limits, ends: list[int]) -> None:
        """Turn this forked process into one that may do ``deed``, with the file descriptors ``ends`` as 0, 1, ..."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for number, copy in enumerate([fcntl.fcntl(end, fcntl.F_DUPFD, _COPIES) for end in ends]):
            os.dup2(copy, number)
        os.closerange(len(ends), os.sysconf("SC_OPEN_MAX"))
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        sys.stdout = open(_STDOUT, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(_STDERR, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        random.seed(0)
        is_answer = deed != "exec"
        writes = deed in ("exec", "load", "save")
        # What the programs of an episode wrote must not become a module, or a file, of the tests.
        folder = [] if self._directory is None or deed == "asserts" else [self._directory]
        kernel.confine(
            limits,
            self._confinement,
            readable=[*self._confinement.readable, *folder],
            places=(self._confinement.places or folder) if writes else [],
            is_answer=is_answer,
            shared=0 if is_answer else self._tasks(),
        )
        for directory in folder:
            os.chdir(directory)
            if deed in _RUN_ANSWERS:
                sys.path.insert(0, directory)

    def _tasks(self) -> int:
        """Return how many threads outside this box count towards the limit of processes that code in it has."""
        if self._confinement.uid is not None or self._confinement.isolation != "landlock":
            return 4
        mine, count = os.getuid(), 0
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}").st_uid == mine:
                    count += len(os.listdir(f"/proc/{pid}/task"))
        return count


class _Answer(Run):
    """The run of an answer, which ends as well when it has only waited for long, because others wait for its box.

    An answer that wants the processor gets a share of it, even from a machine with a hundred others for each core.
    """

    _clock = _counted = _waited = 0.0

    def _over_limit(self, clock: float, ticks: int) -> str | None:
        cause = super()._over_limit(clock, ticks)
        longest = max(self._limits.cpu_seconds, WAIT_SECONDS)
        turn, self._clock = clock - self._clock, clock
        # A busy machine is late to run this watch, too. Only Linux tells the processor time of a process that runs.
        if turn < 1.9 * TICK_SECONDS and self._measured > 0:
            self._waited += turn
        if self._measured - self._counted > WAIT_SHARE * longest:
            self._counted, self._waited = self._measured, 0.0
        return cause or ("timeout" if self._waited > longest else None)


def _serve(source: str) -> None:
    harness.serve_answer(source, *_link())


def _asserts(**tests: Any) -> None:
    with _open_reply() as reply:
        harness.run_asserts(**tests, link=_link(), reply=reply)


def _calls(source: str, name: str | None, inputs: list[list[Any]]) -> None:
    with _open_reply() as reply:
        harness.run_calls(source, name, inputs, reply)


def _execute(argv: list[str], environment: dict[str, str]) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvpe(argv[0], argv, environment)


def _load(executable: list[str]) -> None:
    programs = {*executable}
    for path, content in json.load(sys.stdin).items():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        mode = 0o755 if path in programs else 0o644
        with open(path, "wb", opener=lambda name, flags, mode=mode: os.open(name, flags, mode)) as file:  # type: ignore[misc]
            file.write(a2b_base64(content))


def _save(places: list[str], most_bytes: int) -> None:
    files: dict[str, str] = {}
    executable, left = [], most_bytes
    for folder, names in (found for place in places for found in _folders(place)):
        for path in (os.path.normpath(os.path.join(folder, name)) for name in names):
            # A link could name a file of the system, and a pipe has no end.
            if stat.S_ISREG((status := os.lstat(path)).st_mode):
                # A sparse file has more bytes than it takes.
                left -= status.st_size
                if left < 0:
                    raise OSError(f"the files have more than {most_bytes} bytes")
                with open(path, "rb") as file:
                    files[path] = b2a_base64(file.read(), newline=False).decode()
                executable += [path] if status.st_mode & stat.S_IXUSR else []
        if len(files) > MOST_FILES:
            raise OSError(f"there are more than {MOST_FILES} files")
    with _open_reply() as reply:
        json.dump([files, executable], reply, sort_keys=True)


def _folders(place: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the directories of a place with the names of their files; without what is mounted below."""
    device = os.lstat(place).st_dev
    for folder, *contents in os.walk(place):
        for names in contents:
            names[:] = [name for name in names if os.lstat(os.path.join(folder, name)).st_dev == device]
        yield folder, contents[1]


def _open_reply() -> TextIO:
    return open(_REPLY, "w", encoding="utf-8")


def _link() -> harness.Link:
    return open(_LINK, encoding="utf-8"), open(os.dup(_LINK), "w", encoding="utf-8")


DEEDS: dict[str, Callable[..., None]] = {
    "script": harness.run_script,
    "calls": _calls,
    "serve": _serve,
    "asserts": _asserts,
    "exec": _execute,
    "load": _load,
    "save": _save,
}
