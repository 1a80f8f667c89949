"""Measure POST /evaluate with a batch of states as JSON, as raw float32 and as MessagePack.

    python -m benchmarks.evaluate_bodies [--quick] [--rounds N] [--states 64] [--numbers 512] [--json FILE]

One client sends request after request over one connection to a head whose policy is a linear layer, so that reading
the body is most of the work. A request's time is from its numpy array to the reply's bytes: encoding it counts.
The exit code is 1 if a body gets other actions.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import orjson
import psutil
import torch
from numpy.typing import NDArray

from benchmarks.common import harness
from benchmarks.common.harness import spread
from benchmarks.common.service import Connection, connect, running
from services.evaluation_head.app import MSGPACK, RAW
from services.evaluation_head.checkpoint import save_policy
from services.protocol.evaluation import ActionKind, ActionSpec, StateKind, StateSpec

ACTIONS = 4
WARM_UP = 20

Encode = Callable[[NDArray[np.float32]], tuple[str, bytes]]
"""Returns the path with its query, and the body."""


def as_json(states: NDArray[np.float32]) -> tuple[str, bytes]:
    """Return the states as nested lists."""
    return "/evaluate", orjson.dumps({"states": states}, option=orjson.OPT_SERIALIZE_NUMPY)


def as_raw(states: NDArray[np.float32]) -> tuple[str, bytes]:
    """Return the states as raw float32."""
    return f"/evaluate?shape={len(states)},{states.shape[1]}", states.tobytes()


def as_msgpack(states: NDArray[np.float32]) -> tuple[str, bytes]:
    """Return the states as bytes in MessagePack."""
    return "/evaluate", msgpack.packb({"states": states.tobytes(), "shape": states.shape})


@dataclass
class Side:
    """A kind of body, and what its requests cost."""

    name: str
    media_type: str
    encode: Encode
    bytes_sent: int = 0
    milliseconds: list[float] = field(default_factory=list)
    """The median of each round."""
    cpu_ms: list[float] = field(default_factory=list)
    """The head's processor time of a request, in each round."""
    actions: list[Any] = field(default_factory=list)


async def ask(side: Side, states: NDArray[np.float32], connection: Connection, requests: int) -> list[float]:
    """Send requests one after another; return the milliseconds of each."""
    took = []
    for _ in range(requests):
        started = time.perf_counter()
        path, body = side.encode(states)
        reply = await connection.request("POST", path, body, side.media_type)
        took.append(1e3 * (time.perf_counter() - started))
    side.bytes_sent, side.actions = len(body), orjson.loads(reply)["actions"]
    return took


async def measure(side: Side, states: NDArray[np.float32], port: int, pid: int, requests: int) -> str:
    """Measure one round of a side; return a line about it."""
    async with connect(port) as connection:
        await ask(side, states, connection, WARM_UP)
        process = psutil.Process(pid)
        before = sum(process.cpu_times()[:2])
        took = await ask(side, states, connection, requests)
        side.cpu_ms.append(1e3 * (sum(process.cpu_times()[:2]) - before) / requests)
    side.milliseconds.append(float(np.median(took)))
    return f"{side.milliseconds[-1]:.2f} ms"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and measure; return 1 if a body gets other actions."""
    parser = harness.CommandLine("evaluate_bodies", rounds=5, quick="100 requests a side, one round")
    parser.add_argument("--states", type=int, default=64, help="in a request")
    parser.add_argument("--numbers", type=int, default=512, help="of a state")
    given = parser.parse(arguments)
    sides = [
        Side("JSON", "application/json", as_json),
        Side("MessagePack", MSGPACK, as_msgpack),
        Side("raw float32", RAW, as_raw),
    ]
    states = np.random.default_rng(0).normal(size=(given.states, given.numbers)).astype(np.float32)
    requests = 100 if given.quick else 500
    with tempfile.TemporaryDirectory() as directory:
        policy = Path(directory) / "policy.pt2"
        torch.manual_seed(0)
        state = StateSpec(kind=StateKind.NUMBERS, shape=[given.numbers])
        action = ActionSpec(kind=ActionKind.INDEX, count=ACTIONS)
        save_policy(torch.nn.Linear(given.numbers, ACTIONS), policy, state, action)
        variables = {"HEAD_POLICIES": f"linear={policy}", "HEAD_BATCH_SIZE": str(given.states), "JOBGROUP_TOKEN": ""}
        with running("evaluation_head", **variables) as head:
            harness.in_turn(
                sides,
                given.rounds,
                lambda side: asyncio.run(measure(side, states, head.port, head.pid, requests)),
            )
    columns = ("body", "bytes", "ms a request", "head's processor ms")
    rows = [(side.name, side.bytes_sent, spread(side.milliseconds), spread(side.cpu_ms)) for side in sides]
    title = f"/evaluate, {given.states} states of {given.numbers} numbers"
    harness.finish(given, [harness.table(title, columns, rows)], rows)
    return int(any(side.actions != sides[0].actions for side in sides))


if __name__ == "__main__":
    sys.exit(main())
