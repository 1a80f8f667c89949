"""A gateway whose model says what a test wants: one token a character, and a trace as the real gateway keeps it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.core.tasks import Stopwatch
from tests.fake_service import Route

Message = dict[str, Any]

END = "\n"
"""The end of a turn, whose token follows each message."""


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


@dataclass
class Session:
    """A session's requests and its sequences so far."""

    request: dict[str, Any]
    version: int
    sequences: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """The conversation of each sequence, rendered."""
    reward: dict[str, Any] | None = None
    turns: int = 0
    refused: str | None = None
    called: bool = False
    waits: Stopwatch = field(default_factory=Stopwatch)


class FakeGateway(dict[str, Route]):
    """The routes of a gateway for ``fake_service``; ``says`` is the model: messages in, its text or a status out."""

    def __init__(self, says: Callable[[list[Message]], str | int]) -> None:
        super().__init__()
        self.says = says
        self.sessions: dict[str, Session] = {}
        """All sessions, the deleted ones included."""
        self.deleted: list[str] = []
        self.version = 1
        self.limit = "max_turns"
        """The limit over which a call is refused to which ``says`` answers 429."""
        self.finish_reason = "stop"
        """Why the turns from now on end."""
        self.counts_waits = False
        """True if sessions say how long their calls waited for ``says``."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the route of a request."""
        if name in self:
            return self[name]
        if name == "POST /sessions":
            return self.create
        found = re.fullmatch(r"(\w+) /sessions/([\w.-]+)(?:/(finish|v1/chat/completions))?", name)
        if found is None or found[2] not in self.sessions:
            return default
        session = self.sessions[found[2]]
        routes = {
            ("GET", None): self.state,
            ("DELETE", None): self.delete,
            ("POST", "finish"): self.finish,
        }
        route = routes.get((found[1], found[3]), self.complete)
        return lambda request: route(session, request)

    def state(self, session: Session, _: dict[str, Any]) -> dict[str, Any]:
        waited = session.waits.seconds if self.counts_waits else 0.0
        known = {"called": session.called, "refused": session.refused, "waited_seconds": waited}
        return {"id": session.request["id"], "status": "open", **known}

    def delete(self, session: Session, _: dict[str, Any]) -> dict[str, Any]:
        self.deleted.append(session.request["id"])
        return {}

    def create(self, request: dict[str, Any]) -> dict[str, Any]:
        session = self.sessions.setdefault(request["id"], Session(request, self.version))
        return {"id": session.request["id"], "status": "open"}

    def complete(self, session: Session, request: dict[str, Any]) -> dict[str, Any] | int:
        messages = request["messages"]
        session.called = True
        with session.waits.running():
            said = 429 if session.turns == session.request["max_turns"] else self.says(messages)
        session.refused = self.limit if said == 429 else None
        if isinstance(said, int):
            return said
        session.turns += 1
        rendered = "".join(f"{message['content']}{END}" for message in messages)
        place = next((i for i, text in enumerate(session.texts) if rendered.startswith(text)), None)
        if place is None:
            place = len(session.sequences)
            empty = {"completion_ids": [], "logprobs": [], "loss_mask": [], "policy_versions": []}
            session.sequences.append({"prompt_ids": ids(rendered), "finish_reason": "stop", **empty})
        else:
            self._extend(session.sequences[place], rendered[len(session.texts[place]) :], is_sampled=False)
        self._extend(session.sequences[place], said + END, is_sampled=True)
        end = len(session.sequences[place]["completion_ids"])
        span = {"call": session.turns - 1, "number": session.turns - 1, "start": end - len(said + END), "end": end}
        session.sequences[place].setdefault("turns", []).append(span)
        session.sequences[place] |= {"text": said, "finish_reason": self.finish_reason}
        session.sequences[place]["messages"] = [*messages, {"role": "assistant", "content": said, "sampled": True}]
        session.texts[place:] = [rendered + said + END, *session.texts[place + 1 :]]
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        return {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}

    def _extend(self, sequence: dict[str, Any], text: str, *, is_sampled: bool) -> None:
        sequence["completion_ids"] += ids(text)
        # The log-probability of a token that was not sampled means nothing.
        sequence["logprobs"] += [-0.5 if is_sampled else 7.0] * len(text)
        sequence["loss_mask"] += [is_sampled] * len(text)
        # Nor does its version.
        sequence["policy_versions"] += [self.version if is_sampled else 0] * len(text)

    def finish(self, session: Session, request: dict[str, Any]) -> dict[str, Any]:
        self.deleted += request.pop("received")
        session.reward = request
        sampled = sum(sum(sequence["loss_mask"]) for sequence in session.sequences)
        named = {name: session.request[name] for name in ("id", "group_id", "index")}
        counts = {"turns": session.turns, "sampled_tokens": sampled, "tool_calls": 0, "unparsed_tool_calls": 0}
        trace = named | request | counts | {"refused": session.refused}
        trace |= {"sequences": session.sequences, "branches": max(len(session.sequences) - 1, 0)}
        return json.loads(json.dumps(trace))
