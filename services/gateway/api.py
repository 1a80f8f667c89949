"""An API in which agents talk to the gateway: its requests, replies and streams as chat completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from services.gateway.requests import ChatRequest
from services.gateway.sessions import Session


@dataclass(frozen=True)
class Api:
    """An API of agents. A reply depends on chat completion and request alone, and a stream on the reply."""

    path: str
    """The route's path behind ``/v1``."""
    request: Callable[[Mapping[str, Any], Session], ChatRequest]
    """Returns the request of a body; raises ProblemError, 400."""
    reply: Callable[[dict[str, Any], ChatRequest], dict[str, Any]]
    """Returns a chat completion in the API's form."""
    stream: Callable[[Mapping[str, Any], ChatRequest], Iterator[bytes]]
    """Yields a reply as server-sent events."""


def named_event(content: Mapping[str, Any]) -> bytes:
    """Return a server-sent event with the name that its content has as ``type``."""
    return f"event: {content['type']}\ndata: ".encode() + orjson.dumps(content) + b"\n\n"
