"""A gateway on a port of its own, in front of an engine that uses a tool, for clients that nobody here wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY

from services.core.endpoints import ENDPOINTS_VARIABLE
from services.gateway.app import create_app
from services.gateway.settings import GatewaySettings
from tests.services.gateway.fake_engine import FakeEngine
from tests.services.run_page.serving import served, served_ready
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
    """A gateway, and the sessions that the tests opened there."""

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
def serving_gateway(directory: Path, engine_url: str, kept: Path) -> Iterator[str]:
    """Serve a gateway in a thread, for clients that take URLs.

    Args:
        directory: the model's.
        engine_url: the engine's URL.
        kept: the sessions' directory.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENDPOINTS_VARIABLE, json.dumps({"rollout-server-0:30000": engine_url.removeprefix("http://")}))
        with served_ready(create_app(GatewaySettings(model_name=str(directory), gateway_dir=kept))) as url:
            yield url


@contextmanager
def serving_clients(directory: Path, kept: Path) -> Iterator[Service]:
    """Serve a gateway. In the end, its traces must have every token that its engine sampled, and no prefix be broken.

    Args:
        directory: the model's.
        kept: the sessions' directory.
    """
    engine = FakeEngine(model(directory))
    before = REGISTRY.get_sample_value("gateway_broken_prefixes_total")
    with served(engine) as engine_url, serving_gateway(directory, engine_url, kept) as url:  # type: ignore[arg-type]
        made = Service(url)
        yield made
        traces = [made.finish(session) for session in made.sessions]
        assert sum(trace["sampled_tokens"] for trace in traces) == engine.completion_tokens > 0
        assert not any(trace["lost_tokens"] for trace in traces)
        assert REGISTRY.get_sample_value("gateway_broken_prefixes_total") == (before or 0.0)
