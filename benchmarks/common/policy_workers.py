"""The workers of ``benchmarks.policy``: processes that play episodes one after another.

A worker either asks the evaluation head for each action, or has loaded the policy itself.
"""

from __future__ import annotations

import hashlib
import http.client
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil

READY_SECONDS = 180.0
REQUEST_SECONDS = 60.0

Decide = Callable[[str, int, float, Any], Any]
"""(episode, step, return so far, state) -> action."""


class WorkerFailedError(RuntimeError):
    """A worker ended, or did not answer in time."""


@dataclass(frozen=True)
class Work:
    """What one worker does: ``head`` is the port of the head, None for a worker with a model of its own."""

    number: int
    environment: str
    seeds: list[int]
    policy: Path
    device: str
    threads: int
    head: int | None
    deadline_seconds: float


@dataclass
class Played:
    """What one worker did. Returns and a digest of the actions are by seed; the times are of the monotonic clock."""

    returns: dict[int, float] = field(default_factory=dict)
    actions: dict[int, str] = field(default_factory=dict)
    steps: int = 0
    began: float = 0.0
    ended: float = 0.0
    decision_seconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    memory_mb: float = 0.0


def run(works: Sequence[Work]) -> tuple[list[Played], float]:
    """Runs a worker for each of ``works``; they begin together once all are ready. Also returns how long that took.

    Raises:
        WorkerFailedError: one of them failed; the others are ended.
    """
    context = multiprocessing.get_context("spawn")
    started = time.monotonic()
    processes, pipes = [], []
    try:
        for work in works:
            ours, theirs = context.Pipe()
            process = context.Process(target=_main, args=(work, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        for work, pipe in zip(works, pipes, strict=True):
            _receive(work, pipe, READY_SECONDS)
        ready_seconds = time.monotonic() - started
        for pipe in pipes:
            pipe.send("begin")
        end = time.monotonic() + max(work.deadline_seconds for work in works)
        return [_receive(w, p, end - time.monotonic()) for w, p in zip(works, pipes, strict=True)], ready_seconds
    finally:
        for process in processes:
            process.join(0 if process.exitcode is None else 5)
            process.terminate()
            process.join(10)


def _receive(work: Work, pipe: Connection, seconds: float) -> Any:
    if not pipe.poll(max(0.0, seconds)):
        raise WorkerFailedError(f"worker {work.number} is not done after {seconds:.0f} s")
    try:
        content = pipe.recv()
    except EOFError as error:
        raise WorkerFailedError(f"worker {work.number} ended without a result; its output is above") from error
    if isinstance(content, str) and content != "ready":
        raise WorkerFailedError(f"worker {work.number}: {content}")
    return content


def _main(work: Work, pipe: Connection) -> None:
    # Before torch is loaded: its threads would contend with those of the other workers.
    os.environ["OMP_NUM_THREADS"] = str(work.threads)
    try:
        from services.environment_server.gymnasium_environment import GymnasiumEnvironment

        environment = GymnasiumEnvironment.make(work.environment)
        player: Decide = LocalPolicy(work) if work.head is None else Head(work)
        pipe.send("ready")
        pipe.recv()
        pipe.send(_play(work, environment, player))
    # The parent is told whatever it is, and this process ends of it, with its traceback on standard error.
    except Exception as error:
        with suppress(BrokenPipeError):
            pipe.send(f"{type(error).__name__}: {error}")
        raise


def _play(work: Work, environment: Any, decide: Decide) -> Played:
    played = Played(began=time.monotonic())
    cpu_before = time.process_time()
    for seed in work.seeds:
        episode, step, total, done = f"seed-{seed}", 0, 0.0, False
        actions = hashlib.sha256()
        state = environment.reset(seed)
        while not done:
            asked = time.perf_counter()
            action = decide(episode, step, total, state)
            played.decision_seconds.append(time.perf_counter() - asked)
            actions.update(orjson.dumps(action))
            transition = environment.step(action)
            state, total, step = transition.state, total + transition.reward, step + 1
            done = transition.terminated or transition.truncated
        if isinstance(decide, Head):
            decide.report(episode, step, total, seed)
        played.returns[seed], played.actions[seed] = total, actions.hexdigest()[:16]
        played.steps += step
    played.ended = time.monotonic()
    played.cpu_seconds = time.process_time() - cpu_before
    played.memory_mb = psutil.Process().memory_info().rss / 1e6
    environment.close()
    return played


class LocalPolicy:
    """The worker's own copy of the policy, which sees one state at a time."""

    def __init__(self, work: Work) -> None:
        import torch

        from services.evaluation_head import checkpoint

        torch.set_num_threads(work.threads)
        device = torch.device(work.device)
        self._loaded = checkpoint.load(checkpoint.find(work.policy), device)

    def __call__(self, episode: str, step: int, total: float, state: Any) -> Any:
        """See Decide."""
        [action], _ = self._loaded.decide(np.asarray([state], np.float32))
        return action


class Head:
    """The evaluation head, over one connection that stays open."""

    def __init__(self, work: Work) -> None:
        assert work.head is not None
        self._about = {"server": f"worker-{work.number}", "environment": work.environment}
        self._connection = http.client.HTTPConnection("127.0.0.1", work.head, timeout=REQUEST_SECONDS)
        self._connection.connect()

    def __call__(self, episode: str, step: int, total: float, state: Any) -> Any:
        """See Decide."""
        position = {"episode": episode, "step": step, "episode_return": total}
        return self._ask(state=state, episodes=[position])["action"]

    def report(self, episode: str, steps: int, total: float, seed: int) -> None:
        """Tells the head that an episode has ended."""
        self._ask(finished=[{"episode": episode, "steps": steps, "episode_return": total, "seed": seed}])

    def _ask(self, **request: Any) -> Any:
        body = orjson.dumps(self._about | request)
        end = time.monotonic() + REQUEST_SECONDS
        while True:
            self._connection.request("POST", "/evaluate", body, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            content = response.read()
            if response.status == 200:
                return orjson.loads(content)
            if response.status != 429 or time.monotonic() > end:
                raise RuntimeError(f"/evaluate answers {response.status}: {content[:300].decode()}")
            time.sleep(float(response.headers["Retry-After"]))
