"""An engine with a test's answers, on a port of its own: the part of SGLang's /generate that the gateway uses."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from services.http.server import serving

Reply = dict[str, Any] | int
"""A body, or a status without one."""


@dataclass
class FakeEngine:
    """Answers each prompt with the tokens that ``answer`` returns, and counts them."""

    answer: Callable[[dict[str, Any]], list[int]]
    """Returns the ids of a completion to a request, of which the engine gives as many as the request allows."""
    port: int = 0
    seconds: float = 0.0
    """The time of each answer."""
    version: int = 3
    later_version: int | None = None
    """The version of a completion's tokens but the first, as if weights changed in mid-turn; None: ``version``."""
    troubles: list[int | None] = field(default_factory=list)
    """For the next requests: none, an HTTP status, or, below 100, the number of tokens of an aborted completion."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    completion_tokens: int = 0
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at first; while it is clear, requests wait for their answers."""

    def __post_init__(self) -> None:
        self.may_answer.set()

    def prompts(self) -> list[list[int]]:
        """Return the prompts so far."""
        return [request["input_ids"] for request in self.requests]

    def reply(self, request: dict[str, Any]) -> Reply:
        self.requests.append(request)
        trouble = self.troubles.pop(0) if self.troubles else None
        if trouble is not None and trouble >= 100:
            return trouble
        ids, limit = self.answer(request), request["sampling_params"]["max_new_tokens"]
        finish = "stop" if len(ids) <= limit else "length"
        ids = ids[:limit]
        if trouble is not None:
            ids, finish = ids[:trouble], "abort"
        self.completion_tokens += len(ids)
        meta = {
            "id": request["rid"],
            "finish_reason": {"type": finish},
            "completion_tokens": len(ids),
            "weight_version": str(self.version),
            "output_token_logprobs": [[logprob(request["input_ids"], n), id, None] for n, id in enumerate(ids)],
        }
        if self.later_version is not None:
            spans = ((self.version, 0, 1), (self.later_version, 1, len(ids)))
            meta["weight_versions"] = [{"version": str(v), "start": start, "end": end} for v, start, end in spans]
        return {"text": "", "output_ids": ids, "meta_info": meta}

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        reply = self.reply(orjson.loads(body))
        await asyncio.sleep(self.seconds)
        await self.may_answer.wait()
        status, content = (reply, b"{}") if isinstance(reply, int) else (200, orjson.dumps(reply))
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def logprob(prompt_ids: list[int], place: int) -> float:
    """Return a log-probability that depends on the whole prompt, as a real one does."""
    digest = hashlib.blake2b(orjson.dumps([prompt_ids, place]), digest_size=2).digest()
    return -int.from_bytes(digest, "big") / 65536


@asynccontextmanager
async def running(engine: FakeEngine) -> AsyncIterator[FakeEngine]:
    """Serve the engine on a free port of this machine."""
    async with serving(engine, timeout_keep_alive=60) as url:
        engine.port = int(url.rpartition(":")[2])
        yield engine
