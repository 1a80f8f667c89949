"""Agents' programs that play Harbor tasks, each in the box of its task, which reaches the gateway and nothing else.

A relay forwards the program's calls. Its UNIX socket is mounted into the box, whose own network has no other way out.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import httpx

from services.agents import AgentFailedError, Program, endpoint_variables
from services.clients.agent_episodes import RetryingTransport
from services.core.errors import DependencyLostError
from services.core.tasks import Stopwatch
from services.data_server.harbor import Task
from services.environment_server.environments import (
    ActionRefusedError,
    Conversation,
    EnvironmentBrokenError,
    Transition,
    text_of,
)
from services.environment_server.sandbox_environment import shown
from services.environment_server.trials import Trial
from services.harnesses import HARNESSES, Preset, context_at, program_of
from services.protocol.evaluation import Action, ProgramRequest, State
from services.relay import Relay
from services.sandbox import forward
from services.sandbox.box import Files, Outcome, Result

if TYPE_CHECKING:
    from services.environment_server.harbor import HarborTasks

HOME, SOCKET = "/agent", "/run/gateway.sock"
"""A directory of the program's own, and the relay's socket, by their paths in the box."""
PROCESSES = 512
"""Threads of the program and of what it starts: such programs have one for each core, and more."""
WAIT_SECONDS = 5.0
"""A step is answered after this time, so that its client learns that the program still runs."""
_NAME = re.compile(r"[\w./+-]*[./][\w./+-]*")


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
                        *(request.base_url, request.api_key, client),
                        ends_when_refused=program.ends_when_refused,
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
        files, command, variables = Files(), _with_paths(program.command), endpoint_variables(url, key)
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
            is_resident=True,
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


def _with_paths(command: str) -> str:
    return _NAME.sub(lambda match: str(_own_path(match[0]) or match[0]), command)


def _own_path(word: str) -> Path | None:
    """Return the path of a file or directory below the working directory; None for any other word."""
    path = Path(word).resolve()
    return path if path.exists() and Path.cwd().resolve() in path.parents else None
