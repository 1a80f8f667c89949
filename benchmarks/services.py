"""The services under the loads for which they are built.

Each service runs as a process of its own, as in a job group, and gets its load over HTTP from this machine, whose cost
is in every number. Latencies are measured at the client; memory is resident in the service and its children.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks import load
from benchmarks.load import Figure, connect, percentile, running, send_all
from services.protocol.groups import Group, TokenSequence, pack
from services.protocol.prompts import Prompt
from services.protocol.replay import GROUPS_TYPE, framed, unframed
from services.protocol.rewards import FinishReason, RewardResult

ITEMS = 500
"""Completions of a request to the reward-server."""


def reward_figures(args: argparse.Namespace) -> Iterator[Figure]:
    """Measure plain completions, and hostile ones among them, whose check exceeds its processor time."""
    plain = [_plain(i) for i in range(5_000 if args.quick else 20_000)]
    # No two hostile completions are equal, so that no cache helps.
    mixed = [_plain(i) if i % 100 else _hostile(9, i) for i in range(1_000 if args.quick else 3_000)]
    with running("reward_server", REWARD_FN="math") as service:
        _score(service.port, plain[:1000])
        seconds, replies = _score(service.port, plain)
        assert all(reply["reward"] == 1.0 for reply in replies)
        yield Figure("plain answers", len(plain) / seconds, "1/s")
        seconds, replies = _score(service.port, mixed)
        stopped = sum(reply["status"] == "over_limit" for reply in replies)
        assert stopped == len(mixed) // 100, f"{stopped} of {len(mixed)} answers exceeded the limit"
        yield Figure("1 in 100 hostile", len(mixed) / seconds, "1/s")
        yield Figure("memory, workers included", service.memory_mb(), "MB")


def _plain(number: int) -> dict[str, str]:
    text = f"She had 3 and bought {number - 3} more. The answer is {number}."
    return {"prompt": "How many?", "response": text, "ground_truth": str(number)}


def _hostile(base: int, number: int) -> dict[str, str]:
    return {"prompt": "", "response": rf"\boxed{{{base}^{{9^{{{number + 9}}}}}}}", "ground_truth": "5"}


def _score(port: int, items: Sequence[dict[str, str]]) -> tuple[float, list[dict[str, object]]]:
    bodies = [orjson.dumps({"items": items[start : start + ITEMS]}) for start in range(0, len(items), ITEMS)]
    seconds, replies = asyncio.run(send_all(port, min(4, len(bodies)), "/batch_reward", bodies))
    return seconds, [reward for reply in replies for reward in orjson.loads(reply)["rewards"]]


CLIENTS = 50


def data_figures(args: argparse.Namespace) -> Iterator[Figure]:
    """Measure fifty clients at once on a file of a million rows."""
    rows = 100_000 if args.quick else 1_000_000
    with tempfile.TemporaryDirectory() as directory:
        cache = str(Path(directory) / "cache")
        large = write_rows(Path(directory) / "large.jsonl", rows)
        for start in ("first", "later"):
            with running("data_server", DATASET=str(large), HF_DATASETS_CACHE=cache) as service:
                yield Figure(f"{rows} rows, {start} start", service.start_seconds, "s")
                latencies = asyncio.run(_ask_for_prompts(service.port, 10 if args.quick else 100))
                memory = service.memory_mb()
        yield percentile(f"{rows} rows", 99, latencies)
        yield Figure(f"{rows} rows, memory", memory, "MB")


def write_rows(path: Path, count: int) -> Path:
    """Write questions of about the length and form of GSM8K's."""
    filler = "Natalia sold clips to her friends, and then she sold half as many clips in the month after it. " * 2
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            answer = f"She sold {i}/2 = {i // 2} clips in May.\nAltogether she sold {i + i // 2}.\n#### {i + i // 2}"
            row = {"question": f"{filler}She began with {i}. How many?", "answer": answer}
            file.write(json.dumps(row) + "\n")
    return path


async def _ask_for_prompts(port: int, requests: int) -> list[float]:
    """Return the latencies in ms of clients that each send one request after the other.

    They have one cursor and so get different prompts, and no prompt is rendered twice.
    """
    latencies: list[float] = []

    async def client() -> None:
        async with connect(port) as connection:
            for _ in range(requests):
                started = time.perf_counter()
                await connection.request("GET", "/prompts?batch_size=4&consumer=all")
                latencies.append(1e3 * (time.perf_counter() - started))

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return latencies


GROUP_SIZE = 8
COMPLETION_TOKENS = 128


def replay_figures(args: argparse.Namespace) -> Iterator[Figure]:
    """Measure adding groups, drawing from all of them, snapshots, and a restart."""
    count = args.groups // 10 if args.quick else args.groups
    with tempfile.TemporaryDirectory() as directory:
        environment = {"REPLAY_DIR": directory}
        with running("replay_buffer", **environment) as service:
            yield Figure("groups added", count / _add(service.port, count), "1/s")
            latencies = asyncio.run(_sample(service.port, 30 if args.quick else 200))
            yield percentile(f"64 of {count} by priority", 99, latencies)
            yield Figure(f"{count} groups, memory", service.memory_mb(), "MB")
            disk = sum(file.stat().st_blocks * 512 for file in Path(directory).iterdir()) / 1e6
            yield Figure(f"{count} groups, disk", disk, "MB")
        with running("replay_buffer", **environment) as service:
            yield Figure(f"restart with {count}", service.start_seconds, "s")


def random_sequences(rng: np.random.Generator) -> list[TokenSequence]:
    """Return the sequences of a group."""
    ids = rng.integers(0, 150_000, (GROUP_SIZE, COMPLETION_TOKENS))
    logprobs = (-rng.exponential(size=(GROUP_SIZE, COMPLETION_TOKENS))).astype(np.float32)
    return [
        TokenSequence(
            completion="She sold 48 clips in April, and half as many in May. " * (COMPLETION_TOKENS // 16),
            completion_ids=ids[i],
            logprobs=logprobs[i],
            policy_versions=[0] * COMPLETION_TOKENS,
            finish_reason=FinishReason.STOP,
            result=RewardResult(reward=float(i % 2)),
        )
        for i in range(GROUP_SIZE)
    ]


def group_of(number: int, sequences: list[TokenSequence]) -> Group:
    """Return the group of a number."""
    text, ids = "Natalia sold clips to 48 of her friends in April. How many?", list(range(number, number + 80))
    prompt = Prompt(id=f"clips/{number}", prompt=text, ground_truth="72", prompt_ids=ids)
    return Group(group_id=f"group-{number}", prompt=prompt, sequences=sequences)


def _add(port: int, count: int) -> float:
    """Return the seconds to add groups, 32 a request over 2 connections, without the time to make the requests."""
    rng = np.random.default_rng(0)
    # Groups share sequences, because it takes longer to make a sequence than to store it.
    sequences = [random_sequences(rng) for _ in range(50)]
    seconds = 0.0
    for start in range(0, count, 2000):
        bodies = []
        for first in range(start, min(start + 2000, count), 32):
            numbers = range(first, min(first + 32, start + 2000, count))
            groups = [pack(group_of(number, sequences[number % len(sequences)])) for number in numbers]
            bodies.append(framed({"priorities": [0.1 + (number % 97) / 97 for number in numbers]}, groups))
        seconds += asyncio.run(send_all(port, 2, "/groups", bodies, GROUPS_TYPE))[0]
    return seconds


async def _sample(port: int, requests: int) -> list[float]:
    """Return the latencies in ms of drawing 64 groups."""
    chooser = random.Random(0)
    latencies = []
    async with connect(port) as connection:
        for _ in range(requests):
            request = {"batch_size": 64, "correction": 0.4, "seed": chooser.randrange(2**32)}
            started = time.perf_counter()
            reply = await connection.request("POST", "/groups/sample", orjson.dumps(request), accept=GROUPS_TYPE)
            latencies.append(1e3 * (time.perf_counter() - started))
    assert len(unframed(reply)["groups"]) == 64
    return latencies


async def play(port: int, clients: int, at_once: int, episodes: int) -> tuple[list[float], int, float]:
    """Play ``episodes``, ``at_once`` of them, by a number of clients.

    Returns:
        The milliseconds of each request, and the steps and the seconds of all.
    """
    seeds = iter(range(episodes))
    milliseconds: list[float] = []
    steps = 0

    async def client() -> None:
        nonlocal steps
        live: list[dict[str, Any]] = []
        async with connect(port) as connection:
            while True:
                if new := list(islice(seeds, at_once // clients - len(live))):
                    body = orjson.dumps({"episodes": len(new), "seed": new[0]})
                    live += orjson.loads(await connection.request("POST", "/reset", body))["episodes"]
                if not live:
                    return
                # The cart is pushed to the side where the pole leans; it falls after about forty steps.
                moves = [
                    {"episode": o["episode"], "step": o.get("steps", 0), "action": int(o["state"][2] > 0)} for o in live
                ]
                body = orjson.dumps({"steps": moves})
                started = time.perf_counter()
                results = orjson.loads(await connection.request("POST", "/step", body))["results"]
                milliseconds.append(1e3 * (time.perf_counter() - started))
                steps += len(live)
                live = [result for result in results if result["status"] == "running"]

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return milliseconds, steps, time.perf_counter() - began


def environment_figures(args: argparse.Namespace) -> Iterator[Figure]:
    """Measure CartPole-v1 with one client that steps all episodes, and with a client for each episode."""
    episodes = args.episodes * (1 if args.quick else 4)
    with running("environment_server", ENVIRONMENT="CartPole-v1") as server:
        for clients in (1, args.episodes):
            before = server.cpu_seconds()
            milliseconds, steps, seconds = asyncio.run(play(server.port, clients, args.episodes, episodes))
            cpu = server.cpu_seconds() - before
            name = f"{clients} client{'s' * (clients > 1)}"
            yield Figure(f"{name}, steps", steps / seconds, "1/s")
            yield Figure(f"{name}, processor time of a step", 1e6 * cpu / steps, "us")
            yield percentile(f"{name}, step", 99, milliseconds)


SERVICES: Mapping[str, Callable[[argparse.Namespace], Iterator[Figure]]] = {
    "reward-server": reward_figures,
    "data-server": data_figures,
    "replay-buffer": replay_figures,
    "environment-server": environment_figures,
}


def main() -> None:
    """Measure the services in turn."""
    parser = load.parser("services", __doc__)
    parser.add_argument("--groups", type=int, default=100_000, help="groups of the replay-buffer")
    parser.add_argument("--episodes", type=int, default=256, help="that the environment-server plays at once")
    args = parser.parse_args()
    load.measure({name: partial(figures, args) for name, figures in SERVICES.items()}, args)


if __name__ == "__main__":
    main()
