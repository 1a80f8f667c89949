"""Environment-server, evaluation head and trajectories: the cost of a step, of a request and of a file of episodes."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import msgpack
import numpy as np
import orjson
import psutil
import torch
from numpy.typing import NDArray
from rich.table import Table

from benchmarks import harness
from benchmarks.harness import Benchmark, Given, Option, Side
from benchmarks.service import Connection, Figure, Service, connect, figure_table, measure_figures, percentile, running
from evaluation.trajectories.run import Options, generate
from services.core import logs
from services.evaluation_head import checkpoint
from services.evaluation_head.app import MSGPACK, RAW
from services.protocol.evaluation import ActionKind, ActionSpec, StateKind, StateSpec
from toys.cartpole import ACTION, STATE, CartPolePolicy

EPISODES = 256
"""Episodes that an environment-server plays at once, and environments of a process that writes trajectories."""
ACTIONS = 4
"""Actions of the policy whose head gets states in different bodies."""
WARM_UP = 20
EPISODE_STEPS = 500
"""Steps of an episode of trajectories."""

Act = Callable[[Any], Any]
Decide = Callable[[list[Any]], list[int]]
Encode = Callable[[NDArray[np.float32]], tuple[str, bytes]]
"""Returns the path with its query, and the body."""


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


ENVIRONMENTS: dict[str, Act] = {"CartPole-v1": lean, "guessing": bisect}


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
    """Play ``episodes`` by a number of clients; return the load and the seconds."""
    load = Load(act, episodes)

    async def client() -> None:
        async with connect(port) as connection:
            await load.play(connection, EPISODES // clients)

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return load, time.perf_counter() - started


def environment_figures(*, quick: bool) -> Iterator[Figure]:
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


def measure_environments(given: Given) -> list[Side]:
    """Measure one environment-server with 256 episodes at once: gymnasium's CartPole, and a guessing game of text.

    The server is a process of its own. "One client" steps all its episodes in each request, as the evaluation head and
    trajectories do; "256 clients" each step one episode over a connection of their own, as episodes of training do. The
    clients push the cart to the side where the pole leans, and find the number by bisection. They share one process,
    whose cost is in every number. The latency of a step is that of a request to /step. With --quick a side has 256
    episodes.
    """
    return measure_figures({"environment-server": partial(environment_figures, quick=given.quick)}, given)


ENVIRONMENT_SERVER = Benchmark(
    measure=measure_environments,
    tables=figure_table(f"one environment-server, {EPISODES} episodes at once"),
    rounds=3,
)


def as_json(states: NDArray[np.float32]) -> tuple[str, bytes]:
    """Return the states as nested lists."""
    return "/evaluate", orjson.dumps({"states": states}, option=orjson.OPT_SERIALIZE_NUMPY)


def as_raw(states: NDArray[np.float32]) -> tuple[str, bytes]:
    """Return the states as raw float32."""
    return f"/evaluate?shape={len(states)},{states.shape[1]}", states.tobytes()


def as_msgpack(states: NDArray[np.float32]) -> tuple[str, bytes]:
    """Return the states as bytes in MessagePack."""
    return "/evaluate", msgpack.packb({"states": states.tobytes(), "shape": states.shape})


async def send(
    encode: Encode, media_type: str, states: NDArray[np.float32], head: Service, requests: int
) -> dict[str, Any]:
    """Send requests one after another, and return what they cost.

    ``ms`` is the median of the requests, ``cpu_ms`` the head's processor time of a request.
    """

    async def ask(connection: Connection, count: int) -> tuple[list[float], int, list[Any]]:
        took = []
        for _ in range(count):
            started = time.perf_counter()
            path, body = encode(states)
            reply = await connection.request("POST", path, body, media_type)
            took.append(1e3 * (time.perf_counter() - started))
        return took, len(body), orjson.loads(reply)["actions"]

    async with connect(head.port) as connection:
        await ask(connection, WARM_UP)
        process = psutil.Process(head.pid)
        before = sum(process.cpu_times()[:2])
        took, size, actions = await ask(connection, requests)
        cpu = 1e3 * (sum(process.cpu_times()[:2]) - before) / requests
    return {"ms": float(np.median(took)), "cpu_ms": cpu, "bytes": size, "actions": str(actions)}


def measure_bodies(given: Given) -> list[Side]:
    """Measure POST /evaluate with a batch of states as JSON, as raw float32 and as MessagePack.

    One client sends request after request over one connection to a head whose policy is a linear layer, so that reading
    the body is most of the work. A request's time is from its numpy array to the reply's bytes: encoding it counts. The
    exit code is 1 if a body gets other actions.
    """
    kinds: dict[str, tuple[Encode, str]] = {
        "JSON": (as_json, "application/json"),
        "MessagePack": (as_msgpack, MSGPACK),
        "raw float32": (as_raw, RAW),
    }
    states = np.random.default_rng(0).normal(size=(given.states, given.numbers)).astype(np.float32)
    with tempfile.TemporaryDirectory() as directory:
        policy = Path(directory) / "policy.pt2"
        torch.manual_seed(0)
        state = StateSpec(kind=StateKind.NUMBERS, shape=[given.numbers])
        action = ActionSpec(kind=ActionKind.INDEX, count=ACTIONS)
        checkpoint.save_policy(torch.nn.Linear(given.numbers, ACTIONS), policy, state, action)
        variables = {"HEAD_POLICIES": f"linear={policy}", "HEAD_BATCH_SIZE": str(given.states), "JOBGROUP_TOKEN": ""}
        with running("evaluation_head", **variables) as head:

            def measure(encode: Encode, media_type: str, _round: int) -> Mapping[str, Any]:
                return asyncio.run(send(encode, media_type, states, head, given.requests))

            sides = [Side(name, partial(measure, *kind)) for name, kind in kinds.items()]
            return harness.in_turn(sides, given.rounds)


def body_tables(given: Given, sides: Sequence[Side]) -> list[Table]:
    """Return what each kind of body costs."""
    columns: harness.Columns = {
        "body": harness.name_of,
        "bytes": lambda side: side.rounds[0]["bytes"],
        "ms a request": lambda side: side.spread("ms"),
        "head's processor ms": lambda side: side.spread("cpu_ms"),
    }
    return [harness.table(f"/evaluate, {given.states} states of {given.numbers} numbers", sides, columns)]


EVALUATE_BODIES = Benchmark(
    measure=measure_bodies,
    tables=body_tables,
    rounds=5,
    quick={"requests": 100},
    options={
        "states": Option(64, "in a request"),
        "numbers": Option(512, "of a state"),
        "requests": Option(500, "of a round"),
    },
    conclude=lambda _given, sides: int(any(side.values("actions") != sides[0].values("actions") for side in sides)),
)


def balance(states: list[Any]) -> list[int]:
    """Return actions that balance the pole, at the least cost."""
    return [int(state[2] + 0.3 * state[3] > 0) for state in states]


def step_alone(steps: int, decide: Decide) -> None:
    """Step environments of gymnasium ``steps`` times in all, with the actions of ``decide``."""
    environments = [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(EPISODES)]
    states = [environment.reset(seed=seed)[0] for seed, environment in enumerate(environments)]
    for _ in range(steps // EPISODES):
        actions = decide(states)
        for place, environment in enumerate(environments):
            state, _, terminated, truncated, _ = environment.step(actions[place])
            states[place] = environment.reset()[0] if terminated or truncated else state


def step_with_policy(steps: int, policy: Path) -> None:
    """Do the same with a batched torch policy."""
    loaded = checkpoint.load(checkpoint.find(policy), torch.device("cpu"))
    step_alone(steps, lambda states: loaded.decide(np.asarray(states, np.float32))[0])


def write_trajectories(steps: int, policy: Path) -> None:
    """Write the same number of steps to Parquet files."""
    with tempfile.TemporaryDirectory() as directory:
        options = Options(
            environment="CartPole-v1",
            server=None,
            policies=f"cartpole={policy}",
            episodes=steps // EPISODE_STEPS,
            seed=0,
            shard_episodes=256,
            at_once=EPISODES,
            save_to=Path(directory),
        )
        played = asyncio.run(generate(options, lambda _line: None))["steps"]
        if played != steps:
            raise SystemExit(f"error: {played} steps were written instead of {steps}")


def measure_trajectories(given: Given) -> list[Side]:
    """Time a million steps of CartPole-v1 as grpo trajectories writes them, against gymnasium alone.

    Every side plays the same number of steps in 256 environments of one process. "gymnasium alone" steps them and does
    nothing else, which is the floor. "with the policy" also asks the policy of toys.cartpole for the actions of all
    environments at once. "trajectories" is the whole command's work, from loading the policy to the last Parquet file;
    each of its episodes has 500 steps.
    """
    logs.configure("trajectories", "warning")
    with tempfile.TemporaryDirectory() as directory:
        policy = Path(directory) / "cartpole.pt2"
        checkpoint.save_policy(CartPolePolicy(64, 2, 0), policy, STATE, ACTION)

        def timed(play: Callable[[int], None], _round: int) -> Mapping[str, float]:
            started, cpu = time.perf_counter(), time.process_time()
            play(given.steps)
            return {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu}

        sides = [
            Side("gymnasium alone", partial(timed, lambda steps: step_alone(steps, balance))),
            Side("with the policy", partial(timed, lambda steps: step_with_policy(steps, policy))),
            Side("trajectories", partial(timed, lambda steps: write_trajectories(steps, policy))),
        ]
        return harness.in_turn(sides, given.rounds)


def trajectory_tables(given: Given, sides: Sequence[Side]) -> list[Table]:
    """Return seconds, and the processor time of each side to that of gymnasium alone, the first side."""
    alone = sides[0].values("cpu")
    columns: harness.Columns = {
        "": harness.name_of,
        "seconds": lambda side: side.spread("seconds", 1),
        "processor seconds": lambda side: side.spread("cpu", 1),
        "steps/s": lambda side: harness.spread([given.steps / seconds for seconds in side.values("seconds")], 0),
        "processor time to gymnasium's": lambda side: harness.spread(
            [ours / base for ours, base in zip(side.values("cpu"), alone, strict=True)]
        ),
    }
    title = f"{given.steps} steps of CartPole-v1, {EPISODES} environments in one process"
    return [harness.table(title, sides, columns)]


TRAJECTORIES = Benchmark(
    measure=measure_trajectories,
    tables=trajectory_tables,
    rounds=3,
    quick={"steps": 50_000},
    options={"steps": Option(1_000_000, "of each side")},
)
