"""Simulate MODE=async group by group, by the rules of collector and learner, for seconds and staleness of a step.

The collector keeps a bounded number of prompts in flight, and at most BATCH_SIZE * (MAX_STALENESS + 1) groups in
flight, waiting and in training. The learner takes the BATCH_SIZE oldest waiting groups, without those that have become
too stale; then it trains and publishes.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass

SIMULATED = 100
WARM_UP = 10
"""Steps until the queue has its usual length; they are left out."""


@dataclass(frozen=True)
class Pipeline:
    """The speeds and limits of collector and learner."""

    batch: int
    """Groups a step."""
    concurrency: int
    """Prompts in flight at most."""
    max_staleness: int
    group_seconds: float
    """Mean time from a prompt to its scored group, with ``concurrency`` in flight."""
    spread: float
    """Standard deviation of that time, as a share of it: completions differ in length."""
    step_seconds: float
    """Time to train, to publish and for everything else."""


@dataclass(frozen=True)
class Flow:
    """The result of a simulation."""

    step_seconds: float
    staleness: float
    """Mean over trained groups, in policy versions."""
    stalest: int
    dropped: int
    """Groups that were too stale when their turn came."""
    idle: float
    """Share of the time in which the learner waits for groups."""


def flow(pipeline: Pipeline, steps: int = SIMULATED, seed: int = 0) -> Flow:
    """Simulate the warm-up and then ``steps`` steps."""
    draws = random.Random(seed)
    now = started = waited = 0.0
    version = dropped = in_training = 0
    ages: list[int] = []
    in_flight: list[tuple[float, int]] = []  # when each group will be done, and the version that makes it
    waiting: deque[int] = deque()

    def launch() -> None:
        room = pipeline.batch * (pipeline.max_staleness + 1) - len(waiting) - in_training
        for _ in range(min(room, pipeline.concurrency) - len(in_flight)):
            seconds = max(0.1, draws.gauss(1.0, pipeline.spread)) * pipeline.group_seconds
            heapq.heappush(in_flight, (now + seconds, version))

    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            started, waited, dropped = now, 0.0, 0
            ages.clear()
        began = now
        while in_training < pipeline.batch:
            launch()
            if not waiting:
                now, made_with = heapq.heappop(in_flight)
                waiting.append(made_with)
            elif (age := version - waiting.popleft()) > pipeline.max_staleness:
                dropped += 1
            else:
                ages.append(age)
                in_training += 1
        waited += now - began
        trained = now + pipeline.step_seconds
        launch()
        while in_flight and in_flight[0][0] <= trained:
            now, made_with = heapq.heappop(in_flight)
            waiting.append(made_with)
            launch()
        now, in_training, version = trained, 0, version + 1
    seconds = now - started
    return Flow(seconds / steps, sum(ages) / len(ages), max(ages), dropped, waited / seconds)
