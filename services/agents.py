"""Agents: functions and programs of the user's that answer an example by talking to a model over several turns.

The same agent is evaluated (``grpo evaluate``) and trained (``ROLLOUT=agent`` or ``program``). A function is an
``async def`` that gets the example and the keyword arguments ``base_url``, ``api_key`` and ``http_client`` of an
endpoint that speaks OpenAI's API, and returns a reward, or None for an answer that cannot be scored.

A program, in any language, is a shell command. It reads the example as JSON from standard input and finds its endpoint
in OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. Its standard output is the answer,
which REWARD_FN scores. A program that has a reward of its own writes ``{"reward": 1.0}``, with a number or null and
optionally a ``reason``, to the file descriptor GRPO_REWARD_FD. The reward is never read from the output, because that
is where the model's text goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, ClassVar, TypedDict, Unpack
from urllib.parse import urlsplit

import httpx
from pydantic import ConfigDict, Field

from services.core import machine
from services.core.endpoints import exempt_from_proxies
from services.core.errors import ConfigurationError
from services.core.extras import install_command
from services.core.imports import load_function
from services.core.logs import get_logger
from services.core.processes import describe_exit, end_group
from services.core.settings import SECRET
from services.core.tasks import Stopwatch
from services.protocol.prompts import Prompt
from services.protocol.rewards import LARGEST_REWARD, RewardResult, RewardStatus

log = get_logger(__name__)

EPISODES_AT_ONCE = 256
"""Further episodes wait. An agent may hold connections, files or processes of its own."""
POLL_SECONDS = 1.0
"""Least time between two looks at how long an agent over its time has waited."""

Agent = Callable[..., Awaitable[float | None]]
Scorer = Callable[[str], Awaitable[RewardResult]]
"""Scores an answer to an example by REWARD_FN."""


class Endpoint(TypedDict):
    """The keyword arguments by which an agent talks to the model."""

    base_url: str
    api_key: str
    http_client: httpx.AsyncClient


class AgentFailedError(Exception):
    """An agent raised an error, took too long, or returned no reward; ``reason`` is one word for metrics."""

    def __init__(self, message: str, reason: str = "exception") -> None:
        super().__init__(message)
        self.reason = reason


class Example(Prompt):
    """A prompt as an agent gets it.

    ``row`` has the columns that AGENT_COLUMNS names, where the prompt's row has them. The others, such as hidden tests,
    are for rewards alone.
    ``prompt`` is the user's turn, with the instruction on how to give the answer. ``messages`` is the whole
    conversation before the answer: the system turn and solved examples, where there are any.
    """

    model_config = ConfigDict(frozen=False, arbitrary_types_allowed=True)

    row: dict[str, Any] = Field(default_factory=dict)  # type: ignore[assignment]
    model: str
    """The model's name in requests."""
    scorer: Scorer = Field(repr=False, exclude=True)
    result: RewardResult | None = None
    """The result of the last call of ``score``, or the result that a program gave."""
    turn_rewards: list[float] = Field(default_factory=list)
    """Rewards of the model's turns, one a call of the model in order, for an agent that has them. The reward that the
    agent returns is that of the whole episode."""
    figures: dict[str, float] = Field(default_factory=dict)
    """Named numbers about the episode, which are reported as means over the step's episodes."""
    output: str = ""
    """The end of a program's output, as the end of a message."""
    waits: Stopwatch = Field(default_factory=Stopwatch, repr=False, exclude=True)
    """Runs while the episode waits for the model, for the verifier or for another seat of its game."""

    @classmethod
    def of(cls, prompt: Prompt, columns: Sequence[str], **others: Any) -> Example:
        """Return a prompt with those of the ``columns`` that its row has, and the ``others``, its further fields."""
        row = json.loads(prompt.row or "{}")
        visible = {name: row[name] for name in columns if name in row}
        return cls(**dict(prompt) | {"row": visible}, **others)

    def for_program(self) -> str:
        """Return the JSON that a program reads."""
        return self.model_dump_json(exclude={"result", "output", "prompt_ids"})

    async def score(self, response: str) -> float | None:
        """Return the reward of ``response`` by REWARD_FN; None if it cannot be scored."""
        with self.waits.running():
            self.result = await self.scorer(response)
        return self.result.reward

    def result_of(self, reward: float | None) -> RewardResult:
        """Return the agent's reward, with the verifier's result if the agent asked for it and returned its reward."""
        if self.result is not None and self.result.reward == reward:
            return self.result
        if reward is None:
            return RewardResult(reward=None, status=RewardStatus.ERROR, reason="the agent returned no reward")
        return RewardResult(reward=reward, extracted=self.result.extracted if self.result else None)


async def play(
    agent: Agent,
    example: Example,
    seconds: float,
    waited: Callable[[], Awaitable[float]] | None = None,
    **endpoint: Unpack[Endpoint],
) -> float | None:
    """Let ``agent`` answer ``example`` and return its reward.

    Its time is that by the clock, less the time that it waited: ``example.waits``, or what ``waited`` returns.

    Raises:
        AgentFailedError: it took more than ``seconds``, or returned neither None nor a number up to
            LARGEST_REWARD.
        Exception: the error that the agent or ``waited`` raised.
    """
    started, left = time.monotonic(), seconds
    playing = asyncio.ensure_future(agent(example, **endpoint))
    try:
        while left > 0 and not (await asyncio.wait([playing], timeout=max(left, POLL_SECONDS)))[0]:
            seconds_waited = await waited() if waited is not None else example.waits.seconds
            left = started + seconds + seconds_waited - time.monotonic()
    finally:
        is_over = not playing.done()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
    if is_over:
        raise AgentFailedError(f"the agent took more than {seconds:g} s{example.output}", "timeout")
    reward = playing.result()
    if reward is None:
        return None
    if isinstance(reward, bool | int | float) and abs(reward) <= LARGEST_REWARD:
        return float(reward)
    allowed = f"a finite number, or None, and at most {LARGEST_REWARD:g} in size"
    raise AgentFailedError(f"the agent returned {reward!r}; allowed is {allowed}", "reward")


def load_agent(variable: str, name: str) -> Agent:
    """Import the agent ``module:function``; the current directory is on the path, too.

    Args:
        variable: the setting or option that names the agent, for messages.
        name: ``module:function``.

    Raises:
        ConfigurationError: the module or its function does not exist, or the function is not an ``async def``.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        agent: Agent = load_function(variable, name)
    except ConfigurationError as error:
        missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        # A module of the agent's name is the user's, and no package has it.
        if missing is None or name.startswith((f"{missing}:", f"{missing}.")):
            raise
        install = install_command("evaluation")
        raise ConfigurationError(f"{error}; if {missing} is a library that agents use, run: {install}") from error
    if not inspect.iscoroutinefunction(agent):
        raise ConfigurationError(f"{variable} {name!r} is not an `async def`; episodes run at once, so make it one")
    return agent


# --- programs ---------------------------------------------------------------------------------------------------------

OUTPUT_BYTES = 2**18
"""The end of each of a program's two outputs that is kept."""
REWARD_BYTES = 2**16
"""The end of the text written to GRPO_REWARD_FD that is kept; its last line is the reward."""
SHOWN_CHARACTERS = 1000
"""Characters of the output's end that a failure's reason shows."""

PROGRAMS_A_CORE = 8
"""Programs mostly wait for the model."""
BYTES_A_PROGRAM = 2**30

TERM_SECONDS = 2.0
"""The time between SIGTERM and SIGKILL."""
ORPHANS_SECONDS = 1.0
"""The wait for the end of an output that a process outside the program's process group holds open."""

_GUARDED = """
(trap '' TERM; read -r _; kill -KILL 0) </dev/fd/"$2" >/dev/null 2>&1 &
trap : TERM
exec 4>/dev/fd/"$3" 3>&2 2>&4 4>&-
/bin/sh -c "$1"
status=$?
kill -KILL $!
wait $! 2>/dev/null
exit $status
"""
"""Runs the command $1. Its guard ends the process group as soon as no process has the other end of the pipe $2 open,
so that no program outlives a killed collector. PR_SET_PDEATHSIG, which macOS lacks, would reach one process only.
The standard error becomes the program's file descriptor 3, GRPO_REWARD_FD, because dash allows one digit in ``>&3``.
The pipe $3 becomes its standard error."""
_REWARD_FD = "3"

_DROP = (
    *("setpriv", "--inh-caps=-all"),
    "--bounding-set=-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+net_bind_service,+sys_chroot",
)
"""Runs a command as root that keeps root's rights over files and users, but not those over the system. The kernel shows
environment and memory of a process only to processes that have all of its capabilities. Another user would see as
little, but could not read a program below /root either, where SkyPilot has the working directory."""


@dataclass(frozen=True)
class Program:
    """A shell command as an agent."""

    command: str

    ends_when_refused: ClassVar[bool] = False
    """True if the relay ends it at the first call that the gateway does not answer; a user's program may continue."""

    async def __call__(self, example: Example, **endpoint: Unpack[Endpoint]) -> float | None:
        """Let the program answer ``example``, and return its reward; ``example.result`` has its reason.

        It is a process group of its own. Cancelling this call ends it by SIGTERM and then SIGKILL, as does the end of
        the program itself for processes that it left behind.

        Raises:
            AgentFailedError: its exit code is not 0, or the last line in GRPO_REWARD_FD has no reward that is a finite
                number or null.
        """
        # Without our secrets, and without keys that would win over the session's.
        variables = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
        variables |= endpoint_variables(endpoint["base_url"], endpoint["api_key"])
        variables |= exempt_from_proxies(urlsplit(endpoint["base_url"]).hostname or "")
        status, answer, reward = await self._run(self.command, example, variables | {"GRPO_REWARD_FD": _REWARD_FD})
        if status != 0:
            raise AgentFailedError(f"the program {describe_exit(status)}{example.output}")
        if reward.strip():
            example.result = _result_of(reward)
            return example.result.reward
        if "reward" in _last_record(answer):
            _warn_of_reward_in_output()
        return await example.score(answer.strip())

    async def _run(self, command: str, example: Example, variables: dict[str, str]) -> tuple[int, str, str]:
        """Run a shell command to its end; return its exit code, and the ends of its output and of its rewards."""
        async with contextlib.AsyncExitStack() as stack:
            # A pipe that nobody writes to: it ends with this context, or when this process dies.
            lifeline, writing = os.pipe()
            for end in (lifeline, writing):
                stack.callback(os.close, end)
            (answer, out), (errors, err) = [await _open_output(stack, OUTPUT_BYTES) for _ in range(2)]
            reward, rewards = await _open_output(stack, REWARD_BYTES)
            with tempfile.TemporaryFile() as task, out, err, rewards:
                task.write(example.for_program().encode())
                task.seek(0)
                process = await asyncio.create_subprocess_exec(
                    *privilege_drop(),
                    *("/bin/sh", "-c", _GUARDED, "agent", command, str(lifeline), str(err.fileno())),
                    stdin=task,
                    stdout=out,
                    stderr=rewards,
                    env=variables,
                    pass_fds=(lifeline, err.fileno()),
                    start_new_session=True,
                )
            try:
                await process.wait()
            finally:
                await end_group(process, TERM_SECONDS, whole=True)
                ends = [asyncio.create_task(output.ended.wait()) for output in (answer, errors, reward)]
                # Not asyncio.timeout, which Python 3.11.2 takes for the cancellation that has led here.
                for late in (await asyncio.wait(ends, timeout=ORPHANS_SECONDS))[1]:
                    late.cancel()
                example.output = _ending(f"{answer.text.rstrip()}\n{errors.text}")
        assert process.returncode is not None
        return process.returncode, answer.text, reward.text


def endpoint_variables(base_url: str, api_key: str) -> dict[str, str]:
    """Return the variables in which a program finds its endpoint."""
    # Anthropic's clients append /v1 themselves.
    others = {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api_key}
    return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, **others}


def programs_at_once() -> int:
    """Return the number of programs that this node should run at once, by its cores and its memory."""
    return max(1, min(EPISODES_AT_ONCE, PROGRAMS_A_CORE * machine.cores(), machine.host_memory() // BYTES_A_PROGRAM))


@cache
def privilege_drop() -> tuple[str, ...]:
    """Return the command under which programs cannot read our secrets in other processes, or log that there is none."""
    if os.geteuid() == 0:
        reads = f"cat /proc/{os.getpid()}/environ"
        with contextlib.suppress(FileNotFoundError):  # macOS and small images have no setpriv.
            trial = subprocess.run([*_DROP, "/bin/sh", "-c", f"! {reads}"], capture_output=True, check=False)
            if trial.returncode == 0:
                return _DROP
    log.warning(
        "programs can read what this user can: files, and secrets in the environment of this user's processes; only "
        "as root, on Linux with setpriv, the latter are hidden from them",
        secrets=[name for name in os.environ if SECRET.search(name)],
    )
    return ()


def _result_of(rewards: str) -> RewardResult:
    """Return the reward in the last line of the text that a program wrote to GRPO_REWARD_FD.

    Raises:
        AgentFailedError: the line has no reward that is a finite number or null.
    """
    record = _last_record(rewards)
    reward, reason = record.get("reward", math.nan), record.get("reason")
    reason_text = None if reason is None else str(reason)
    if reward is None:
        return RewardResult(reward=None, status=RewardStatus.ERROR, reason=reason_text or "the program gave no reward")
    if isinstance(reward, bool | float) and math.isfinite(reward):
        return RewardResult(reward=float(reward), reason=reason_text)
    line = rewards.rstrip().rpartition("\n")[2][-SHOWN_CHARACTERS:]
    form = '{"reward": 0.5}, with a finite number, or null'
    raise AgentFailedError(f"the program's last line in GRPO_REWARD_FD is {line!r}; write one such as {form}", "reward")


def _last_record(text: str) -> dict[str, Any]:
    """Return the JSON object in a text's last line, its whole numbers as floats; empty if there is none."""
    try:
        parsed = json.loads(text.rstrip().rpartition("\n")[2], parse_int=float)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


@cache
def _warn_of_reward_in_output() -> None:
    log.warning(
        "a program's last line of output has a reward, but output is the answer, which REWARD_FN scores as text; "
        """a program gives a reward of its own by: echo '{"reward": 1}' >&$GRPO_REWARD_FD"""
    )


class _Output(asyncio.Protocol):
    """The last ``size`` bytes that come out of a pipe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept = b""
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self._kept = (self._kept + data)[-self._size :]

    def connection_lost(self, _error: Exception | None) -> None:
        self.ended.set()

    @property
    def text(self) -> str:
        """The bytes as text."""
        return self._kept.decode("utf-8", "replace")


async def _open_output(stack: contextlib.AsyncExitStack, size: int) -> tuple[_Output, IO[bytes]]:
    """Open a pipe for a program to write to, of which ``size`` bytes are kept; ``stack`` closes the end for reading.

    Pipes of asyncio's own would keep Process.wait until all processes that hold them have ended.
    """
    reading, writing = (os.fdopen(end, mode, 0) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    transport, output = await asyncio.get_running_loop().connect_read_pipe(lambda: _Output(size), reading)
    stack.callback(transport.close)
    return output, writing


def _ending(output: str) -> str:
    """Return the end of an output as the end of a message."""
    ending = output.strip()[-SHOWN_CHARACTERS:]
    return f"; its output ends with {ending!r}" if ending else ""
