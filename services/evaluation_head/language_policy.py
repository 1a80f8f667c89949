"""A language model as a policy: states are conversations, an action is the model's next message.

Rollout servers batch continuously by themselves, so conversations are sent as they come, up to a bound.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from services.core.errors import DependencyLostError
from services.evaluation_head import policy
from services.evaluation_head.policy import Decision, OverloadedError, Policy, PolicyFailedError, StatesRefusedError
from services.evaluation_head.settings import HeadSettings
from services.http.client import HttpClient, RequestRefusedError
from services.protocol.evaluation import ActionKind, EnvironmentInfo, State, StateKind

ANSWER_SECONDS = 120.0
"""Limit of one answer, with retries and the wait for a place in the rollout server's batch."""
VERSION_SECONDS = 5.0
"""Limit of one request for the version of the weights, which a busy rollout server answers, too."""


class _Turn(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: str = Field(pattern=r"^(system|user|assistant|tool)$")
    content: str


_CONVERSATION = TypeAdapter(Annotated[list[_Turn], Field(min_length=1)])


class _Message(BaseModel):
    content: str | None = None


class _Token(BaseModel):
    logprob: float


class _Logprobs(BaseModel):
    content: list[_Token] | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _ChatReply(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


class _ModelInfo(BaseModel):
    weight_version: str | int | None = None


class LanguagePolicy(Policy):
    """The model of a rollout server or router at ``url``, through its OpenAI routes."""

    kind = "language model"

    def __init__(self, name: str, url: str, settings: HeadSettings) -> None:
        super().__init__(name)
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
        self._states = 0

    async def __aenter__(self) -> LanguagePolicy:
        await self._http.__aenter__()
        await self.refresh()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.__aexit__()

    async def act(self, states: Sequence[State], *, logprobs: bool = False) -> list[Decision]:
        """See Policy. An answer's log-probability is the sum over the tokens that the rollout server lists."""
        conversations = [_conversation(i, state) for i, state in enumerate(states)]
        if self._waiting and self._waiting + len(states) > policy.MAX_WAITING:
            raise OverloadedError(self._waiting, retry_after=5)
        self._waiting += len(states)
        try:
            async with asyncio.TaskGroup() as group:
                answers = [group.create_task(self._answer(conversation, logprobs)) for conversation in conversations]
        except* (PolicyFailedError, StatesRefusedError) as errors:
            # The first error is the reason; the other conversations were cancelled with it.
            raise errors.exceptions[0] from None
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
        return {
            "version": self._version,
            "url": self._http.url,
            "waiting": self._waiting,
            "states": self._states,
        }

    async def refresh(self) -> None:
        """See Policy."""
        try:
            reply = await self._http.send_once("GET", "/model_info", seconds=VERSION_SECONDS)
            version = str(_ModelInfo.model_validate_json(reply.content).weight_version)
        except (DependencyLostError, ValidationError) as error:
            self.trouble = f"the rollout server does not tell its weights: {error}"[:300]
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
                reply = await self._http.call("POST", "/v1/chat/completions", _ChatReply, payload)
            except RequestRefusedError as error:
                raise StatesRefusedError(f"the rollout server refuses the conversation: {error.detail}") from error
            except DependencyLostError as error:
                raise PolicyFailedError(str(error)) from error
        choice = reply.choices[0]
        if choice.finish_reason == "abort" or choice.message.content is None:
            raise PolicyFailedError(f"the rollout server gave no text (finish_reason {choice.finish_reason!r})")
        self._states += 1
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
            f'state {index} is no list of messages {{"role", "content"}}: {where}: {first["msg"]}'
        ) from error
