"""Programs in any language as agents: a shell command that answers an example by talking to a model over HTTP.

The same command is evaluated (``scripts.evaluate --agent-command``) and trained (``ROLLOUT=program``). It reads the
example as JSON from standard input and finds its endpoint in OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL
and ANTHROPIC_API_KEY. The last line of its output may be ``{"reward": 1.0}``, with a number or null and optionally a
``reason``; otherwise REWARD_FN scores the whole output as the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from services.agents import EPISODES_AT_ONCE, AgentFailedError, Example
from services.core import memory, processors
from services.protocol.groups import RewardResult, RewardStatus

WITHHELD = ("JOBGROUP_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "ANTHROPIC_AUTH_TOKEN")
"""Variables that a program does not inherit: our secrets, and a key that would win over the session's."""

OUTPUT_BYTES = 2**18
"""The end of each of a program's two outputs that is kept."""
SAID_CHARACTERS = 1000
"""The end of the output that a failure's reason has."""

PROGRAMS_A_CORE = 8
"""Programs mostly wait for the model."""
BYTES_A_PROGRAM = 2**30

POLL_SECONDS = 0.05
TERM_POLLS = 40
"""The time between SIGTERM and SIGKILL, in POLL_SECONDS."""
ORPHANS_SECONDS = 1.0
"""The wait for the end of an output that a process outside the program's process group holds open."""

_GUARDED = """
(trap '' TERM; read -r _; kill -KILL 0) </dev/fd/"$2" >/dev/null 2>&1 &
trap : TERM
/bin/sh -c "$1"
status=$?
kill -KILL $!
wait $! 2>/dev/null
exit $status
"""
"""Runs the command $1. Its guard ends the process group as soon as no process has the other end of the pipe $2 open,
so that no program outlives a killed collector. PR_SET_PDEATHSIG, which macOS lacks, would reach one process only."""


class ProgramFailedError(Exception):
    """A program ended with an error; the message has the end of its output."""


@dataclass(frozen=True)
class Program:
    """A shell command as an agent."""

    command: str

    async def __call__(self, example: Example, *, base_url: str, api_key: str, http_client: object) -> float | None:
        """Let the program answer ``example``, and return its reward; ``example.result`` has its reason.

        It is a process group of its own. Cancelling this call ends it by SIGTERM and then SIGKILL, as does the end of
        the program itself for processes that it left behind.

        Raises:
            ProgramFailedError: its exit code is not 0.
            AgentFailedError: it gives a reward that is neither a finite number nor null.
        """
        variables = {name: value for name, value in os.environ.items() if name not in WITHHELD}
        variables |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        # Anthropic's clients append /v1 themselves.
        variables |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api_key}
        status, answer = await self._run(example, variables)
        if status != 0:
            code = f"signal {-status}" if status < 0 else f"exit code {status}"
            raise ProgramFailedError(f"the program ended with {code}{example.output}")
        example.result = reward_in(answer)
        return await example.score(answer.strip()) if example.result is None else example.result.reward

    async def _run(self, example: Example, variables: dict[str, str]) -> tuple[int, str]:
        """Run the program to its end; return its exit code and the end of its standard output."""
        async with contextlib.AsyncExitStack() as stack:
            lifeline = stack.enter_context(_lifeline())
            (answer, out), (errors, err) = [await _open_output(stack) for _ in range(2)]
            with tempfile.TemporaryFile() as task, out, err:
                task.write(example.model_dump_json(exclude={"result", "output", "prompt_ids"}).encode())
                task.seek(0)
                process = await asyncio.create_subprocess_exec(
                    *("/bin/sh", "-c", _GUARDED, "agent", self.command, str(lifeline)),
                    stdin=task,
                    stdout=out,
                    stderr=err,
                    env=variables,
                    pass_fds=(lifeline,),
                    start_new_session=True,
                )
            try:
                await process.wait()
            finally:
                await _end_group(process)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ORPHANS_SECONDS):
                        await asyncio.gather(answer.ended.wait(), errors.ended.wait())
                example.output = _ending(f"{answer.text.rstrip()}\n{errors.text}")
        assert process.returncode is not None
        return process.returncode, answer.text


def programs_at_once() -> int:
    """Return the number of programs that this node should run at once, by its cores and its memory."""
    return max(1, min(EPISODES_AT_ONCE, PROGRAMS_A_CORE * processors.cores(), memory.host_memory() // BYTES_A_PROGRAM))


def reward_in(output: str) -> RewardResult | None:
    """Return the reward that the last line of a program's output gives; None if that line is no such JSON.

    Raises:
        AgentFailedError: the line has a reward that is neither a finite number nor null.
    """
    last = output.rstrip().rpartition("\n")[2]
    try:
        found = json.loads(last, parse_int=float)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or "reward" not in found:
        return None
    reward, reason = found["reward"], found.get("reason")
    told = None if reason is None else str(reason)
    if reward is None:
        return RewardResult(reward=None, status=RewardStatus.ERROR, reason=told or "the program gave no reward")
    if isinstance(reward, bool | float) and math.isfinite(reward):
        return RewardResult(reward=float(reward), reason=told)
    raise AgentFailedError(
        f"the program's last line is {last!r}; allowed as reward is a finite number, or null", "reward"
    )


class _Output(asyncio.Protocol):
    """The last OUTPUT_BYTES that come out of a pipe."""

    def __init__(self) -> None:
        self._kept = b""
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self._kept = (self._kept + data)[-OUTPUT_BYTES:]

    def connection_lost(self, _error: Exception | None) -> None:
        self.ended.set()

    @property
    def text(self) -> str:
        """The bytes as text."""
        return self._kept.decode("utf-8", "replace")


async def _open_output(stack: contextlib.AsyncExitStack) -> tuple[_Output, IO[bytes]]:
    """Open a pipe for a program to write to; its end for reading is closed with ``stack``.

    Pipes of asyncio's own would keep Process.wait until all processes that hold them have ended.
    """
    reading, writing = (os.fdopen(end, mode, 0) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    transport, output = await asyncio.get_running_loop().connect_read_pipe(_Output, reading)
    stack.callback(transport.close)
    return output, writing


def _ending(output: str) -> str:
    """Return the end of an output as the end of a message."""
    said = output.strip()[-SAID_CHARACTERS:]
    return f"; its output ends with {said!r}" if said else ""


@contextlib.contextmanager
def _lifeline() -> Iterator[int]:
    """Yield a file that ends when the context is left, or when this process dies: a pipe that nobody writes to."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End a program's process group: by SIGTERM if the program still runs, then by SIGKILL."""

    def is_left(number: int) -> bool:
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):  # macOS refuses to signal a group of zombies.
            return False
        return True

    try:
        if process.returncode is None and is_left(signal.SIGTERM):
            for _ in range(TERM_POLLS):
                await asyncio.sleep(POLL_SECONDS)
                if not is_left(0):
                    break
    finally:
        is_left(signal.SIGKILL)
