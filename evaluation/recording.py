"""A transport that records an agent's conversation and gives its requests the evaluation's sampling parameters.

An agent gets an ordinary httpx client on top of it, so lengths, turns and the conversation are known whatever library
the agent uses.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import httpx

from evaluation.server import LIMITS
from evaluation.settings import EvaluationSettings
from services.core.tasks import Stopwatch
from services.protocol.base import derive_seed

_COMPLETIONS = ("/chat/completions", "/completions")
_OTHER_API = re.compile(r"/(messages|responses)(/[^/]+)?$")
ONLY_CHAT = (
    "an evaluation samples and records only the chat completions of OpenAI's API. Anthropic's Messages API and "
    "OpenAI's Responses API are for training, whose gateway answers them. Have the agent ask for chat completions, or "
    "set EVAL_PROMPTS in its run and see accuracy in metrics.jsonl"
)


@dataclass
class Recording:
    """The conversation of one episode so far."""

    turns: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of the first turn."""
    completion_tokens: int = 0
    tool_calls: int = 0
    is_truncated: bool = False
    """True if the last turn was cut off at its length limit."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    server_error: str | None = None
    """The failure of the server with which the last request ended; None where it was answered."""
    refused: str | None = None
    """The reason why the last request was not sent; None where it was."""
    other_api: str | None = None
    """The path of a request by an API that is not recorded."""
    equal: defaultdict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    """A flag for each of the equal requests, by the digest of their bodies: answered or in flight."""

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
    settings: EvaluationSettings
    """The limits of an episode and of its turns, unless the agent sets a lower one, and the chat template's arguments,
    over which the agent's own win."""
    forced: dict[str, Any]
    """Sampling parameters that win over the agent's own."""
    seed: int | None
    """The episode's seed; None: requests have none."""
    recording: Recording
    """The conversation so far, which each request continues."""
    waits: Stopwatch
    """Runs while a request waits for its reply; for a streamed reply, until it begins."""
    limit_name: str = LIMITS[0]
    """The server's name for the length limit."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; a request for a completion gets the evaluation's sampling parameters and is recorded."""
        recording, path = self.recording, request.url.path
        recording.refused = None
        if _OTHER_API.search(path):
            recording.other_api = path
            return self._refuse(404, f"{path}: {ONLY_CHAT}")
        if request.method != "POST" or not path.endswith(_COMPLETIONS):
            return await self._send(request, is_read=False)
        body = json.loads(await request.aread())
        digest = _digest(body)
        equal = recording.equal[digest]
        # A retry takes the place, and with it the seed, of the attempt that failed, or whose reply was lost.
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        number = equal.index(False) if False in equal else len(equal) - (is_retry and bool(equal))
        is_new = number == len(equal) or not equal[number]
        if is_new and (limit := self._reached_limit()):
            return self._refuse(429, f"the episode has had its {limit}; end the agent's loop before")
        equal[number:] = [True, *equal[number + 1 :]]
        seeded = {} if self.seed is None else {"seed": derive_seed(self.seed, digest, number)}
        body = self._with_sampling(body) | seeded
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("content-length", "host")}
        request = httpx.Request("POST", request.url, headers=headers, json=body, extensions=request.extensions)
        is_answered = False
        try:
            # A streamed reply passes unread: its text is for the agent alone.
            response = await self._send(request, is_read=not body.get("stream"))
            is_answered = response.status_code == httpx.codes.OK
        finally:
            if is_new and not is_answered:
                equal[number] = False
        recording.turns += is_answered
        if is_answered and not body.get("stream"):
            self._record(body, response.json())
        return response

    async def _send(self, request: httpx.Request, *, is_read: bool) -> httpx.Response:
        try:
            with self.waits.running():
                response = await self.shared.send(request, stream=True)
                if is_read:
                    await response.aread()
        except httpx.TransportError as error:
            self.recording.server_error = f"{type(error).__name__}: {error}"
            raise
        status = response.status_code
        is_overloaded = status >= 500 or status == httpx.codes.TOO_MANY_REQUESTS
        self.recording.server_error = f"the server answered {status}" if is_overloaded else None
        return response

    def _refuse(self, status: int, why: str) -> httpx.Response:
        """Answer a request here; the header keeps OpenAI's clients from asking again."""
        self.recording.refused = why
        return httpx.Response(status, headers={"X-Should-Retry": "false"}, json={"error": {"message": why}})

    def _reached_limit(self) -> str | None:
        settings, recording = self.settings, self.recording
        if sum(map(sum, recording.equal.values())) >= settings.agent_max_turns:
            return f"{settings.agent_max_turns} turns (AGENT_MAX_TURNS)"
        if recording.completion_tokens >= settings.agent_max_tokens:
            return f"{settings.agent_max_tokens} tokens (AGENT_MAX_TOKENS)"
        return None

    def _with_sampling(self, body: dict[str, Any]) -> dict[str, Any]:
        left = (self.settings.agent_max_tokens - self.recording.completion_tokens) // (body.get("n") or 1)
        limits = (int(body[name]) for name in LIMITS if body.get(name))
        limit = max(1, min(self.settings.max_new_tokens, left, *limits))
        kept = {name: value for name, value in body.items() if name not in LIMITS}
        if args := self.settings.chat_template_args:
            kept["chat_template_kwargs"] = {**args, **(body.get("chat_template_kwargs") or {})}
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


def other_api_of(error: BaseException | None) -> str | None:
    """Return the path of a failed request, of a client that the agent made itself, by an API that is not recorded."""
    while error is not None:
        # The errors of OpenAI's and Anthropic's packages have the request.
        path = getattr(getattr(vars(error).get("request"), "url", None), "path", "")
        if _OTHER_API.search(path):
            return str(path)
        error = error.__cause__
    return None


def _digest(body: dict[str, Any]) -> str:
    """Return a digest of a request's body, the same whether or not the reply is streamed."""
    asked = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    return hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=16).hexdigest()
