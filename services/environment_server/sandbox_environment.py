"""ENVIRONMENT=sandbox: tasks of DATASET that a model solves by programs, and boxes for the tools of agents.

The programs of an episode run in a box of its own, which keeps their files. The last answer is graded in a second, new
box, which gets the first one's files and nothing that still ran there. Expected values enter neither box.
"""

from __future__ import annotations

import asyncio
import json
import sys
from abc import abstractmethod
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import WeakSet

from services.core.errors import ConfigurationError, DependencyLostError, first_line
from services.core.tasks import in_background
from services.data_server import dataset_rows
from services.data_server.dataset_rows import Rows
from services.data_server.settings import DataSettings
from services.data_server.task_sets import datasets_of
from services.environment_server.environments import Conversation, EnvironmentBrokenError, Tasks, Transition, text_of
from services.environment_server.settings import EnvironmentSettings
from services.protocol.chat import CalledFunction
from services.protocol.evaluation import Action, State
from services.reward_server.code import Tests, count, fenced_blocks, tests_of
from services.reward_server.settings import CodeScore, RewardSettings
from services.sandbox.backends import BackendName, Interpreter, Layout
from services.sandbox.box import Box, Outcome, Result, SandboxError, require_box
from services.sandbox.kernel import Limits
from services.sandbox.probe import choose

RULES = (
    "Solve the task in the current directory. To run a program, end your message with a block of ```python or ```bash; "
    "its output is the next message, and its files are kept. A message without such a block ends the task."
)
SESSION_SECONDS = 60.0
"""Processor time of all programs of an episode, or of an agent's session; CODE_CPU_SECONDS bounds each of them."""
SOLUTION = "solution.py"
"""The file that the tests are about, unless the row's column ``file`` names another one."""
SAVED_BYTES = 8 * 2**20
SHOWN_CHARACTERS = 4000
"""Longer outputs are cut in the middle."""
TIME_IS_OVER = "\n[the processor time of this session is over]"
STEPS_PARTS = 3
"""A step may run a program, start a box and grade, so each may take this share of ENVIRONMENT_STEP_SECONDS."""
BOX = "box"
"""The split without a task: an empty box, for the tools of an agent."""
_PROGRAMS = {"python": "code", "bash": "command"}
"""The argument that has the program, by the name of the tool."""
_LANGUAGES = {"python": "python", "py": "python", "bash": "bash", "sh": "bash"}
_READ_PROGRAM = {"python": "import sys; exec(sys.stdin.buffer.read())", "bash": 'eval "$(cat)"'}
"""Arguments of ``-c`` that run the program from standard input, because Linux refuses arguments of 128 kB."""
_ARGUMENT_BYTES = 2**17

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """A task: its question, the files that it begins with, and the tests of one of its files."""

    question: str
    files: Mapping[str, bytes]
    tests: Tests
    file: str


def program_of(text: str) -> tuple[str, str] | None:
    """Return the tool and the program of an answer: of its ``<tool_call>``, or else of its last block.

    Returns None without either, and raises ValueError for a call that cannot be read.
    """
    call, closed, _ = text.partition("<tool_call>")[2].rpartition("</tool_call>")
    if closed:
        called = CalledFunction.model_validate_json(call.strip())
        try:
            arguments = json.loads(called.arguments) if isinstance(called.arguments, str) else called.arguments
            return called.name, "".join(arguments[_PROGRAMS[called.name]])
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            takes = ", ".join(f"{name} with a text as its one argument {one!r}" for name, one in _PROGRAMS.items())
            raise ValueError(f"the call cannot be read; the tools are {takes}") from error
    blocks = [(_LANGUAGES[name], program) for name, program in fenced_blocks(text) if name in _LANGUAGES]
    return blocks[-1] if blocks else None


def shown(result: Result) -> str:
    """Return what a program printed, as the model reads it."""
    text = (result.stdout + result.stderr).decode("utf-8", "replace")
    if (more := len(text) - SHOWN_CHARACTERS) > 0:
        half = SHOWN_CHARACTERS // 2
        text = f"{text[:half]}\n[{more} more characters]\n{text[-half:]}"
    if result.outcome is Outcome.OK:
        return text or "[no output]"
    end = f"exit code {result.exit_code}" if result.outcome is Outcome.FAILED else f"ended: {result.outcome}"
    return f"{text}\n[{end}]".lstrip()


class Boxes(Tasks):
    """Tasks whose programs run in boxes, which live on the event loop on which it was made."""

    def __init__(self, settings: EnvironmentSettings, rewards: RewardSettings, backend: BackendName) -> None:
        self.settings, self.rewards = settings, rewards
        self.deterministic = settings.sandbox_repeatable
        seconds = settings.environment_step_seconds / STEPS_PARTS
        self.limits = Limits(
            rewards.code_cpu_seconds, seconds, rewards.code_memory_mb, disk_mb=settings.sandbox_disk_mb
        )
        self.places = asyncio.Semaphore(rewards.reward_workers)
        """One for each program that runs."""
        self.trees: dict[str, Interpreter] = {}
        """By the name of the image that a tree stands for."""
        self.no_processes = ""
        """The reason why the boxes of programs as agents have no /proc; empty if they have it."""
        self._boxes: WeakSet[Box] = WeakSet()
        self._backend, self._loop = backend, asyncio.get_running_loop()

    def interpreter_of(self, image: str) -> Interpreter:
        """Return the Python of a box of an image, which has the programs of its tree or of this machine."""
        return self.trees.get(image, self.rewards.interpreter)

    def root_of(self, image: str) -> Path | None:
        """Return the directory with the files of an image: its tree, or this container's root; None without either."""
        tree = self.interpreter_of(image).tree
        return Path(tree) if tree else Path("/") if self.settings.sandbox_image else None

    def box(self, limits: Limits | None = None, layout: Layout | None = None, image: str = "") -> Box:
        """Return a new box with a directory, or with the paths of ``layout`` and the programs of an image."""
        box = Box(self._backend, self.interpreter_of(image), limits or self.limits, writes=True, layout=layout)
        self._boxes.add(box)
        return box

    async def started(self, box: Box, files: Mapping[str, bytes]) -> Box:
        """Start a box and load files into it.

        Raises:
            DependencyLostError: it does not start.
            EnvironmentBrokenError: the files cannot be written.
        """
        try:
            await box.start()
        except SandboxError as error:
            raise DependencyLostError(f"a box did not start: {error}") from error
        loaded = require_box(await box.load(files))
        if loaded.outcome is not Outcome.OK:
            await box.close()
            raise EnvironmentBrokenError(f"the files of the task cannot be written: {loaded.last_line}")
        return box

    async def end(self) -> None:
        """End the boxes, also those in which a program runs."""
        await asyncio.gather(*(box.close() for box in self._boxes))

    async def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine, which runs on the boxes' event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class Sandboxes(Boxes):
    """The rows of DATASET as tasks, and the task ``box``, which is an empty box."""

    def __init__(
        self, rows: Mapping[str, Rows], settings: EnvironmentSettings, rewards: RewardSettings, backend: BackendName
    ) -> None:
        super().__init__(settings, rewards, backend)
        self.splits = {name: len(split) for name, split in rows.items()} | {BOX: 1}
        digests = " ".join(f"{split.digest()} {split.texts_digest()}" for split in rows.values())
        turns, session = settings.text_turns, SESSION_SECONDS
        self.version = f"1, {turns} turns of {self.limits}, {session:g} s, {rewards.code_score}, rows {digests}"
        self._rows = rows

    def make(self, split: str, index: int) -> Sandboxed:
        """See Tasks."""
        return Sandboxed(self, None if split == BOX else lambda: self._task(split, index))

    def _task(self, split: str, index: int) -> Task:
        """Return the task of a row.

        Raises:
            ConfigurationError: its tests or its files cannot be read.
        """
        [row], text = self._rows[split].take([index]), self._rows[split].text(index)
        columns = json.loads(text or "{}")
        try:
            tests = tests_of(text, row.ground_truth)
            files = columns.get("files") or {}
            files = json.loads(files) if isinstance(files, str) else files
            content = {str(path): str(text).encode() for path, text in files.items() if text is not None}
        except (ValueError, AttributeError) as error:
            raise ConfigurationError(f"row {row.number} of DATASET: {error}") from error
        return Task(row.question, content, tests, str(columns.get("file") or SOLUTION))


class BoxEpisode(Conversation):
    """An episode whose answers are programs for a box, or end it."""

    def __init__(self, tasks: Boxes) -> None:
        self._tasks = tasks
        self._left, self._seconds = tasks.settings.text_turns, SESSION_SECONDS
        self._messages: list[dict[str, str]] = []

    def _ask(self, question: str) -> State:
        self._messages = [{"role": "system", "content": RULES}, {"role": "user", "content": question}]
        return list(self._messages)

    async def step(self, action: Action) -> Transition:
        """Run the program, or grade the files."""
        return await self._tasks.on_loop(self._step(text_of(action)))

    async def close(self) -> None:  # type: ignore[override]
        """End the box."""
        await self._tasks.on_loop(self._close())

    async def _step(self, text: str) -> Transition:
        output = await self._output_of(text)
        self._left -= 1
        self._messages.append({"role": "assistant", "content": text})
        if output is not None:
            self._messages.append({"role": "user", "content": output})
        return await self._after(is_done=output is None, is_over=self._left == 0 or self._seconds <= 0)

    @abstractmethod
    async def _after(self, *, is_done: bool, is_over: bool) -> Transition:
        """Return what follows an answer, which had no program if it ``is_done``; ``is_over`` ends the episode."""

    @abstractmethod
    async def _close(self) -> None: ...

    @abstractmethod
    async def _execute(self, tool: str, program: str) -> Result:
        """Run a program in the box, for the processor time that is left."""

    async def _output_of(self, text: str) -> str | None:
        """Return what the program of an answer prints; None for an answer without one."""
        try:
            if (program := program_of(text)) is None:
                return None
            async with self._tasks.places:
                result = await self._execute(*program)
        except ValueError as error:
            return f"[{first_line(error)}]"
        self._seconds -= result.cpu_seconds
        return shown(result) + (TIME_IS_OVER if self._seconds <= 0 else "")


class Sandboxed(BoxEpisode):
    """An episode with a box, which starts with the first program."""

    def __init__(self, tasks: Boxes, read: Any) -> None:
        super().__init__(tasks)
        self._read = read
        if read is None:  # The agent's own limits apply.
            self._left = sys.maxsize
        self._task: Task | None = None
        self._box: Box | None = None

    async def reset(self, seed: int) -> State:
        """Show the task."""
        if self._read is None:
            return []
        self._task = self._read()
        return self._ask(self._task.question)

    async def _close(self) -> None:
        if self._box is not None:
            await self._box.close()

    async def _after(self, *, is_done: bool, is_over: bool) -> Transition:
        reward = 0.0
        if self._task is None:
            # Nobody reads more: the conversation is the agent's.
            self._messages = self._messages[-1:]
        elif is_done or is_over:
            reward = await self._grade(self._task)
        return Transition(list(self._messages), reward, terminated=is_done, truncated=is_over)

    async def _execute(self, tool: str, program: str) -> Result:
        limits = self._tasks.limits
        if self._box is None:
            self._box = await self._tasks.started(self._tasks.box(), self._task.files if self._task else {})
        limits = limits._replace(cpu_seconds=min(limits.cpu_seconds, self._seconds))
        return require_box(await execute(self._box, tool, program, limits))

    async def _grade(self, task: Task) -> float:
        """Return the reward of the box's files, by the tests in a second box."""
        tasks, files = self._tasks, task.files
        if self._box is not None:
            saved = require_box(await self._box.save(SAVED_BYTES))
            await self._box.close()
            files = saved if isinstance(saved, dict) else {}
            if not isinstance(saved, dict):
                limit = f"at most {SAVED_BYTES >> 20} MiB of files are taken to the tests"
                self._messages.append({"role": "user", "content": f"This earns 0: {limit} ({saved.last_line})."})
        if task.file not in files:
            return 0.0
        left = tasks.limits.seconds

        async def run(deed: str, **what: Any) -> Result:
            nonlocal left
            result = await box.run(deed, limits=tasks.limits._replace(seconds=max(left, 0.1)), **what)
            left -= result.seconds
            return result

        async with tasks.places:
            box = await tasks.started(tasks.box(), files)
            try:
                code = files[task.file].decode("utf-8", "replace")
                stops = tasks.rewards.code_score is CodeScore.ALL
                module = ".".join(PurePosixPath(task.file).with_suffix("").parts)
                passed, _ = await count(task.tests, code, run, stops=stops, module=module)
            finally:
                await box.close()
        share = passed / len(task.tests)
        return float(share == 1) if stops else share


async def execute(
    box: Box, tool: str, program: str, limits: Limits, environment: Mapping[str, str] = MappingProxyType({})
) -> Result:
    """Run a program by the tool ``python`` or ``bash`` in a box."""
    stdin = program.encode(errors="replace")
    program, stdin = (program, b"") if len(stdin) < _ARGUMENT_BYTES else (_READ_PROGRAM[tool], stdin)
    words = [box.python if tool == "python" else tool, "-c", program]
    return await box.exec(words, stdin=stdin, limits=limits, environment=environment)


@asynccontextmanager
async def open_sandboxes(settings: EnvironmentSettings) -> AsyncIterator[Boxes]:
    """Load the tasks, choose the sandbox, and see that the tools run in it.

    Raises:
        ConfigurationError: DATASET cannot be loaded, no sandbox holds on this machine, or a tool does not run in one.
    """
    # Which imports this module.
    from services.environment_server import harbor

    data = DataSettings.load()
    rewards = RewardSettings.load().without_sources(reward_fn="code", accuracy_fn=None)
    tasks: Boxes
    if of_harbor := datasets_of(data):
        tasks = await harbor.load(of_harbor, settings, rewards)
    else:
        data = data.model_copy(update={"reward_fn": "code"})
        dataset = await in_background(lambda: dataset_rows.load(data, seen=("files", "file")))
        backend = await choose(rewards.sandbox, rewards.interpreter, writes=True)
        tasks = Sandboxes({"test": dataset.test, "train": dataset.train}, settings, rewards, backend)
    box = await tasks.box().start()
    try:
        for program, advice in ((box.python, "set SANDBOX_PYTHON"), ("bash", "install bash")):
            result = await box.exec([program, "-c", "exit" if program == "bash" else "pass"])
            if result.outcome is not Outcome.OK:
                raise ConfigurationError(f"{program} does not run in a box: {result.last_line}; {advice}")
    finally:
        await box.close()
    try:
        yield tasks
    finally:
        await tasks.end()
