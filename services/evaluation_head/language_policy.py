"""A language model as a policy: states are conversations, actions what the model says next.

The rollout servers batch by themselves, continuously, so conversations go to them as they come, up to a bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from services.core.errors import DependencyLostError
from services.evaluation_head.policy import Decision, OverloadedError, Policy, PolicyFailedError, StatesRefusedError
from services.evaluation_head.settings import HeadSettings
from services.http.client import HttpClient, RequestRefusedError
from services.protocol.evaluation import ActionKind, EnvironmentInfo, State, StateKind

MAX_CHARACTERS = 1_000_000


class _Turn(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: str = Field(pattern=r"^(system|user|assistant|tool)$")
    content: str


_Conversation = TypeAdapter(list[_Turn])


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _ChatReply(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


class _ModelInfo(BaseModel):
    weight_version: str | int | None = None


class LanguagePolicy(Policy):
    """What a rollout server or router at ``url`` answers on its OpenAI routes."""

    kind = "language model"

    def __init__(self, name: str, url: str, settings: HeadSettings) -> None:
        super().__init__(name)
        self._settings = settings
        self._places = asyncio.Semaphore(settings.head_llm_concurrency)
        self._http = HttpClient(
            url,
            token=settings.token,
            service="rollout-server",
            timeout=settings.head_llm_seconds,
            deadline=settings.head_llm_seconds,
            max_connections=settings.head_llm_concurrency + 4,
        )
        self._version: int | None = None
        self._watching: asyncio.Task[None] | None = None
        self._trouble: str | None = None
        self.waiting = 0
        self.states = 0
        self.truncated = 0

    async def __aenter__(self) -> LanguagePolicy:
        await self._http.__aenter__()
        await self._look()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._http.__aexit__(None, None, None)

    async def act(self, states: Sequence[State]) -> list[Decision]:
        """See Policy."""
        conversations = [self._conversation(i, state) for i, state in enumerate(states)]
        if self.waiting + len(states) > self._settings.head_max_waiting and self.waiting:
            raise OverloadedError(
                f"{self.waiting} conversations wait already, allowed are {self._settings.head_max_waiting} "
                "(HEAD_MAX_WAITING)",
                retry_after=5,
            )
        self.waiting += len(states)
        try:
            async with asyncio.TaskGroup() as group:
                answers = [group.create_task(self._answer(conversation)) for conversation in conversations]
        except* (PolicyFailedError, StatesRefusedError) as errors:
            # The first says why; the others were cancelled with it.
            raise errors.exceptions[0] from None
        finally:
            self.waiting -= len(states)
        return [answer.result() for answer in answers]

    def misfit(self, environment: EnvironmentInfo) -> str | None:
        """See Policy."""
        if environment.state.kind is not StateKind.MESSAGES or environment.action.kind is not ActionKind.TEXT:
            return f"policy {self.name!r} is a language model, {environment.id} is not a conversation"
        return None

    @property
    def trouble(self) -> str | None:
        """See Policy."""
        return self._trouble

    def stats(self) -> dict[str, Any]:
        """See Policy."""
        return {
            "version": self._version,
            "url": self._http.url,
            "waiting": self.waiting,
            "states": self.states,
            "truncated": self.truncated,
        }

    def _conversation(self, index: int, state: State) -> list[dict[str, str]]:
        try:
            turns = _Conversation.validate_python(state)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "it"
            raise StatesRefusedError(
                f'state {index} is no list of messages {{"role", "content"}}: {where}: {first["msg"]}'
            ) from error
        if not turns:
            raise StatesRefusedError(f"state {index} has no message")
        if (size := sum(len(turn.content) for turn in turns)) > MAX_CHARACTERS:
            raise StatesRefusedError(f"state {index} has {size} characters; allowed are {MAX_CHARACTERS}")
        return [turn.model_dump() for turn in turns]

    async def _answer(self, messages: list[dict[str, str]]) -> Decision:
        payload = {
            "model": "default",
            "messages": messages,
            "max_tokens": self._settings.head_llm_max_tokens,
            "temperature": self._settings.head_llm_temperature,
        }
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
        self.states += 1
        self.truncated += choice.finish_reason == "length"
        # Weights that changed meanwhile chose parts of the answer: then no one version did.
        return Decision(choice.message.content, version if version == self._version else None)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._settings.head_reload_seconds)
            await self._look()

    async def _look(self) -> None:
        """Asks which version of the weights answers."""
        try:
            info = _ModelInfo.model_validate_json(
                (await self._http.send_once("GET", "/model_info", seconds=5.0)).content
            )
        except (DependencyLostError, ValidationError) as error:
            self._trouble = f"the rollout server does not tell its weights: {error}"[:300]
            return
        self._trouble = None
        text = str(info.weight_version)
        self._version = int(text) if text.isdecimal() else None
