"""Boxes, the pool of warm ones, and the attack that decides whether a backend may be used.

Hostile code costs only itself: on every backend, as root and as an ordinary user, and as in a default container.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import operator
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.core.errors import ConfigurationError
from services.sandbox import backends, probe, zygote
from services.sandbox.backends import BackendName, Interpreter
from services.sandbox.box import Box, BoxPool, Outcome, Result, SandboxError
from services.sandbox.kernel import Limits, landlock_version
from services.sandbox.watch import Run
from tests.services.sandbox import hostile
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, eventually, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the backends for Linux")
LIMITS = Limits(cpu_seconds=10, seconds=IDLE_SECONDS, memory_mb=256)
HAS_LANDLOCK = bool(landlock_version())
NO_BWRAP = pytest.mark.skipif(not shutil.which("bwrap"), reason="no bubblewrap")
BACKENDS = [
    pytest.param(BackendName.BWRAP, marks=[NO_BWRAP, *([pytest.mark.slow] if HAS_LANDLOCK else [])]),
    pytest.param(BackendName.LANDLOCK, marks=pytest.mark.skipif(not HAS_LANDLOCK, reason="no Landlock")),
]
"""The second backend of a machine that has both is tested with the slow tests."""
SCRIPT_PYTHON = shutil.which("python3", path="/usr/bin") or sys.executable


@pytest.fixture(scope="module")
def interpreter() -> Interpreter:
    return Interpreter.find(sys.executable)


@pytest.fixture(params=BACKENDS)
async def box(request: pytest.FixtureRequest, interpreter: Interpreter) -> AsyncIterator[Box]:
    """A box with a directory, by each backend of this machine."""
    box = await Box(request.param, interpreter, LIMITS, writes=True).start()
    yield box
    await box.close()


async def test_files_are_kept_between_calls_and_a_program_sees_no_others(box: Box) -> None:
    assert (await box.load({"a/b.txt": b"one\xff\n"})).outcome is Outcome.OK
    done = await box.exec(["sh", "-c", "cat a/b.txt - > c; echo x $HOME; exit 3"], stdin=b"two")
    assert (done.outcome, done.exit_code) == (Outcome.FAILED, 3)
    assert done.stdout.split()[0] == b"x"
    assert (await box.exec(["cat", "c"])).stdout == b"one\xff\ntwo"
    outside = await box.load({"/tmp/grpo-outside": b"x"})
    assert outside.outcome is Outcome.FAILED
    assert "grpo-outside" not in os.listdir("/tmp")


async def test_where_memory_is_what_programs_use_they_may_reserve_more_and_the_newest_are_killed(box: Box) -> None:
    limits = LIMITS._replace(memory_mb=128, is_resident=True)
    reserve = "import mmap; mmap.mmap(-1, 2**36, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0)"
    assert (await box.exec([SCRIPT_PYTHON, "-c", reserve], limits=limits)).outcome is Outcome.OK
    take = "memory = b'x' * 2**29; import time; time.sleep(3600)"
    inner = await box.exec(["sh", "-c", f'{SCRIPT_PYTHON} -c "{take}"; echo $?'], limits=limits)
    assert (inner.outcome, inner.stdout) == (Outcome.OK, b"137\n")
    assert (await box.exec([SCRIPT_PYTHON, "-c", take], limits=limits)).outcome is Outcome.MEMORY
    # A program may end with any code, or kill itself.
    for command, outcome in (("exit 77", Outcome.FAILED), ("kill -9 $$", Outcome.FAILED)):
        assert (await box.exec(["sh", "-c", command], limits=limits)).outcome is outcome


async def test_files_move_to_another_box_where_answers_read_them_and_write_none(
    box: Box, interpreter: Interpreter
) -> None:
    made = await box.exec(
        ["sh", "-c", "mkdir -p a/b; printf 'x = 7' > a/b/m.py; printf '\\377' > c; ln -s c d; mkfifo e"]
    )
    assert made.outcome is Outcome.OK
    files = await box.save(10_000)
    assert files == {"a/b/m.py": b"x = 7", "c": b"\xff"}
    too_large = await box.save(10)
    assert isinstance(too_large, Result)
    assert too_large.outcome is Outcome.OUTPUT
    other = await Box(box.backend, interpreter, LIMITS, writes=True).start()
    try:
        assert (await other.load(files)).outcome is Outcome.OK
        assert (await other.run("script", source="from a.b.m import x; print(x)")).stdout == b"7\n"
        assert (await other.run("script", source="open('c', 'w')")).last_line.startswith("PermissionError")
        assert (await other.load({"../out": b"", "f": b""})).outcome is Outcome.FAILED
    finally:
        await other.close()


async def test_no_answer_and_no_file_changes_what_its_tests_see(box: Box) -> None:
    await box.load(dict.fromkeys(hostile.SHADOWS, hostile.SHADOW))
    earned = {name: await hostile.passed(box, *case) for name, case in hostile.ASSERTS.items()}
    assert {name: passed for name, passed in earned.items() if passed not in (None, [False])} == {}
    # A right answer passes the tests that import something.
    imports = [test for source, test in hostile.ASSERTS.values() if source == hostile.WRONG and "open(" not in test]
    assert len(imports) == 5
    assert await hostile.passed(box, "def add(a, b): return a + b", *imports) == [True] * 5


AS_A_PROGRAM = {
    "print(1); exit()": b"1\n",
    "print(2); quit(0)": b"2\n",
    "help, copyright, credits, license; print(3)": b"3\n",
    "import os; print(os.path.dirname(__file__) == os.getcwd())": b"True\n",
    "import sys; print(len(sys.argv))": b"1\n",
    "__builtins__.print(4)": b"4\n",
    "import atexit; atexit.register(print, 6); print(5); exit()": b"5\n6\n",
    "import threading as t, time\nt.Thread(target=lambda: (time.sleep(0.1), print(8))).start(); print(7)": b"7\n8\n",
}


async def test_a_program_has_what_python_gives_programs(box: Box) -> None:
    results = {source: await box.run("script", source=source) for source in AS_A_PROGRAM}
    assert {source: (result.outcome, result.stdout) for source, result in results.items()} == {
        source: (Outcome.OK, stdout) for source, stdout in AS_A_PROGRAM.items()
    }
    assert (await box.run("script", source="exit(3)")).exit_code == 3
    # In a call it is an error of that call.
    calls = await box.run("calls", source="def f(x):\n  return x or exit()", name="f", inputs=[[0], [1]])
    assert [kind for kind, _ in json.loads(calls.reply)] == ["error", "value"]


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes have their directory in memory, where many files take less time."""
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")


async def test_more_files_than_can_be_read_quickly_are_refused(in_memory: None, box: Box) -> None:
    many = await box.exec(["sh", "-c", "i=0; while [ $i -le 10000 ]; do i=$((i + 1)); : > $i; done"])
    assert many.outcome is Outcome.OK
    result = await box.save(2**20)
    assert isinstance(result, Result)
    assert "more than 10000 files" in result.last_line


async def test_a_program_that_does_not_exist_fails_by_name(box: Box) -> None:
    done = await box.exec(["no-such-program"])
    assert done.outcome is Outcome.FAILED
    assert "no-such-program" in done.last_line or "No such file" in done.last_line


async def test_processor_time_of_children_and_output_are_limited(box: Box) -> None:
    tight = Limits(cpu_seconds=0.4, seconds=IDLE_SECONDS, output_bytes=1000)
    spin = await box.exec([SCRIPT_PYTHON, "-c", "while True: pass"], limits=tight)
    assert (spin.outcome, spin.exit_code) == (Outcome.TIMEOUT, None)
    assert spin.cpu_seconds > 0.4
    loud = await box.exec(["sh", "-c", "while :; do echo xxxxxxxxxx; done"], limits=Limits(output_bytes=1000))
    assert loud.outcome is Outcome.OUTPUT
    assert len(loud.stdout) == 1000


CHILDREN = """
import os, signal, sys, time
ends = os.pipe()
signal.signal(signal.SIGCHLD, signal.SIG_IGN if sys.argv[1] == "ignore" else signal.SIG_DFL)
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        while time.process_time() < 60:
            pass
        os._exit(0)
os.close(ends[1])
os.read(ends[0], 1)
"""


@pytest.mark.parametrize("how", ["ignore", "leave"])
async def test_children_count_while_nobody_waits_for_them(box: Box, how: str) -> None:
    tight = LIMITS._replace(cpu_seconds=0.5)
    result = await box.exec([SCRIPT_PYTHON, "-c", CHILDREN, how], limits=tight)
    assert result.outcome is Outcome.TIMEOUT
    assert 0.5 < result.cpu_seconds < 10


OPEN = """
import ctypes, os, time
files = []
def fill(count=6):
    for _ in range(count):
        files.append(os.open("x", os.O_CREAT | os.O_RDWR))
        os.remove("x")
        os.write(files[-1], bytes(2**20))
"""
DISK = {
    "files without a name": "fill()",
    "of a child": "if os.fork() == 0:\n os.setsid(); fill(); time.sleep(60)",
    "mapped only": "fill()\nfor f in files: ctypes.CDLL(None).mmap(None, 4096, 1, 1, f, 0); os.close(f)",
    "of a program that cannot be read": (
        "fill(3)\nfor f in files: os.set_inheritable(f, True)\n"
        "p = os.open('p', os.O_CREAT | os.O_WRONLY, 0o111); os.write(p, open('/bin/sleep', 'rb').read()); os.close(p)\n"
        "os.execv('p', ['p', '60'])"
    ),
    "empty files": "for i in range(1100): open(str(i), 'w').close()",
    "deep directories": "for _ in range(600): os.mkdir('d'); os.chdir('d')",
    "more than is measured before it ends": "for i in range(6): open(str(i), 'wb').write(bytes(2**20))\nos._exit(0)",
}


@pytest.mark.skipif(not HAS_LANDLOCK, reason="no Landlock")
async def test_all_that_fills_the_disk_is_measured(in_memory: None, interpreter: Interpreter) -> None:
    """With bubblewrap the kernel bounds it."""
    box = await Box(BackendName.LANDLOCK, interpreter, LIMITS, writes=True).start()
    try:
        for name, source in DISK.items():
            program = f"{OPEN}{source}\ntime.sleep(60)"
            result = await box.exec([SCRIPT_PYTHON, "-c", program], limits=LIMITS._replace(disk_mb=4))
            assert result.outcome is Outcome.OUTPUT, (name, result)
            if "name" not in name:
                await box.exec(["sh", "-c", "rm -rf *"])
        await box.exec([SCRIPT_PYTHON, "-c", f"{OPEN}{source}"], limits=LIMITS._replace(disk_mb=4))
        assert await box.save(10_000) == {}, "what is too much is removed"
        for refused in (
            "os.posix_fallocate(1, 0, 9)",
            "import socket; socket.send_fds(socket.socketpair()[0], [b'x'], [1])",
        ):
            assert (await box.exec([SCRIPT_PYTHON, "-c", f"import os; {refused}"])).last_line.startswith(
                "PermissionError"
            )
    finally:
        await box.close()


async def test_a_cancelled_run_ends_and_the_box_with_it(box: Box) -> None:
    pid = box.pid
    task = asyncio.create_task(box.exec(["sleep", "3600"]))

    def is_asleep() -> bool:
        return any(child.name() == "sleep" for child in psutil.Process(pid).children(recursive=True))

    await eventually(is_asleep, "the program")
    children = psutil.Process(pid).children(recursive=True)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not box.is_alive
    assert psutil.wait_procs(children, IDLE_SECONDS)[1] == []
    assert (await box.exec(["true"])).outcome is Outcome.INFRASTRUCTURE


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_hundred_right_answers_leave_nothing(
    backend: BackendName, interpreter: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = psutil.Process()
    # Other tests have boxes and mounts of their own at the same time.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def state() -> tuple[int, int, int, int]:
        mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if "grpo-box" in line]
        return len(me.children(recursive=True)), me.num_fds(), len(os.listdir(tmp_path)), len(mounts)

    def no_more_than(then: tuple[int, ...]) -> bool:
        # Less is no leak: what earlier tests of this process left open may be closed meanwhile.
        return all(map(operator.le, state(), then))

    before = state()
    pool = BoxPool(backend, interpreter, LIMITS, 2)
    await pool.start()
    warm = state()

    def descriptors() -> int:
        return sum(child.num_fds() for child in me.children(recursive=True))

    async def answer(number: int) -> bytes:
        source = "import sys; print(int(sys.stdin.read()) ** 2)"
        result = await pool.run("script", seconds=IDLE_SECONDS, source=source, stdin=str(number).encode())
        return result.stdout

    # After half of them both boxes have answered, so that what they open at their first answer is counted.
    first = await asyncio.gather(*(answer(number) for number in range(50)))
    then = descriptors()
    second = await asyncio.gather(*(answer(number) for number in range(50, 100)))
    assert first + second == [b"%d\n" % number**2 for number in range(100)]
    # A box may still be closing the descriptors of its last answer.
    await eventually(
        lambda: no_more_than(warm) and descriptors() <= then,
        told=lambda: f"{state()}, {descriptors()}; before {warm}, {then}",
    )
    await pool.stop()
    # A thread of the event loop may still be closing what it had open.
    await eventually(lambda: no_more_than(before), told=lambda: f"{state()}, before {before}")


async def test_an_answer_that_only_waits_ends_before_its_clock(box: Box) -> None:
    result = await box.run("script", source="import time; time.sleep(3600)", limits=LIMITS._replace(cpu_seconds=1))
    assert (result.outcome, result.seconds < IDLE_SECONDS) == (Outcome.TIMEOUT, True)


TURNS: dict[str, tuple[list[tuple[float, Any]], bool]] = {
    "sleeps": ([(0.05, 0.0)] * 110, True),
    "sleeps after some work": ([(0.05, 0.05)] * 20 + [(0.05, 0.0)] * 110, True),
    "sleeps in short pieces": ([(0.05, 0.0003)] * 110, True),
    "is one of many": ([(0.05, 0.0)] * 49 + [(0.05, 0.06)], False),
    "gets a fiftieth of a core": ([(0.05, 0.001)] * 1000, False),
    "is on a machine that stands still": ([(0.1, 0.0)] * 1000, False),
    "waits now and then": (([(0.05, 0.0)] * 90 + [(0.05, 0.06)]) * 10, False),
    "is on a system that does not tell": ([(0.05, None)] * 1000, False),
}
"""By what an answer does: pairs of seconds by the clock and of processor time; whether it is ended."""


@pytest.mark.parametrize("name", TURNS)
def test_a_busy_machine_is_no_answer_that_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, ends = TURNS[name]
    monkeypatch.setattr(Run, "_over_limit", lambda *_: None)
    run = zygote._Answer.__new__(zygote._Answer)
    run._limits, run._measured, clock = LIMITS._replace(cpu_seconds=1), 0.0, 0.0
    causes = set()
    for seconds, cpu_seconds in turns:
        clock += seconds
        run._measured = 0.0 if cpu_seconds is None else run._measured + cpu_seconds + 1e-9
        causes.add(run._over_limit(clock, 0))
    assert causes == ({None, "timeout"} if ends else {None})


@pytest.mark.parametrize(("seconds", "scored"), [(IDLE_SECONDS, 3), (0.01, 1)])
async def test_an_answer_waits_as_long_as_those_before_it_may_take(
    seconds: float, scored: int, interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = BoxPool(BackendName.LANDLOCK, interpreter, LIMITS._replace(seconds=seconds), 1)
    over = asyncio.Event()

    async def run(*_: object) -> Result:
        await over.wait()
        return Result(Outcome.OK)

    monkeypatch.setattr(Box, "is_alive", True)
    monkeypatch.setattr(Box, "run", run)
    pool._free.put_nowait(pool._boxes[0])
    runs = [asyncio.create_task(pool.run("script", seconds=0.01)) for _ in range(3)]
    await asyncio.wait(runs, timeout=0.2)
    over.set()
    results = await asyncio.gather(*runs, return_exceptions=True)
    assert [isinstance(result, Result) for result in results].count(True) == scored
    assert all(isinstance(result, Result | TimeoutError) for result in results)


async def _answers(pool: BoxPool) -> list[bytes]:
    source = "import sys, time; n = int(sys.stdin.read()); time.sleep(0.2); print(n * n)"

    async def answer(number: int) -> bytes:
        return (await pool.run("script", seconds=IDLE_SECONDS, source=source, stdin=str(number).encode())).stdout

    return await asyncio.gather(*(answer(number) for number in range(24)))


def _kill(victim: str, boxes: set[psutil.Process]) -> bool:
    """Kill a process of one of ``boxes``, if one has more than its own."""
    for box in boxes:
        with contextlib.suppress(psutil.NoSuchProcess):  # an answer may end by itself meanwhile
            processes = [box, *box.children(recursive=True)]
            place = {"box": 0, "zygote": len(processes) - 2, "answer": len(processes) - 1}[victim]
            if len(processes) > 1:
                processes[max(place, 0)].send_signal(signal.SIGKILL)
                return True
    return False


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("victim", ["box", "zygote", "answer"])
async def test_killed_boxes_and_answers_change_no_result(
    backend: BackendName, victim: str, interpreter: Interpreter
) -> None:
    """As by the kernel when the machine's memory runs out, which ends a box's processes first."""
    before = psutil.Process().children()
    pool = BoxPool(backend, interpreter, LIMITS, 2)
    await pool.start()
    quiet = await _answers(pool)
    # One victim in each round: a second try of the same answer must not be killed, too.
    for _ in range(2):
        is_killed = False
        while not is_killed:
            running = asyncio.create_task(_answers(pool))
            while not is_killed and not running.done():
                await asyncio.sleep(0.1)
                is_killed = _kill(victim, set(psutil.Process().children()) - set(before))
            assert await running == quiet
    await pool.stop()
    await eventually(lambda: set(psutil.Process().children()) <= set(before), "the pool's processes have ended")


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def test_a_box_is_the_first_that_the_kernel_ends(interpreter: Interpreter) -> None:
    box = await Box(BackendName.LANDLOCK, interpreter, LIMITS).start()
    assert oom_score(box.pid) == 1000
    await box.close()


def test_the_attacks_of_the_check_are_real(tmp_path: Path) -> None:
    """Without a box nearly all of them pass, so that a failure means that the box kept them."""
    for name in ("canary", "canary2"):
        (tmp_path / name).write_text("secret")
    with probe._targets() as (_, port, _folder, shared):
        parent = subprocess.Popen(["sleep", "600"])
        source = probe._ATTACKS.replace("SERVER", repr((parent.pid, port, str(tmp_path), shared)))
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
        parent.kill()
        parent.wait()
        made = [*map(os.path.exists, shared)]
    passed = json.loads(done.stdout)
    names = len(re.findall(r'":\s+lambda: ', probe._ATTACKS)) + 1
    assert len(passed) >= names - 2, passed  # A namespace, and this process as a parent that may be traced already.
    assert "it watched a directory of this user" in passed
    assert (made, [*map(os.path.exists, shared)]) == ([True, True], [False, False]), "the check leaves nothing"


HOLES = {
    "    install_filter(": ["it opened a UNIX socket", "it forked", "it ran a program"],
    "        _restrict_files(": ["it read a file of this user", "it listed a directory of this user"],
    "    _limit(": ["it used more memory than it may"],
}


@pytest.mark.parametrize("removed", HOLES)
async def test_a_backend_with_a_hole_is_refused_with_what_passed(
    removed: str, interpreter: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "services/sandbox"
    shutil.copytree(backends.ROOT / "services/sandbox", copy)
    source = (copy / "kernel.py").read_text()
    assert source.count(removed) == 1
    (copy / "kernel.py").write_text(
        source.replace(removed, removed.replace(removed.strip(), "(lambda *_, **__: None)("))
    )
    monkeypatch.setattr(backends, "ROOT", tmp_path)
    monkeypatch.setattr(probe, "AUTOMATIC", (BackendName.LANDLOCK,))
    with pytest.raises(ConfigurationError) as refusal:
        await probe.choose(BackendName.AUTO, interpreter, writes=False)
    assert all(name in str(refusal.value) for name in HOLES[removed]), refusal.value


async def test_a_backend_that_is_not_there_is_refused(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(ConfigurationError, match="bwrap"):
        await probe.choose(BackendName.BWRAP, interpreter, writes=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigurationError, match="this is darwin"):
        await probe.choose(BackendName.AUTO, interpreter, writes=False)


async def test_auto_takes_a_backend_that_holds(interpreter: Interpreter) -> None:
    assert await probe.choose(BackendName.AUTO, interpreter, writes=True) in probe.AUTOMATIC


def test_a_python_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\necho \'[[3, 8], "python", "/usr"]\'\n')
    old.chmod(0o755)
    for path, said in ((str(old), "is Python 3.8"), ("/no/such/python", "does not run")):
        with pytest.raises(ConfigurationError, match=f"SANDBOX_PYTHON '{path}' {said}"):
            Interpreter.find(path)


async def test_a_box_whose_python_cannot_start_says_why(interpreter: Interpreter) -> None:
    broken = dataclasses.replace(interpreter, program="/no/such/python")
    with pytest.raises(SandboxError, match="/no/such/python"):
        await Box(BackendName.LANDLOCK, broken, LIMITS).start()


@pytest.mark.skipif(
    os.geteuid() != 0 or not landlock_version(), reason="only root gives boxes other users; needs Landlock"
)
async def test_a_python_that_only_root_can_reach_is_copied_once_for_the_users_of_boxes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    private = tmp_path / "private"
    venv.create(private, symlinks=True)
    private.chmod(0o700)
    next(private.glob("lib/python*/site-packages")).joinpath("late.py").write_text("import sqlite3\nvalue = 7\n")
    source = "import late, os; print(late.value, os.getuid() > 0)"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as copies, contextlib.ExitStack() as stack:
        os.chmod(copies, 0o755)
        monkeypatch.setattr(backends, "_COPIES", Path(copies))
        stack.callback(os.umask, os.umask(0o077))
        for _ in range(2):
            interpreter = Interpreter.find(str(private / "bin/python"))
            box = await Box(BackendName.LANDLOCK, interpreter, LIMITS, writes=True).start()
            answer = await box.run("script", source=source)
            program = await box.exec(["bash", "-c", f"python -c '{source}'"])
            listing = await box.exec(["ls", str(private)])
            await box.close()
            assert (answer.stdout, program.stdout) == (b"7 True\n", b"7 True\n"), (answer, program)
            assert listing.outcome is Outcome.FAILED
            assert len(os.listdir(copies)) == 1
    assert private.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("backend", BACKENDS)
def test_boxes_end_with_the_process_that_started_them(backend: BackendName) -> None:
    source = (
        "import asyncio, sys\n"
        "from services.sandbox.backends import *\nfrom services.sandbox.box import *\n"
        "async def main():\n"
        " box = await Box(BackendName(sys.argv[1]), Interpreter.find(sys.executable), Limits(), writes=True).start()\n"
        " task = asyncio.create_task(box.exec(['sh', '-c', 'setsid sleep 3600 & sleep 3600']))\n"
        " print('started', flush=True)\n await task\n"
        "asyncio.run(main())"
    )
    with subprocess.Popen([sys.executable, "-c", source, backend.value], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"started\n"
        process = psutil.Process(server.pid)
        wait_until(lambda: sum(c.name() == "sleep" for c in process.children(recursive=True)) == 2, "programs")
        children = process.children(recursive=True)
        server.kill()
    assert psutil.wait_procs(children, IDLE_SECONDS)[1] == []


# --- hostile code ----------------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
SYSTEM_PYTHON = "/usr/bin/python3"
ORDINARY = 65_534
IS_ROOT = os.geteuid() == 0


def run(script: str, *arguments: str, is_container: bool, user: int | None) -> subprocess.CompletedProcess[str]:
    """Run a script of the standard library on the Python that ``user`` can reach, perhaps as in a container."""
    python = sys.executable if user is None else SYSTEM_PYTHON
    command = [python, *([str(HERE / "stand_in.py"), python] if is_container else []), *script.split(), *arguments]
    identity: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*command, python], cwd="/", env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, **identity
    )


def check_can_run(backend: str, user: int | None) -> None:
    if backend == "bwrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    if backend == "landlock" and not landlock_version():
        pytest.skip("the kernel has no Landlock")
    if user is not None and not (IS_ROOT and Path(SYSTEM_PYTHON).exists()):
        pytest.skip("only root can become another user, for whom the system's Python is needed")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS + 60)
@pytest.mark.parametrize(
    ("backend", "user", "is_container"),
    [
        ("bwrap", None, False),
        ("bwrap", ORDINARY, False),
        ("landlock", None, False),
        ("landlock", ORDINARY, True),
    ],
)
def test_each_costs_only_itself(backend: str, user: int | None, is_container: bool) -> None:
    check_can_run(backend, user)
    done = run(str(HERE / "hostile.py"), backend, is_container=is_container, user=user)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for kind, table in (("answers", hostile.ANSWERS), ("calls", hostile.CALLS), ("programs", hostile.PROGRAMS)):
        outcomes = {name: found[kind][name]["outcome"] for name in table}
        unexpected = {
            name: found[kind][name] for name, (_, expected) in table.items() if outcomes[name] not in expected
        }
        assert unexpected == {}, kind
    assert {name: passed for name, passed in found["asserts"].items() if passed not in (None, [False])} == {}
    # Right code runs after each of them.
    assert [name for name, is_right in found["after"].items() if not is_right] == []
    # Nothing of theirs outlives them, and nothing of ours has changed.
    assert found["left"] == []
    assert found["boxes"] == []
    assert (found["secret"], found["mode"], found["sibling"]) == ("secret", 0o666, "secret")
    # A link in the box leads nowhere, and a daemon wrote nothing after its program's end.
    assert found["link"]["outcome"] == found["late"]["outcome"] == "failed"
    # Values of the answer's own classes do not come out.
    assert "not a plain value" in found["calls"]["object as reply"]["reply"]


@pytest.mark.slow
@pytest.mark.parametrize("user", [None, ORDINARY])
def test_in_a_container_bubblewrap_is_refused_in_its_own_words_and_landlock_holds(user: int | None) -> None:
    check_can_run("bwrap", user)
    check_can_run("landlock", user)
    done = run("-m services.sandbox.probe", is_container=True, user=user)
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert "ermi" in lines["bwrap"]  # "No permissions", "Operation not permitted"
    assert lines["landlock"] == "holds"
