"""The services of a large job group, whose engines are simulated: router, publication, collectors and packing."""

from __future__ import annotations

import asyncio
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import orjson
import psutil
import torch
import uvloop

from benchmarks import service
from benchmarks.harness import Args, Benchmark, Option, Side
from benchmarks.quick_engine import LOAD_SECONDS
from benchmarks.rollout_tier import ENGINE_SECONDS, rollout_tier, write_model
from benchmarks.service import Connection, Figure, percentile
from benchmarks.services import GROUP_SIZE, group_of, random_sequences, write_rows
from services.core import logs
from services.core.endpoints import ENDPOINTS_VARIABLE, Endpoint
from services.core.tasks import ServiceThread
from services.protocol.groups import TokenSequence, pack, split
from services.protocol.replay import GROUPS_TYPE, LeaseReply, framed, unframed
from services.rollout_server.registration import poll_seconds

P = ParamSpec("P")
T = TypeVar("T")

STEP_GROUPS = 64
COMPLETION_TOKENS = 1000
NODES = 64
NEEDED_GROUPS = 33.0
"""Groups a second of 64 H100 with an 8B model at 4,100 tokens a second each (docs/scaling.md)."""
TURNS, READ_TOKENS, SAMPLED_TOKENS = 20, 340, 60
MICRO_BATCH_TOKENS = 32_768


def in_process(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Return the result of a function that runs in a process of its own, as in the trainer's."""
    with ProcessPoolExecutor(1, get_context("spawn"), _prepare) as processes:
        return processes.submit(work, *arguments, **named).result()


def _prepare() -> None:
    logs.configure("trainer", "warning")
    torch.set_num_threads(1)  # Tensors are small here, and on a busy machine threads would wait for each other.


def router_figures(model: Path, nodes: int, args: Args, token: str = "") -> Iterator[Figure]:
    """Measure the registration of all nodes, their polls, and as many calls under way as ``args`` say."""
    with rollout_tier(model, nodes, token) as tier:
        yield Figure("registration of all nodes", uvloop.run(tier.register()), "s", at_most=10)
        before, polls = tier.cpu_seconds(), uvloop.run(tier.poll())
        polls_a_second = nodes / poll_seconds(nodes)  # fewer were made if the machine was busy
        for name, used in tier.cpu_seconds().items():
            share = (used - before[name]) / polls * polls_a_second
            yield Figure(f"polls of all launchers, {name}'s CPU", 100 * share, "%")
        before, began = tier.cpu_seconds(), time.perf_counter()
        milliseconds = uvloop.run(tier.call(args.requests, args.calls))
        count = args.requests * (1 + args.calls)
        # The last session begins ENGINE_SECONDS after the first one.
        needed = round(0.9 * count / (ENGINE_SECONDS * (2 + args.calls)))
        yield Figure("calls", count / (time.perf_counter() - began), "1/s", at_least=needed)
        for share in (50, 99):
            yield percentile("added", share, [latency - 1e3 * ENGINE_SECONDS for latency in milliseconds])
        for name, used in tier.cpu_seconds().items():
            yield Figure(f"{name}'s CPU a call", 1e3 * (used - before[name]) / count, "ms")
            yield Figure(f"{name}'s memory", tier.services[name].memory_mb(), "MB")


def publication_figures(model: Path, nodes: int) -> Iterator[Figure]:
    """Measure publications by the trainer's own publisher."""
    with rollout_tier(model, nodes) as tier, tempfile.TemporaryDirectory() as shared:
        uvloop.run(tier.register())
        yield from in_process(publish, model, Path(shared), tier.address, nodes)


def publish(model: Path, shared: Path, router: Endpoint, nodes: int, versions: int = 3) -> list[Figure]:
    """Publish versions to engines that are registered with ``router``, after one that warms up."""
    from trainer.config import TrainerSettings
    from trainer.model.policy import load_policy
    from trainer.model.ranks import join_ranks
    from trainer.publishing.publisher import Publisher
    from trainer.publishing.writer import VersionWriter

    os.environ[ENDPOINTS_VARIABLE] = orjson.dumps({"rollout-server-0:30000": f"{router.host}:{router.port}"}).decode()
    settings = TrainerSettings.load(model_name=str(model), shared_dir=shared, run_id="cluster", min_workers=nodes)
    with join_ranks() as ranks, ServiceThread() as thread:
        publisher = Publisher(settings, thread, VersionWriter(settings, load_policy(settings, ranks), ranks))
        publisher.publish(1)
        began, cpu = time.perf_counter(), time.process_time()
        pauses = [publisher.publish(2 + version)["pause_seconds"] for version in range(versions)]
        seconds, used = time.perf_counter() - began, time.process_time() - cpu
        publisher.writer.close()
    return [
        Figure("until all serve a version", seconds / versions, "s", at_most=2 * LOAD_SECONDS),
        Figure("longest pause of an engine", max(pauses), "s"),
        Figure("trainer's CPU for a version", used / versions, "s"),
    ]


@dataclass
class Collectors:
    """Collectors that make groups as fast as the services take them, and a trainer that takes them in steps."""

    ports: dict[str, int]
    count: int
    groups: int
    """Groups of each collector."""
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    """The latencies of each route."""
    _sequences: list[list[TokenSequence]] = field(default_factory=list)

    async def run(self) -> float:
        """Return the seconds until the trainer has taken all groups."""
        rng = np.random.default_rng(0)
        self._sequences = [random_sequences(rng, COMPLETION_TOKENS) for _ in range(20)]
        began = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            clients.create_task(self._train())
            for number in range(self.count):
                clients.create_task(self._collect(number))
        return time.perf_counter() - began

    async def _collect(self, collector: int) -> None:
        room = {"collector": f"collector-{collector}", "in_flight": 0, "most": 1, "batch_size": STEP_GROUPS}
        room |= {"max_staleness": 4, "wait_seconds": 5}
        async with (
            service.connect(self.ports["data_server"]) as data,
            service.connect(self.ports["reward_server"]) as reward,
            service.connect(self.ports["replay_buffer"]) as replay,
        ):
            for number in range(collector * self.groups, (collector + 1) * self.groups):
                places = 0
                while not places:
                    places = orjson.loads(await replay.request("POST", "/queue/admission", orjson.dumps(room)))[
                        "places"
                    ]
                [prompt] = orjson.loads(
                    await self._timed("a prompt", data, "GET", "/prompts?batch_size=1&consumer=collectors")
                )["prompts"]
                sequences = self._sequences[number % len(self._sequences)]
                texts = [
                    f"{s.completion}The answer is {GROUP_SIZE * number + place}." for place, s in enumerate(sequences)
                ]
                items = [{"prompt": prompt["prompt"], "response": text, "ground_truth": "72"} for text in texts]
                body = orjson.dumps({"items": items, "is_group": True})
                scored = await self._timed("8 rewards", reward, "POST", "/batch_reward", body)
                assert len(orjson.loads(scored)["rewards"]) == GROUP_SIZE
                body = framed({"priorities": [0.5]}, [pack(group_of(number, sequences))])
                path = f"/queue?collector={room['collector']}"
                await self._timed("a group queued", replay, "POST", path, body, GROUPS_TYPE)

    async def _train(self) -> None:
        left = self.count * self.groups
        async with service.connect(self.ports["replay_buffer"]) as replay:
            while left:
                count = min(STEP_GROUPS, left)
                body = orjson.dumps({"max_groups": count, "min_groups": count, "wait_seconds": 60})
                reply = await replay.request("POST", "/queue/lease", body, accept=GROUPS_TYPE)
                head, *groups = split(reply)
                assert len(groups) == count, f"{len(groups)} of {count} groups came within a minute"
                left -= count
                body = orjson.dumps({"lease_id": orjson.loads(head)["lease_id"]})
                await replay.request("POST", "/queue/acknowledge", body)

    async def _timed(self, name: str, connection: Connection, *request: str | bytes) -> bytes:
        began = time.perf_counter()
        reply = await connection.request(*request)  # type: ignore[arg-type]
        self.milliseconds.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
        return reply


def collector_figures(args: Args) -> Iterator[Figure]:
    """Measure collectors at data-server, reward-server and replay-buffer at once."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rows = write_rows(directory / "rows.jsonl", 7_473)
        environments = {
            "data_server": {"DATASET": str(rows), "HF_DATASETS_CACHE": str(directory / "cache")},
            "reward_server": {"REWARD_FN": "math"},
            "replay_buffer": {"REPLAY_DIR": str(directory / "replay")},
        }
        services = {name: stack.enter_context(service.running(name, **of)) for name, of in environments.items()}
        load = Collectors({name: one.port for name, one in services.items()}, args.collectors, args.groups)
        before = {name: one.cpu_seconds(recursive=True) for name, one in services.items()}
        seconds, count = uvloop.run(load.run()), args.collectors * args.groups
        yield Figure("groups", count / seconds, "1/s", at_least=NEEDED_GROUPS)
        for name, milliseconds in load.milliseconds.items():
            yield percentile(name, 99, milliseconds)
        for name, one in services.items():
            yield Figure(f"{name}'s CPU a group", 1e3 * (one.cpu_seconds(recursive=True) - before[name]) / count, "ms")
        yield Figure("replay_buffer's memory", services["replay_buffer"].memory_mb(), "MB")


def packing_figures(sessions: int) -> list[Figure]:
    """Measure the way of a step's sessions from the bytes of a lease to packed micro-batches; in the trainer's process.

    Sessions of 8,000 tokens have 20 turns, whose sampled tokens are trained on. Eight are a group.
    """
    from trainer.algorithm.attention_layout import TreeMask
    from trainer.algorithm.packing import pack as pack_rows
    from trainer.config import TrainerSettings
    from trainer.config.objective import Objective
    from trainer.model.micro_batching import share_out

    rng = np.random.default_rng(0)
    mask = np.tile(np.arange(READ_TOKENS + SAMPLED_TOKENS) >= READ_TOKENS, TURNS)
    packed = []
    for number in range(sessions // GROUP_SIZE):
        sequences = [s.model_copy(update={"loss_mask": mask}) for s in random_sequences(rng, len(mask))]
        packed.append(pack(group_of(number, sequences)))
    data = framed({"lease_id": "lease"}, packed)
    before, marks = psutil.Process().memory_info().rss, [time.perf_counter()]
    groups = LeaseReply.model_validate(unframed(data)).groups
    marks.append(time.perf_counter())
    objective = Objective(TrainerSettings.load())
    training = objective.with_advantages([objective.training_group(group) for group in groups])
    marks.append(time.perf_counter())
    [micro_batches] = share_out(training, 1, MICRO_BATCH_TOKENS, "cuda")
    marks.append(time.perf_counter())
    tokens = sum(len(pack_rows(pieces, TreeMask).input_ids) for pieces in micro_batches)
    marks.append(time.perf_counter())
    reading, advantages, sharing, packing = np.diff(marks).tolist()
    return [
        Figure("tokens, packed", tokens / 1e6, "M"),
        Figure("bytes of the lease", len(data) / 1e6, "MB"),
        Figure("reading the groups", reading, "s"),
        Figure("advantages", advantages, "s"),
        Figure("sharing out", sharing, "s"),
        Figure("before the first micro-batch", reading + advantages + sharing, "s", at_most=10),
        Figure("packing of all micro-batches, which all ranks share", packing, "s"),
        Figure(
            "memory besides the bytes", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before / 1e6, "MB"
        ),
    ]


def measure(args: Args) -> list[Side]:
    """Measure the services of a job group with 64 rollout nodes, each by the load that such a group gives it.

    Each service is the product's own process. Only the engines are simulated: one process listens in the place of all,
    answers after 1 s and loads a version in 1 s. Services, engines and load share this machine's cores, so that a
    processor time says more than a rate. Router: calls of 4,000 tokens, with as many under way as --requests says;
    every launcher looks at the router's list again and again. With a token the authenticating proxy is in front of it.
    Publication: the trainer's publisher, over the volume, a tiny model. Collectors: they generate nothing, and make
    groups of 8 completions of 1,000 tokens as fast as the services take them; the trainer leases 64 at a time. Packing:
    sessions of 8,000 tokens from the bytes of a lease to micro-batches of 32,768 tokens. Targets are what 64 nodes of
    one H100 need with a model of 8B parameters. The exit code is 1 if a target is missed.
    """
    with tempfile.TemporaryDirectory() as name:
        write_model(model := Path(name))
        loads: dict[str, Callable[[], Iterable[Figure]]] = {
            "router, 1 node": partial(router_figures, model, 1, args),
            "router, 64 nodes": partial(router_figures, model, NODES, args),
            "router, 64 nodes, token": partial(router_figures, model, NODES, args, "token"),
            "publication": partial(publication_figures, model, NODES),
            "collectors": partial(collector_figures, args),
            "packing": partial(in_process, packing_figures, args.sessions),
        }
        return service.measure_figures({name: loads[name] for name in ([args.only] if args.only else loads)}, args)


CLUSTER = Benchmark(
    measure=measure,
    tables=service.figure_table("the services of a large job group with simulated engines"),
    rounds=1,
    quick={"requests": 200, "calls": 3, "collectors": 25, "groups": 8, "sessions": 80},
    options={
        "requests": Option(1000, "under way at the router"),
        "calls": Option(5, "that each of them is followed by"),
        "collectors": Option(100, "collectors"),
        "groups": Option(20, "of each collector"),
        "sessions": Option(1000, "of the step that is packed"),
        "only": Option("", "one load"),
        "no-fail": service.NO_FAIL,
    },
    conclude=service.has_missed,
)
