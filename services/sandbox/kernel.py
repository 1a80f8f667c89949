"""Takes rights away from this process for good, by Landlock, seccomp and resource limits; standard library only.

Landlock (kernel 5.13) limits the files that a process may open. Other calls reach files and processes of the same user
without opening anything, such as chmod, truncate, sched_setaffinity or fcntl(F_SETOWN), so seccomp refuses these.
Calls from number 424 on, which io_uring and clone3 belong to, look as if the kernel lacked them: the C library then
uses older ones. https://docs.kernel.org/userspace-api/landlock.html, seccomp(2).
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import stat
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

_LIBRARY: Any = ctypes.CDLL(None, use_errno=True)
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""AUDIT_ARCH and the column of the tables below, by machine."""

# Names with the numbers on x86_64 and aarch64; - where an architecture lacks the call.
_REFUSED = """
ptrace 101 117  process_vm_readv 310 270  process_vm_writev 311 271  kcmp 312 272  bpf 321 280  userfaultfd 323 282
perf_event_open 298 241  add_key 248 217  request_key 249 218  keyctl 250 219  socket 41 198  unshare 272 97
setns 308 268  mount 165 40  umount2 166 39  pivot_root 155 41  chroot 161 51  open_by_handle_at 304 265
inotify_add_watch 254 27  fanotify_init 300 262  fanotify_mark 301 263  fallocate 285 47  sendmsg 46 211
sendmmsg 307 269  memfd_create 319 279  shmget 29 194  semget 64 190  msgget 68 186  mq_open 240 180  chmod 90 -
fchmod 91 52  fchmodat 268 53  chown 92 -  fchown 93 55  lchown 94 -  fchownat 260 54  utime 132 -  utimes 235 -
futimesat 261 -  utimensat 280 88  setxattr 188 5  lsetxattr 189 6  fsetxattr 190 7  removexattr 197 14
lremovexattr 198 15  fremovexattr 199 16  truncate 76 45  personality 135 92  modify_ldt 154 -  migrate_pages 256 238
move_pages 279 239  setpriority 141 140  sched_setscheduler 144 119  sched_setparam 142 118  sched_setattr 314 274
sched_setaffinity 203 122  ioprio_set 251 30
"""
_REFUSED_TO_ANSWERS = """
fork 57 -  vfork 58 -  execve 59 221  execveat 322 281  kill 62 129  tkill 200 130  tgkill 234 131
rt_sigqueueinfo 129 138  rt_tgsigqueueinfo 297 240  setrlimit 160 164  timer_create 222 107
"""
_OF_OWN_NETWORK = "socket sendmsg sendmmsg fallocate truncate utime utimes futimesat utimensat"
_OF_OWN_FILES = """
chmod fchmod fchmodat chown fchown lchown fchownat setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr
"""
"""Of those, the calls that are allowed where the box has a network and files that nothing else sees."""
_CLONE, _FCNTL, _IOCTL, _PRLIMIT, _SOCKET = (56, 220), (72, 25), (16, 29), (302, 261), (41, 198)
_FIRST_UNKNOWN = 424
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_CLONE_THREAD, _NEW_NAMESPACES = 0x10000, 0x7E020000
_OTHER_FAMILIES = (0, 3, 4, 5, 6, 7, 8, 9)
"""The address families up to AF_INET6 that are neither AF_UNIX nor internet."""
_SIGNAL_OWNERS = (8, 10, 15)
"""F_SETOWN, F_SETSIG and F_SETOWN_EX, by which the kernel sends any signal to any process of the user."""
_TERMINALS = (0x8901, 0x8902, 0x5412)
"""FIOSETOWN and SIOCSPGRP, which do the same, and TIOCSTI, which types into the terminal."""

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""The number of Landlock's rights on files by its version; 16 from version 5 on."""
_READ, _WRITE_FILE, _ON_FILES = 0b1101, 0b10, 0xC007
"""Execute, read files and directories; write to files; the rights that apply to something else than a directory."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38


class Limits(NamedTuple):
    """The limits of one run of code; processor time and files of all of its processes, the rest of each.

    ``seconds`` are by the clock. ``memory_mb`` is address space, the interpreter's included; with ``is_resident`` what
    all processes together have in memory, above which the newest are killed. ``disk_mb`` bounds the files of the box,
    ``output_bytes`` what it prints.
    """

    cpu_seconds: float = 5.0
    seconds: float = 50.0
    memory_mb: int = 512
    is_resident: bool = False
    output_bytes: int = 2**20
    processes: int = 64
    disk_mb: int = 64


class Confinement(NamedTuple):
    """The limits on files and users that all pieces of code in a box have in common."""

    uid: int | None
    """The user as whom code runs; None: this one."""
    readable: Sequence[str]
    """Files and directories that code may read."""
    directory: str | None
    """The directory that code may write to; None: no directory."""
    isolation: str
    """The backend: ``bwrap`` or ``landlock``."""
    places: Sequence[str] | None
    """The directories that programs may write to, with ``directory`` among them, if the box has paths of its own; None:
    they write to ``directory`` alone."""
    keeps_modes: bool
    """True if they may not change the modes of files there."""


def landlock_version() -> int:
    """Return the version of Landlock's interface that the kernel has; 0 without Landlock."""
    return max(0, int(_LIBRARY.syscall(_LANDLOCK_CREATE, None, 0, 1))) if sys.platform == "linux" else 0


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans, so that it can find and end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def look_as(user: int) -> None:
    """Look into processes as ``user`` may from now on: root in a container may not look into those of others."""
    _LIBRARY.setfsgid(user)
    _LIBRARY.setfsuid(user)


def confine(
    limits: Limits, box: Confinement, *, readable: Sequence[str], places: Sequence[str], is_answer: bool, shared: int
) -> None:
    """Take every right from this process that code in a box does not need.

    Args:
        limits: what it may take.
        box: the confinement of all code in its box. In one with paths of its own, files and network are the box's own,
            too, so that programs may open sockets, and change modes and owners.
        readable: files and directories that it may read.
        places: the directories that it may write to.
        is_answer: whether it may neither fork, nor execute a program, nor send a signal.
        shared: threads outside the box that count towards its number of processes.

    Raises:
        OSError: the kernel refuses a step.
    """
    is_alone, uid = box.places is not None and not is_answer, box.uid
    _limit(limits, is_answer=is_answer, can_write=bool(places), shared=shared)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if box.isolation == "landlock" or landlock_version():
        # As the first user, who may reach directories that the other one may not.
        _restrict_files(readable, places, has_network=is_alone)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _check(_LIBRARY.capset(struct.pack("<Ii", 0x20080522, 0), bytes(24)), "capset")
    _prctl(_PR_SET_DUMPABLE, int(not is_answer))  # The files that a program has open can be seen.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    install_filter(filter_program(is_answer=is_answer, is_alone=is_alone, has_modes=is_alone and not box.keeps_modes))


def _limit(limits: Limits, *, is_answer: bool, can_write: bool, shared: int) -> None:
    disk = limits.disk_mb * 2**20 if can_write else 0
    # The zygote measures processor time more finely; this ends what the zygote no longer watches.
    bounds = {
        resource.RLIMIT_CPU: int(limits.cpu_seconds) + 2,
        resource.RLIMIT_FSIZE: disk,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if not limits.is_resident:
        bounds[resource.RLIMIT_AS] = limits.memory_mb * 2**20
    if not is_answer:
        bounds[resource.RLIMIT_NPROC] = limits.processes + shared
    for name, bound in bounds.items():
        hard = resource.getrlimit(name)[1]
        resource.setrlimit(name, (bound if hard == resource.RLIM_INFINITY else min(bound, hard),) * 2)


def _restrict_files(readable: Iterable[str], places: Sequence[str], *, has_network: bool) -> None:
    version = landlock_version()
    rights = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    # No TCP port (version 4), no abstract socket and no signal beyond this process's own (version 6).
    has_ports = version >= 4 and not has_network
    attributes = struct.pack("<QQQ", rights, 3 if has_ports else 0, 3 if version >= 6 else 0)
    ruleset = _check(_LIBRARY.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0), "landlock_create_ruleset")
    allowed = [(path, _READ) for path in readable] + [(path, _READ | _WRITE_FILE) for path in _DEVICES]
    for path, wanted in [*allowed, *((place, rights) for place in places)]:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        granted = wanted & rights & (-1 if stat.S_ISDIR(os.fstat(place).st_mode) else _ON_FILES)
        rule = struct.pack("<Qi", granted, place)
        _check(_LIBRARY.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock_add_rule for {path}")
        os.close(place)
    _check(_LIBRARY.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def filter_program(*, is_answer: bool, is_alone: bool = False, has_modes: bool = False) -> bytes:
    """Return the seccomp filter, a program of classic BPF.

    Raises:
        OSError: the numbers of this architecture's calls are not known.
    """
    audit, column = _architecture()
    program = [
        *[(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL)],
        (_LOAD, 0, 0, 0),
    ]
    # ``main`` takes further rights away.
    for call in (_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT) if is_alone else ():
        program += [(_EQUAL, 0, 1, call), (_RETURN, 0, 0, _ALLOW)]
    # On x86_64 the calls of x32 have bit 30, so that they are beyond, too.
    program += [(_AT_LEAST, 0, 1, _FIRST_UNKNOWN), (_RETURN, 0, 0, _ENOSYS)]
    allowed = f"{_OF_OWN_NETWORK if is_alone else ''} {_OF_OWN_FILES if has_modes else ''}".split()
    words = (_REFUSED + (_REFUSED_TO_ANSWERS if is_answer else "")).split()
    for name, number in zip(words[::3], words[1 + column :: 3], strict=True):
        if number != "-" and name not in allowed:
            program += [(_EQUAL, 0, 1, int(number)), (_RETURN, 0, 0, _EPERM)]
    if is_alone:
        program += _when(_SOCKET[column], 16, _AT_LEAST, (11,)) + _when(_SOCKET[column], 16, _EQUAL, _OTHER_FAMILIES)
    if is_answer:  # Only threads.
        program += [(_EQUAL, 0, 4, _CLONE[column]), (_LOAD, 0, 0, 16), (_ANY_BIT, 1, 0, _CLONE_THREAD)]
        program += [(_RETURN, 0, 0, _EPERM), (_LOAD, 0, 0, 0)]
    else:
        program += _when(_CLONE[column], 16, _ANY_BIT, (_NEW_NAMESPACES,))
    program += _when(_FCNTL[column], 24, _EQUAL, _SIGNAL_OWNERS) + _when(_IOCTL[column], 24, _EQUAL, _TERMINALS)
    # Limits may be read. The limits of an answer are final, because by a lower one it could end like a lost machine.
    for offset in (32, 36) if is_answer else (16,):
        program += _when(_PRLIMIT[column], offset, _ANY_BIT, (0xFFFFFFFF,))
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _when(number: int, offset: int, test: int, values: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Return instructions that refuse a call when the argument at ``offset`` passes the test with one of ``values``."""
    tests = [step for value in values for step in ((test, 0, 1, value), (_RETURN, 0, 0, _EPERM))]
    return [(_EQUAL, 0, 2 + len(tests), number), (_LOAD, 0, 0, offset), *tests, (_LOAD, 0, 0, 0)]


def install_filter(program: bytes) -> None:
    """Install a seccomp filter in this process; OSError where the kernel refuses it."""
    code = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    _check(_LIBRARY.prctl(_PR_SET_SECCOMP, 2, described, 0, 0), "seccomp")


def _architecture() -> tuple[int, int]:
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(f"there is no seccomp filter for {machine}; it is written for {', '.join(_ARCHITECTURES)}")
    return _ARCHITECTURES[machine]


def _prctl(option: int, value: int) -> None:
    _check(_LIBRARY.prctl(option, value, 0, 0, 0), f"prctl {option}")


def _check(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def main() -> None:
    """Run a program of an answer for tests: it can neither read them, nor write their verdict, nor signal them.

    Before the program stand the paths that it may read and the directories that it may write to, joined by colons. The
    tests of a box find all words before the program in the variable AS_ANSWER.
    """
    readable, places = (words.split(":") for words in sys.argv[1:3])
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _restrict_files(readable, places, has_network=True)
    os.execvp(sys.argv[3], sys.argv[3:])


if __name__ == "__main__":
    main()
