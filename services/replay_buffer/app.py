"""The replay-buffer's routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Path
from fastapi.responses import Response
from prometheus_client import Gauge

from services.core.logs import get_logger
from services.core.tasks import in_background
from services.http.app import create_service_app, model_response
from services.http.problems import ProblemError
from services.protocol import (
    AcknowledgeReply,
    AcknowledgeRequest,
    AddExperiencesReply,
    AddExperiencesRequest,
    AddGroupsReply,
    AddGroupsRequest,
    Group,
    LeaseReply,
    LeaseRequest,
    ReplayStats,
    SampleExperiencesReply,
    SampleExperiencesRequest,
    SampleGroupsReply,
    SampleGroupsRequest,
    SnapshotReply,
    SnapshotRequest,
    UpdatePrioritiesReply,
    UpdatePrioritiesRequest,
)
from services.replay_buffer.archive import Archive
from services.replay_buffer.fresh import FreshDesk
from services.replay_buffer.settings import ReplaySettings
from services.replay_buffer.state import State
from services.replay_buffer.store import Store

T = TypeVar("T")

log = get_logger(__name__)

GROUPS = Gauge("replay_groups", "Groups to draw from.")
QUEUE = Gauge("replay_queue_groups", "Fresh groups, by whether they wait or are leased.", ["place"])
DISK = Gauge("replay_disk_bytes", "Disk that the buffer takes.")

# Groups of long completions are large; clients send few at a time.
MAX_BODY_BYTES = 256 * 2**20

Label = Annotated[str, Path(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")]


class Buffer:
    """The parts of the buffer over one state, run in one thread of its own so that the disk holds up no event loop."""

    def __init__(self, settings: ReplaySettings, *, clock: Callable[[], float] = time.time) -> None:
        self.state = State(settings, clock=clock)
        self.store = Store(self.state)
        self.fresh = FreshDesk(self.state)
        self.archive = Archive(self.state)
        self.changed = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "replay-buffer")

    async def run(self, work: Callable[[], T]) -> T:
        """Runs ``work`` after everything that was asked for before it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        """Closes the files after everything that was asked for."""
        await self.run(self.state.close)
        self._thread.shutdown()

    def stats(self) -> dict[str, Any]:
        """The content of GET /stats."""
        state = self.state
        return ReplayStats(
            size=len(state.groups) + len(state.experiences),
            capacity=state.settings.replay_capacity,
            groups=len(state.groups),
            experiences=len(state.experiences),
            waiting=state.queue.waiting,
            leased=state.queue.leased,
            newest_policy_version=state.newest_version,
            leases=sum(not lease.expired for lease in state.queue.leases.values()),
            snapshots=state.kept.labels,
            disk_bytes=state.storage.used_bytes,
            counts=dict(state.counts),
        ).model_dump()

    def measure(self) -> None:
        """Sets the gauges."""
        GROUPS.set(len(self.state.groups))
        QUEUE.labels("waiting").set(self.state.queue.waiting)
        QUEUE.labels("leased").set(self.state.queue.leased)
        DISK.set(self.state.storage.used_bytes)

    def seconds_to_expiry(self) -> float:
        """How long until the next lease runs out."""
        expiry = self.state.queue.next_expiry()
        return float("inf") if expiry is None else max(0.01, expiry - self.state.clock())

    def wake(self) -> None:
        """Lets requests that wait for fresh groups look again."""
        self.changed.set()
        self.changed = asyncio.Event()


def create_app(settings: ReplaySettings, *, clock: Callable[[], float] = time.time) -> FastAPI:
    """The replay-buffer."""
    held: list[Buffer] = []

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        started = time.perf_counter()
        buffer = await in_background(lambda: Buffer(settings, clock=clock))
        buffer.measure()
        log.info(
            "loaded",
            directory=str(settings.directory),
            groups=len(buffer.state.groups),
            waiting=buffer.state.queue.waiting,
            seconds=time.perf_counter() - started,
        )
        held.append(buffer)
        try:
            yield
        finally:
            await held.pop().close()

    async def stats() -> dict[str, Any]:
        return await held[0].run(held[0].stats)

    app = create_service_app(
        "replay-buffer",
        settings=settings,
        lifespan=lifespan,
        stats=stats,
        description=__doc__ or "",
        max_body_bytes=MAX_BODY_BYTES,
    )

    async def run(work: Callable[[Buffer], T]) -> T:
        buffer = held[0]

        def measured() -> T:
            result = work(buffer)
            buffer.measure()
            return result

        return await buffer.run(measured)

    _add_store_routes(app, run)
    _add_queue_routes(app, held, run)
    _add_snapshot_routes(app, held, run)
    return app


Run = Callable[[Callable[[Buffer], Any]], Any]


def _add_store_routes(app: FastAPI, run: Run) -> None:
    @app.post("/groups", response_model=AddGroupsReply, tags=["store"])
    async def post_groups(request: AddGroupsRequest) -> Response:
        """Stores groups; those whose id is known already are left as they are."""
        return model_response(await run(lambda b: b.store.add(request.groups, request.priorities)))

    @app.post("/groups/sample", response_model=SampleGroupsReply, tags=["store"])
    async def post_sample_groups(request: SampleGroupsRequest) -> Response:
        """Draws groups without replacement."""
        return _json(await run(lambda b: b.store.sample(request)))

    @app.post("/groups/priorities", response_model=UpdatePrioritiesReply, tags=["store"])
    async def post_priorities(request: UpdatePrioritiesRequest) -> Response:
        """Sets the priorities of groups by id."""
        return model_response(await run(lambda b: b.store.update_priorities(request.priorities)))

    @app.get("/groups/{group_id}", response_model=Group, tags=["store"])
    async def get_group(group_id: Annotated[str, Path(min_length=1, max_length=200)]) -> Response:
        """One group, from store or queue."""
        found = await run(lambda b: b.store.get(group_id))
        if found is None:
            raise ProblemError(404, "no group of that id is in the store or the queue")
        return _json(found)

    @app.post("/add", response_model=AddExperiencesReply, tags=["experiences without tokens"])
    async def post_add(request: AddExperiencesRequest) -> Response:
        """Stores experiences without tokens, for clients that know no groups."""
        return model_response(await run(lambda b: b.store.add_experiences(request.experiences)))

    @app.post("/sample", response_model=SampleExperiencesReply, tags=["experiences without tokens"])
    async def post_sample(request: SampleExperiencesRequest) -> Response:
        """Draws experiences without tokens: by priority (their own, else the size of their reward) or all alike."""
        return _json(await run(lambda b: b.store.sample_experiences(request)))


def _add_queue_routes(app: FastAPI, held: list[Buffer], run: Run) -> None:
    @app.post("/queue", response_model=AddGroupsReply, tags=["queue"])
    async def post_queue(request: AddGroupsRequest) -> Response:
        """Queues fresh groups; those whose id is known already are left as they are."""
        reply = await run(lambda b: b.fresh.enqueue(request.groups, request.priorities))
        held[0].wake()
        return model_response(reply)

    @app.post("/queue/lease", response_model=LeaseReply, tags=["queue"])
    async def post_lease(request: LeaseRequest) -> Response:
        """Takes fresh groups off the front of the queue, waiting for them if asked to."""
        deadline = time.monotonic() + request.wait_seconds
        draining: asyncio.Event = app.state.lifecycle.draining
        while True:
            changed = held[0].changed
            left = deadline - time.monotonic()
            give_up = left <= 0 or draining.is_set()
            reply = await run(partial(_lease, request, give_up))
            if reply is not None:
                return _json(reply)
            await _first_of([changed, draining], min(left, await run(Buffer.seconds_to_expiry)))

    @app.post("/queue/acknowledge", response_model=AcknowledgeReply, tags=["queue"])
    async def post_acknowledge(request: AcknowledgeRequest) -> Response:
        """Says that a lease's groups were trained on."""
        return model_response(await run(lambda b: b.fresh.acknowledge(request)))


def _add_snapshot_routes(app: FastAPI, held: list[Buffer], run: Run) -> None:
    @app.post("/snapshots", response_model=SnapshotReply, tags=["snapshots"])
    async def post_snapshot(request: SnapshotRequest) -> Response:
        """Remembers store and queue as they are now under a label."""
        return model_response(await run(lambda b: b.archive.save(request.label)))

    @app.post("/snapshots/restore", response_model=SnapshotReply, tags=["snapshots"])
    async def post_restore(request: SnapshotRequest) -> Response:
        """Takes store and queue back to exactly what they were."""
        reply = await run(lambda b: b.archive.restore(request.label))
        held[0].wake()
        return model_response(reply)

    @app.delete("/snapshots/{label}", response_model=SnapshotReply, tags=["snapshots"])
    async def delete_snapshot(label: Label) -> Response:
        """Forgets a snapshot; one that does not exist holds 0 groups."""
        return model_response(await run(lambda b: b.archive.drop(label)))


def _lease(request: LeaseRequest, take_fewer: bool, buffer: Buffer) -> bytes | None:
    return buffer.fresh.lease(request, take_fewer=take_fewer)


async def _first_of(events: list[asyncio.Event], seconds: float) -> None:
    """Returns when one of the events is set, or after ``seconds``."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
