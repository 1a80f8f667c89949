"""Takes down what an agent says to its model, and sees to it that the model is sampled as the evaluation wants.

An agent gets an ordinary httpx client. What passes through it is recorded, so that lengths, turns and the conversation
are known whatever the agent is made of.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

_COMPLETIONS = ("/chat/completions", "/completions")
# What a client may call the same thing.
_LIMITS = ("max_tokens", "max_completion_tokens")


@dataclass
class Recording:
    """What one episode has said so far."""

    turns: int = 0
    prompt_tokens: int = 0
    """Of the first turn."""
    completion_tokens: int = 0
    tool_calls: int = 0
    is_truncated: bool = False
    """Whether the last turn was cut off at its length limit."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    lost: str | None = None
    """What the last request ended with where the server failed, not the agent."""

    @property
    def last_text(self) -> str:
        """What the model said last."""
        said = [m.get("content") for m in self.messages if m.get("role") == "assistant"]
        return next((text for text in reversed(said) if isinstance(text, str)), "")


class RecordingTransport(httpx.AsyncBaseTransport):
    """Sends requests through a client that all episodes share; closing it closes nothing."""

    def __init__(
        self, shared: httpx.AsyncClient, forced: dict[str, Any], max_tokens: int, recording: Recording
    ) -> None:
        """Makes a transport.

        Args:
            shared: sends the requests.
            forced: sampling parameters that win over what the agent asks for.
            max_tokens: of a turn, where the agent sets no limit or a larger one.
            recording: is filled.
        """
        self._shared = shared
        self._forced = forced
        self._max_tokens = max_tokens
        self._recording = recording

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends a request, completions with the evaluation's sampling parameters."""
        body = None
        if request.method == "POST" and request.url.path.endswith(_COMPLETIONS):
            body = self._with_sampling(json.loads(await request.aread()))
            headers = {k: v for k, v in request.headers.items() if k.lower() not in ("content-length", "host")}
            request = httpx.Request("POST", request.url, headers=headers, json=body, extensions=request.extensions)
        try:
            response = await self._shared.send(request, stream=True)
            if body is None or body.get("stream"):
                # A streamed reply goes on as it is: what it says is the agent's to read.
                self._note_turn(response.status_code)
                return response
            await response.aread()
        except httpx.TransportError as error:
            self._recording.lost = f"{type(error).__name__}: {error}"
            raise
        self._note_turn(response.status_code)
        if response.status_code == httpx.codes.OK:
            self._note_reply(body, response.json())
        return response

    def _with_sampling(self, body: dict[str, Any]) -> dict[str, Any]:
        limit = min([self._max_tokens, *(int(body[name]) for name in _LIMITS if body.get(name))])
        kept = {name: value for name, value in body.items() if name not in _LIMITS}
        return {**kept, "max_tokens": limit, **self._forced}

    def _note_turn(self, status: int) -> None:
        cannot_now = status >= 500 or status == httpx.codes.TOO_MANY_REQUESTS
        self._recording.lost = f"the server answered {status}" if cannot_now else None
        self._recording.turns += status == httpx.codes.OK

    def _note_reply(self, body: dict[str, Any], reply: dict[str, Any]) -> None:
        recording = self._recording
        usage = reply.get("usage") or {}
        if not recording.prompt_tokens:
            recording.prompt_tokens = int(usage.get("prompt_tokens", 0))
        recording.completion_tokens += int(usage.get("completion_tokens", 0))
        choice = reply["choices"][0]
        recording.is_truncated = choice.get("finish_reason") == "length"
        message = choice.get("message") or {"role": "assistant", "content": choice.get("text")}
        said = {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)}
        recording.tool_calls += len(message.get("tool_calls") or [])
        recording.messages = [*(body.get("messages") or []), said]
