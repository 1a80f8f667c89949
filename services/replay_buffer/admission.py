"""Admission of prompts: how many each collector may have in flight, given to those that ask, in the order they asked.

The prompts in flight of all collectors together are bounded by what the trainer can use in time, so the load on engines
and services depends on the trainer and not on the number of collectors.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.protocol.replay import AdmissionRequest

SILENT_SECONDS = 15.0
"""A collector that has not asked again this long after its last request ended is taken for dead: others get its share.
A collector asks at least every five seconds."""

REUNION_SECONDS = 10.0
"""After a restart nobody is admitted for this long, in which every collector has asked once more and said what it has
in flight: the longest pause of a client that repeats a request is five seconds."""


@dataclass
class _Collector:
    """The prompts in flight of one collector, which count until a time of the clock."""

    in_flight: int
    until: float


@dataclass
class Asking:
    """A request that waits for places."""

    request: AdmissionRequest
    places: int = 0
    admitted: asyncio.Event = field(default_factory=asyncio.Event)


class Admission:
    """The prompts in flight of all collectors, in memory, and the requests for more. Used from the event loop only."""

    def __init__(self, *, is_restart: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._opens_at = clock() + (REUNION_SECONDS if is_restart else 0.0)
        self._collectors: dict[str, _Collector] = {}
        self._asking: list[Asking] = []

    @property
    def is_awaited(self) -> bool:
        """True while a request waits."""
        return bool(self._asking)

    def in_flight(self) -> dict[str, int]:
        """Return the prompts in flight by collector, without the collectors that fell silent."""
        now = self._clock()
        self._collectors = {name: known for name, known in self._collectors.items() if known.until > now}
        return {name: known.in_flight for name, known in self._collectors.items()}

    def ask(self, request: AdmissionRequest) -> Asking:
        """Note what a collector has in flight, and put its request behind the others; drop its earlier request."""
        until = self._clock() + request.wait_seconds + SILENT_SECONDS
        self._collectors[request.collector] = _Collector(request.in_flight, until)
        self._asking = [other for other in self._asking if other.request.collector != request.collector]
        self._asking.append(asking := Asking(request))
        return asking

    def withdraw(self, asking: Asking) -> None:
        """Let a request wait no longer."""
        if asking in self._asking:
            self._asking.remove(asking)

    def finish(self, collector: str, groups: int) -> None:
        """Note that a collector has queued the groups of some of its prompts."""
        if known := self._collectors.get(collector):
            known.in_flight = max(0, known.in_flight - groups)

    def admit(self, waiting: int, leased: int) -> None:
        """Give places to the requests, given the numbers of groups that wait in the queue and that leases hold.

        The learner trains one batch a version and publishes one version a batch. So a group that is begun with fewer
        than MAX_STALENESS batches ahead of it is fresh enough when its turn comes, whatever the learner is doing (the
        bound of AReaL, arXiv:2505.24298, counted from the learner's side). With MAX_STALENESS 0, the next batch is
        begun when the last one has been trained on. No collector gets more than an equal share of the bound.
        """
        if self._clock() < self._opens_at:
            return
        in_flight = self.in_flight()
        ahead = waiting + sum(in_flight.values())
        for asking in list(self._asking):
            request = asking.request
            batch, bound = request.batch_size, request.batch_size * request.max_staleness
            free = max(bound - ahead, batch - leased - ahead)
            share = math.ceil(max(bound, batch) / max(1, len(in_flight)))
            places = min(free, request.most, share - in_flight.get(request.collector, 0))
            if places > 0:
                ahead += places
                self._collectors[request.collector].in_flight += places
                asking.places = places
                asking.admitted.set()
                self._asking.remove(asking)
