"""Attacks a box before it is trusted, and chooses the first backend that holds."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.core.errors import ConfigurationError
from services.sandbox.backends import AUTOMATIC, BackendName, Interpreter, Layout
from services.sandbox.box import Box, Outcome, Result, SandboxError
from services.sandbox.kernel import Limits

_ATTACKS = """
import ctypes, json, os, resource, socket, sys
server, port, folder, shared = SERVER
canary, libc = folder + "/canary", ctypes.CDLL(None, use_errno=True)

def fork():
    if os.fork() == 0:
        os._exit(0)

attacks = {
    "it read a file of this user": lambda: open(canary).read(),
    "it listed a directory of this user": lambda: os.listdir(folder),
    "it wrote a file of this user": lambda: open(canary, "a"),
    "it made a file beside this user's": lambda: open(folder + "/new", "w"),
    "it watched a directory of this user":
        lambda: 1 / (libc.inotify_add_watch(libc.inotify_init(), folder.encode(), 0x100) >= 0),
    "it made a file in /tmp": lambda: open(shared[0], "w"),
    "it made a file in /dev/shm": lambda: open(shared[1], "w"),
    "it removed a file of this user": lambda: os.remove(canary + "2"),
    "it changed the mode of a file": lambda: os.chmod(canary, 0),
    "it truncated a file": lambda: os.truncate(canary, 0),
    "it read the server's environment": lambda: open(f"/proc/{server}/environ").read(),
    "it connected to this machine": lambda: socket.create_connection(("127.0.0.1", port), 1),
    "it opened a socket for UDP": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "it opened a UNIX socket": lambda: socket.socket(socket.AF_UNIX),
    "it could signal the server": lambda: os.kill(server, 0),
    "it could signal its parent": lambda: os.kill(os.getppid(), 0),
    "it forked": fork,
    "it ran a program": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "it raised its limits": lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)),
    "it made a user namespace": lambda: 1 / (libc.unshare(0x10000000) == 0),
    "it traced its parent": lambda: 1 / (libc.ptrace(16, os.getppid(), 0, 0) == 0),
}
passed = []
for name, attack in attacks.items():
    try:
        attack()
        passed.append(name)
    except Exception:
        pass
json.dump(passed, sys.stdout)
"""
_LIMITS = {
    "it used more memory than it may": "import mmap; mmap.mmap(-1, 2**30)",
    "it used more processor time than it may": "while True: pass",
    "it slept longer than it may": "import time; time.sleep(3600)",
    "it printed more than it may": "while True: print('x' * 1000)",
}
_CHILDREN = """
import os, time
count, program = 0, os.getpid()
try:
    while count < 300:
        if os.fork() == 0:
            os.setsid()
            while os.getppid() == program:
                time.sleep(0.05)
            time.sleep(0.5)
            open("late", "w").close()
            os._exit(0)
        count += 1
except OSError:
    print(count)
"""
_FILL = "i = 0\nwhile True:\n  i += 1\n  open(str(i), 'wb').write(bytes(2**20))"
_FILL_UNNAMED = (
    "import os, time\nfiles = []\nfor _ in range(8):\n"
    "  files.append(open('x', 'wb', 0)); os.remove('x'); files[-1].write(bytes(2**20))\ntime.sleep(5)"
)
_LATE_SECONDS = 1.2


async def choose(
    setting: BackendName, interpreter: Interpreter, *, writes: bool, layout: Layout | None = None
) -> BackendName:
    """Return the backend to use: that of SANDBOX, or the first of AUTOMATIC through which no attack passes.

    Raises:
        ConfigurationError: this is not Linux, or no backend holds; the message says what passed, or each one's error.
    """
    if sys.platform != "linux":
        raise ConfigurationError(
            f"models' programs need a sandbox of Linux, and this is {sys.platform}: use a Linux container, or a cluster"
        )
    refusals = []
    for backend in AUTOMATIC if setting is BackendName.AUTO else (setting,):
        problems = await attack(backend, interpreter, writes=writes, layout=layout)
        if not problems:
            return backend
        refusals.append(f"{backend}: {', '.join(problems)}")
    raise ConfigurationError(
        f"code needs a sandbox, and SANDBOX={setting} has none on this machine. {'; '.join(refusals)}. "
        "docs/security.md says what each needs, and what a pod must be given"
    )


async def attack(
    backend: BackendName, interpreter: Interpreter, *, writes: bool, layout: Layout | None = None
) -> list[str]:
    """Return what a box of ``backend`` does not keep code from, or why there is no such box here; empty if it holds.

    Args:
        backend: what isolates the box.
        interpreter: runs in it.
        writes: whether the box is for programs that fork and write files, too.
        layout: paths of its own, and a network of its own, for these programs.
    """
    generous = Limits(cpu_seconds=10, seconds=60, memory_mb=512)
    tight = generous._replace(cpu_seconds=0.3, seconds=1.0, output_bytes=10_000)
    box = Box(backend, interpreter, generous._replace(disk_mb=4, processes=16), writes=writes, layout=layout)
    try:
        await box.start()
        with _targets() as targets:
            result = await box.run("script", source=_ATTACKS.replace("SERVER", repr(targets)))
        if result.outcome is not Outcome.OK:
            return [f"code does not run: {_reason(result)}"]
        passed: list[str] = json.loads(result.stdout)
        for name, source in _LIMITS.items():
            result = await box.run("script", source=source, limits=tight)
            if result.outcome in (Outcome.OK, Outcome.INFRASTRUCTURE):
                passed.append(name)
        return passed + (await _attack_as_program(box, interpreter) if writes else [])
    except SandboxError as error:
        return [str(error)]
    finally:
        await box.close()


async def _attack_as_program(box: Box, interpreter: Interpreter) -> list[str]:
    passed = []
    # As root, programs run as another user, who may be unable to reach the interpreter.
    python = shutil.which("python3", path="/usr/bin") or interpreter.program
    result = await box.exec([python, "-c", _CHILDREN])
    if result.outcome is Outcome.INFRASTRUCTURE or not result.stdout:
        passed.append(f"its processes were not counted: {_reason(result)}")
    await asyncio.sleep(_LATE_SECONDS)
    if (await box.exec(["cat", "late"])).outcome is Outcome.OK:
        passed.append("a process outlived its program")
    # Signal 0 only asks whether one may be sent. Answers cannot ask, because kill is refused to them.
    if (await box.exec([python, "-c", f"import os; os.kill({os.getpid()}, 0)"])).outcome is Outcome.OK:
        passed.append("it signalled another process, which Landlock prevents from Linux 6.12 on, and another user")
    with _targets() as (_, port, _, _):
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
        if (await box.exec([python, "-c", connect])).outcome is Outcome.OK:
            passed.append("a program connected to this machine")
    for name, source in (("files", _FILL), ("files without a name", _FILL_UNNAMED)):
        if (await box.exec([python, "-c", source])).outcome is Outcome.OK:
            passed.append(f"it filled the disk by {name}")
    return passed


def _reason(result: Result) -> str:
    return result.last_line or str(result.outcome)


@contextmanager
def _targets() -> Iterator[tuple[int, int, str, list[str]]]:
    """Yield what an attack aims at: this process, a port that listens, a directory with files, and names for files."""
    with tempfile.TemporaryDirectory(prefix="grpo-canary-") as folder, socket.create_server(("127.0.0.1", 0)) as server:
        shared = [f"{place}/{Path(folder).name}-new" for place in ("/tmp", "/dev/shm")]
        for name in ("canary", "canary2"):
            Path(folder, name).write_text("secret", encoding="utf-8")
        os.chmod(folder, 0o777)  # so that file modes keep nothing from the attack
        yield os.getpid(), server.getsockname()[1], folder, shared
        for name in shared:
            Path(name).unlink(missing_ok=True)


def main() -> None:
    """Print what each backend keeps here: ``python -m services.sandbox.probe [python]``."""
    interpreter = Interpreter.find(sys.argv[1] if len(sys.argv) > 1 else sys.executable)
    for backend in AUTOMATIC:
        problems = asyncio.run(attack(backend, interpreter, writes=True))
        print(f"{backend}: {'holds' if not problems else ', '.join(problems)}")


if __name__ == "__main__":
    main()
