"""Rollout nodes with simulated engines behind the real router."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from benchmarks import harness, service
from benchmarks.service import Service
from services.clients.rollout import ROUTING_KEY
from services.core.endpoints import Endpoint
from services.engines.engine import ROUTED
from services.engines.router import RouterAdmin, proxy_command, router_command
from services.engines.settings import RolloutSettings
from services.rollout_server.registration import poll_seconds

ENGINE_SECONDS = 1.0
PROMPT_TOKENS, ANSWER_TOKENS = 4000, 60
"""The mean of an agent's calls, as in the gateway's benchmark."""
POLLS_SECONDS = 5.0


@dataclass(frozen=True)
class Tier:
    """Rollout nodes with simulated engines behind the real router."""

    services: dict[str, Service]
    """The router and, with a token, the proxy in front of it, which clients reach."""
    engines: list[int]
    token: str

    @property
    def address(self) -> Endpoint:
        """Where clients reach the router."""
        return Endpoint("127.0.0.1", [*self.services.values()][-1].port)

    def cpu_seconds(self) -> dict[str, float]:
        """Return the processor time of each process so far."""
        return {name: process.cpu_seconds(recursive=True) for name, process in self.services.items()}

    async def register(self) -> float:
        """Register all engines at once, as launchers do; return the seconds until the router sends them requests."""
        began = time.perf_counter()
        async with RouterAdmin(self.address, self.token) as admin:
            urls = [f"http://127.0.0.1:{port}" for port in self.engines]
            await asyncio.gather(*(admin.add(ROUTED(url, self.token, timeout=60)) for url in urls))
            async with asyncio.timeout(service.START_SECONDS):
                while sum(worker.is_healthy for worker in await admin.workers()) < len(urls):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        return time.perf_counter() - began

    async def poll(self) -> int:
        """Ask for POLLS_SECONDS what the launchers of all nodes ask again and again; return how often they did."""
        pause, count = poll_seconds(len(self.engines)), 0

        async def node(number: int) -> None:
            nonlocal count
            await asyncio.sleep(pause * number / len(self.engines))
            async with service.connect(self.address.port) as connection:
                while True:
                    for path in ("/health", "/workers"):
                        await connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}"})
                    count += 1
                    await asyncio.sleep(pause)

        polls = [asyncio.create_task(node(number)) for number in range(len(self.engines))]
        await asyncio.wait(polls, timeout=POLLS_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
        for poll in polls:
            poll.cancel()
        ends = await asyncio.gather(*polls, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        return count

    async def call(self, sessions: int, calls: int) -> list[float]:
        """Return the milliseconds of each call of sessions at once, each of which calls again at once."""
        body = orjson.dumps(ROUTED.generate_body(range(10_000, 10_000 + PROMPT_TOKENS), {"max_new_tokens": 60, "n": 1}))
        milliseconds: list[float] = []

        async def session(number: int) -> None:
            headers = {ROUTING_KEY: f"session-{number}", "Authorization": f"Bearer {self.token}"}
            await asyncio.sleep(ENGINE_SECONDS * number / sessions)  # Real sessions do not all call at the same time.
            async with service.connect(self.address.port) as connection:
                for call in range(1 + calls):
                    began = time.perf_counter()
                    await connection.request("POST", ROUTED.generate_path, body, headers=headers)
                    if call:  # Connections are opened for the first.
                        milliseconds.append(1e3 * (time.perf_counter() - began))

        await asyncio.gather(*map(session, range(sessions)))
        return milliseconds


@contextmanager
def quick_engines(count: int, seconds: float, model: Path) -> Iterator[list[int]]:
    """Run engines that answer after ``seconds`` with one of the model's replies.json; yield their ports."""
    command = [sys.executable, "-m", "benchmarks.quick_engine", str(count), str(seconds), str(model / "replies.json")]
    with harness.programs([command], [os.environ], None) as [process]:
        assert process.stdout is not None
        yield [*map(int, process.stdout.readline().split())]


@contextmanager
def rollout_tier(model: Path, nodes: int, token: str = "") -> Iterator[Tier]:
    """Run the router with registered engines, behind the authenticating proxy if there is a token."""
    with ExitStack() as stack:
        engines = stack.enter_context(quick_engines(nodes, ENGINE_SECONDS, model))
        listen, metrics = (Endpoint("127.0.0.1", harness.free_port()) for _ in range(2))
        command = router_command(RolloutSettings.load(model_name=str(model)), listen, metrics)
        variables = {**command.variables(), "JOBGROUP_TOKEN": token}
        found = {"router": stack.enter_context(service.started(command.line, listen.port, variables))}
        if token:
            front = Endpoint("127.0.0.1", harness.free_port())
            proxy = proxy_command(front, listen, nodes)
            variables = {**proxy.variables(), "JOBGROUP_TOKEN": token}
            found["proxy"] = stack.enter_context(service.started(proxy.line, front.port, variables))
        yield Tier(found, engines, token)


def write_model(model: Path) -> None:
    """Write a tiny model, and the engines' reply."""
    from toys.arithmetic import build_tokenizer
    from toys.models import qwen2, random_model

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    random_model(qwen2(vocab_size=32, num_key_value_heads=1, **sizes)).save_pretrained(model)
    build_tokenizer().save_pretrained(model)
    logprobs = [[-1.0 / (place + 1.1), 20_000 + place, None] for place in range(ANSWER_TOKENS)]
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "0", "output_token_logprobs": logprobs}
    (model / "replies.json").write_bytes(orjson.dumps([orjson.dumps({"text": "", "meta_info": meta}).decode()]))
