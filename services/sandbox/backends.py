"""The isolation of a box from this machine: bubblewrap, Landlock with seccomp alone, or macOS' seatbelt.

Inside each of them ``zygote`` runs, which takes the rights of every piece of code away by Landlock and seccomp, too,
where the kernel has them. docs/security.md says what each isolates.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from services.core.errors import ConfigurationError
from services.sandbox import kernel

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
"""The directories and files of the system that programs need, read-only; those that do not exist are left out."""
BOX = "/box"
"""The directory of a bubblewrap box that code may write to."""
_START = (
    "import sys; sys.path[:] = sys.argv[2:]; services = sys.modules['services'] = type(sys)('services'); "
    "services.__path__ = [sys.argv[1]]; from services.sandbox.zygote import main; main()"
)
"""Starts ``zygote`` without ``site`` and without this project's other modules, which would take most of the time."""
_DESCRIBE = (
    "import json, sys as s; print(json.dumps([s.version_info[:2], s.executable, s.prefix, s.base_prefix, *s.path]))"
)
_OLDEST = (3, 11)
_SECONDS = 60


class BackendName(StrEnum):
    """The value of SANDBOX."""

    AUTO = "auto"
    BWRAP = "bwrap"
    LANDLOCK = "landlock"
    SEATBELT = "seatbelt"


AUTOMATIC = (BackendName.BWRAP, BackendName.LANDLOCK)
"""The backends that ``auto`` tries, in this order. Seatbelt is not among them: nobody has run the hostile set on macOS
yet."""


@dataclass(frozen=True)
class Interpreter:
    """A Python for code in boxes: its program, where it looks for modules, and what it and programs need to read."""

    program: str
    path: tuple[str, ...]
    readable: tuple[str, ...]

    @classmethod
    def find(cls, path: str) -> Interpreter:
        """Ask an interpreter for its directories; ConfigurationError where it cannot be used."""
        try:
            done = subprocess.run(
                [path, "-sPc", _DESCRIBE], capture_output=True, text=True, timeout=_SECONDS, check=True, env={}
            )
            version, executable, *directories = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise ConfigurationError(f"SANDBOX_PYTHON {path!r} does not run ({error}); name a Python 3.11") from error
        if tuple(version) < _OLDEST:
            raise ConfigurationError(f"SANDBOX_PYTHON {path!r} is Python {version[0]}.{version[1]}; name a Python 3.11")
        readable = _outermost([*SYSTEM, *directories, str(ROOT / "services/sandbox")])
        return cls(executable, tuple(directories[2:]), tuple(readable))


def _outermost(paths: list[str]) -> list[str]:
    """Return those of ``paths`` that exist and are not below another one."""
    existing = [Path(path) for path in dict.fromkeys(paths) if os.path.isabs(path) and os.path.exists(path)]
    return [str(path) for path in existing if not any(other in path.parents for other in existing)]


def command(backend: BackendName, interpreter: Interpreter, *, disk_mb: int, directory: str | None) -> list[str]:
    """Return the command of a box.

    Args:
        backend: what isolates it.
        interpreter: runs in it.
        disk_mb: the size of the directory that code may write to; 0: there is none.
        directory: that directory, for a backend that shares this machine's file system.

    Raises:
        OSError: this machine does not have the backend; the message says why.
    """
    zygote = [interpreter.program, "-sPS", "-c", _START, str(ROOT / "services"), *interpreter.path]
    match backend:
        case BackendName.BWRAP:
            return [*_bubblewrap(interpreter, disk_mb), *zygote]
        case BackendName.LANDLOCK if sys.platform == "linux":
            if not kernel.landlock_version():
                raise OSError(f"the kernel ({platform.release()}) has no Landlock, or its `lsm=` leaves it out")
            return zygote
        case BackendName.SEATBELT if sys.platform == "darwin":
            return ["/usr/bin/sandbox-exec", "-p", _profile(interpreter, directory), *zygote]
    raise OSError(f"{backend} is not for {sys.platform}")


def _bubblewrap(interpreter: Interpreter, disk_mb: int) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise OSError("the program bwrap is missing; install the package bubblewrap")
    arguments = [program, "--unshare-ipc", "--unshare-net", "--unshare-pid", "--unshare-uts", "--hostname", "box"]
    # Root takes no user namespace, so that it can give every box a user of its own, whose processes are counted.
    own = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")
    arguments += ["--cap-drop", "ALL"]
    arguments += [word for name in own for word in ("--cap-add", name)] if os.geteuid() == 0 else ["--unshare-user"]
    parents = {str(parent): None for path in interpreter.readable for parent in reversed(Path(path).parents[:-1])}
    for parent in parents:
        # Below /root, too, programs reach the interpreter, whose user is not root.
        arguments += ["--perms", "0755", "--dir", parent]
    for path in interpreter.readable:
        arguments += ["--ro-bind", path, path]
    arguments += ["--dev", "/dev"]
    if disk_mb:
        arguments += ["--perms", "0777", "--size", str(disk_mb * 2**20), "--tmpfs", BOX]
    return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/", "--new-session", "--chdir", "/"]


def _profile(interpreter: Interpreter, directory: str | None) -> str:
    reads = " ".join(f"(subpath {json.dumps(os.path.realpath(path))})" for path in interpreter.readable)
    writes = f"(allow file* (subpath {json.dumps(os.path.realpath(directory))}))" if directory else ""
    return (
        "(version 1)(deny default)(allow process-fork process-exec sysctl-read)(allow signal (target same-sandbox))"
        f'(allow file-read* {reads} (subpath "/System") (literal "/") (literal "/dev/null") (literal "/dev/urandom"))'
        f'(allow file-write-data (literal "/dev/null")){writes}'
    )
