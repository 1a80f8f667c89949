"""An attempt at a task: the box of its programs, a second one in which tests run on those files, and the verdict."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from statistics import fmean
from types import MappingProxyType

from services.core.errors import first_line
from services.data_server.harbor import HOME, Step, Task
from services.environment_server.environments import EnvironmentBrokenError, Transition
from services.environment_server.sandbox_environment import STEPS_PARTS, Boxes, execute
from services.sandbox.backends import ROOT, Layout, is_below
from services.sandbox.box import Box, Files, Outcome, Result, require_box
from services.sandbox.kernel import Limits
from services.sandbox.zygote import MOST_FILES

Rewards = dict[str, float]
"""The rewards of a verdict by name; ``reward`` is the one that counts."""

VERDICTS = "/logs/verifier"
"""The directory of the reward files in a box of tests."""
REWARD_FILES = ("reward.json", "reward.txt")
_MOST_NAMES = 32
_PIPE_BYTES = 2**16
_HOOKS = (
    *("conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc", "__pycache__", "*.dist-info"),
    *("*.egg-info", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "*.so", "*.so.*"),
    *(".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".profile", ".inputrc", ".zshenv", ".zshrc"),
)
"""Names of files and directories that a Python, pytest, a shell or a loader reads by itself."""
_LAST_ON_PATH = """
import os, sys
sys.path += [os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0]))]
"""
"""The sitecustomize.py of the tests: no file beside them, or of the answer, comes before a module of Python."""
SAVED_BYTES = 16 * 2**20
"""Bytes of the files that travel from the first box to the second."""
MOST = f"{MOST_FILES:,} files of {SAVED_BYTES >> 20} MiB in all"
VERIFIER_HOME, SOLUTION = "/home/verifier", "/solution"
_OURS = re.compile(r"PATH|HOME|ENV|BASH_ENV|SHELL|IFS|PYTHON.*|LD_.*|GIT_.*|PYTEST_.*")
"""Variables of the tests that the task does not set."""
_GIT = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
"""The directories of a box are not its user's, which git would refuse."""
_VERIFIER = _GIT | {
    "HOME": VERIFIER_HOME,
    "GIT_CONFIG_NOSYSTEM": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONSAFEPATH": "1",
    "PYTHONPATH": "/python",
}
_TESTS = f"exec /tests/test.sh > {VERDICTS}/test-stdout.txt 2>&1"
_WITH_SERVER = f"""
sh -c "$1" > {VERDICTS}/server.txt 2>&1 &
timeout "$3" sh -c 'until sh -c "$0" > /dev/null 2>&1; do sleep 0.1; done' "$2"
{_TESTS}
"""
"""Starts the server $1 and waits for the health check $2, $3 seconds at most."""


class NoRewardError(EnvironmentBrokenError):
    """An attempt that cannot be graded, which is not the same as one that earns 0."""


class Trial:
    """An attempt at a task: the box of its programs, and a verdict for each of its steps.

    An async context manager, which ends the box.
    """

    def __init__(
        self, tasks: Boxes, task: Task, *, scratch: str = "", mounts: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Describe an attempt; its box starts with the first program.

        Args:
            tasks: make its boxes.
            task: the task.
            scratch: a further directory of the first box, whose files the tests do not get.
            mounts: what this box has of this machine, as ``Layout.mounts``.

        Raises:
            EnvironmentBrokenError: the box cannot begin with the files of its image.
        """
        self.task, self._tasks = task, tasks
        self._layout = Layout(
            (*task.places, *filter(None, [scratch])), mounts, has_processes=bool(scratch and not tasks.no_processes)
        )
        root = tasks.root_of(task.image)
        self.original = _of_image(task, root) if root is not None else Files()
        if root is None or not task.is_built:
            self.original = _over(self.original, files_of(task.copies))
        """The files that its box begins with, by their paths in it."""
        self._box: Box | None = None
        self.verdicts: list[Rewards] = []
        """One a step that was graded."""
        self.output = ""
        """The end of what the last tests printed."""
        self.not_taken = ""
        """A sentence on the files of a step that could not be taken to its tests; empty if all could."""
        self._add_workdir()

    async def __aenter__(self) -> Trial:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the box, and all that runs in it."""
        box, self._box = self._box, None
        if box is not None:
            await box.close()

    @property
    def step(self) -> Step:
        """The step under way."""
        return self.task.steps[len(self.verdicts)]

    @property
    def limits(self) -> Limits:
        """The limits of a program in this box."""
        ours, task = self._tasks.limits, self.task
        memory, disk = task.memory_mb or ours.memory_mb, task.disk_mb or ours.disk_mb
        # Programs of Node.js or Java reserve much more than they use, and a container's limit is on what they use.
        return ours._replace(memory_mb=min(memory, ours.memory_mb), disk_mb=min(disk, ours.disk_mb), is_resident=True)

    @property
    def own_environment(self) -> dict[str, str]:
        """The variables of the agent's box; its PATH has this machine's programs, and not those of the image."""
        return {"HOME": HOME} | _GIT | {name: text for name, text in self.task.environment.items() if name != "PATH"}

    async def run(self, tool: str, program: str, cpu_seconds: float | None = None) -> Result:
        """Run a program of the agent in its box, which begins with the first one, and the task's setup.sh before it.

        Raises:
            DependencyLostError: the box was lost.
        """
        limits = self.limits
        if cpu_seconds is not None:
            limits = limits._replace(cpu_seconds=min(limits.cpu_seconds, cpu_seconds))
        return require_box(await execute(await self._opened(), tool, program, limits, self.own_environment))

    async def exec(
        self, words: Sequence[str], files: Files, limits: Limits, variables: Mapping[str, str], stdin: bytes = b""
    ) -> Result:
        """Run a program that is not the model's in this box, with further files.

        Raises:
            DependencyLostError: the box was lost.
        """
        box = await self._opened()
        require_box(await box.load(files))
        environment = {**self.own_environment, **variables}
        return require_box(await box.exec(words, stdin=stdin, limits=limits, environment=environment))

    async def solve(self) -> Result:
        """Run the solution of the step as an agent would, with the time of its tests.

        Raises:
            NoRewardError: the step has no solution.
        """
        step = self.step
        if not (step.solution / "solve.sh").is_file():
            raise NoRewardError("it has no solution/solve.sh")
        if self.verdicts:
            await self.run("bash", f"rm -rf {SOLUTION}/*")
        files = _below(step.solution, SOLUTION)
        files.executable.add(f"{SOLUTION}/solve.sh")  # as Harbor has it
        variables = {"DEBIAN_FRONTEND": "noninteractive"} | self.task.solution_environment
        limits = self.limits._replace(cpu_seconds=self.limits.seconds)
        return await self.exec([f"{SOLUTION}/solve.sh"], files, limits, variables)

    async def grade(self) -> Rewards:
        """Return the rewards of the step by its tests, in a second box with the files that the first has now.

        Raises:
            NoRewardError: the tests took too long, were killed, or wrote no reward that can be read.
            DependencyLostError: a box was lost.
        """
        left = await self.left()
        rewards = {"reward": 0.0}
        if left is not None:
            rewards, _ = await self.judge(left)
        self.verdicts.append(rewards)
        return rewards

    async def go_on(self) -> bool:
        """Begin the next step, unless there is none or the last one earned too little; return whether it began."""
        least = self.task.steps[len(self.verdicts) - 1].min_reward
        earned = self.verdicts[-1]
        is_enough = all(earned.get(name, -math.inf) >= value for name, value in least.items())
        if len(self.verdicts) == len(self.task.steps) or not is_enough:
            return False
        added = self._add_workdir()
        if self._box is not None:
            require_box(await self._box.load(added))
            await self._set_up()
        return True

    @property
    def rewards(self) -> Rewards:
        """The rewards of all steps that have a verdict: those of the last one, or the mean of each name."""
        if self.task.reward_strategy == "final":
            return self.verdicts[-1]
        names = dict.fromkeys(name for verdict in self.verdicts for name in verdict)
        return {name: fmean(verdict.get(name, 0.0) for verdict in self.verdicts) for name in names}

    def transition(self, messages: Sequence[dict[str, str]], *, is_over: bool = False) -> Transition:
        """Return the end of an episode, with these rewards; its last message says if files were not taken to tests."""
        figures = self.rewards | {"files_over_limit": float(bool(self.not_taken))}
        last = [{"role": "user", "content": self.not_taken}] if self.not_taken else []
        return Transition([*messages, *last], figures.pop("reward"), not is_over, is_over, figures)

    def _add_workdir(self) -> Files:
        """Add the step's own files to those of the task, and return them."""
        added = _below(self.step.workdir, self.task.workdir)
        self.original = _over(self.original, added)
        return added

    async def _opened(self) -> Box:
        if self._box is None:
            box = self._tasks.box(self.limits, self._layout, self.task.image)
            self._box = await self._tasks.started(box, self.original)
            await self._set_up()
        return self._box

    async def _set_up(self) -> None:
        """Run what the step has to run before it."""
        if self._box is not None and (self.step.workdir / "setup.sh").is_file():
            await self.run("bash", "./setup.sh", self.limits.seconds)

    async def left(self) -> Files | None:
        """Return the files that the first box has; None where they are more than may travel, which is the answer's."""
        if self._box is None:
            return self.original
        saved = require_box(await self._box.save(SAVED_BYTES, self.task.places))
        if isinstance(saved, Files):
            return saved
        limit = f"at most {MOST} are taken to the tests"
        self.output = self.not_taken = f"The step earns 0: {limit} ({saved.last_line or saved.outcome})."
        return None

    async def judge(self, left: Files, marker: str = "") -> tuple[Rewards, bool]:
        """Return the rewards of what was left, by the step's tests in a new box, and whether ``marker`` was made there.

        Raises:
            NoRewardError, DependencyLostError: as ``grade``.
        """
        step, task = self.step, self.task
        seconds = min(step.verifier_seconds, self.limits.seconds)
        limits = self.limits._replace(cpu_seconds=seconds, seconds=seconds)
        given = task.environment | step.verifier_environment
        environment = {name: text for name, text in given.items() if not _OURS.fullmatch(name)} | _VERIFIER
        words = ["/bin/sh", "-c", _WITH_SERVER if task.server else _TESTS]
        with verdict_files(step.tests) as (mounts, pipes, read):
            places = (*task.places, VERDICTS, VERIFIER_HOME)
            box = self._tasks.box(self.limits, Layout(places, mounts, pipes), task.image)
            try:
                await self._tasks.started(box, merged(self.original, left))
                environment["AS_ANSWER"] = box.as_answer(["/python"], task.places)
                server = ["sh", task.server, task.health_command or "sleep 1", f"{seconds / STEPS_PARTS:g}"]
                result = require_box(
                    await box.exec([*words, *(server if task.server else [])], limits=limits, environment=environment)
                )
                tail = require_box(await box.exec(["tail", "-c", "2000", f"{VERDICTS}/test-stdout.txt"]))
                made = require_box(await box.exec(["test", "-e", marker]))
                self.output = (tail.stdout + result.stderr).decode("utf-8", "replace").strip()
            finally:
                await box.close()
            # Nothing that could write is left.
            texts = read()
        if result.outcome is Outcome.TIMEOUT:
            raise NoRewardError(f"the tests took more than {seconds:g} s")
        if result.outcome not in (Outcome.OK, Outcome.FAILED):
            raise NoRewardError(f"the tests ended by {result.outcome}")
        if result.exit_code is None or not 0 <= result.exit_code < 128:
            raise NoRewardError(f"the tests, or what they ran last, were killed ({result.exit_code})")
        return read_rewards(texts), bool(marker) and made.outcome is Outcome.OK


def files_of(sources: Mapping[str, Path]) -> Files:
    """Return files of this machine as those of a box, by their paths in it."""
    executable = [name for name, path in sources.items() if os.access(path, os.X_OK)]
    return Files({name: path.read_bytes() for name, path in sources.items()}, executable)


def _of_image(task: Task, root: Path) -> Files:
    """Return the files that a task's image, whose files are below ``root``, has in the task's own places.

    Raises:
        EnvironmentBrokenError: they are more than may travel, cannot be read, or are this machine's.
    """
    files: dict[str, Path] = {}
    size = 0
    for place in task.own_places:
        below = root / place[1:]
        if not is_below(root, below):
            raise EnvironmentBrokenError(
                f"{task.image}: {place} is a link out of {root}; put the directory itself there"
            )
        for other in (ROOT, task.path.resolve()):
            if other.is_relative_to(below) or below.is_relative_to(other):
                raise EnvironmentBrokenError(f"{task.image}: {other} is in {place}; give programs another directory")
        for path in below.rglob("*"):
            if path.is_file() and not path.is_symlink():
                files[f"/{path.relative_to(root)}"] = path
                size += path.stat().st_size
            if size > SAVED_BYTES or len(files) > MOST_FILES:
                raise EnvironmentBrokenError(f"{task.image}: {place} has more than a box may begin with, {MOST}")
    try:
        return files_of(files)
    except OSError as error:
        raise EnvironmentBrokenError(f"{task.image}: {error}") from error


def _over(below: Files, files: Files) -> Files:
    """Return files, and others of ``below`` that they do not replace."""
    return Files(below | files, (below.executable - files.keys()) | files.executable)


def _below(folder: Path, place: str) -> Files:
    """Return the files below a directory of this machine, none if it does not exist, as those below ``place``."""
    return files_of({f"{place}/{path.relative_to(folder)}": path for path in folder.rglob("*") if path.is_file()})


# --- verdicts ---------------------------------------------------------------------------------------------------------


def is_hook(path: str, content: bytes) -> bool:
    """Return whether a file of an answer could run, or change settings, before the tests ask for it."""
    parts = PurePosixPath(path).parts
    if any(fnmatch(part, pattern) for part in parts for pattern in _HOOKS):
        return True
    if ".git" in parts:
        return "hooks" in parts or parts[-1] in (".git", "config", "config.worktree")
    if parts[-1] == "setup.cfg":
        return b"pytest" in content
    if parts[-1] != "pyproject.toml":
        return False
    try:
        return "pytest" in tomllib.loads(content.decode()).get("tool", {})
    except (ValueError, AttributeError):
        return True


def merged(original: Files, left: Files) -> Files:
    """Return the files of the second box: those that the first one had left, with the task's own hooks."""
    kept = {path: content for path, content in left.items() if not is_hook(path, content)}
    hooks = {path: content for path, content in original.items() if is_hook(path, content)}
    programs = (left.executable & kept.keys()) | (original.executable & hooks.keys())
    return Files(kept | hooks, programs)


def read_rewards(texts: Mapping[str, bytes]) -> Rewards:
    """Return the rewards that the tests wrote, by reward.json, or else by reward.txt.

    Args:
        texts: all that was written to each of REWARD_FILES.

    Raises:
        NoRewardError: there is none, or it is not one flat object of finite numbers, or one number, from 0 to 1; or the
            two files differ.
    """
    found_rewards = []
    for name in REWARD_FILES:
        if text := texts.get(name, b"").strip():
            try:
                if len(text) >= _PIPE_BYTES - 1:
                    raise ValueError(f"it has more than {_PIPE_BYTES} bytes")
                found_rewards.append(_rewards_of(name, text.decode("utf-8")))
            except (ValueError, OverflowError, RecursionError) as error:
                raise NoRewardError(f"{name} is broken: {first_line(error)}") from error
    if not found_rewards:
        raise NoRewardError("the tests wrote no reward file")
    if found_rewards[0]["reward"] != found_rewards[-1]["reward"]:
        raise NoRewardError("reward.json and reward.txt differ")
    return found_rewards[0]


def _of_json(text: str) -> Rewards:
    pairs = json.loads(text, object_pairs_hook=tuple)
    if not isinstance(pairs, tuple) or not pairs or len(dict(pairs)) != len(pairs) or len(pairs) > _MOST_NAMES:
        raise ValueError(f"it is no object of 1 to {_MOST_NAMES} different names")
    if not all(type(value) in (int, float) for _, value in pairs):
        raise ValueError("a value is not a number")
    rewards = {str(name)[:60]: float(value) for name, value in pairs}
    return rewards if "reward" in rewards else {"reward": fmean(rewards.values())} | rewards


def _rewards_of(name: str, text: str) -> Rewards:
    rewards = _of_json(text) if name == "reward.json" else {"reward": float(text)}
    if not all(map(math.isfinite, rewards.values())) or not 0 <= rewards["reward"] <= 1:
        raise ValueError("a reward is not finite, or `reward` is not from 0 to 1")
    return rewards


@contextlib.contextmanager
def verdict_files(
    folders: Sequence[Path],
) -> Iterator[tuple[dict[str, str], dict[str, str], Callable[[], dict[str, bytes]]]]:
    """Lay tests over each other, and make the pipes of the reward files.

    Yields:
        the directories of the tests and of their Python, and the pipes, by their paths in a box; and a function that
        returns what was written.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-tests-") as place, contextlib.ExitStack() as stack:
        tests = Path(place, "tests")
        for folder in folders:
            shutil.copytree(folder, tests, dirs_exist_ok=True)
        python = Path(place, "python")
        python.mkdir()
        (python / "sitecustomize.py").write_text(_LAST_ON_PATH, "utf-8")
        for path in Path(place).rglob("*"):
            # The box's user is another one.
            path.chmod(0o755)
        pipes, ends = {}, {}
        for name in REWARD_FILES:
            pipe = Path(place, name)
            os.mkfifo(pipe)
            ends[name] = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, ends[name])
            # Who could read it could take a verdict out of it.
            pipe.chmod(0o222)
            pipes[f"{VERDICTS}/{name}"] = str(pipe)

        def read() -> dict[str, bytes]:
            texts = {}
            for name, end in ends.items():
                with contextlib.suppress(BlockingIOError):
                    texts[name] = os.read(end, _PIPE_BYTES)
            return texts

        yield {"/tests": str(tests), "/python": str(python)}, pipes, read
