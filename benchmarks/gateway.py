"""The gateway with an engine that costs nothing: calls a second, and the time that it adds."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import uvloop

from benchmarks import harness, service
from benchmarks.harness import Args, Benchmark, Option, Side
from benchmarks.models import PRETRAINED
from benchmarks.rollout_tier import quick_engines
from benchmarks.service import Connection, Figure, percentile
from services.core.endpoints import ENDPOINTS_VARIABLE


@dataclass(frozen=True)
class Shape:
    """The conversations of a load."""

    sessions: int = 64
    """Sessions at once."""
    turns: int = 4
    """Calls of a session."""
    paragraphs: int = 5
    """Paragraphs of what an agent adds between two calls, each of 22 tokens."""


MANY = Shape(sessions=1000, turns=20, paragraphs=13)
"""Agents at scale: the last prompt of a session has 8,000 tokens."""
MANY_SECONDS = 1.2
"""The time of an answer of 60 tokens from an engine that has 1,000 of them under way."""
RATES = (100, 200)
"""Calls a second."""
ENGINE_SECONDS = 0.1
TEMPLATE = harness.ROOT / "tests/services/gateway/templates/qwen2.5.jinja"

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up what the encyclopedia says on a subject, and return its first paragraphs.",
        "parameters": {
            "type": "object",
            "properties": {
                "subject": {"type": "string", "description": "The title of the article."},
                "paragraphs": {"type": "integer", "description": "How many paragraphs to return."},
            },
            "required": ["subject"],
        },
    },
}
SYSTEM = "You answer questions by the encyclopedia. Look up what you do not know, and say where you found it. " * 5
PARAGRAPH = "The river rises in the hills above the old town, turns south at the mill, and flows into the sea. "
ANSWERS = (
    '<tool_call>\n{"name": "look_up", "arguments": {"subject": "rivers of the north %d", "paragraphs": 3}}\n'
    "</tool_call>",
    "The article number %d does not say where the river ends, so that I cannot answer the question from it alone. It "
    "says that the river turns south at the mill; please give me another name of the river or of a town at its end.",
)


@dataclass
class Load:
    """The sessions of a measurement."""

    name: str
    port: int
    rate: float | None
    """Calls a second; None: each session calls again at once."""
    shape: Shape = Shape()
    milliseconds: list[float] = field(default_factory=list)
    """Latencies of the calls."""
    seconds: float = 0.0
    """The time of all calls, without the creation of sessions and their traces."""
    tracing: float = 0.0
    """The time in which all traces were read, one after the other."""
    tokens: int = 0
    """Tokens of the last session."""
    _started: float = 0.0

    async def run(self, waves: int) -> None:
        """Play ``waves`` episodes in each session's place, one after the other."""
        for wave in range(waves):
            async with service.connect(self.port) as connection:
                for place in range(self.shape.sessions):
                    request = {"id": f"{self.name}-{wave}-{place}", "seed": place}
                    await connection.request("POST", "/sessions", orjson.dumps(request))
            self._started = time.perf_counter()
            await asyncio.gather(*(self._episode(wave, place) for place in range(self.shape.sessions)))
            self.seconds += time.perf_counter() - self._started
            async with service.connect(self.port) as connection:
                began = time.perf_counter()
                for place in range(self.shape.sessions):
                    trace = orjson.loads(
                        await connection.request("POST", f"/sessions/{self.name}-{wave}-{place}/finish")
                    )
                    assert trace["turns"] == self.shape.turns
                    [sequence] = trace["sequences"]  # else a conversation was broken
                self.tracing += time.perf_counter() - began
                self.tokens = len(sequence["prompt_ids"]) + len(sequence["completion_ids"])

    async def _episode(self, wave: int, place: int) -> None:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Where does river {wave}-{place} end? " + PARAGRAPH * 4},
        ]
        async with service.connect(self.port) as connection:
            for turn in range(self.shape.turns):
                if self.rate is not None:
                    begin = self._started + (turn * self.shape.sessions + place) / self.rate
                    await asyncio.sleep(begin - time.perf_counter())
                message = await self._call(connection, f"{self.name}-{wave}-{place}", messages)
                messages.append(message)
                text = (
                    f"Article {wave}-{place}-{turn}. " + PARAGRAPH * self.shape.paragraphs
                )  # Another one for each call.
                if calls := message.get("tool_calls"):
                    messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": text})
                else:
                    messages.append({"role": "user", "content": f"Try again. {text}"})

    async def _call(self, connection: Connection, session: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        body = orjson.dumps({"model": "m", "messages": messages, "tools": [TOOL]})
        started = time.perf_counter()
        reply = await connection.request("POST", f"/sessions/{session}/v1/chat/completions", body)
        self.milliseconds.append(1e3 * (time.perf_counter() - started))
        message: dict[str, Any] = orjson.loads(reply)["choices"][0]["message"]
        return message


@contextmanager
def gateway(model: Path, directory: str | None, engine_seconds: float) -> Iterator[service.Service]:
    """Run the gateway and an engine that answers after ``engine_seconds``."""
    with ExitStack() as stack:
        [port] = stack.enter_context(quick_engines(1, engine_seconds, model))
        endpoints = {"rollout-server-0:30000": f"127.0.0.1:{port}", "gateway-0:8005": "127.0.0.1:0"}
        kept = stack.enter_context(tempfile.TemporaryDirectory(dir=directory))
        environment = {
            "MODEL_NAME": str(model),
            "GATEWAY_DIR": kept,
            ENDPOINTS_VARIABLE: orjson.dumps(endpoints).decode(),
        }
        yield stack.enter_context(service.running("gateway", **environment))


def write_model(source: Path, model: Path) -> None:
    """Write ``source``'s tokenizer with a template that has tools, and the engine's replies."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = TEMPLATE.read_text("utf-8")
    tokenizer.response_template = None  # The replies have their calls in the form of the chat template.
    tokenizer.save_pretrained(model)
    AutoConfig.from_pretrained(source).save_pretrained(model)
    replies = []
    for number in range(100):
        ids = tokenizer.encode(ANSWERS[number % len(ANSWERS)] % number, add_special_tokens=False)
        ids.append(tokenizer.convert_tokens_to_ids("<|im_end|>"))
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": "3",
            "output_token_logprobs": [[-1.0 / (place + 1.1), token, None] for place, token in enumerate(ids)],
        }
        replies.append(orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta}).decode())
    (model / "replies.json").write_bytes(orjson.dumps(replies))


def figures(model: Path, directory: str | None, waves: int) -> Iterator[Figure]:
    """Measure the gateway saturated, then at RATES."""
    with gateway(model, directory, 0.0) as process:
        uvloop.run(Load("first", process.port, None).run(1))  # Templates are compiled, connections opened.
        load, before = Load("next", process.port, None), process.cpu_seconds()
        uvloop.run(load.run(waves))
        used = process.cpu_seconds() - before
    calls = len(load.milliseconds)
    yield Figure("saturated, calls", calls / load.seconds, "1/s", at_least=200)
    yield percentile("saturated, latency", 50, load.milliseconds)
    yield percentile("saturated, latency", 99, load.milliseconds)
    yield Figure("saturated, gateway's CPU a call, sessions included", 1e3 * used / calls, "ms")
    for rate in RATES:
        with gateway(model, directory, ENGINE_SECONDS) as process:
            uvloop.run(Load("first", process.port, rate).run(1))
            load = Load("next", process.port, rate)
            uvloop.run(load.run(waves))
        added = [latency - 1e3 * ENGINE_SECONDS for latency in load.milliseconds]
        yield Figure(f"at {rate} a second, calls", len(added) / load.seconds, "1/s")
        yield percentile(f"at {rate} a second, added", 50, added, at_most=10)
        yield percentile(f"at {rate} a second, added", 99, added, at_most=30)


def many_figures(model: Path, directory: str | None, shape: Shape) -> Iterator[Figure]:
    """Measure a thousand sessions at once, whose prompts grow to 8,000 tokens."""
    with gateway(model, directory, MANY_SECONDS) as process:
        uvloop.run(Load("first", process.port, None, Shape(sessions=8)).run(1))
        load, before = Load("next", process.port, None, shape), process.cpu_seconds()
        uvloop.run(load.run(1))
        used, calls = process.cpu_seconds() - before, len(load.milliseconds)
        yield Figure("calls", calls / load.seconds, "1/s")
        yield Figure("engines alone, calls", shape.sessions / MANY_SECONDS, "1/s")
        yield Figure("tokens of a session", load.tokens, "")
        for share in (50, 99):
            added = [latency - 1e3 * MANY_SECONDS for latency in load.milliseconds]
            yield percentile("added", share, added)
        yield Figure("gateway's CPU a call, sessions included", 1e3 * used / calls, "ms")
        yield Figure("a trace", 1e3 * load.tracing / shape.sessions, "ms")
        yield Figure("gateway's memory", process.memory_mb(), "MB")


def measure(args: Args) -> list[Side]:
    """Measure how many calls a second the gateway records, and what it adds to the engine's time.

    64 sessions at once play episodes of 4 turns with a tool; prompts grow from about 350 to 1,000 tokens, and each turn
    has about 60. Every call is on the disk before it is answered. The gateway has a process of its own; this process
    makes the load, and a third one plays the engine and answers any prompt after a fixed time. Each has one thread for
    its work, and all of them share the machine's cores. A latency counts from the request to the whole reply, as the
    agent sees it, less the engine's fixed time. "saturated": each session calls again at once and the engine takes no
    time. Other loads have a fixed number of calls a second, evenly spaced, and an engine that takes 0.1 s. The exit
    code is 1 if a target is missed. With --quick there are fewer episodes.
    """
    with tempfile.TemporaryDirectory() as name:
        write_model(args.model, Path(name))
        model = Path(name)
        loads = {
            "64 sessions of 4 turns": partial(figures, model, args.directory, 2 if args.quick else 8),
            "1,000 sessions of 20 turns": partial(
                many_figures, model, args.directory, replace(MANY, sessions=250) if args.quick else MANY
            ),
        }
        return service.measure_figures(loads, args)


GATEWAY = Benchmark(
    measure=measure,
    tables=service.figure_table("the gateway with an engine that costs nothing"),
    rounds=3,
    options={
        "model": Option(PRETRAINED, "whose tokenizer to use"),
        "directory": Option(None, "where the gateway writes; default the system's for new files"),
        "no-fail": service.NO_FAIL,
    },
    conclude=service.has_missed,
)
