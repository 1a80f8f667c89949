"""``grpo tasks check``: whether a task can be trained on, by attempts in the boxes that a run will use.

A task passes if its solution earns 1 and doing nothing earns 0, each in two attempts with equal verdicts, and nothing
of the answer can be read in the agent's box. Weaknesses of its tests are named and do not fail it: they are found by
answers that replace each Python file of the solution by a hostile one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.core.errors import first_line
from services.data_server.harbor import Task
from services.environment_server.environments import EnvironmentBrokenError
from services.environment_server.harbor import HarborTasks
from services.environment_server.trials import SOLUTION, VERDICTS, NoRewardError, Rewards, Trial
from services.sandbox.box import Files

ATTEMPTS = 2
_LEAST_BYTES = 16
"""Shorter files are in others by chance."""
_MARKER = "/tmp/.tests-were-read"
_EQUAL = """
import sys
class Equal(type(sys)):
    __file__, __path__, __spec__, __all__ = "", [], None, []
    def __getattr__(self, name): return self
    def __call__(self, *arguments, **named): return self
    def __getitem__(self, key): return self
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = type(sys).__hash__
sys.modules[__name__] = Equal(__name__)
"""
_WRITES = f'''
import os
for name, text in (("json", '{{"reward": 1}}'), ("txt", "1")):
    try:
        with open("{VERDICTS}/reward." + name, "w") as file:
            file.write(text)
    except OSError:
        pass
os.kill(os.getppid(), 9)
'''
_READS = f'''
import os
try:
    os.listdir("/tests")
    open("{_MARKER}", "w").close()
except OSError:
    pass
'''
_FAILS = b"raise SystemExit(1)\n"
_HOSTILE = {
    "passes by os._exit(0)": "import os\nos._exit(0)\n",
    "passes by an object that equals everything": _EQUAL,
    "passes by writing the reward and killing its tests": _WRITES,
}
_LOOK = """
import os, shutil, socket, subprocess
for place in ("/tests", "/solution", "/logs/verifier"):
    if os.path.exists(place):
        print(f"{place} is in the agent's box")
try:
    socket.create_connection(("1.1.1.1", 53), 2)
    print("the network is open")
except OSError:
    pass
for folder, folders, _ in os.walk("."):
    if ".git" in folders and shutil.which("git"):
        def git(*words):
            return subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True).stdout.strip()
        later = {*git("rev-list", "--all", "--reflog", "--not", "HEAD").split()}
        lost = git("fsck", "--unreachable", "--no-reflogs").splitlines()
        later |= {line.split()[-1] for line in lost if " commit " in line}
        if later:
            print(f"{folder}/.git has commits beyond its HEAD: {len(later)}")
"""


@dataclass
class Check:
    """A verdict on a task. ``reason`` is short, so that tasks can be counted by it; ``detail`` explains it."""

    task: str
    digest: str
    limits: str
    """The conditions in which it was found."""
    oracle: list[float | None] = field(default_factory=list)
    """The reward of each attempt of the solution; None where there was none."""
    nothing: list[float | None] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    weaknesses: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    passes: bool = False
    reason: str = ""
    detail: str = ""
    seconds: float = 0.0


def conditions(tasks: HarborTasks, task: Task) -> str:
    """Return a text that is another one for boxes of other limits, or with other programs."""
    return f"{tasks.limits} {tasks.settings.sandbox_image or tasks.interpreter_of(task.image).tree}".strip()


async def check_task(tasks: HarborTasks, task: Task) -> Check:
    """Attempt a task by its solution and by doing nothing, and look for leaks and weaknesses.

    Raises:
        DependencyLostError: a box was lost, which says nothing about the task.
    """
    started = time.monotonic()
    check = Check(task.name, task.digest, conditions(tasks, task), notes=list(task.notes))
    try:
        files = Trial(tasks, task).original
    except EnvironmentBrokenError as error:
        check.reason, check.detail = "has no box in its image", first_line(error)
        return check
    check.leaks = [*copied_answers(task, files), *await _looked(tasks, task)]
    attempts = (
        (check.oracle, 1.0, "its solution does not earn 1"),
        (check.nothing, 0.0, "doing nothing does not earn 0"),
    )
    for earned, expected, reason in attempts:
        verdicts = []
        for _ in range(ATTEMPTS):
            rewards, detail = await _attempt(tasks, task, solves=earned is check.oracle)
            earned.append(None if rewards is None else rewards["reward"])
            verdicts.append(rewards)
        if not check.reason and set(earned) != {expected}:
            check.reason, check.detail = reason, detail or f"its tests say {verdicts}"
        elif not check.reason and verdicts[0] != verdicts[-1]:
            check.reason, check.detail = "its verdicts differ", f"{verdicts}"
    if check.leaks and not check.reason:
        check.reason, check.detail = "a leak", "; ".join(check.leaks)
    check.passes = not check.reason
    if check.passes:
        check.weaknesses = await _weaknesses(tasks, task)
    check.seconds = round(time.monotonic() - started, 2)
    return check


async def _attempt(tasks: HarborTasks, task: Task, *, solves: bool) -> tuple[Rewards | None, str]:
    """Return the rewards of an attempt, None where there are none, and why it did not earn them."""
    async with tasks.places, Trial(tasks, task, scratch=SOLUTION if solves else "") as trial:
        said = ""
        try:
            while True:
                if solves:
                    said = (await trial.solve()).last_line
                await trial.grade()
                if not await trial.go_on():
                    return trial.rewards, " ".join(f"{said} {trial.output}".split())[-300:]
        except NoRewardError as error:
            return None, " ".join(f"{first_line(error)}. {said} {trial.output}".split())[:300]
        except (EnvironmentBrokenError, ValueError) as error:
            return None, first_line(error)


def copied_answers(task: Task, files: Files) -> Iterator[str]:
    """Yield a sentence for each file of tests or solutions that an instruction or one of a box's files has in it."""
    shown = dict(files)
    for step in task.steps:
        shown["the instruction"] = step.instruction.encode()
        for folder in (*step.tests, step.solution):
            for path in folder.rglob("*"):
                content = path.read_bytes().strip() if path.is_file() else b""
                for name, own in shown.items():
                    if len(content) >= _LEAST_BYTES and content in own:
                        yield f"{name} has {path.relative_to(task.path)} in it"


async def _looked(tasks: HarborTasks, task: Task) -> list[str]:
    """Return what an agent can see in its box and should not."""
    async with tasks.places, Trial(tasks, task) as trial:
        try:
            result = await trial.run("python", _LOOK, trial.limits.seconds)
        except EnvironmentBrokenError as error:
            return [first_line(error)]
    return result.stdout.decode("utf-8", "replace").splitlines()


async def _weaknesses(tasks: HarborTasks, task: Task) -> list[str]:
    """Return what hostile answers can do in place of the files of the solution."""
    named: set[str] = set()
    async with tasks.places, Trial(tasks, task, scratch=SOLUTION) as trial:

        async def judged(left: Files, replaced: dict[str, bytes]) -> tuple[bool, bool]:
            """Return whether files earn 1, and whether they have read the tests."""
            try:
                rewards, was_read = await trial.judge(Files(left | replaced, left.executable), _MARKER)
            except NoRewardError:
                return False, False
            return rewards["reward"] == 1.0, was_read

        while True:
            await trial.solve()
            left = await trial.left() or Files()
            programs = [path for path in left if path.endswith(".py") and trial.original.get(path) != left[path]]
            # A program that the tests do not run, and that no result depends on, shows nothing.
            if programs and not (await judged(left, dict.fromkeys(programs, _FAILS)))[0]:
                for name, source in _HOSTILE.items():
                    if (await judged(left, dict.fromkeys(programs, source.encode())))[0]:
                        named.add(name)
                if (await judged(left, {path: _READS.encode() + left[path] for path in programs}))[1]:
                    named.add("reads the tests while they run it")
            await trial.grade()
            if not await trial.go_on():
                return sorted(named)
