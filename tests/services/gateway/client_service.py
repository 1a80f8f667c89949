"""A gateway process in front of an engine that uses a tool, for clients that nobody here wrote."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from services.core.endpoints import ENDPOINTS_VARIABLE
from tests.services.gateway.fake_engine import FakeEngine, running
from tests.waiting import IDLE_SECONDS

QUESTION = "What is 12+30?"
THANKS = "Thanks"


def add(a: int, b: int) -> str:
    """Return the sum of two numbers."""
    return str(a + b)


def model(directory: Path) -> Callable[[dict[str, Any]], list[int]]:
    """Return an engine that calls add where it is offered, repeats a tool's answer, and says goodbye to thanks."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)

    def answer(request: dict[str, Any]) -> list[int]:
        prompt = tokenizer.decode(request["input_ids"])
        last = prompt.rsplit("<|im_start|>", 2)[1]
        if answered := re.search(r"<tool_response>\s*(.*?)\s*</tool_response>", last, re.DOTALL):
            text = f"It is {answered[1]}."
        elif "<tools>" in prompt and "+" in last:
            text = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call>'
        else:
            text = "Bye."
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    return answer


@dataclass
class Service:
    """A gateway in a process of its own, and the sessions that the tests opened there."""

    url: str
    sessions: list[str] = field(default_factory=list)

    def open(self, **limits: Any) -> str:
        """Open a session and return its id."""
        session = f"s{len(self.sessions)}"
        self._ask("POST", "/sessions", json={"id": session, **limits})
        self.sessions.append(session)
        return session

    def finish(self, session: str) -> dict[str, Any]:
        """Finish a session and return its trace."""
        trace: dict[str, Any] = self._ask("POST", f"/sessions/{session}/finish").json()
        return trace

    def check(self, session: str, turns: int) -> None:
        """Finish a session; it must be one sequence of so many turns."""
        trace = self.finish(session)
        assert (trace["turns"], len(trace["sequences"]), trace["branches"]) == (turns, 1, 0)
        assert sum(trace["sequences"][0]["loss_mask"]) == trace["sampled_tokens"]

    def _ask(self, method: str, path: str, **fields: Any) -> httpx.Response:
        return httpx.request(
            method, self.url + path, trust_env=False, timeout=IDLE_SECONDS, **fields
        ).raise_for_status()


@contextmanager
def serving_clients(directory: Path, start_service: Any, kept: Path) -> Iterator[Service]:
    """Run a gateway. In the end, its traces must have every token that its engine sampled, and no prefix be broken.

    Args:
        directory: the model's.
        start_service: the fixture.
        kept: the sessions' directory.
    """
    engine = FakeEngine(model(directory))
    with _in_thread(engine):
        mapping = {"rollout-server-0:30000": f"127.0.0.1:{engine.port}", "gateway-0:8005": "127.0.0.1:0"}
        process = start_service(
            "services.gateway",
            MODEL_NAME=str(directory),
            GATEWAY_DIR=str(kept),
            **{ENDPOINTS_VARIABLE: json.dumps(mapping)},
        )
        made = Service(process.url)
        yield made
        traces = [made.finish(session) for session in made.sessions]
        assert sum(trace["sampled_tokens"] for trace in traces) == engine.completion_tokens > 0
        assert not any(trace["lost_tokens"] for trace in traces)
        metrics = httpx.get(made.url + "/metrics", trust_env=False, timeout=IDLE_SECONDS).text
        assert "gateway_broken_prefixes_total 0.0" in metrics
        process.end()


@contextmanager
def _in_thread(engine: FakeEngine) -> Iterator[None]:
    """Serve an engine, whose event loop is that of no test."""
    loop, started, stopped = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with running(engine):
            started.set()
            await stopped.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    started.wait()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        loop.close()
