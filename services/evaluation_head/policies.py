"""The kinds of policies, by the target in HEAD_POLICIES; ``torch_policy.py`` has the kind that needs torch.

A language model's states are conversations, and an action is its next message; rollout servers batch continuously by
themselves, so conversations are sent as they come, up to a bound. A function is a rule, a solver, or a baseline to
compare with. A policy of another head is named ``head+http://host:8080`` or ``head+http://host:8080#policy``.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from services.clients.evaluation_head import EvaluationHeadClient, HeadActions, decisions_of
from services.clients.play import Decision, Episode
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.imports import load_function
from services.core.tasks import in_background
from services.evaluation_head.policy import Policy, PolicyFailedError, StatesRefusedError, check_room
from services.evaluation_head.settings import HeadSettings
from services.http.client import HttpClient, RequestRefusedError
from services.protocol.chat import ChatReply
from services.protocol.evaluation import MAX_STATES, Action, ActionKind, EnvironmentInfo, State, StateKind

ANSWER_SECONDS = 120.0
"""Limit of one answer, with retries and the wait for a place in the rollout server's batch."""
VERSION_SECONDS = 5.0
"""Limit of one request for the version of the weights, which also a busy rollout server answers."""
REMOTE_PREFIX = "head+"
_ACTIONS = TypeAdapter(list[Action])
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


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
            "temperature": self._settings.head_llm_temperature,
        }
        if logprobs:
            payload["logprobs"] = True
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
        raise StatesRefusedError(
            f'state {index} is not a list of messages {{"role", "content"}}: {where}: {first["msg"]}'
        ) from error


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
            raise PolicyFailedError(
                f"{self._target} gave {output!r:.100}; needed is a list with an int, finite float, str or list a state"
            ) from error
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


class RemotePolicy(Policy):
    """The policy that another head has for a client, which belongs to this policy."""

    kind = "evaluation head"

    def __init__(self, name: str, client: EvaluationHeadClient) -> None:
        super().__init__(name, url=client.url)
        self._client = client
        self._actions = HeadActions(client)

    async def __aenter__(self) -> RemotePolicy:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.__aexit__(*error)

    async def act(self, states: Sequence[State], *, logprobs: bool = False) -> list[Decision]:
        """See Policy."""
        decisions: list[Decision] = []
        for start in range(0, len(states), MAX_STATES):
            try:
                reply = await self._client.act(states[start : start + MAX_STATES], logprobs=logprobs)
            except RequestRefusedError as error:
                raise self._refusal(error) from error
            except DependencyLostError as error:
                raise PolicyFailedError(str(error)) from error
            decisions += decisions_of(reply)
        self.states += len(states)
        return decisions

    async def ask(self, episodes: Sequence[Episode]) -> list[Decision]:
        """Do the same with the episodes' positions and the reports of ended ones, for the other head's dashboard.

        Raises:
            StatesRefusedError: the head refuses a state.
            ConfigurationError: it refuses this player, or has no such policy.
            DependencyLostError: the head gives no actions.
        """
        try:
            return await self._actions.ask(episodes)
        except RequestRefusedError as error:
            if error.status in (400, 422):
                raise self._refusal(error) from error
            raise ConfigurationError(str(error)) from error

    def report(self, episode: Episode) -> None:
        """Report an episode that has ended with the next request."""
        self._actions.report(episode)

    def _refusal(self, error: RequestRefusedError) -> StatesRefusedError:
        return StatesRefusedError(f"the head at {self._client.url} refuses: {error.detail}")


def make_policy(name: str, target: str, settings: HeadSettings) -> Policy:
    """Return the policy that ``target`` stands for; see HEAD_POLICIES."""
    if target.startswith(REMOTE_PREFIX):
        url, _, policy = target.removeprefix(REMOTE_PREFIX).partition("#")
        return RemotePolicy(name, EvaluationHeadClient(url, policy=policy or None, token=settings.token))
    if "://" in target:
        return LanguagePolicy(name, target, settings)
    if _FUNCTION.fullmatch(target):
        return FunctionPolicy(name, target)
    # Torch takes seconds to load, and a head of language models alone needs none.
    from services.evaluation_head.torch_policy import TorchPolicy

    return TorchPolicy(name, Path(target), settings)
