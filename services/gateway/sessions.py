"""A session: one episode of an agent, with its limits, its tree of calls, its reward and its trace."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NoReturn

from services.gateway.requests import ChatRequest
from services.gateway.tree import Tree
from services.http.problems import ProblemError
from services.protocol.sessions import CreateSessionRequest, SessionReply, SessionStatus, Trace

END_BEFORE = "end the agent's loop before, or catch this error and return a reward"


@dataclass
class Session:
    """One episode."""

    request: CreateSessionRequest
    created: float
    """Unix seconds."""
    is_finished: bool = False
    reward: float | None = None
    reason: str | None = None
    called: bool = False
    """True once the agent has made a call; a gateway that restarts forgets it."""
    refused: str | None = None
    """The limit over which the newest call was refused."""
    tree: Tree = field(default_factory=Tree)
    lost: Counter[str] = field(default_factory=Counter)
    """Sampled tokens that the tree lacks, by reason."""
    in_flight: dict[str, asyncio.Task[dict[str, Any]]] = field(default_factory=dict)
    """The calls that are being answered, by digest."""
    reserved_tokens: int = 0
    """The most tokens that the calls in flight may sample."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the session is written and changed."""

    @property
    def id(self) -> str:
        """The session's id."""
        return self.request.id

    @property
    def sampled_tokens(self) -> int:
        """The number of sampled tokens in the tree."""
        return sum(call.sampled_tokens for call in self.tree.calls.values())

    @property
    def seconds_left(self) -> float:
        """The seconds until the deadline."""
        return self.created + self.request.deadline_seconds - time.time()

    def check_open(self) -> None:
        """Raise ProblemError, 409, once the session is finished."""
        if self.is_finished:
            refuse(409, f"session {self.id} is finished and takes no more calls", "session_finished")

    def admit(self, call: ChatRequest) -> int:
        """Return the most tokens that each choice of a new call may have.

        Raises:
            ProblemError: 429, a limit of the session is reached.
        """
        self.called, self.refused = True, None
        limits = self.request
        left = (limits.max_tokens - self.sampled_tokens - self.reserved_tokens) // call.n
        if self.seconds_left <= 0:
            self.refuse_late()
        if len(self.tree.calls) + len(self.in_flight) >= limits.max_turns:
            self._refuse(f"has had its {limits.max_turns} turns (AGENT_MAX_TURNS); {END_BEFORE}", "max_turns")
        if left < 1:
            self._refuse(f"has sampled its {limits.max_tokens} tokens (AGENT_MAX_TOKENS); {END_BEFORE}", "max_tokens")
        return min(limits.max_turn_tokens, left, call.max_tokens or left)

    def refuse_late(self, why: str = "") -> NoReturn:
        """Raise ProblemError, 429, because the deadline has passed."""
        seconds = f"{self.request.deadline_seconds:g}"
        self._refuse(f"has had its {seconds} s (AGENT_SECONDS); {why or END_BEFORE}", "deadline_seconds")

    def _refuse(self, why: str, limit: str) -> NoReturn:
        self.refused = limit
        refuse(429, f"session {self.id} {why}", limit)

    def reply(self) -> SessionReply:
        """Return the state of the session."""
        return SessionReply(
            id=self.id,
            status=SessionStatus.FINISHED if self.is_finished else SessionStatus.OPEN,
            called=self.called or bool(self.tree.calls),
            turns=len(self.tree.calls),
            sampled_tokens=self.sampled_tokens,
            reward=self.reward,
            reason=self.reason,
            refused=self.refused,
        )

    def trace(self) -> Trace:
        """Return the whole episode so far."""
        turns = list(self.tree.turns)
        return Trace(
            id=self.id,
            group_id=self.request.group_id,
            index=self.request.index,
            reward=self.reward,
            reason=self.reason,
            sequences=self.tree.sequences(),
            turns=len(self.tree.calls),
            sampled_tokens=self.sampled_tokens,
            tool_calls=sum(len(turn.message.get("tool_calls", ())) for turn in turns),
            unparsed_tool_calls=sum(turn.unparsed_calls for turn in turns),
            branches=self.tree.branches,
            other_api_calls=sum(call.reply.get("object") != "chat.completion" for call in self.tree.calls.values()),
            lost_tokens=dict(self.lost),
        )


def refuse(status: int, detail: str, code: str) -> NoReturn:
    """Raise ProblemError with ``code`` in OpenAI's error; the header keeps OpenAI's clients from asking again."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    raise ProblemError(status, detail, {"X-Should-Retry": "false"}, error={"type": kind, "code": code, "param": None})
