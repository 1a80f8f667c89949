"""The opponent of OPPONENT=http://...: a fixed model that plays the seats of a game that are not trained."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from pydantic import BaseModel, Field

from services.core.errors import ConfigurationError
from services.http.client import HttpClient, RequestRefusedError
from trainer.config import TrainerSettings


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model] = Field(min_length=1)


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message


class _Reply(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


class Opponent:
    """The first model of an OpenAI endpoint. An async context manager.

    It gets no key: JOBGROUP_TOKEN must not leave the job group. Its answers have the trained policy's temperature and
    length limit.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        url = settings.opponent.rstrip("/").removesuffix("/v1")
        seconds = settings.agent_seconds
        self._http = HttpClient(url, service="opponent", timeout=seconds, deadline=seconds)
        self._sampling = {"temperature": settings.temperature, "max_tokens": settings.max_new_tokens}
        self._naming = asyncio.Lock()
        self._model: str | None = None

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.__aexit__()

    async def wait_healthy(self, deadline_seconds: float) -> None:
        """Wait until the endpoint tells its models.

        Raises:
            ConfigurationError: it refuses to.
            DependencyLostError: it did not within ``deadline_seconds``.
        """
        try:
            await self._name(deadline_seconds)
        except RequestRefusedError as error:
            raise ConfigurationError(
                f"OPPONENT: {error}; it must be an OpenAI endpoint that asks for no key"
            ) from error

    async def ask(self, messages: list[dict[str, Any]]) -> str:
        """Return the model's answer.

        Raises:
            DependencyLostError: it did not answer within AGENT_SECONDS.
            RequestRefusedError: it refuses the conversation, or asks for a key.
        """
        body = {"model": await self._name(), "messages": messages, **self._sampling}
        reply = await self._http.call("POST", "/v1/chat/completions", _Reply, body)
        return reply.choices[0].message.content or ""

    async def _name(self, deadline: float | None = None) -> str:
        async with self._naming:
            if self._model is None:
                self._model = (await self._http.call("GET", "/v1/models", _Models, deadline=deadline)).data[0].id
        return self._model
