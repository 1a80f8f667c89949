"""A transport that records an agent's conversation and gives its requests the evaluation's sampling parameters.

An agent gets an ordinary httpx client on top of it, so lengths, turns and the conversation are known whatever library
the agent uses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from evaluation.server import LIMITS

_COMPLETIONS = ("/chat/completions", "/completions")


@dataclass
class Recording:
    """The conversation of one episode so far."""

    turns: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of the first turn."""
    completion_tokens: int = 0
    tool_calls: int = 0
    is_truncated: bool = False
    """Whether the last turn was cut off at its length limit."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    server_error: str | None = None
    """The failure of the server with which the last request ended; None where it was answered."""

    @property
    def last_text(self) -> str:
        """The last text that the model wrote."""
        texts = [m.get("content") for m in self.messages if m.get("role") == "assistant"]
        return next((text for text in reversed(texts) if isinstance(text, str)), "")


@dataclass
class RecordingTransport(httpx.AsyncBaseTransport):
    """A transport over a client that all episodes share; closing the transport leaves that client open."""

    shared: httpx.AsyncClient
    """Sends the requests."""
    forced: dict[str, float]
    """Sampling parameters that win over the agent's own."""
    max_tokens: int
    """Length limit of a turn, unless the agent sets a lower one."""
    recording: Recording
    """The conversation so far, which each request continues."""
    limit_name: str = "max_tokens"
    """The server's name for the length limit."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, over which the agent's own win."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; a request for a completion gets the evaluation's sampling parameters and is recorded."""
        body = None
        if request.method == "POST" and request.url.path.endswith(_COMPLETIONS):
            body = self._with_sampling(json.loads(await request.aread()))
            headers = {k: v for k, v in request.headers.items() if k.lower() not in ("content-length", "host")}
            request = httpx.Request("POST", request.url, headers=headers, json=body, extensions=request.extensions)
        try:
            response = await self.shared.send(request, stream=True)
            # A streamed reply passes unread: its text is for the agent alone.
            is_read = body is not None and not body.get("stream")
            if is_read:
                await response.aread()
        except httpx.TransportError as error:
            self.recording.server_error = f"{type(error).__name__}: {error}"
            raise
        status = response.status_code
        is_overloaded = status >= 500 or status == httpx.codes.TOO_MANY_REQUESTS
        self.recording.server_error = f"the server answered {status}" if is_overloaded else None
        self.recording.turns += status == httpx.codes.OK
        if body is not None and is_read and status == httpx.codes.OK:
            self._record(body, response.json())
        return response

    def _with_sampling(self, body: dict[str, Any]) -> dict[str, Any]:
        limit = min([self.max_tokens, *(int(body[name]) for name in LIMITS if body.get(name))])
        kept = {name: value for name, value in body.items() if name not in LIMITS}
        if self.template_args:
            kept["chat_template_kwargs"] = {**self.template_args, **(body.get("chat_template_kwargs") or {})}
        return {**kept, self.limit_name: limit, **self.forced}

    def _record(self, body: dict[str, Any], reply: dict[str, Any]) -> None:
        recording = self.recording
        usage = reply.get("usage") or {}
        recording.prompt_tokens = recording.prompt_tokens or int(usage.get("prompt_tokens", 0))
        recording.completion_tokens += int(usage.get("completion_tokens", 0))
        choice = reply["choices"][0]
        recording.is_truncated = choice.get("finish_reason") == "length"
        message = choice.get("message") or {"role": "assistant", "content": choice.get("text")}
        answer = {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)}
        recording.tool_calls += len(message.get("tool_calls") or [])
        recording.messages = [*(body.get("messages") or []), answer]
