"""The trainer's client of the gateway: sessions of agents, their rewards and their traces."""

from __future__ import annotations

import asyncio
import functools

from services.core.endpoints import Task, endpoint
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.http.client import RequestRefusedError, ServiceClient
from services.protocol.base import derive_seed
from services.protocol.sessions import CreateSessionRequest, FinishRequest, GatewayStats, SessionReply, Trace

log = get_logger(__name__)

DELETE_SECONDS = 10.0
"""Longest wait for the deletion of a session, which the gateway makes up for."""


class GatewayClient(ServiceClient):
    """The gateway: one session and two requests an episode. Repeating any of these requests does no harm.

    A gateway of several nodes shares the sessions among them by their ids, once ``wait_healthy`` has found the nodes.
    All attempts at an episode, whose ids differ behind the last dash only, are at one node.

    Every method raises RequestRefusedError with status 404 for an unknown session. A session is deleted by the next
    one's ``finish``, or when the client closes, because until then its trace may have to be sent again.
    """

    task = Task.GATEWAY

    @functools.cached_property
    def _nodes(self) -> list[GatewayClient]:
        """The clients of the gateway's nodes by rank: this one, and those that it has found."""
        return [self]

    @functools.cached_property
    def _received(self) -> list[str]:
        """The finished sessions of this node whose traces are here."""
        return []

    async def __aexit__(self, *_: object) -> None:
        try:
            await asyncio.gather(*map(self._delete, self._take_received()))
            await asyncio.gather(*(node.__aexit__() for node in self._nodes[1:]))
        finally:
            await super().__aexit__()

    async def wait_healthy(self, deadline_seconds: float) -> None:
        """Wait until the gateway is healthy on all its nodes.

        Raises:
            DependencyLostError: it was not within ``deadline_seconds``; the message has the last state seen.
        """
        await super().wait_healthy(deadline_seconds)
        for rank in range(len(self._nodes), (await self.stats()).nodes):
            address = endpoint(self.task, rank=rank)
            node = GatewayClient(address, self.token, timeout=self.timeout, deadline=self.deadline)
            self._nodes.append(await node.__aenter__())
        await asyncio.gather(*(ServiceClient.wait_healthy(node, deadline_seconds) for node in self._nodes[1:]))

    def _node_of(self, session_id: str) -> GatewayClient:
        place = session_id.rpartition("-")[0] or session_id
        return self._nodes[derive_seed(place) % len(self._nodes)]

    def agent_url(self, session_id: str) -> str:
        """Return the base URL that the session's agent gives its OpenAI client; it ends with ``/v1``."""
        return f"{self._node_of(session_id).url}/sessions/{session_id}/v1"

    async def create(self, request: CreateSessionRequest) -> SessionReply:
        """Open a session, or return the session that the same request opened before.

        Raises:
            RequestRefusedError: 409, another request opened a session of this id.
        """
        return await self._node_of(request.id).call("POST", "/sessions", SessionReply, request)

    async def session(self, session_id: str) -> SessionReply:
        """Return the state of a session."""
        return await self._node_of(session_id).call("GET", f"/sessions/{session_id}", SessionReply)

    async def finish(self, session_id: str, reward: float | None, reason: str | None = None) -> Trace:
        """End the session: it takes no more calls. Return its trace, which stays the same from now on.

        The reward is the episode's: a number, or None with the reason why there is none.

        Raises:
            RequestRefusedError: 409, the session is finished with another reward.
        """
        node = self._node_of(session_id)
        received = node._take_received()
        request = FinishRequest(reward=reward, reason=reason, received=received)
        try:
            trace = await node.call("POST", f"/sessions/{session_id}/finish", Trace, request)
        except BaseException:
            node._received += received
            raise
        node._received.append(session_id)
        return trace

    async def stats(self, *, deadline: float | None = None) -> GatewayStats:
        """Return the account of sampled tokens of all nodes; ``deadline``, in seconds, replaces the client's."""
        calls = (node.call("GET", "/stats", GatewayStats, deadline=deadline) for node in self._nodes)
        return GatewayStats.sum_of(await asyncio.gather(*calls))

    def _take_received(self) -> list[str]:
        received = [*self._received]
        self._received.clear()
        return received

    async def _delete(self, session_id: str) -> None:
        """Delete a session; where that fails, the gateway does it after the deadline."""
        try:
            await self.request("DELETE", f"/sessions/{session_id}", deadline=DELETE_SECONDS)
        except (DependencyLostError, RequestRefusedError) as error:
            log.warning("session not deleted", session=session_id, reason=str(error))
