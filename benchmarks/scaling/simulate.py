"""MODE=async by simulation: the collector's and the learner's rules, group by group, give step seconds and staleness.

The collector keeps GENERATION_CONCURRENCY prompts in flight, and no more groups in flight, waiting and in training than
BATCH_SIZE * (MAX_STALENESS + 1). The learner takes the BATCH_SIZE oldest of the waiting groups, trains and publishes;
what has become too stale meanwhile it leaves out.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass

SIMULATED = 100
WARM_UP = 10
"""Steps until the queue is as full as it stays; they are left out."""


@dataclass(frozen=True)
class Pipeline:
    """What is simulated."""

    batch: int
    """Groups a step."""
    concurrency: int
    """Prompts in flight at most."""
    max_staleness: int
    group_seconds: float
    """From a prompt to its scored group, on average, with ``concurrency`` in flight."""
    spread: float
    """Standard deviation of that, as a share of it: completions differ in length."""
    step_seconds: float
    """Of training, publishing and what is left over."""


@dataclass(frozen=True)
class Flow:
    """What comes of it."""

    step_seconds: float
    staleness: float
    """Mean over trained groups, in policy versions."""
    stalest: int
    dropped: int
    """Groups that were too stale when their turn came."""
    idle: float
    """Share of the time that the learner waits for groups."""


def flow(pipeline: Pipeline, steps: int = SIMULATED, seed: int = 0) -> Flow:
    """Simulates so many steps after the warm-up."""
    simulation = _Simulation(pipeline, random.Random(seed))
    for _ in range(WARM_UP):
        simulation.step()
    started, before = simulation.now, simulation.waited
    simulation.stale.clear()
    simulation.dropped = 0
    for _ in range(steps):
        simulation.step()
    seconds = simulation.now - started
    stale = simulation.stale
    idle = (simulation.waited - before) / seconds
    return Flow(seconds / steps, sum(stale) / len(stale), max(stale), simulation.dropped, idle)


class _Simulation:
    def __init__(self, pipeline: Pipeline, draws: random.Random) -> None:
        self.now = self.waited = 0.0
        self.stale: list[int] = []
        self.dropped = 0
        self._pipeline = pipeline
        self._draws = draws
        self._version = 0
        self._in_training = 0
        self._in_flight: list[tuple[float, int]] = []
        """When each group will be there, and the version that makes it."""
        self._waiting: deque[int] = deque()

    def step(self) -> None:
        """The learner waits for a batch, trains on it and publishes a version; groups come in meanwhile."""
        started = self.now
        taken: list[int] = []
        while len(taken) < self._pipeline.batch:
            self._launch()
            if self._waiting:
                self._take(taken)
            else:
                self._finish_one()
        self.waited += self.now - started
        self.stale += [self._version - made_with for made_with in taken]
        self._in_training = len(taken)
        trained = self.now + self._pipeline.step_seconds
        self._launch()
        while self._in_flight and self._in_flight[0][0] <= trained:
            self._finish_one()
            self._launch()
        self.now, self._in_training = trained, 0
        self._version += 1

    def _take(self, taken: list[int]) -> None:
        made_with = self._waiting.popleft()
        if self._version - made_with > self._pipeline.max_staleness:
            self.dropped += 1
        else:
            taken.append(made_with)
            self._in_training = len(taken)

    def _launch(self) -> None:
        pipeline = self._pipeline
        room = pipeline.batch * (pipeline.max_staleness + 1) - len(self._waiting) - self._in_training
        for _ in range(min(room, pipeline.concurrency) - len(self._in_flight)):
            seconds = max(0.1, self._draws.gauss(1.0, pipeline.spread)) * pipeline.group_seconds
            heapq.heappush(self._in_flight, (self.now + seconds, self._version))

    def _finish_one(self) -> None:
        self.now, made_with = heapq.heappop(self._in_flight)
        self._waiting.append(made_with)
