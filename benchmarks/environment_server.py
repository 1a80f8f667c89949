"""Measure one environment-server with 256 episodes at once: gymnasium's CartPole, and a guessing game of text.

    python -m benchmarks.environment_server [--quick] [--rounds N] [--json FILE]

The server is a process of its own. "One client" steps all its episodes in each request, as the evaluation head and
trajectories do; "256 clients" each step one episode over a connection of their own, as episodes of training do. The
clients push the cart to the side where the pole leans, and find the number by bisection. They share one process, whose
cost is in every number. The latency of a step is that of a request to /step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson
import psutil

from benchmarks.common import harness
from benchmarks.common.service import Connection, Figure, connect, percentile, running
from benchmarks.services import row

EPISODES = 256
Act = Callable[[Any], Any]


def push(state: list[float]) -> int:
    """Return the action for a state of CartPole; the pole falls after some forty steps."""
    return int(state[2] > 0)


def bisect(state: list[dict[str, str]]) -> str:
    """Return the guess for a conversation of the guessing game."""
    low, high = 1, 100
    for guess, answer in zip(state[1::2], state[2::2], strict=True):
        if answer["content"] == "Higher.":
            low = int(guess["content"]) + 1
        else:
            high = int(guess["content"]) - 1
    return str((low + high) // 2)


ENVIRONMENTS: dict[str, Act] = {"CartPole-v1": push, "guessing": bisect}


class Load:
    """The episodes to play, and the milliseconds of each step."""

    def __init__(self, act: Act, episodes: int) -> None:
        self._act = act
        self._left = episodes
        self.steps = 0
        self.milliseconds: list[float] = []

    async def play(self, connection: Connection, at_once: int) -> None:
        """Play episodes, ``at_once`` in each request, until there are none left."""
        live: list[dict[str, Any]] = []
        while True:
            if (count := min(at_once - len(live), self._left)) > 0:
                self._left -= count
                body = orjson.dumps({"episodes": count, "seed": self._left})
                begun = orjson.loads(await connection.request("POST", "/reset", body))["episodes"]
                live += [{"episode": one["episode"], "state": one["state"], "steps": 0} for one in begun]
            if not live:
                return
            live = await self._step(connection, live)

    async def _step(self, connection: Connection, live: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        steps = [{"episode": o["episode"], "step": o["steps"], "action": self._act(o["state"])} for o in live]
        body = orjson.dumps({"steps": steps})
        started = time.perf_counter()
        reply = await connection.request("POST", "/step", body)
        self.milliseconds.append(1e3 * (time.perf_counter() - started))
        self.steps += len(live)
        return [result for result in orjson.loads(reply)["results"] if result["status"] == "running"]


async def play(port: int, act: Act, clients: int, episodes: int) -> tuple[Load, float]:
    """Play ``episodes`` by so many clients; return the load and the seconds."""
    load = Load(act, episodes)

    async def client() -> None:
        async with connect(port) as connection:
            await load.play(connection, EPISODES // clients)

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return load, time.perf_counter() - started


def figures(*, quick: bool) -> Iterator[Figure]:
    """Measure each environment with one client and with many."""
    for environment, act in ENVIRONMENTS.items():
        with running("environment_server", ENVIRONMENT=environment, JOBGROUP_TOKEN="") as server:
            for clients, times in ((1, 4), (EPISODES, 4)):
                episodes = EPISODES * (1 if quick else times)
                process = psutil.Process(server.pid)
                cpu = sum(process.cpu_times()[:2])
                load, seconds = asyncio.run(play(server.port, act, clients, episodes))
                cpu = sum(process.cpu_times()[:2]) - cpu
                name = f"{environment}, {clients} client{'s' * (clients > 1)}"
                yield Figure(f"{name}, episodes", episodes / seconds, "1/s")
                yield Figure(f"{name}, steps", load.steps / seconds, "1/s")
                yield Figure(f"{name}, processor time of a step", 1e6 * cpu / load.steps, "us")
                yield percentile(f"{name}, step", 50, load.milliseconds)
                yield percentile(f"{name}, step", 99, load.milliseconds)
            yield Figure(f"{environment}, memory", server.memory_mb(), "MB")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    given = harness.CommandLine("environment_server", rounds=3, quick="256 episodes a side, one round").parse(arguments)
    rounds = [list(figures(quick=given.quick)) for _ in range(given.rounds)]
    rows = [row("environment-server", measured) for measured in zip(*rounds, strict=True)]
    columns = ("service", "load", "median (least to most)", "unit", "target")
    title = f"one environment-server, {EPISODES} episodes at once"
    harness.finish(given, [harness.table(title, columns, rows)], rows)


if __name__ == "__main__":
    main()
