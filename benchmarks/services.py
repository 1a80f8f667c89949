"""The services under the loads for which they are built."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import orjson
import torch

from benchmarks.harness import Args, Benchmark, Option, Side
from benchmarks.service import (
    NO_FAIL,
    Connection,
    Figure,
    connect,
    figure_table,
    has_missed,
    measure_figures,
    percentile,
    running,
    send_all,
)
from services.evaluation_head import checkpoint
from services.evaluation_head.app import MSGPACK, RAW
from services.protocol.evaluation import ActionKind, ActionSpec, StateKind, StateSpec
from services.protocol.groups import Group, TokenSequence, pack
from services.protocol.prompts import Prompt
from services.protocol.replay import GROUPS_TYPE, framed, unframed
from services.protocol.rewards import FinishReason, RewardResult

ITEMS = 500
"""Completions of a request to the reward-server."""
WIDE = 65_536
"""Characters of a column such as hidden tests."""
WARM_UP = 20
"""Requests to the evaluation head that are not measured."""


def reward_figures(args: Args) -> Iterator[Figure]:
    """Measure plain completions, and hostile ones among them, whose check exceeds its processor time."""
    plain = [_plain(i) for i in range(5_000 if args.quick else 20_000)]
    # No two hostile completions are equal, so that no cache helps.
    mixed = [_plain(i) if i % 100 else _hostile(9, i) for i in range(1_000 if args.quick else 3_000)]
    with running("reward_server", REWARD_FN="math") as service:
        _score(service.port, plain[:1000])
        seconds, replies = _score(service.port, plain)
        assert all(reply["reward"] == 1.0 for reply in replies)
        yield Figure("plain answers", len(plain) / seconds, "1/s", at_least=5_000)
        seconds, replies = _score(service.port, mixed)
        stopped = sum(reply["status"] == "over_limit" for reply in replies)
        assert stopped == len(mixed) // 100, f"{stopped} of {len(mixed)} answers exceeded the limit"
        yield Figure("1 in 100 hostile", len(mixed) / seconds, "1/s", at_least=500)
        wide = [plain[i] | {"row": str(i // GROUP_SIZE % (ITEMS // GROUP_SIZE))} for i in range(len(plain) // 5)]
        rows = {str(i): json.dumps({"number": i, "tests": "x" * WIDE}) for i in range(ITEMS // GROUP_SIZE)}
        seconds, _ = _score(service.port, wide, rows)
        yield Figure(f"plain answers, {GROUP_SIZE} to a row of 64 KiB", len(wide) / seconds, "1/s")
        latencies = asyncio.run(_plain_among_hostile(service.port, 20 if args.quick else 60))
        yield percentile("plain answer among hostile ones", 99, latencies)
        yield Figure("memory, workers included", service.memory_mb(), "MB")


def _plain(number: int) -> dict[str, str]:
    text = f"She had 3 and bought {number - 3} more. The answer is {number}."
    return {"prompt": "How many?", "response": text, "ground_truth": str(number)}


def _hostile(base: int, number: int) -> dict[str, str]:
    return {"prompt": "", "response": rf"\boxed{{{base}^{{9^{{{number + 9}}}}}}}", "ground_truth": "5"}


def _score(
    port: int, items: Sequence[dict[str, str]], rows: Mapping[str, str] | None = None
) -> tuple[float, list[dict[str, object]]]:
    shared = {"rows": rows} if rows else {}
    bodies = [orjson.dumps({"items": items[start : start + ITEMS]} | shared) for start in range(0, len(items), ITEMS)]
    seconds, replies = asyncio.run(send_all(port, min(4, len(bodies)), "/batch_reward", bodies))
    return seconds, [reward for reply in replies for reward in orjson.loads(reply)["rewards"]]


async def _plain_among_hostile(port: int, hostile: int) -> list[float]:
    """Return the milliseconds of single plain requests while hostile completions keep every worker busy."""
    body = orjson.dumps(_plain(5))
    latencies: list[float] = []
    items = orjson.dumps({"items": [_hostile(8, i) for i in range(hostile)]})
    async with connect(port) as connection, connect(port) as other:
        busy = asyncio.create_task(other.request("POST", "/batch_reward", items))
        while not busy.done():
            started = time.perf_counter()
            await connection.request("POST", "/reward", body)
            latencies.append(1e3 * (time.perf_counter() - started))
            await asyncio.sleep(0.005)
        await busy
    return latencies


CLIENTS = 50


def data_figures(args: Args) -> Iterator[Figure]:
    """Measure fifty clients at once on a GSM8K-sized file, and a file of a million rows."""
    rows = 100_000 if args.quick else 1_000_000
    with tempfile.TemporaryDirectory() as directory:
        cache = str(Path(directory) / "cache")
        small = write_rows(Path(directory) / "small.jsonl", 7_473)
        with running("data_server", DATASET=str(small), HF_DATASETS_CACHE=cache) as service:
            latencies, seconds = asyncio.run(_ask_for_prompts(service.port, 20 if args.quick else 200))
            yield percentile("50 clients", 50, latencies)
            yield percentile("50 clients", 99, latencies, at_most=50)
            yield Figure("50 clients, requests", len(latencies) / seconds, "1/s")
        wide = write_rows(Path(directory) / "wide.jsonl", 1000, {"tests": "x" * WIDE})
        with running("data_server", DATASET=str(wide), HF_DATASETS_CACHE=cache) as service:
            latencies, seconds = asyncio.run(_ask_for_prompts(service.port, 10 if args.quick else 50))
            yield percentile("50 clients, rows of 64 KiB", 99, latencies)
            yield Figure("50 clients, rows of 64 KiB, requests", len(latencies) / seconds, "1/s")
            yield Figure("rows of 64 KiB, memory", service.memory_mb(), "MB")
        large = write_rows(Path(directory) / "large.jsonl", rows)
        for start in ("first", "later"):
            with running("data_server", DATASET=str(large), HF_DATASETS_CACHE=cache) as service:
                yield Figure(f"{rows} rows, {start} start", service.start_seconds, "s", at_most=15)
                latencies, _ = asyncio.run(_ask_for_prompts(service.port, 10 if args.quick else 100, shared=True))
                memory = service.memory_mb()
        yield percentile(f"{rows} rows", 99, latencies)
        yield Figure(f"{rows} rows, memory", memory, "MB", at_most=1000)


def write_rows(path: Path, count: int, further: Mapping[str, str] | None = None) -> Path:
    """Write questions of about the length and form of GSM8K's, and further columns."""
    filler = "Natalia sold clips to her friends, and then she sold half as many clips in the month after it. " * 2
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            answer = f"She sold {i}/2 = {i // 2} clips in May.\nAltogether she sold {i + i // 2}.\n#### {i + i // 2}"
            row = {"question": f"{filler}She began with {i}. How many?", "answer": answer, **(further or {})}
            file.write(json.dumps(row) + "\n")
    return path


async def _ask_for_prompts(port: int, requests: int, *, shared: bool = False) -> tuple[list[float], float]:
    """Return the latencies in ms of clients that each send one request after the other, and the seconds for all.

    Clients with one ``shared`` cursor get different prompts, so that no prompt is rendered twice.
    """
    latencies: list[float] = []

    async def client(number: int) -> None:
        consumer = "all" if shared else f"client-{number}"
        async with connect(port) as connection:
            for _ in range(requests):
                started = time.perf_counter()
                await connection.request("GET", f"/prompts?batch_size=4&consumer={consumer}")
                latencies.append(1e3 * (time.perf_counter() - started))

    started = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return latencies, time.perf_counter() - started


GROUP_SIZE = 8
COMPLETION_TOKENS = 128


def replay_figures(args: Args) -> Iterator[Figure]:
    """Measure adding groups, drawing from all of them, snapshots, and a restart."""
    count = args.groups // 10 if args.quick else args.groups
    with tempfile.TemporaryDirectory() as directory:
        environment = {"REPLAY_DIR": directory}
        with running("replay_buffer", **environment) as service:
            yield Figure("groups added", count / _add(service.port, count), "1/s", at_least=500)
            for strategy in ("priority", "recency", "uniform"):
                latencies = asyncio.run(_sample(service.port, strategy, 30 if args.quick else 200))
                yield percentile(f"64 of {count} by {strategy}", 50, latencies)
                yield percentile(f"64 of {count} by {strategy}", 99, latencies, at_most=50)
            yield Figure(f"{count} groups, memory", service.memory_mb(), "MB")
            disk = sum(file.stat().st_blocks * 512 for file in Path(directory).iterdir()) / 1e6
            yield Figure(f"{count} groups, disk", disk, "MB")
            for path, what in (("/snapshots", "saved"), ("/snapshots/restore", "restored")):
                seconds, _ = asyncio.run(send_all(service.port, 1, path, [orjson.dumps({"label": "benchmark"})]))
                yield Figure(f"snapshot {what}", 1e3 * seconds, "ms")
        with running("replay_buffer", **environment) as service:
            yield Figure(f"restart with {count}", service.start_seconds, "s", at_most=10)
    with tempfile.TemporaryDirectory() as directory, running("replay_buffer", REPLAY_DIR=directory) as service:
        row = json.dumps({"tests": "x" * WIDE}).encode()
        yield Figure("groups with a row of 64 KiB added", 1000 / _add(service.port, 1000, row), "1/s")


def random_sequences(rng: np.random.Generator, tokens: int = COMPLETION_TOKENS) -> list[TokenSequence]:
    """Return the sequences of a group, with about the text of as many tokens."""
    ids = rng.integers(0, 150_000, (GROUP_SIZE, tokens))
    logprobs = (-rng.exponential(size=(GROUP_SIZE, tokens))).astype(np.float32)
    return [
        TokenSequence(
            completion="She sold 48 clips in April, and half as many in May. " * (tokens // 16),
            completion_ids=ids[i],
            logprobs=logprobs[i],
            policy_versions=[0] * tokens,
            finish_reason=FinishReason.STOP,
            result=RewardResult(reward=float(i % 2)),
        )
        for i in range(GROUP_SIZE)
    ]


def group_of(number: int, sequences: list[TokenSequence], row: bytes = b"") -> Group:
    """Return the group of a number."""
    prompt = Prompt(
        id=f"clips/{number}",
        prompt="Natalia sold clips to 48 of her friends in April. How many?",
        ground_truth="72",
        prompt_ids=list(range(number, number + 80)),
        row=row,
    )
    return Group(group_id=f"group-{number}", prompt=prompt, sequences=sequences)


def _add(port: int, count: int, row: bytes = b"") -> float:
    """Return the seconds to add groups, 32 a request over 2 connections, without the time to make the requests."""
    rng = np.random.default_rng(0)
    # Groups share sequences, because it takes longer to make a sequence than to store it.
    sequences = [random_sequences(rng) for _ in range(50)]
    seconds = 0.0
    for start in range(0, count, 2000):
        bodies = []
        for first in range(start, min(start + 2000, count), 32):
            numbers = range(first, min(first + 32, start + 2000, count))
            groups = [pack(group_of(number, sequences[number % len(sequences)], row)) for number in numbers]
            bodies.append(framed({"priorities": [0.1 + (number % 97) / 97 for number in numbers]}, groups))
        seconds += asyncio.run(send_all(port, 2, "/groups", bodies, GROUPS_TYPE))[0]
    return seconds


async def _sample(port: int, strategy: str, requests: int) -> list[float]:
    """Return the latencies in ms of drawing 64 groups."""
    chooser = random.Random(0)
    latencies = []
    async with connect(port) as connection:
        for _ in range(requests):
            request = {"batch_size": 64, "strategy": strategy, "correction": 0.4, "seed": chooser.randrange(2**32)}
            started = time.perf_counter()
            reply = await connection.request("POST", "/groups/sample", orjson.dumps(request), accept=GROUPS_TYPE)
            latencies.append(1e3 * (time.perf_counter() - started))
    assert len(unframed(reply)["groups"]) == 64
    return latencies


def lean(state: list[float]) -> int:
    """Return the action for a state of CartPole; the pole falls after about forty steps."""
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


ENVIRONMENTS: dict[str, Callable[[Any], Any]] = {"CartPole-v1": lean, "guessing": bisect}
"""Each environment's name, and the action for a state."""


class Load:
    """The episodes to play, and the milliseconds of each step."""

    def __init__(self, act: Callable[[Any], Any], episodes: int) -> None:
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


async def play(port: int, act: Callable[[Any], Any], clients: int, at_once: int, episodes: int) -> tuple[Load, float]:
    """Play ``episodes``, ``at_once`` of them by a number of clients; return the load and the seconds."""
    load = Load(act, episodes)

    async def client() -> None:
        async with connect(port) as connection:
            await load.play(connection, at_once // clients)

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return load, time.perf_counter() - started


def environment_figures(args: Args) -> Iterator[Figure]:
    """Measure each environment with one client that steps all episodes, and with a client for each episode.

    The clients push the cart to the side where the pole leans, and find the number by bisection.
    """
    episodes = args.episodes * (1 if args.quick else 4)
    for environment, act in ENVIRONMENTS.items():
        with running("environment_server", ENVIRONMENT=environment, JOBGROUP_TOKEN="") as server:
            for clients in (1, args.episodes):
                before = server.cpu_seconds()
                load, seconds = asyncio.run(play(server.port, act, clients, args.episodes, episodes))
                cpu = server.cpu_seconds() - before
                name = f"{environment}, {clients} client{'s' * (clients > 1)}"
                yield Figure(f"{name}, episodes", episodes / seconds, "1/s")
                yield Figure(f"{name}, steps", load.steps / seconds, "1/s")
                yield Figure(f"{name}, processor time of a step", 1e6 * cpu / load.steps, "us")
                yield percentile(f"{name}, step", 50, load.milliseconds)
                yield percentile(f"{name}, step", 99, load.milliseconds)
            yield Figure(f"{environment}, memory", server.memory_mb(), "MB")


STATES, NUMBERS, ACTIONS = 64, 512, 4
"""States of a request to the evaluation head, numbers of a state, and actions of the policy."""


def head_figures(args: Args) -> Iterator[Figure]:
    """Measure POST /evaluate with a batch of states as JSON, as MessagePack and as raw float32.

    One client sends request after request. The policy is a linear layer, so that reading the body is most of the work.
    A request's time is from its numpy array to the reply's bytes.
    """
    states = np.random.default_rng(0).normal(size=(STATES, NUMBERS)).astype(np.float32)
    bodies: dict[str, tuple[str, str, Callable[[], bytes]]] = {
        "JSON": (
            "/evaluate",
            "application/json",
            lambda: orjson.dumps({"states": states}, option=orjson.OPT_SERIALIZE_NUMPY),
        ),
        "MessagePack": (
            "/evaluate",
            MSGPACK,
            lambda: msgpack.packb({"states": states.tobytes(), "shape": states.shape}),
        ),
        "raw float32": (f"/evaluate?shape={STATES},{NUMBERS}", RAW, states.tobytes),
    }
    count = 100 if args.quick else 500
    replies = []
    with tempfile.TemporaryDirectory() as directory:
        policy = Path(directory) / "policy.pt2"
        torch.manual_seed(0)
        state = StateSpec(kind=StateKind.NUMBERS, shape=[NUMBERS])
        action = ActionSpec(kind=ActionKind.INDEX, count=ACTIONS)
        checkpoint.save_policy(torch.nn.Linear(NUMBERS, ACTIONS), policy, state, action)
        variables = {"HEAD_POLICIES": f"linear={policy}", "HEAD_BATCH_SIZE": str(STATES), "JOBGROUP_TOKEN": ""}
        with running("evaluation_head", **variables) as head:
            for name, body in bodies.items():
                asyncio.run(_evaluate(head.port, *body, requests=WARM_UP))
                before = head.cpu_seconds()
                latencies, reply = asyncio.run(_evaluate(head.port, *body, requests=count))
                cpu = head.cpu_seconds() - before
                replies.append(orjson.loads(reply)["actions"])
                yield percentile(f"{STATES} states as {name}, {len(body[2]())} bytes", 50, latencies)
                yield Figure(f"{STATES} states as {name}, head's processor time", 1e3 * cpu / count, "ms")
    assert all(actions == replies[0] for actions in replies), "a body got other actions"


async def _evaluate(
    port: int, path: str, media_type: str, body: Callable[[], bytes], *, requests: int
) -> tuple[list[float], bytes]:
    """Return the milliseconds of each request, and the last reply."""
    latencies, reply = [], b""
    async with connect(port) as connection:
        for _ in range(requests):
            started = time.perf_counter()
            reply = await connection.request("POST", path, body(), media_type)
            latencies.append(1e3 * (time.perf_counter() - started))
    return latencies, reply


SERVICES = {
    "reward-server": reward_figures,
    "data-server": data_figures,
    "replay-buffer": replay_figures,
    "environment-server": environment_figures,
    "evaluation-head": head_figures,
}


def measure(args: Args) -> list[Side]:
    """Measure services under the loads for which they are built.

    Each service runs as a process of its own, as in a job group, and gets its load over HTTP. Latencies are measured at
    the client; memory is resident in the service and its children. The load comes from the same machine, so its cost is
    in every number. The table shows median, least and most of the rounds. A target is met if the median meets it. The
    exit code is 1 if a target is missed. With --quick loads are smaller.
    """
    return measure_figures({name: partial(SERVICES[name], args) for name in args.only.split(",")}, args)


SERVICES_UNDER_LOAD = Benchmark(
    measure=measure,
    tables=figure_table("services under load"),
    rounds=3,
    options={
        "only": Option(",".join(SERVICES), "services, with commas"),
        "groups": Option(100_000, "groups of the replay-buffer"),
        "episodes": Option(256, "episodes that the environment-server plays at once"),
        "no-fail": NO_FAIL,
    },
    conclude=has_missed,
)
