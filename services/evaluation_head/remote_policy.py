"""A policy of another evaluation head, ``head+http://host:8080`` or ``head+http://host:8080#policy``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.clients.evaluation_head import EvaluationHeadClient
from services.core.errors import DependencyLostError
from services.evaluation_head.policy import Decision, Policy, PolicyFailedError, StatesRefusedError
from services.evaluation_head.settings import HeadSettings
from services.http.client import RequestRefusedError
from services.protocol.evaluation import MAX_STATES, EnvironmentInfo, State

PREFIX = "head+"


class RemotePolicy(Policy):
    """The policy behind the ``#`` of its target, or that head's first one."""

    kind = "evaluation head"

    def __init__(self, name: str, target: str, settings: HeadSettings) -> None:
        super().__init__(name)
        url, _, policy = target.removeprefix(PREFIX).partition("#")
        self._client = EvaluationHeadClient(url, policy=policy or None, token=settings.token)
        self._states = 0

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
                raise StatesRefusedError(f"the head at {self._client.url} refuses: {error.detail}") from error
            except DependencyLostError as error:
                raise PolicyFailedError(str(error)) from error
            given = reply.logprobs or [None] * len(reply.actions)
            decisions += map(Decision, reply.actions, reply.policy_versions, given)
        self._states += len(states)
        return decisions

    async def refresh(self) -> None:
        """Do nothing, because that head looks for new versions itself."""

    def misfit(self, environment: EnvironmentInfo) -> str | None:
        """Return None, because that head refuses states that do not fit."""
        return None

    def stats(self) -> dict[str, Any]:
        """See Policy."""
        return {"url": self._client.url, "states": self._states}
