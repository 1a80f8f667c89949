"""Agents: the user's functions that answer an example by talking to a model over several turns.

The same function is evaluated (``grpo evaluate --agent``) and trained (``ROLLOUT=agent``). It is an ``async def``
that gets the example and the keyword arguments ``base_url``, ``api_key`` and ``http_client`` of an endpoint that speaks
OpenAI's API, and returns a reward, or None for an answer that cannot be scored.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from pydantic import ConfigDict, Field

from services.core.errors import ConfigurationError
from services.core.extras import install_command
from services.core.imports import load_function
from services.core.tasks import Stopwatch
from services.protocol.prompts import Prompt
from services.protocol.rewards import LARGEST_REWARD, RewardResult, RewardStatus

EPISODES_AT_ONCE = 256
"""Further episodes wait. An agent may hold connections, files or processes of its own."""
POLL_SECONDS = 1.0
"""Least time between two looks at how long an agent over its time has waited."""

Agent = Callable[..., Awaitable[float | None]]
Scorer = Callable[[str], Awaitable[RewardResult]]
"""Scores an answer to an example by REWARD_FN."""


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
    history: list[dict[str, Any]] = Field(default_factory=list)
    """The session's conversation over the questions before this one; empty at the first one, and in training."""
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
    *,
    base_url: str,
    api_key: str,
    http_client: httpx.AsyncClient,
    waited: Callable[[], Awaitable[float]] | None = None,
) -> float | None:
    """Let ``agent`` answer ``example`` and return its reward.

    Its time is that by the clock, less the time that it waited: ``example.waits``, or what ``waited`` returns.

    Raises:
        AgentFailedError: it took more than ``seconds``, or returned neither None nor a number up to
            LARGEST_REWARD.
        Exception: the error that the agent or ``waited`` raised.
    """
    started, left = time.monotonic(), seconds
    playing = asyncio.ensure_future(agent(example, base_url=base_url, api_key=api_key, http_client=http_client))
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
        raise ConfigurationError(
            f"{variable} {name!r} is not an `async def`; make it one, because many episodes run at once"
        )
    return agent
