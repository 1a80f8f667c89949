"""Runs hostile code in boxes and prints what came of it, as JSON: ``python hostile.py BACKEND PYTHON``.

Standard library only, so that it runs on any Python, as any user, and behind a filter like a container's.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from services.sandbox.backends import BackendName, Interpreter
from services.sandbox.box import Box, Result
from services.sandbox.kernel import Limits

LIMITS = Limits(cpu_seconds=5, seconds=60, memory_mb=256, output_bytes=2**20, processes=24, disk_mb=8)
SHORT = LIMITS._replace(cpu_seconds=0.5, seconds=2.0)

FAILS = {"failed"}
ANSWERS: dict[str, tuple[str, set[str]]] = {
    "endless loop": ("while True: pass", {"timeout"}),
    "sleep": ("import time; time.sleep(3600)", {"timeout"}),
    "fork bomb": ("import os\nwhile True: os.fork()", FAILS),
    "thread bomb": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(3600,)).start()",
        {"failed", "memory", "timeout"},
    ),
    "2 GB list": ("x = [0] * 2**28", {"memory"}),
    "2 GB in steps": ("x = []\nwhile True: x.append(bytearray(2**22))", {"memory"}),
    "2 GB file": ("with open('/tmp/grpo-hostile', 'wb') as f:\n for _ in range(2048): f.write(bytes(2**20))", FAILS),
    "memfd": ("import os; os.ftruncate(os.memfd_create('x'), 2**31)", FAILS),
    "fill /dev/shm": ("open('/dev/shm/grpo-hostile', 'wb').write(bytes(2**24))", FAILS),
    "1 GB of stdout": ("while True: print('x' * 2**16)", {"output"}),
    "1 GB of stderr": ("import sys\nwhile True: print('x' * 2**16, file=sys.stderr)", {"output"}),
    "recursion": ("import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", {"failed", "memory", "timeout"}),
    "segfault": ("import ctypes; ctypes.string_at(0)", FAILS),
    "os._exit(0)": ("import os; os._exit(0)", {"ok"}),
    "environment": ("import os; assert 'HOSTILE_SECRET' not in os.environ", {"ok"}),
    "server's environment": ("print(open('/proc/SERVER/environ').read())", FAILS),
    "zygote's descriptors": ("import os; os.listdir(9)", FAILS),
    "parent's environment": ("import os; print(open(f'/proc/{os.getppid()}/environ').read())", FAILS),
    "parent's memory": ("import os; open(f'/proc/{os.getppid()}/mem', 'rb').read(1)", FAILS),
    "run directory": ("print(open('FOLDER/secret').read())", FAILS),
    "run directory listed": ("import os; print(os.listdir('FOLDER'))", FAILS),
    "run directory written": ("open('FOLDER/secret', 'w').write('x')", FAILS),
    "run directory renamed": ("import os; os.rename('FOLDER/secret', 'FOLDER/other')", FAILS),
    "file truncated": ("import os; os.truncate('FOLDER/secret', 0)", FAILS),
    "mode changed": ("import os; os.chmod('FOLDER/secret', 0o777)", FAILS),
    "time changed": ("import os; os.utime('FOLDER/secret')", FAILS),
    "attribute set": ("import os; os.setxattr('FOLDER/secret', 'user.x', b'x')", FAILS),
    "sibling's box": ("print(open('SIBLING/mine').read())", FAILS),
    "TCP to loopback": ("import socket; socket.create_connection(('127.0.0.1', PORT), 2)", FAILS),
    "TCP to metadata": ("import socket; socket.create_connection(('169.254.169.254', 80), 2)", FAILS),
    "UDP": ("import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))", FAILS),
    "UNIX socket": ("import socket; socket.socket(socket.AF_UNIX).connect('FOLDER/socket')", FAILS),
    "kill all": ("import os, signal; os.kill(-1, signal.SIGKILL)", FAILS),
    "kill the parent": ("import os, signal; os.kill(os.getppid(), signal.SIGKILL)", FAILS),
    "stop itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", FAILS),
    "kill itself": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", FAILS),
    "killed by a timer": (
        "import ctypes, struct\nevent = struct.pack('<QiiQQQQQQ', 0, 9, 0, 0, 0, 0, 0, 0, 0)\n"
        "timer = ctypes.c_int()\nassert ctypes.CDLL(None, use_errno=True).syscall(222, 1, event, "
        "ctypes.byref(timer)) == 0",
        FAILS,
    ),
    "a lower limit": ("import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass", FAILS),
    "signals by a pipe": ("import fcntl, os; fcntl.fcntl(os.pipe()[0], 8, os.getppid())", FAILS),
    "slow the server": ("import os; os.sched_setaffinity(os.getppid(), {0})", FAILS),
    "daemon": ("import os\nif os.fork() == 0: os.setsid()", FAILS),
    "symlink": ("import os; os.symlink('/etc', '/tmp/grpo-hostile-link')", FAILS),
    "setuid program": ("import os; os.execv('/bin/su', ['su', '-c', 'id'])", FAILS),
    "subprocess": ("import subprocess; subprocess.run(['/bin/true'])", FAILS),
    "posix_spawn": ("import os; os.posix_spawn('/bin/true', ['true'], {})", FAILS),
    "user namespace": ("import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0", FAILS),
    "trace the parent": ("import ctypes, os; assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0", FAILS),
    "become root": ("import os; os.setuid(0); open('/etc/shadow')", FAILS),
    "old system calls": (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
        "m.write(bytes.fromhex('b814000000cd80c3'))\n"  # getpid by int 0x80, the calls of 32 bits
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()",
        FAILS,
    ),
    "x32 calls": ("import ctypes; assert ctypes.CDLL(None).syscall(0x40000000 + 41, 2, 1, 0) >= 0", FAILS),
    "io_uring": ("import ctypes; assert ctypes.CDLL(None).syscall(425, 8, bytes(120)) >= 0", FAILS),
    "shared memory": ("import ctypes; assert ctypes.CDLL(None).shmget(1, 4096, 0o1666) >= 0", FAILS),
    "watch of a directory": (
        "import ctypes; c = ctypes.CDLL(None); assert c.inotify_add_watch(c.inotify_init(), b'FOLDER', 256) >= 0",
        FAILS,
    ),
    "deleted standard library": ("import os; os.remove(os.__file__)", FAILS),
}
CALLS: dict[str, tuple[str, set[str]]] = {
    "closed reply": ("import os\nos.close(3)\ndef f(): return 1", FAILS),
    "10 MB reply": ("def f(): return 'x' * 10**7", {"output"}),
    "deep reply": ("def f():\n x = []\n for _ in range(10**5): x = [x]\n return x", {"ok", "failed", "memory"}),
    "object as reply": ("class A:\n __eq__ = lambda *_: True\ndef f(): return A()", {"ok"}),
    "patched json": ("import json; json.dumps = lambda *_: '[[\"value\", 1]]'\ndef f(): return 2", {"ok"}),
}
_SERVES = """
import json, os
requests, replies = os.fdopen(os.dup(4)), os.fdopen(os.dup(4), "w")
def say(value):
    replies.write(json.dumps(value) + chr(10))
    replies.flush()
say(NAMES)
for line in requests:
    deed, target, given = json.loads(line)
    say(REPLY)
os._exit(0)
"""
"""An answer that writes what the tests' process reads itself: its names, and its reply to everything."""


def serves(names: str, reply: str) -> str:
    return _SERVES.replace("NAMES", names).replace("REPLY", reply)


WRONG = "def add(a, b): return 0"
SHADOWS = ("hashlib.py", "_strptime.py", "csv.py", "numpy.py", "solution.py")
SHADOW = b"""
import json, os, sys
frame = sys._getframe()
while frame and "nonce" not in frame.f_locals:
    frame = frame.f_back
if frame:
    os.write(3, json.dumps({"passed": [True] * len(frame.f_locals["tests"]), "nonce": "n"}).encode())
    os._exit(0)
"""
"""A module in the box's directory, which passes the tests that import it."""
_SAME = "assert add(1, 2) == 3"
_A = "def add(a, b): return A()"
_ALL = "assert all(map(lambda case: add(case, 1) == case + 1, [1, 2]))"
_ZERO = '["value", {"object": 0} if deed in ("item", "get") else 0, given]'
_OBJECT = '["value", {"object": 0} if deed == "call" else {"dict": []}, given]'
ASSERTS: dict[str, tuple[str, str]] = {
    "builtins": (serves('["add", "__builtins__"]', _ZERO), "assert abs(add(1, 2) - 3) < 1e-6"),
    "builtins by name": (serves('["add", "abs", "set"]', _ZERO), "assert abs(add(1, 2) - 3) + len(set()) < 1e-6"),
    "a module by name": (serves('["add", "math"]', _ZERO), "assert math.floor(add(1, 2)) == 3"),
    "names that are none": (serves("[[1], {}]", _ZERO), _SAME),
    "a pointer for numpy": (serves('["add"]', _OBJECT), "assert hasattr(add(1, 2), '__array_' + 'interface__')"),
    "a pointer for ctypes": (serves('["add"]', _OBJECT), "assert hasattr(add(1, 2), '_as_' + 'parameter_')"),
    "a copy of its own": (
        serves('["add"]', _OBJECT),
        "copied = copy.deepcopy(getattr(add(1, 2), '__deepcopy' + '__'))\nassert copied == {}",
    ),
    "no length": (serves('["add"]', '["value", {"object": 0} if deed == "call" else -1, given]'), "len(add(1, 2))"),
    "StopIteration": ("def add(a, b): raise StopIteration", _ALL),
    "StopIteration by its own replies": (serves('["add"]', '["error", "StopIteration", ""]'), _ALL),
    "StopIteration's child": (f"class Stop(StopIteration): pass\n{WRONG.replace('return 0', 'raise Stop')}", _ALL),
    "GeneratorExit": (serves('["add"]', '["error", "GeneratorExit", ""]'), _ALL),
    "SystemExit": (serves('["add"]', '["error", "SystemExit", "0"]'), _SAME),
    "MemoryError": (serves('["add"]', '["error", "MemoryError", ""]'), _SAME),
    "a class that is no error": (serves('["add"]', '["error", "print", "x"]'), _SAME),
    "an error without a text": (serves('["add"]', '["error"]'), _SAME),
    "replies of no form": (serves('["add"]', "{}"), _SAME),
    "__eq__": (f"class A:\n __eq__ = __ne__ = lambda *_: True\n __hash__ = lambda _: 3\n{_A}", _SAME),
    "__hash__": (
        f"class A(int):\n __eq__ = lambda *_: True\n __hash__ = lambda _: 3\n{_A}",
        "assert add(1, 2) in {3}",
    ),
    "__class__": (f"class A:\n __class__ = int\n{_A}", "assert isinstance(add(1, 2), int)"),
    "an endless reply": (f"import os\nwhile True: os.write(4, b'[' * 2**20)\n{WRONG}", _SAME),
    "a deep reply": (f"import os\nos.write(4, b'[' * 2**20 + b'\\n')\n{WRONG}", _SAME),
    "a module of the library": (WRONG, f"import hashlib, csv\n{_SAME}"),
    "a module of a package": (WRONG, f"try:\n import numpy\nexcept ImportError: pass\n{_SAME}"),
    "a module that the library imports late": (WRONG, f"datetime.datetime.strptime('2020', '%Y')\n{_SAME}"),
    "its own file": (WRONG, f"from solution import add\n{_SAME}"),
    "its own file as a module": (WRONG, "import solution\nassert solution.add(1, 2) == 3"),
    "all of its own file": (WRONG.replace("add", "abs"), "from solution import *\nassert abs(-1) == 0"),
    "a file": (WRONG, "assert open('hashlib.py').read()"),
}
"""Answers and a test that none of them passes, in a box whose files are SHADOW."""


async def passed(box: Box, source: str, *tests: str) -> Any:
    """Return which tests an answer passes; None where its tests did not end."""
    what: dict[str, Any] = {"tests": tests, "own": [], "setup": "", "module": "solution", "nonce": "n"}
    result = await box.run("asserts", source=source, **what)
    return json.loads(result.reply)["passed"] if result.outcome.value == "ok" else None


# The marker finds processes that outlive their box.
MARKER = "grpo-hostile-marker"
_LATE = (
    "import os, time\nfor _ in range(2):\n if os.fork(): os._exit(0)\n os.setsid()\ntime.sleep(3)\nopen('late', 'w')"
)
_UNNAMED = (
    "import os\nf = []\ndef new():\n f.append(os.open('x', os.O_CREAT | os.O_RDWR)); os.remove('x')\n"
    " assert os.write(f[-1], bytes(2**20)) == 2**20\n"
)
PROGRAMS: dict[str, tuple[str, set[str]]] = {
    "fork bomb": ("import os\nwhile True:\n try: os.fork()\n except OSError: pass", {"timeout"}),
    "daemon": (_LATE, {"ok"}),
    "many daemons": (
        "import os, time\nfor _ in range(10):\n if os.fork() == 0:\n  os.setsid(); time.sleep(3600)",
        {"ok"},
    ),
    "fill the box": ("i = 0\nwhile True:\n i += 1\n open(str(i), 'wb').write(bytes(2**20))", {"failed", "output"}),
    "files without a name": (f"{_UNNAMED}while True: new()", {"failed", "output"}),
    "files that are mapped only": (
        f"import ctypes\n{_UNNAMED}while True:\n new(); ctypes.CDLL(None).mmap(None, 4096, 1, 1, f[-1], 0)\n"
        " os.close(f.pop())",
        {"failed", "output"},
    ),
    "files in transit": (
        f"import socket\n{_UNNAMED}a, b = socket.socketpair()\nwhile True: new(); socket.send_fds(a, [b'x'], [f[-1]])",
        FAILS,
    ),
    "allocated file": ("import os; os.posix_fallocate(os.open('x', os.O_CREAT | os.O_WRONLY), 0, 2**20)", FAILS),
    "children at work": (
        "import os\nfor _ in range(4):\n if os.fork() == 0:\n  while True: pass\nos.wait()",
        {"timeout"},
    ),
    "2 GB file": ("f = open('x', 'wb')\nwhile True: f.write(bytes(2**20))", {"failed", "output"}),
    "endless loop in a child": ("import os\nos.fork()\nwhile True: pass", {"timeout"}),
    "1 GB of stdout": ("while True: print('x' * 2**16)", {"output"}),
    "kill all": ("import os, signal; os.kill(-1, signal.SIGTERM)", {"failed", "ok", "infrastructure"}),
    "server's environment": ("print(open('/proc/SERVER/environ').read())", FAILS),
    "zygote's descriptors": ("import os; os.listdir(9)", FAILS),
    "run directory": ("print(open('FOLDER/secret').read())", FAILS),
    "mode changed": ("import os; os.chmod('FOLDER/secret', 0o777)", FAILS),
    "TCP to loopback": ("import socket; socket.create_connection(('127.0.0.1', PORT), 2)", FAILS),
    "UNIX socket": ("import socket; socket.socket(socket.AF_UNIX).connect('FOLDER/socket')", FAILS),
    "sibling's box": ("print(open('SIBLING/mine').read())", FAILS),
    "setuid program": ("import os; os.execv('/bin/su', ['su', '-c', 'id'])", FAILS),
    "user namespace": ("import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0", FAILS),
    "fill /dev/shm": ("open('/dev/shm/grpo-hostile', 'wb').write(bytes(2**24))", FAILS),
    "symlink": ("import os; os.symlink('FOLDER/secret', 'link')", {"ok"}),
}


def report(result: Result) -> dict[str, Any]:
    return {"outcome": result.outcome.value, "said": result.last_line, "out": result.stdout[:200].decode("latin-1")}


async def main(backend: BackendName, interpreter: Interpreter, folder: str, port: int) -> dict[str, Any]:
    answers = await Box(backend, interpreter, LIMITS).start()
    sibling = await Box(backend, interpreter, LIMITS, writes=True).start()
    await sibling.load({"mine": b"secret"})

    def filled(source: str) -> str:
        place = sibling._directory or ""
        names = {"SERVER": os.getpid(), "PORT": port, "FOLDER": folder, "SIBLING": place}
        for name, value in names.items():
            source = source.replace(name, str(value))
        return source

    boxes: set[str] = set()
    found: dict[str, Any] = {"answers": {}, "calls": {}, "asserts": {}, "programs": {}, "after": {}}
    for name, (source, expected) in ANSWERS.items():
        limits = SHORT if "timeout" in expected else LIMITS
        found["answers"][name] = report(await answers.run("script", source=filled(source), limits=limits))
        found["after"][name] = (await answers.run("script", source="print(6 * 7)")).stdout == b"42\n"
    for name, (source, _) in CALLS.items():
        result = await answers.run("calls", source=source, name="f", inputs=[[]])
        found["calls"][name] = report(result) | {"reply": result.reply[:200].decode("latin-1")}
    await sibling.load(dict.fromkeys(SHADOWS, SHADOW))
    for name, (source, test) in ASSERTS.items():
        found["asserts"][name] = await passed(sibling, source, test)
        found["after"][name] = await passed(sibling, "def add(a, b): return a + b", _SAME) == [True]
    for name, (source, expected) in PROGRAMS.items():
        box = await Box(backend, interpreter, LIMITS, writes=True).start()
        boxes.add(Path(box._directory or "").name)
        limits = SHORT if "timeout" in expected else LIMITS
        found["programs"][name] = report(
            await box.exec(["/usr/bin/python3", "-c", filled(source), MARKER], limits=limits)
        )
        if name == "daemon":
            await asyncio.sleep(4)
            found["late"] = report(await box.exec(["cat", "late"]))
        if name == "symlink":
            found["link"] = report(await box.exec(["cat", "link"]))
        await box.close()
    found["sibling"] = (await sibling.exec(["cat", "mine"])).stdout.decode()
    for box in (answers, sibling):
        await box.close()
    found["left"] = [
        pid for pid in filter(str.isdecimal, os.listdir("/proc")) if int(pid) != os.getpid() and MARKER in _command(pid)
    ]
    with open(f"{folder}/secret") as file:  # noqa: ASYNC230
        found["secret"] = file.read()
    found["mode"] = os.stat(f"{folder}/secret").st_mode & 0o777
    found["boxes"] = [name for name in os.listdir(tempfile.gettempdir()) if name in boxes]
    return found


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    os.environ["HOSTILE_SECRET"] = "secret"
    with tempfile.TemporaryDirectory() as here, socket.create_server(("127.0.0.1", 0)) as server:
        Path(here, "secret").write_text("secret")
        os.chmod(here, 0o777)
        os.chmod(Path(here, "secret"), 0o666)
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(f"{here}/socket")
        unix.listen()
        os.chmod(f"{here}/socket", 0o777)
        arguments = BackendName(sys.argv[1]), Interpreter.find(sys.argv[2]), here, server.getsockname()[1]
        print(json.dumps(asyncio.run(main(*arguments))))
