"""Policies by their targets in HEAD_POLICIES; ``torch_policy.py`` has the kind that needs torch.

A language model's states are conversations, and an action is its next message; rollout servers batch continuously by
themselves, so conversations are sent as they come, up to a bound. A function is a rule, a solver, or a baseline to
compare with.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from services.clients.play import Decision, NoActionError
from services.core.errors import DependencyLostError
from services.core.imports import load_function
from services.core.tasks import in_background
from services.evaluation_head.settings import HeadSettings
from services.http.client import HttpClient, RequestRefusedError
from services.http.problems import ProblemError
from services.protocol.chat import ChatReply
from services.protocol.evaluation import Action, ActionKind, EnvironmentInfo, State, StateKind

MAX_WAITING = 4096
"""States that may wait for one policy: as many as one request may have. More would only wait longer."""
RELOAD_SECONDS = 5.0
"""Time between two searches for a new version of a policy."""
ANSWER_SECONDS = 120.0
"""Limit of one answer, with retries and the wait for a place in the rollout server's batch."""
VERSION_SECONDS = 5.0
"""Limit of one request for the version of the weights, which also a busy rollout server answers."""
_ACTIONS = TypeAdapter(list[Action])
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class StatesRefusedError(ProblemError, NoActionError):
    """States that the policy does not take; the message says which, and what the policy takes."""

    def __init__(self, detail: str) -> None:
        super().__init__(422, detail)


class PolicyFailedError(ProblemError):
    """A policy that gave no action: it raised, could not be reached, or its output is not an action."""

    def __init__(self, detail: str) -> None:
        super().__init__(500, detail)


class OverloadedError(ProblemError):
    """A policy for which too many states wait; ``retry_after`` is in seconds."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        detail = f"{waiting} states wait already, allowed are {MAX_WAITING}; ask again after Retry-After"
        super().__init__(429, detail, {"Retry-After": str(retry_after)})
        self.retry_after = retry_after


def check_room(waiting: int, states: int, retry_after: int) -> None:
    """Check that further states may wait.

    Raises:
        OverloadedError: too many wait already.
    """
    if waiting and waiting + states > MAX_WAITING:
        raise OverloadedError(waiting, retry_after)


class Policy(AbstractAsyncContextManager["Policy"], ABC):
    """A policy under its name. An async context manager from load to end."""

    kind: str

    def __init__(self, name: str, **about: Any) -> None:
        """Make a policy; ``about`` is shown in its entry of /stats."""
        self.name = name
        self._about = about
        self.trouble: str | None = None
        """The policy's current problem, for the dashboard."""
        self.states = 0
        """States that got actions."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None:
        """Release the policy's resources."""

    @abstractmethod
    async def act(self, states: Sequence[Any], *, logprobs: bool = False) -> list[Decision]:
        """Return one decision a state, in order; ``logprobs`` asks for log-probabilities that cost extra.

        Raises:
            StatesRefusedError: a state does not fit.
            OverloadedError: too many states wait.
            PolicyFailedError: the policy gave no action.
        """

    async def refresh(self) -> None:
        """Look for a new version and use it. A failure is reported in ``trouble`` and not raised."""

    def misfit(self, environment: EnvironmentInfo) -> str | None:
        """Return why the policy cannot act in an environment; None if it can, or if only a call can show it."""
        return None

    def stats(self) -> dict[str, Any]:
        """Return the policy's entry in /stats."""
        return {**self._about, "states": self.states}


class _Turn(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: str = Field(pattern=r"^(system|user|assistant|tool)$")
    content: str


_CONVERSATION = TypeAdapter(Annotated[list[_Turn], Field(min_length=1)])


class _ModelInfo(BaseModel):
    weight_version: str | int | None = None


class LanguagePolicy(Policy):
    """The model of a rollout server or router at ``url``, through its OpenAI routes."""

    kind = "language model"

    def __init__(self, name: str, url: str, settings: HeadSettings) -> None:
        super().__init__(name, url=url)
        self._settings = settings
        self._places = asyncio.Semaphore(settings.head_llm_concurrency)
        self._http = HttpClient(
            url,
            token=settings.token,
            service="rollout-server",
            timeout=ANSWER_SECONDS,
            deadline=ANSWER_SECONDS,
            max_connections=settings.head_llm_concurrency + 4,
        )
        self._version: int | None = None
        self._waiting = 0

    async def __aenter__(self) -> LanguagePolicy:
        await self._http.__aenter__()
        await self.refresh()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.__aexit__()

    async def act(self, states: Sequence[State], *, logprobs: bool = False) -> list[Decision]:
        """See Policy. An answer's log-probability is the sum over the tokens that the rollout server lists."""
        conversations = [_conversation(i, state) for i, state in enumerate(states)]
        check_room(self._waiting, len(states), retry_after=5)
        self._waiting += len(states)
        try:
            async with asyncio.TaskGroup() as group:
                answers = [group.create_task(self._answer(conversation, logprobs)) for conversation in conversations]
        except ExceptionGroup as errors:
            # The first error is the reason; the other conversations were cancelled with it. Not by except*, in which
            # Python 3.11.2 wraps what is raised.
            if isinstance(errors.exceptions[0], PolicyFailedError | StatesRefusedError):
                raise errors.exceptions[0] from None
            raise
        finally:
            self._waiting -= len(states)
        return [answer.result() for answer in answers]

    def misfit(self, environment: EnvironmentInfo) -> str | None:
        """See Policy."""
        if environment.state.kind is not StateKind.MESSAGES or environment.action.kind is not ActionKind.TEXT:
            return f"policy {self.name!r} is a language model, {environment.id} is not a conversation"
        return None

    def stats(self) -> dict[str, Any]:
        """See Policy."""
        return super().stats() | {"version": self._version, "waiting": self._waiting}

    async def refresh(self) -> None:
        """See Policy."""
        try:
            reply = await self._http.send_once("GET", "/model_info", seconds=VERSION_SECONDS)
            version = str(_ModelInfo.model_validate_json(reply.content).weight_version)
        except (DependencyLostError, ValidationError) as error:
            self.trouble = f"the version of the rollout server's weights is unknown: {error}"[:300]
        else:
            self.trouble = None
            self._version = int(version) if version.isdecimal() else None

    async def _answer(self, messages: list[dict[str, str]], logprobs: bool) -> Decision:
        payload: dict[str, Any] = {
            "model": self._settings.head_llm_model,
            "messages": messages,
            "max_tokens": self._settings.head_llm_max_tokens,
            "temperature": 0,
            **({"logprobs": True} if logprobs else {}),
        }
        async with self._places:
            version = self._version
            try:
                reply = await self._http.call("POST", "/v1/chat/completions", ChatReply, payload)
            except RequestRefusedError as error:
                raise StatesRefusedError(f"the rollout server refuses the conversation: {error.detail}") from error
            except DependencyLostError as error:
                raise PolicyFailedError(str(error)) from error
        choice = reply.choices[0]
        if choice.finish_reason == "abort" or choice.message.content is None:
            raise PolicyFailedError(f"the rollout server gave no text (finish_reason {choice.finish_reason!r})")
        self.states += 1
        tokens = choice.logprobs.content if choice.logprobs else None
        logprob = math.fsum(token.logprob for token in tokens) if tokens else None
        # If the weights changed meanwhile, no single version chose the answer.
        return Decision(choice.message.content, version if version == self._version else None, logprob)


def _conversation(index: int, state: State) -> list[dict[str, str]]:
    try:
        return [turn.model_dump() for turn in _CONVERSATION.validate_python(state)]
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise StatesRefusedError(f"state {index} is not a list of messages: {where}: {first['msg']}") from error


class FunctionPolicy(Policy):
    """The function ``module:function``, which takes a list of states and returns their actions in order.

    It is called in a thread, for one request at a time.
    """

    kind = "function"

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name, function=target)
        self._target = target
        self._one_at_a_time = asyncio.Lock()

    async def __aenter__(self) -> FunctionPolicy:
        self._function: Callable[[list[State]], Sequence[Action]] = load_function(f"policy {self.name!r}", self._target)
        return self

    async def act(self, states: Sequence[State], *, logprobs: bool = False) -> list[Decision]:
        """See Policy."""
        async with self._one_at_a_time:
            output = await in_background(lambda: self._call(list(states)))
        try:
            actions = _ACTIONS.validate_python(to_jsonable_python(output))
            json.dumps(actions, allow_nan=False, ensure_ascii=False).encode()
        except ValueError as error:  # also for values that JSON lacks, such as NaN, infinities and numbers of numpy
            needed = "needed is a list with an int, finite float, str or list a state"
            raise PolicyFailedError(f"{self._target} gave {output!r:.100}; {needed}") from error
        if len(actions) != len(states):
            raise PolicyFailedError(f"{self._target} gave {len(actions)} actions for {len(states)} states")
        self.states += len(states)
        return [Decision(action, None) for action in actions]

    def _call(self, states: list[State]) -> Sequence[Action]:
        try:
            return self._function(states)
        # The user's function may raise anything, also a SystemExit, which must not end the head.
        except BaseException as error:
            raise PolicyFailedError(f"{self._target} raised {type(error).__name__}: {error}") from error


def make_policy(name: str, target: str, settings: HeadSettings) -> Policy:
    """Return the policy that ``target`` stands for; see HEAD_POLICIES."""
    if "://" in target:
        return LanguagePolicy(name, target, settings)
    if _FUNCTION.fullmatch(target):
        return FunctionPolicy(name, target)
    # Torch takes seconds to load, and a head of language models alone needs none.
    from services.evaluation_head.torch_policy import TorchPolicy

    return TorchPolicy(name, Path(target), settings)


async def keep_fresh(policy: Policy) -> None:
    """Follow the versions of a policy until cancelled."""
    while True:
        await asyncio.sleep(RELOAD_SECONDS)
        await policy.refresh()
