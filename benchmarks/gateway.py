"""The gateway with engines that cost nothing: calls a second, and the time that it adds to an engine's.

1,000 sessions at once play episodes of 20 turns with a tool, whose prompts grow from about 350 to 7,550 tokens. Every
call is on the disk before it is answered. Gateway, engine and load are three processes that share the machine's cores.
A latency counts from the request to the whole reply, less ENGINE_SECONDS. Each session calls again at once.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import uvloop

from benchmarks import job, load
from benchmarks.load import Connection, Figure, Service, connect, percentile
from local_runner.nodes import free_port
from services.core.endpoints import ENDPOINTS_VARIABLE

TURNS = 20
"""Calls of a session."""
PARAGRAPHS = 13
"""Paragraphs of what an agent adds between two calls, each of 22 tokens."""
ENGINE_SECONDS = 1.2
"""The engine's time for an answer; one that has 1,000 answers of 60 tokens under way takes as long for each."""
TEMPLATE = job.ROOT / "tests/services/gateway/templates/qwen2.5.jinja"

TEXT = {"type": "string", "description": "The title of the article."}
PARAMETERS = {"type": "object", "properties": {"subject": TEXT}, "required": ["subject"]}
ABOUT = "Look up what the encyclopedia says on a subject, and return its first paragraphs."
TOOL = {"type": "function", "function": {"name": "look_up", "description": ABOUT, "parameters": PARAMETERS}}
SYSTEM = "You answer questions by the encyclopedia. Look up what you do not know, and say where you found it. " * 5
PARAGRAPH = "The river rises in the hills above the old town, turns south at the mill, and flows into the sea. "
ANSWERS = (
    '<tool_call>\n{"name": "look_up", "arguments": {"subject": "rivers of the north %d"}}\n</tool_call>',
    "The article number %d does not say where the river ends, so that I cannot answer the question from it alone. It "
    "says that the river turns south at the mill; please give me another name of the river or of a town at its end.",
)


@dataclass
class Sessions:
    """The sessions of a measurement."""

    name: str
    port: int
    count: int
    """Sessions at once."""
    milliseconds: list[float] = field(default_factory=list)
    """Latencies of the calls."""
    seconds: float = 0.0
    """The time of all calls, without the creation of sessions and their traces."""
    tracing: float = 0.0
    """The time in which all traces were read, one after the other."""
    tokens: int = 0
    """Tokens of the last session."""

    async def run(self) -> None:
        """Play an episode in each session."""
        async with connect(self.port) as connection:
            for place in range(self.count):
                request = {"id": f"{self.name}-{place}", "seed": place}
                await connection.request("POST", "/sessions", orjson.dumps(request))
        started = time.perf_counter()
        await asyncio.gather(*map(self._episode, range(self.count)))
        self.seconds = time.perf_counter() - started
        async with connect(self.port) as connection:
            began = time.perf_counter()
            for place in range(self.count):
                trace = orjson.loads(await connection.request("POST", f"/sessions/{self.name}-{place}/finish"))
                assert trace["turns"] == TURNS
                [sequence] = trace["sequences"]  # else a conversation was broken
            self.tracing = time.perf_counter() - began
            self.tokens = len(sequence["prompt_ids"]) + len(sequence["completion_ids"])

    async def _episode(self, place: int) -> None:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Where does river {place} end? " + PARAGRAPH * 4},
        ]
        async with connect(self.port) as connection:
            for turn in range(TURNS):
                message = await self._call(connection, f"{self.name}-{place}", messages)
                messages.append(message)
                # Another one for each call.
                text = f"Article {place}-{turn}. " + PARAGRAPH * PARAGRAPHS
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


async def answer(replies: Sequence[str], reader: Any, writer: Any) -> None:
    """Answer the requests of a connection in turn, /generate after ENGINE_SECONDS with one of ``replies``."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            body = await reader.readexactly(int(length or 0))
            reply = b'{"success": true, "weight_version": "3", "is_generation": true}'
            if head.split(b" ", 2)[1] == b"/generate":
                await asyncio.sleep(ENGINE_SECONDS)
                reply = replies[zlib.crc32(body) % len(replies)].encode()
            start = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(reply)
            writer.write(start + reply)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def serve(port: int, replies: Sequence[str]) -> None:
    """Serve an engine that costs nearly nothing, in a process of its own."""

    async def run() -> None:
        async with await asyncio.start_server(partial(answer, replies), "127.0.0.1", port, backlog=1024):
            await asyncio.Event().wait()

    uvloop.run(run())


@contextmanager
def gateway(model: Path) -> Iterator[Service]:
    """Run the gateway and the engine."""
    with ExitStack() as stack:
        port = free_port()
        replies = orjson.loads((model / "replies.json").read_bytes())
        engine = multiprocessing.get_context("spawn").Process(target=serve, args=(port, replies))
        engine.start()
        stack.callback(engine.terminate)
        endpoints = {"rollout-server-0:30000": f"127.0.0.1:{port}", "gateway-0:8005": "127.0.0.1:0"}
        kept = stack.enter_context(tempfile.TemporaryDirectory())
        hosts = {ENDPOINTS_VARIABLE: orjson.dumps(endpoints).decode()}
        yield stack.enter_context(load.running("gateway", MODEL_NAME=str(model), GATEWAY_DIR=kept, **hosts))


def write_model(source: str, model: Path) -> None:
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


def figures(model: Path, count: int) -> Iterator[Figure]:
    """Measure the load of ``count`` sessions, after a small one that compiles templates."""
    with gateway(model) as process:
        uvloop.run(Sessions("first", process.port, 8).run())
        sessions, before = Sessions("next", process.port, count), process.cpu_seconds()
        uvloop.run(sessions.run())
        used, calls = process.cpu_seconds() - before, len(sessions.milliseconds)
        yield Figure("calls", calls / sessions.seconds, "1/s")
        yield Figure("tokens of a session", sessions.tokens, "")
        for share in (50, 99):
            yield percentile("added", share, [latency - 1e3 * ENGINE_SECONDS for latency in sessions.milliseconds])
        yield Figure("gateway's CPU a call, sessions included", 1e3 * used / calls, "ms")
        yield Figure("a trace", 1e3 * sessions.tracing / count, "ms")
        yield Figure("gateway's memory", process.memory_mb(), "MB")


def main() -> None:
    """Measure the load."""
    parser = load.parser("gateway", __doc__)
    parser.add_argument("--model", default=".cache/models/smollm2-135m", help="whose tokenizer to use")
    args = parser.parse_args()
    count = 250 if args.quick else 1000
    with tempfile.TemporaryDirectory() as name:
        write_model(args.model, model := Path(name))
        load.measure({f"{count:,} sessions of {TURNS} turns": partial(figures, model, count)}, args)


if __name__ == "__main__":
    main()
