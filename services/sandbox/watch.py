"""Watches a piece of code in a box: its processes, its pipes, and what it takes. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import selectors
import signal
import socket
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from services.sandbox.kernel import Limits, adopt_orphans, look_as

TICK_SECONDS = 0.05
DISK_TICKS = 5
"""Ticks between two measurements of a directory on a disk."""
HIDDEN_LOOKS = 4
"""Looks at the disk, a second of them, at which a process may hide its files: on a busy machine it starts so slowly."""
_PROC = 9
"""The file descriptor of the machine's /proc with which a box is started."""
_INODE_BYTES, _PATH_LENGTH = 4096, 1024
"""The least that a file or directory takes, and the longest path that can be followed quickly."""
EXIT_MEMORY = 77
_GRACE_SECONDS = 0.5
"""The time for an answer's process to end by itself once its tests have ended."""


class Processes:
    """The processes of a box below this one."""

    def __init__(self, isolation: str, requests: int) -> None:
        """Take responsibility for them.

        Args:
            isolation: the backend.
            requests: the file descriptor at whose end all of them must end.
        """
        self._isolation, self.requests = isolation, requests
        if isolation == "bwrap" and (os.getppid(), os.getpid()) != (1, 2):
            raise RuntimeError("a bubblewrap box has processes of its own only, of which the first is the parent")
        adopt_orphans()
        self.signals, self._sender = socket.socketpair()
        """Readable when a child has ended."""
        self.signals.setblocking(False)
        self._sender.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)

    def end_all(self) -> None:
        """Kill all processes of the box but this one, and wait until none is left."""
        if self._isolation == "bwrap":
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            _kill_descendants()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()


def _kill_descendants() -> None:
    """Kill all descendants, until there is none: one may fork after it was seen, or have others continue."""
    while found := [*map(int, _descendants("self"))]:
        # First all of them stop, so that few fork while others are killed.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _descendants(pid: str) -> Iterator[str]:
    """Yield the processes below one, by their names in /proc."""
    with contextlib.suppress(OSError):
        for task in _listed(f"{pid}/task"):
            with contextlib.suppress(OSError):
                for child in _read(f"{pid}/task/{task}/children").split():
                    yield child
                    yield from _descendants(child)


def _listed(path: str) -> list[str]:
    """Return the names in a directory of /proc; none where it has gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        folder = os.open(path, os.O_RDONLY, dir_fd=_PROC)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)
    return []


def _read(path: str) -> str:
    with open(
        path, encoding="utf-8", errors="replace", opener=lambda name, flags: os.open(name, flags, dir_fd=_PROC)
    ) as file:
        return file.read()


class Run:
    """One piece of code: its processes, its pipes, and the watch over what it takes."""

    def __init__(self, processes: Processes, limits: Limits, stdin: bytes, disk: str | None) -> None:
        """Make the pipes.

        Args:
            processes: those of the box.
            limits: what the code may take.
            stdin: its standard input.
            disk: the directory whose size must be measured, because nothing else bounds it.
        """
        self._processes, self._limits, self._stdin, self._disk = processes, limits, stdin, disk
        pipes = [os.pipe() for _ in range(4)]
        self.ends = [pipes[0][0], *(writer for _, writer in pipes[1:])]
        """The code's standard input, output and error, and the pipe for its reply."""
        self._input = pipes[0][1]
        self._texts = {reader: bytearray() for reader, _ in pipes[1:]}
        self._started = time.monotonic()
        self._measured = 0.0
        self._children: list[int] = []
        self._ended: dict[int, int] = {}
        """Exit codes of the processes that were forked here and have ended by themselves."""
        self._reaped = 0.0
        """Processor seconds of those, of orphans that have ended, and of all that these have waited for."""
        self._seen: dict[str, float] = {}
        """Processor seconds that each process had itself when it was last seen."""
        self._resident: dict[str, int] = {}
        """Bytes in memory of each process that runs, parents before their children."""
        self._hidden = 0
        """Looks in a row at which a process hid its files, as each does while it starts."""
        self._was_short = False
        """True once a process was killed because they had too much memory."""

    def fork(self, become: Callable[[], None], work: Callable[[], None]) -> None:
        """Start a process that takes its own rights away by ``become``, and does ``work``."""
        pid = os.fork()
        if pid:
            self._children.append(pid)
            return
        code = 1
        try:
            become()
            work()
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

    def watch(self, *, may_signal: bool) -> dict[str, Any]:
        """Wait until the code ends or takes too much, end all of its processes, and return the outcome.

        Args:
            may_signal: whether the code may kill itself, so that its being killed says nothing about the machine.
        """
        for end in self.ends:
            os.close(end)
        main, cause, clock, last, ticks, main_ended = self._children[-1], None, 0.0, self._started, 0, 0.0
        due = last + TICK_SECONDS
        with self._selector() as selector:
            while cause is None and len(self._ended) < len(self._children):
                for key, _ in selector.select(max(due - time.monotonic(), 0.0)):
                    cause = key.data(selector) or cause
                now = time.monotonic()
                # A pause of the machine is not the code's.
                clock += min(now - last, 2 * TICK_SECONDS)
                last = now
                self._reap()
                if main in self._ended:
                    main_ended = main_ended or clock
                    if clock > main_ended + _GRACE_SECONDS:
                        break
                if now >= due:
                    due, ticks = now + TICK_SECONDS, ticks + 1
                    cause = cause or self._over_limit(clock, ticks)
        self._processes.end_all()
        if self._disk is not None and self._fills(self._disk):
            cause = cause or "output"
            empty(self._disk)
        for reader in self._texts:
            while self._read(reader) > 0:
                pass
            os.close(reader)
        self._close_input()
        return self._describe(cause or self._too_long(), may_signal=may_signal)

    def _selector(self) -> selectors.BaseSelector:
        selector = selectors.DefaultSelector()
        for reader in self._texts:
            os.set_blocking(reader, False)
            selector.register(reader, selectors.EVENT_READ, self._reading(reader))
        os.set_blocking(self._input, False)
        selector.register(self._input, selectors.EVENT_WRITE, self._feed)
        selector.register(self._processes.signals, selectors.EVENT_READ, self._woken)
        selector.register(self._processes.requests, selectors.EVENT_READ, self._hung_up)
        return selector

    def _reading(self, reader: int) -> Callable[[selectors.BaseSelector], str | None]:
        def read(selector: selectors.BaseSelector) -> str | None:
            if self._read(reader) == 0:
                selector.unregister(reader)
            return self._too_long()

        return read

    def _read(self, reader: int) -> int:
        """Keep what a pipe has, up to the limit; return the bytes read: 0 at its end, -1 if it has none now."""
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
            self._processes.signals.recv(4096)

    def _hung_up(self, _selector: selectors.BaseSelector) -> None:
        """End everything: no request comes before the reply to the last, so the server has gone."""
        self._processes.end_all()
        if self._disk is not None:
            remove(self._disk)
        os._exit(0)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._reaped += usage.ru_utime + usage.ru_stime
                if pid in self._children:
                    self._ended[pid] = os.waitstatus_to_exitcode(status)

    def _over_limit(self, clock: float, ticks: int) -> str | None:
        self._measured = max(self._measured, self._cpu_seconds())
        if clock > self._limits.seconds or self._measured > self._limits.cpu_seconds:
            return "timeout"
        if self._limits.is_resident:
            self._free_memory()
        return "output" if self._disk is not None and ticks % DISK_TICKS == 0 and self._fills(self._disk) else None

    def _free_memory(self) -> None:
        """Kill the newest processes until the others have no more than they may: the program itself comes last."""
        left = sum(self._resident.values()) - self._limits.memory_mb * 2**20
        for name, size in reversed(self._resident.items()):
            if left <= 0:
                break
            with contextlib.suppress(OSError):
                # The name is a number of the machine's, and the last one here is the box's.
                pids = re.findall(r"^NSpid:.*\s(\d+)$", _read(f"{name}/status"), re.MULTILINE)
                os.kill(int(pids[0]), signal.SIGKILL)
                self._was_short = True
                left -= size

    def _cpu_seconds(self) -> float:
        """Return the processor time of all processes, and keep what each of them has in memory.

        A process has the time of the children that it has waited for. Nobody has the time of one that nobody waits for:
        so the times that each was last seen to have count if they are more.
        """
        forked = whole = self._reaped
        for pid in self._children:
            if pid not in self._ended:
                with contextlib.suppress(OSError):
                    # The clock of another process's processor time; see clock_getcpuclockid(3).
                    forked += time.clock_gettime((~pid << 3) | 2)
        self._resident.clear()
        for name in _descendants("self"):
            with contextlib.suppress(OSError):
                fields = _read(f"{name}/stat").rpartition(")")[2].split()
                user, system, *waited_for = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:15])
                self._resident[name] = int(fields[21]) * resource.getpagesize()
                self._seen[name] = user + system
                whole += user + system + sum(waited_for)
        return max(forked, whole, sum(self._seen.values()))

    def _fills(self, directory: str) -> bool:
        """Return whether the files of the box take more than they may, or take it so that nobody can tell how much."""
        most = self._limits.disk_mb * 2**20
        total, hides = _unnamed_bytes(directory, most)
        self._hidden = self._hidden + 1 if hides else 0
        if self._hidden > HIDDEN_LOOKS:
            return True
        waiting = [directory]
        while waiting and total <= most:
            if len(folder := waiting.pop()) > _PATH_LENGTH:
                return True
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        with contextlib.suppress(FileNotFoundError):
                            total += max(entry.stat(follow_symlinks=False).st_blocks * 512, _INODE_BYTES)
                        waiting += [entry.path] if entry.is_dir(follow_symlinks=False) else []
            except PermissionError:
                return True
            except OSError:  # it has gone
                continue
        return total > most

    def _describe(self, cause: str | None, *, may_signal: bool) -> dict[str, Any]:
        codes = self._ended.values()
        cpu_seconds = max(self._measured, self._reaped)
        if cause is None and cpu_seconds > self._limits.cpu_seconds:
            cause = "timeout"
        if cause is None and EXIT_MEMORY in codes and not may_signal:
            cause = "memory"
        # An answer can send no signal: the machine ran out of memory, or somebody killed it.
        if cause is None and -signal.SIGKILL in codes and not may_signal:
            cause = "infrastructure"
        code = self._ended.get(self._children[-1])
        if cause is None and self._was_short and code in (-signal.SIGKILL, 128 + signal.SIGKILL):
            cause = "memory"
        most = self._limits.output_bytes
        texts = [bytes(text[:most]).decode("latin-1") for text in self._texts.values()]
        return {
            "outcome": cause or ("ok" if code == 0 else "failed"),
            "exit_code": code,
            "seconds": time.monotonic() - self._started,
            "cpu_seconds": cpu_seconds,
            **dict(zip(("stdout", "stderr", "reply"), texts, strict=True)),
        }


def _unnamed_bytes(directory: str, most: int) -> tuple[int, bool]:
    """Return what files of a directory take that have no name any more, because a thread has them open or mapped.

    The second value is True where a thread hides them.
    """
    sizes: dict[int, int] = {}
    hides = False
    mapped: set[int] = set()
    place = f" {os.path.realpath(directory)}/"
    look_as(os.stat(directory).st_uid)
    for thread in [f"{pid}/task/{task}" for pid in _descendants("self") for task in _listed(f"{pid}/task")]:
        try:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                maps = _read(f"{thread}/maps").splitlines()
                mapped |= {int(line.split()[4]) for line in maps if place in line and line.endswith(" (deleted)")}
                for name in _listed(f"{thread}/fd") if maps else ():
                    with contextlib.suppress(FileNotFoundError):
                        found = os.stat(f"{thread}/fd/{name}", dir_fd=_PROC)
                        if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                            sizes[found.st_ino] = found.st_blocks * 512
        except PermissionError:  # It hides them, by a program that its user may execute and not read.
            hides = True
    look_as(os.geteuid())
    # Nothing tells the size of one that is mapped only.
    return sum(sizes.values()) + len(mapped - sizes.keys()) * most // 4, hides


def remove(directory: str) -> None:
    """Remove a directory that code has filled, however deep and with whatever modes."""
    for words in (["chmod", "-fR", "u+rwx"], ["rm", "-rf"]):
        with contextlib.suppress(OSError):
            os.waitpid(os.posix_spawnp(words[0], [*words, directory], os.environ), 0)


def empty(directory: str) -> None:
    """Remove all that is in a directory."""
    owner = os.stat(directory)
    remove(directory)
    os.makedirs(directory, 0o755, exist_ok=True)
    os.chown(directory, owner.st_uid, owner.st_gid)
