"""DATASET=harbor:DIR: tasks in Harbor's format, played in one box and graded in another.

The agent's box has the task's files and neither its tests nor its solution. When it has ended, with all processes in
it, a second box gets the regular files that it left, and the tests. What would be loaded before the tests run does not
travel (``trials.is_hook``): so these see what the answer made, and run nothing of it unless they ask for it. The
reward files are named pipes that the second box can neither remove nor replace. What is written there is read once that
box has ended, and two different rewards are none.

The agent is the model itself, or a program in the box that reaches the gateway and nothing else: a relay forwards its
calls, whose UNIX socket is mounted into the box. The box's own network has no other way out.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from services.agents import AgentFailedError, Program, endpoint_variables
from services.clients.agent_episodes import RetryingTransport
from services.clients.environment import MISDIRECTED
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.core.tasks import Stopwatch, in_background
from services.data_server.harbor import FIRST_NUMBER, Task
from services.data_server.task_sets import read_tasks
from services.environment_server.environments import (
    ActionRefusedError,
    Conversation,
    EnvironmentBrokenError,
    Transition,
    text_of,
)
from services.environment_server.sandbox_environment import BOX, SESSION_SECONDS, BoxEpisode, Boxes, Sandboxed, shown
from services.environment_server.settings import EnvironmentSettings
from services.environment_server.trials import Trial
from services.harnesses import HARNESSES, Preset, context_at, program_of
from services.http.problems import ProblemError
from services.protocol.evaluation import PROGRAM, Action, ProgramRequest, State
from services.relay import Relay
from services.reward_server.settings import RewardSettings
from services.sandbox import forward
from services.sandbox.backends import BackendName, Interpreter, Layout
from services.sandbox.box import Files, Outcome, Result
from services.sandbox.probe import choose

SPLIT = "tasks"
HOME, SOCKET = "/agent", "/run/gateway.sock"
"""A directory of the program's own, and the relay's socket, by their paths in the box."""
PROCESSES = 512
"""Threads of the program and of what it starts: such programs have one for each core, and more."""
WAIT_SECONDS = 5.0
"""A step is answered after this time, so that its client learns that the program still runs."""
_NAME = re.compile(r"[\w./+-]*[./][\w./+-]*")
log = get_logger(__name__)


class HarborTasks(Boxes):
    """The tasks of all datasets ``harbor:DIR``, or those of SANDBOX_IMAGE and of images with a tree.

    An episode's seed is the number of its task, or draws one.
    """

    def __init__(
        self, tasks: Mapping[int, Task], settings: EnvironmentSettings, rewards: RewardSettings, backend: BackendName
    ) -> None:
        super().__init__(settings, rewards, backend)
        image, trees = settings.sandbox_image, settings.sandbox_trees
        played = {n: task for n, task in tasks.items() if image in ("", task.image) or task.image in trees}
        self.tasks = dict(sorted(played.items()))
        self._elsewhere = {number: task.image for number, task in tasks.items() if number not in self.tasks}
        self.splits = dict.fromkeys((SPLIT, "train", "test", PROGRAM), len(self.tasks)) | {BOX: 1}
        # Of all tasks, because the servers of a run are of one version.
        digest = hashlib.blake2b(repr(sorted(tasks)).encode(), digest_size=8).hexdigest()
        self.version = f"1, {settings.text_turns} turns of {self.limits}, {SESSION_SECONDS:g} s, tasks {digest}"

    def places_of(self, image: str) -> list[str]:
        """Return the directories that the tasks of an image may write to."""
        return sorted({place for task in self.tasks.values() if task.image == image for place in task.places})

    def maker(self, split: str | None = None, index: int | None = None) -> Callable[[int], Conversation]:
        """See Tasks. The number of a task is a seed of every split."""
        draw = super().maker(split, index)

        def make(seed: int) -> Conversation:
            if seed in self.tasks:
                return self._episode(split, self.tasks[seed])
            if image := self._elsewhere.get(seed):
                raise ProblemError(MISDIRECTED, f"task {seed} needs the image {image}, and this server has another one")
            if seed >= FIRST_NUMBER:
                raise ProblemError(400, f"task {seed} is not here; give data-server and environment-server one DATASET")
            return draw(seed)

        return draw if split == BOX else make

    def make(self, split: str, index: int) -> Conversation:
        """See Tasks."""
        return Sandboxed(self, None) if split == BOX else self._episode(split, list(self.tasks.values())[index])

    def _episode(self, split: str | None, task: Task) -> Conversation:
        return (ProgramEpisode if split == PROGRAM else HarborEpisode)(self, task)


class HarborEpisode(BoxEpisode):
    """An episode of a task, whose later steps are further turns of the user."""

    def __init__(self, tasks: HarborTasks, task: Task) -> None:
        super().__init__(tasks)
        self._trial = Trial(tasks, task)

    async def reset(self, seed: int) -> State:
        """Show the task."""
        return self._ask(self._begun())

    def _begun(self) -> str:
        """Begin the time of the trial's step, and return its instruction."""
        self._seconds = min(self._trial.step.agent_seconds or SESSION_SECONDS, SESSION_SECONDS)
        return self._trial.step.instruction

    async def _close(self) -> None:
        await self._trial.close()

    async def _execute(self, tool: str, program: str) -> Result:
        return await self._trial.run(tool, program, self._seconds)

    async def _after(self, *, is_done: bool, is_over: bool) -> Transition:
        if not (is_done or is_over):
            return Transition(list(self._messages), 0.0)
        async with self._tasks.places:
            await self._trial.grade()
            goes_on = not is_over and await self._trial.go_on()
        if not goes_on:
            return self._trial.transition(self._messages, is_over=is_over)
        self._messages.append({"role": "user", "content": self._begun()})
        return Transition(list(self._messages), 0.0)


class ProgramEpisode(Conversation):
    """An episode of one action, the program, which has ended once the tests of all steps of the task have run."""

    def __init__(self, tasks: HarborTasks, task: Task) -> None:
        self._tasks, self._task = tasks, task
        self._playing: asyncio.Task[Transition] | None = None

    async def reset(self, seed: int) -> State:
        """Show the task."""
        return [{"role": "user", "content": self._task.steps[0].instruction}]

    async def step(self, action: Action) -> Transition:
        """Start the program, and return its reward once it has ended.

        Raises:
            ActionRefusedError: it still runs.
        """
        return await self._tasks.on_loop(self._step(text_of(action)))

    async def close(self) -> None:  # type: ignore[override]
        """End the program, and the box."""
        await self._tasks.on_loop(self._close())

    async def _step(self, text: str) -> Transition:
        if self._playing is None:
            self._playing = asyncio.create_task(self._play(ProgramRequest.model_validate_json(text)))
        await asyncio.wait([self._playing], timeout=min(WAIT_SECONDS, self._tasks.limits.seconds))
        if not self._playing.done():
            raise ActionRefusedError("the program still runs; send the step again")
        return self._playing.result()

    async def _close(self) -> None:
        if self._playing is not None:
            self._playing.cancel()
            await asyncio.gather(self._playing, return_exceptions=True)

    async def _play(self, request: ProgramRequest) -> Transition:
        program = program_of(request.command, request.max_turns, request.max_turn_tokens)
        is_preset = isinstance(program, Preset)
        own = {str(HARNESSES): str(HARNESSES)} if is_preset else self._named(request.command)
        transport, example = RetryingTransport(request.patience, Stopwatch()), request.example
        async with AsyncExitStack() as stack:
            socket = str(Path(stack.enter_context(TemporaryDirectory(prefix="grpo-relay-")), "socket"))
            url = f"http://127.0.0.1:{forward.PORT}"
            relay = await stack.enter_async_context(Relay(socket=socket, url=url))
            client = await stack.enter_async_context(
                httpx.AsyncClient(transport=transport, timeout=2 * request.seconds)
            )
            mounts = {SOCKET: socket, **own}
            trial = await stack.enter_async_context(Trial(self._tasks, self._task, scratch=HOME, mounts=mounts))
            context = await context_at(client, request.base_url, request.api_key) if is_preset else 0
            while True:
                try:
                    result = await relay.serve(
                        partial(self._run, trial, program, request, example, context),
                        ends_when_refused=program.ends_when_refused,
                        base_url=request.base_url,
                        api_key=request.api_key,
                        http_client=client,
                    )
                except AgentFailedError as error:
                    if error.reason == "server":
                        raise DependencyLostError(str(error)) from error
                    return Transition([{"role": "user", "content": str(error)}], 0.0, truncated=True)
                if transport.is_lost and result.outcome is not Outcome.OK:
                    raise DependencyLostError(f"the gateway did not answer the program: {shown(result)}")
                if not relay.has_answered:
                    why = self._tasks.no_processes and f"its box has no /proc ({self._tasks.no_processes}); "
                    raise EnvironmentBrokenError(f"the program got no answer of the model: {why}{shown(result)}")
                async with self._tasks.places:
                    await trial.grade()
                    if not await trial.go_on():
                        break
                text = trial.step.instruction
                example = example | {"prompt": text, "messages": [{"role": "user", "content": text}]}
        return trial.transition([{"role": "user", "content": shown(result)}])

    async def _run(
        self,
        trial: Trial,
        program: Program,
        request: ProgramRequest,
        example: dict[str, Any],
        context: int,
        url: str,
        key: str,
    ) -> Result:
        """Run the program, which reaches the model at ``url``, in the box of its task."""
        files, variables = Files(), endpoint_variables(url, key)
        command = _NAME.sub(lambda match: str(_own_path(match[0]) or match[0]), program.command)
        if isinstance(program, Preset):
            words, variables, texts = program.prepare(Path(HOME), example["prompt"], url, key, context)
            files = Files({f"{HOME}/{name}": text.encode() for name, text in texts.items()})
            command = f"exec {shlex.join(words)} </dev/null"
            variables.pop("PATH", None)
        seconds = min(trial.step.agent_seconds or request.seconds, request.seconds)
        limits = trial.limits._replace(
            cpu_seconds=seconds,
            # Its client ends it earlier, by AGENT_SECONDS without the time of the model's calls.
            seconds=3 * request.seconds,
            memory_mb=self._tasks.limits.memory_mb + (program.harness.memory_mb if isinstance(program, Preset) else 0),
            processes=PROCESSES,
        )
        python = self._tasks.interpreter_of(self._task.image).program
        start = [python, "-IS", str(forward.__file__), SOCKET, f"{HOME}/output", "/bin/sh", "-c", command]
        result = await trial.exec(start, files, limits, variables, json.dumps(example).encode())
        if result.outcome is Outcome.MEMORY:
            most = f"{limits.memory_mb} MB of memory; raise CODE_MEMORY_MB, which is {self._tasks.limits.memory_mb}"
            raise EnvironmentBrokenError(f"the program was killed, because it took more than {most}: {shown(result)}")
        return result

    def _named(self, command: str) -> dict[str, str]:
        """Return the files and directories of the working directory that a command names with a dot or a slash.

        Raises:
            EnvironmentBrokenError: one has the tests of a task in it.
        """
        paths = {str(path): path for word in _NAME.findall(command) if (path := _own_path(word)) is not None}
        for path in paths.values():
            if any(task.path.resolve().is_relative_to(path) for task in self._tasks.tasks.values()):
                raise EnvironmentBrokenError(f"AGENT_COMMAND names {path}, in which the tests of a task are")
        return {name: name for name in paths}


def _own_path(word: str) -> Path | None:
    """Return the path of a file or directory below the working directory; None for any other word."""
    path = Path(word).resolve()
    return path if path.exists() and Path.cwd().resolve() in path.parents else None


async def load(datasets: Sequence[str], settings: EnvironmentSettings, rewards: RewardSettings) -> HarborTasks:
    """Read the tasks of datasets, and choose the sandbox.

    Raises:
        ConfigurationError: there is no task that can be done, no sandbox gives a task the paths that it needs, or a
            tree or an image has no Python that can be used.
    """
    tasks: dict[int, Task] = {}
    for dataset in datasets:
        found_tasks, refused = await in_background(lambda dataset=dataset: read_tasks(dataset))  # type: ignore[misc]
        tasks |= found_tasks
        if not found_tasks:
            name, error = next(iter(refused.items()))
            raise ConfigurationError(f"DATASET {dataset!r} has no task that can be done; {name}: {error}")
    no_processes = ""
    layout = Layout(("/app", "/tmp"), has_processes=True)
    try:
        backend = await choose(rewards.sandbox, rewards.interpreter, writes=True, layout=layout)
    except ConfigurationError as error:
        layout, no_processes = replace(layout, has_processes=False), str(error)
        backend = await choose(rewards.sandbox, rewards.interpreter, writes=True, layout=layout)
        log.warning("programs as agents have no /proc in their boxes, which most presets need", error=no_processes)
    made = HarborTasks(tasks, settings, rewards, backend)
    made.no_processes = no_processes
    for image, tree in settings.sandbox_trees.items():
        made.trees[image] = Interpreter.find_in(tree.absolute(), made.places_of(image))
    if image := settings.sandbox_image:
        if not made.tasks:
            raise ConfigurationError(f"SANDBOX_IMAGE is {image!r}, of which no task of DATASET is; leave it out")
        made.trees[image] = rewards.interpreter.in_image(image, made.places_of(image))
    return made
