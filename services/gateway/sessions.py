"""A session: one episode of an agent, with its limits, its tree of calls, its reward and its trace."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NoReturn

from services.core.tasks import Stopwatch
from services.gateway.requests import ChatRequest
from services.gateway.tree import Call, Tree
from services.http.problems import ProblemError, refuse
from services.protocol import sessions as wire


class Asker:
    """The headers of a request that tell of earlier attempts to send it."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        key = headers.get("idempotency-key")
        self.keys = [name for name in (key, headers.get(wire.REQUEST_MARK)) if name]
        self.is_retry = not key and headers.get("x-stainless-retry-count", "").strip("0").isdecimal()
        """The clients of OpenAI, Anthropic and others count their retries."""


@dataclass
class Session:
    """One episode."""

    request: wire.CreateSessionRequest
    created: float
    """Unix seconds."""
    is_finished: bool = False
    reward: float | None = None
    reason: str | None = None
    called: bool = False
    """True once the agent has made a call; a gateway that restarts forgets it."""
    refused: str | None = None
    """The limit over which the newest call was refused; a gateway that restarts knows it of finished sessions only."""
    waits: Stopwatch = field(default_factory=Stopwatch)
    """Runs while a call is being answered."""
    tree: Tree = field(default_factory=Tree)
    lost: Counter[str] = field(default_factory=Counter)
    """Sampled tokens that the tree lacks, by reason."""
    in_flight: dict[str, asyncio.Task[Call]] = field(default_factory=dict)
    """The calls that are being answered, by name."""
    retried: set[str] = field(default_factory=set)
    """The names of the calls that a counted retry has repeated; a gateway that restarts forgets them."""
    names: dict[tuple[str, str], str] = field(default_factory=dict)
    """Names of calls by digest and key."""
    repeated: int = 0
    """The requests that got the reply of an earlier call."""
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

    def check_reward(self, request: wire.RewardRequest) -> None:
        """Raise ProblemError, 409, if the session is finished with another reward than that of ``request``."""
        if self.is_finished and (self.reward, self.reason) != (request.reward, request.reason):
            raise ProblemError(409, f"session {self.id} is finished; its reward can no longer change")

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
            self._refuse_over(f"{limits.max_turns} turns (AGENT_MAX_TURNS)", "max_turns")
        if left < 1:
            self._refuse_over(f"{limits.max_tokens} tokens (AGENT_MAX_TOKENS)", "max_tokens")
        return min(limits.max_turn_tokens, left, call.max_tokens or left)

    def earlier(self, digest: str, asker: Asker) -> str | None:
        """Return the name of the call that a request repeats, None if it is a new call; ``calls`` has the rules."""
        for key in asker.keys:
            if name := self.names.get((digest, key)):
                return name
        if not asker.is_retry:
            return None
        calls = (*reversed(self.in_flight), *reversed(self.tree.calls))
        name = next((n for n in calls if n.partition("-")[0] == digest and n not in self.retried), None)
        if name is not None:
            self.retried.add(name)
        return name

    def begin(self, digest: str) -> str:
        """Return the name of a new call."""
        names = (f"{digest}-{number}" if number else digest for number in count())
        return next(name for name in names if name not in self.tree.calls and name not in self.in_flight)

    def forget(self, name: str) -> None:
        """Forget a call that failed."""
        self.names = {key: other for key, other in self.names.items() if other != name}
        self.retried.discard(name)

    def record(self, call: Call) -> dict[str, Any]:
        """Return a call with its keys, as plain data for ``restore``."""
        keys = [key for (_, key), name in self.names.items() if name == call.name]
        return call.record() | {"keys": keys, "repeated": self.repeated}

    def restore(self, record: dict[str, Any]) -> None:
        """Add a call from its record."""
        name = self.tree.restore(record).name
        digest, _, _ = name.partition("-")
        self.names.update({(digest, key): name for key in record["keys"]})
        self.repeated = record["repeated"]

    def refuse_late(self, why: str = "its calls waited for engines") -> NoReturn:
        """Raise ProblemError, 429, because the deadline has passed."""
        self.refused, reached = wire.DEADLINE, f"deadline of {self.request.deadline_seconds:g} s (twice AGENT_SECONDS)"
        refuse(429, f"session {self.id} has reached its {reached}: {why}", wire.DEADLINE)

    def _refuse_over(self, reached: str, limit: str) -> NoReturn:
        self.refused = limit
        refuse(429, f"session {self.id} reached its limit of {reached}; {wire.END_BEFORE}", limit)

    def reply(self) -> wire.SessionReply:
        """Return the state of the session."""
        return wire.SessionReply(
            id=self.id,
            status="finished" if self.is_finished else "open",
            called=self.called or bool(self.tree.calls),
            turns=len(self.tree.calls),
            sampled_tokens=self.sampled_tokens,
            reward=self.reward,
            reason=self.reason,
            refused=self.refused,
            waited_seconds=self.waits.seconds,
        )

    def trace(self) -> wire.Trace:
        """Return the whole episode so far."""
        turns = list(self.tree.turns)
        return wire.Trace(
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
            tools_offered=sum(call.offers_tools for call in self.tree.calls.values()),
            branches=self.tree.branches,
            calls_repeated=self.repeated,
            refused=self.refused,
            lost_tokens=dict(self.lost),
        )
