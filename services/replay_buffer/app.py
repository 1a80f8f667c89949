"""The replay buffer's routes."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Depends, FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import Gauge
from pydantic import ValidationError

from services.core.logs import get_logger
from services.core.tasks import in_background, run_until_first_ends
from services.http.app import create_service_app
from services.http.json_body import is_json
from services.http.problems import ProblemError
from services.protocol import replay as wire
from services.protocol.groups import GroupFormatError
from services.replay_buffer.database import damage
from services.replay_buffer.fresh_queue import Admission, FreshQueue
from services.replay_buffer.settings import ReplaySettings
from services.replay_buffer.store import CAPACITY, Store

T = TypeVar("T")

log = get_logger(__name__)

GROUPS = Gauge("replay_groups", "Groups to draw from.")
QUEUE = Gauge("replay_queue_groups", "Fresh groups, by whether they wait or are leased.", ["place"])
DISK = Gauge("replay_disk_bytes", "Disk that the buffer takes.")

# Groups of long completions are large; clients send few at a time.
MAX_BODY_BYTES = 256 * 2**20

Collector = Annotated[str, Query(max_length=200)]

Label = Annotated[str, Path(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")]


class Buffer:
    """The parts of the replay buffer, and the one thread that runs them, so that the disk holds up no event loop."""

    store: Store
    queue: FreshQueue
    admission: Admission

    def __init__(self, on_damage: Callable[[Exception], None]) -> None:
        """Make the buffer; ``on_damage`` gets the error that must end the process, once the database is damaged."""
        self.changed = asyncio.Event()
        self._on_damage = on_damage
        self._thread = ThreadPoolExecutor(1, "replay-buffer")

    def open(self, settings: ReplaySettings, clock: Callable[[], float]) -> None:
        """Open the database and load the indices; raise as Store does, or as ``run``."""
        self._directory = settings.directory
        with self._ended_by_damage():
            self.store = Store(settings, clock=clock)
            self.queue = FreshQueue(self.store)
            self.admission = Admission(is_restart=self.store.database.newest_sequence > 0)
            self.measure()

    @contextmanager
    def _ended_by_damage(self) -> Iterator[None]:
        """End the process if the block finds the database damaged."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            reason = damage(error, self._directory)
            if reason is None:
                raise
            self._on_damage(reason)
            raise reason from error

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` after everything that was asked for before it, and set the gauges.

        Raises:
            ConfigurationError: the database is damaged.
        """

        def measured() -> T:
            result = work()
            self.measure()
            return result

        with self._ended_by_damage():
            return await asyncio.get_running_loop().run_in_executor(self._thread, measured)

    def close(self) -> None:
        """Finish everything that was asked for and close the database."""
        self._thread.shutdown()
        self.store.database.close()

    def stats(self) -> dict[str, Any]:
        """Return the content of GET /stats."""
        groups, experiences = len(self.store.groups), len(self.store.experiences)
        waiting, leased = self.queue.counts()
        return wire.ReplayStats(
            size=groups + experiences,
            capacity=CAPACITY,
            groups=groups,
            experiences=experiences,
            waiting=waiting,
            leased=leased,
            newest_policy_version=self.store.groups.newest_version(),
            leases=self.queue.leases()[0],
            snapshots=self.store.snapshots,
            disk_bytes=self.store.database.used_bytes,
            counts=dict(self.store.counts),
        ).model_dump()

    def measure(self) -> None:
        """Set the gauges."""
        GROUPS.set(len(self.store.groups))
        waiting, leased = self.queue.counts()
        QUEUE.labels("waiting").set(waiting)
        QUEUE.labels("leased").set(leased)
        DISK.set(self.store.database.used_bytes)

    def seconds_to_expiry(self) -> float:
        """Return the seconds until the next lease expires."""
        _, expiry = self.queue.leases()
        return float("inf") if expiry is None else max(0.01, expiry - self.store.clock())

    def wake(self) -> None:
        """Let requests that wait for fresh groups look again."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def admit(self) -> None:
        """Let collectors that wait for room look again."""
        for source in self.admission.awaited:
            self.admission.admit(*await self.run(partial(self.queue.counts, source)), source)


def create_app(settings: ReplaySettings, *, clock: Callable[[], float] = time.time) -> FastAPI:
    """Return the replay buffer's application."""
    buffer = Buffer(lambda error: app.state.lifecycle.fail(error))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        started = time.perf_counter()
        await in_background(lambda: buffer.open(settings, clock))
        log.info(
            "loaded",
            directory=str(settings.directory),
            groups=len(buffer.store.groups),
            waiting=buffer.queue.counts()[0],
            seconds=time.perf_counter() - started,
        )
        try:
            yield
        finally:
            await asyncio.to_thread(buffer.close)

    async def stats() -> dict[str, Any]:
        return await buffer.run(buffer.stats) | {"in_flight": buffer.admission.in_flight()}

    app = create_service_app(
        "replay-buffer",
        settings=settings,
        lifespan=lifespan,
        stats=stats,
        description=__doc__ or "",
        max_body_bytes=MAX_BODY_BYTES,
    )
    _add_store_routes(app, buffer)
    _add_queue_routes(app, buffer)
    _add_snapshot_routes(app, buffer)
    return app


def _add_store_routes(app: FastAPI, buffer: Buffer) -> None:
    @app.post("/groups", tags=["store"])
    async def post_groups(request: Annotated[wire.AddGroupsRequest, Depends(_added)]) -> wire.AddGroupsReply:
        """Store groups; groups whose id is known already are left as they are."""
        return await buffer.run(lambda: buffer.store.add(request.groups, request.priorities))

    @app.post("/groups/sample", response_model=wire.SampleGroupsReply, tags=["store"])
    async def post_sample_groups(http: Request, request: wire.SampleGroupsRequest) -> Response:
        """Draw groups without replacement."""
        return _groups(http, await buffer.run(lambda: buffer.store.sample(request)))

    @app.post("/groups/priorities", tags=["store"])
    async def post_priorities(request: wire.UpdatePrioritiesRequest) -> wire.UpdatePrioritiesReply:
        """Set the priorities of groups by id."""
        return await buffer.run(lambda: buffer.store.update_priorities(request.priorities))

    @app.post("/add", tags=["experiences without tokens"])
    async def post_add(request: wire.AddExperiencesRequest) -> wire.AddExperiencesReply:
        """Store experiences without tokens, for clients that know no groups."""
        return await buffer.run(lambda: buffer.store.add_experiences(request.experiences))

    @app.post("/sample", response_model=wire.SampleExperiencesReply, tags=["experiences without tokens"])
    async def post_sample(request: wire.SampleExperiencesRequest) -> Response:
        """Draw experiences without tokens: by priority (their own, else the size of their reward) or uniformly."""
        drawn = await buffer.run(lambda: buffer.store.sample_experiences(request))
        return Response(drawn, media_type="application/json")


def _add_queue_routes(app: FastAPI, buffer: Buffer) -> None:
    @app.post("/queue", tags=["queue"])
    async def post_queue(
        request: Annotated[wire.AddGroupsRequest, Depends(_added)], collector: Collector = ""
    ) -> wire.AddGroupsReply:
        """Queue fresh groups; groups whose id is known already are left as they are.

        Those that were not known are no longer in flight at the ``collector`` that sends them.
        """
        reply = await buffer.run(lambda: buffer.queue.enqueue(request.groups, request.priorities))
        buffer.wake()
        buffer.admission.finish(collector, reply.added)
        await buffer.admit()
        return reply

    @app.post("/queue/lease", response_model=wire.LeaseReply, tags=["queue"])
    async def post_lease(http: Request, request: wire.LeaseRequest) -> Response:
        """Take fresh groups off the front of the queue, waiting for them if asked to."""
        deadline = time.monotonic() + request.wait_seconds
        draining: asyncio.Event = app.state.lifecycle.draining
        while True:
            changed = buffer.changed
            left = deadline - time.monotonic()
            lease = partial(buffer.queue.lease, request, take_fewer=left <= 0 or draining.is_set())
            reply = await buffer.run(lease)
            if reply is not None:
                await buffer.admit()
                return _groups(http, reply)
            seconds = min(left, await buffer.run(buffer.seconds_to_expiry))
            await run_until_first_ends(changed.wait(), draining.wait(), asyncio.sleep(seconds))

    @app.post("/queue/acknowledge", tags=["queue"])
    async def post_acknowledge(request: wire.AcknowledgeRequest) -> wire.AcknowledgeReply:
        """Take a lease's groups, which were trained on, off the queue."""
        reply = await buffer.run(lambda: buffer.queue.acknowledge(request))
        await buffer.admit()
        return reply

    @app.post("/queue/admission", tags=["queue"])
    async def post_admission(request: wire.AdmissionRequest) -> wire.AdmissionReply:
        """Return how many more prompts a collector may take, waiting for room if asked to."""
        asking = buffer.admission.ask(request)
        draining: asyncio.Event = app.state.lifecycle.draining
        try:
            await buffer.admit()
            await run_until_first_ends(asking.admitted.wait(), draining.wait(), asyncio.sleep(request.wait_seconds))
        finally:
            buffer.admission.withdraw(asking)
        return wire.AdmissionReply(places=asking.places)


def _add_snapshot_routes(app: FastAPI, buffer: Buffer) -> None:
    @app.post("/snapshots", tags=["snapshots"])
    async def post_snapshot(request: wire.SnapshotRequest) -> wire.SnapshotReply:
        """Save store and queue as they are now under a label."""
        return await buffer.run(lambda: buffer.store.save(request.label))

    @app.post("/snapshots/restore", tags=["snapshots"])
    async def post_restore(request: wire.SnapshotRequest) -> wire.SnapshotReply:
        """Take store and queue back to exactly what they were."""
        reply = await buffer.run(lambda: buffer.store.restore(request.label))
        buffer.wake()
        return reply

    @app.delete("/snapshots/{label}", tags=["snapshots"])
    async def delete_snapshot(label: Label) -> wire.SnapshotReply:
        """Drop a snapshot; a label without a snapshot has 0 groups."""
        return await buffer.run(lambda: buffer.store.drop(label))


async def _added(http: Request) -> wire.AddGroupsRequest:
    """Return the groups of a request, packed or as JSON; this is where they are checked."""
    try:
        if http.headers.get("content-type") == wire.GROUPS_TYPE:
            return wire.AddGroupsRequest.model_validate(wire.unframed(await http.body()))
        if not is_json(http):
            raise ProblemError(415, f"send the body as JSON or as {wire.GROUPS_TYPE}, and say so by its Content-Type")
        return wire.AddGroupsRequest.model_validate(await http.json())
    except (GroupFormatError, orjson.JSONDecodeError) as error:
        raise ProblemError(400, f"the body cannot be read: {error}") from error
    except ValidationError as error:
        raise RequestValidationError([{**e, "loc": ("body", *e["loc"])} for e in error.errors()]) from error


def _groups(http: Request, body: bytes) -> Response:
    """Return a reply with groups as its request accepts them: packed, or as JSON."""
    if http.headers.get("accept") == wire.GROUPS_TYPE:
        return Response(body, media_type=wire.GROUPS_TYPE)
    return Response(orjson.dumps(wire.unframed(body), option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")
