"""The trainer's client of the gateway: sessions of agents, their rewards and their traces."""

from __future__ import annotations

from services.core.endpoints import Task
from services.http.client import ServiceClient
from services.protocol.sessions import CreateSessionRequest, GatewayStats, RewardRequest, SessionReply, Trace


class GatewayClient(ServiceClient):
    """The gateway: one session an episode. Repeating any of these requests does no harm.

    Every method raises RequestRefusedError with status 404 for an unknown session.
    """

    task = Task.GATEWAY

    def agent_url(self, session_id: str) -> str:
        """Return the base URL that the session's agent gives its OpenAI client; it ends with ``/v1``."""
        return f"{self.url}/sessions/{session_id}/v1"

    async def create(self, request: CreateSessionRequest) -> SessionReply:
        """Open a session, or return the session that the same request opened before.

        Raises:
            RequestRefusedError: 409, another request opened a session of this id.
        """
        return await self.call("POST", "/sessions", SessionReply, request)

    async def session(self, session_id: str) -> SessionReply:
        """Return the state of a session."""
        return await self.call("GET", f"/sessions/{session_id}", SessionReply)

    async def reward(self, session_id: str, reward: float | None, reason: str | None = None) -> SessionReply:
        """Set the episode's reward: a number, or None with the reason why there is none. The last call counts.

        Raises:
            RequestRefusedError: 409, the session is finished with another reward.
        """
        request = RewardRequest(reward=reward, reason=reason)
        return await self.call("POST", f"/sessions/{session_id}/reward", SessionReply, request)

    async def finish(self, session_id: str) -> Trace:
        """End the session: it takes no more calls. Return its trace, which stays the same from now on."""
        return await self.call("POST", f"/sessions/{session_id}/finish", Trace)

    async def trace(self, session_id: str) -> Trace:
        """Return the trace of the calls so far."""
        return await self.call("GET", f"/sessions/{session_id}/trace", Trace)

    async def delete(self, session_id: str, *, deadline: float | None = None) -> None:
        """Delete a session and everything stored of it; an unknown session is not an error.

        ``deadline`` is in seconds and replaces the client's.
        """
        await self.request("DELETE", f"/sessions/{session_id}", deadline=deadline)

    async def stats(self, *, deadline: float | None = None) -> GatewayStats:
        """Return the account of sampled tokens; ``deadline``, in seconds, replaces the client's."""
        return await self.call("GET", "/stats", GatewayStats, deadline=deadline)
