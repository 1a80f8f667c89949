"""A worker of ``benchmarks.policy``: a program that plays episodes one after the other.

It gets its actions from the evaluation head, or from its own copy of the policy. It prints "ready", waits for a line on
standard input, plays, and prints its measurements as a line of JSON.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil

from services.environment_server.gymnasium_environment import GymnasiumEnvironment

REQUEST_SECONDS = 60.0

Decide = Callable[[str, int, float, Any], Any]
"""Returns the action for: episode, step, return so far, state."""


@dataclass(frozen=True)
class Work:
    """The episodes of a worker; ``head`` is the head's port, or None for a worker with its own model."""

    name: str
    environment: str
    seeds: list[int]
    policy: str
    device: str
    head: int | None


@dataclass
class Played:
    """The measurements of a worker; times are seconds of the monotonic clock."""

    returns: dict[str, float] = field(default_factory=dict)
    """The return of the episode of each seed."""
    actions: dict[str, str] = field(default_factory=dict)
    """A hash of the actions in the episode of each seed."""
    steps: int = 0
    began: float = 0.0
    ended: float = 0.0
    decision_seconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    memory_mb: float = 0.0


def play(work: Work, environment: Any, decide: Decide) -> Played:
    """Play all episodes."""
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
        played.returns[str(seed)], played.actions[str(seed)] = total, actions.hexdigest()[:16]
        played.steps += step
    played.ended = time.monotonic()
    played.cpu_seconds = time.process_time() - cpu_before
    played.memory_mb = psutil.Process().memory_info().rss / 1e6
    return played


def own_model(work: Work) -> Decide:
    """Load the policy, which then sees one state at a time."""
    # A worker that asks the head does without torch, which takes memory.
    import torch

    from services.evaluation_head import checkpoint

    loaded = checkpoint.load(checkpoint.find(Path(work.policy)), torch.device(work.device))

    def decide(_episode: str, _step: int, _total: float, state: Any) -> Any:
        [action], _, _ = loaded.decide(np.asarray([state], np.float32))
        return action

    return decide


class Head:
    """A connection to the evaluation head that stays open."""

    def __init__(self, work: Work) -> None:
        assert work.head is not None
        self._about = {"server": work.name, "environment": work.environment}
        self._connection = http.client.HTTPConnection("127.0.0.1", work.head, timeout=REQUEST_SECONDS)
        self._connection.connect()

    def __call__(self, episode: str, step: int, total: float, state: Any) -> Any:
        """Return the head's action; see Decide."""
        position = {"episode": episode, "step": step, "episode_return": total}
        return self._ask(state=state, episodes=[position])["action"]

    def report(self, episode: str, steps: int, total: float, seed: int) -> None:
        """Tell the head that an episode has ended."""
        self._ask(finished=[{"episode": episode, "steps": steps, "episode_return": total, "seed": seed}])

    def _ask(self, **request: Any) -> Any:
        body = orjson.dumps(self._about | request)
        while True:
            self._connection.request("POST", "/evaluate", body, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            content = response.read()
            if response.status == 200:
                return orjson.loads(content)
            if response.status != 429:
                raise RuntimeError(f"/evaluate answers {response.status}: {content[:300].decode()}")
            time.sleep(float(response.headers["Retry-After"]))


def main() -> None:
    """Play as the JSON on the command line says."""
    work = Work(**json.loads(sys.argv[1]))
    environment = GymnasiumEnvironment(work.environment)
    decide: Decide = own_model(work) if work.head is None else Head(work)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(asdict(play(work, environment, decide))), flush=True)


if __name__ == "__main__":
    main()
