"""A rollout node's copy of the newest policy version (PUBLISH_DELTA), which all engines of the node load.

The launcher brings the copy up to date when the trainer asks for a version, before any engine pauses for it, and when
an engine must catch up. Engines load the copy as they load any model directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from services.core.endpoints import Endpoint, node_rank
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.machine import ComputeType, memory_of_run
from services.core.tasks import in_background
from services.engines.settings import RolloutSettings
from services.engines.shape import read_config, weight_bytes
from services.http.json_body import JsonResponse
from services.http.middleware import ServiceMiddleware
from services.http.problems import problem_response
from services.http.server import DRAIN_SECONDS, listen, serving
from services.weights.deltas import DAMAGE, ModelCopy, check_room
from services.weights.policy_store import DeltaRecord, PolicyStore

COPY_SECONDS = 600.0
"""Longest time until the copy is a version that the trainer asks for, and longest time that the trainer has it then."""
CATCH_UP_COPIES = 3
"""Times COPY_SECONDS that an engine which catches up has: the trainer may have the copy first, and a node that comes
late may read as much as two whole versions."""
LOAD_SECONDS = COPY_SECONDS / 3
"""Longest time in which such an engine loads the copy, so that the trainer, which may wait for that, gets the next."""


class NodeCopy:
    """The copy of the newest version; it never changes while the launcher, or the trainer, has an engine load it."""

    def __init__(self, policy_dir: Path) -> None:
        """Begin without a copy.

        Args:
            policy_dir: the run's versions on the shared volume.
        """
        self._store = PolicyStore(policy_dir)
        self.model = ModelCopy(self._store, memory_of_run(policy_dir, f"rollout-{node_rank()}"))
        self._turn = asyncio.Condition()
        self._readers = 0
        self._lent_until = 0.0
        """The time, by time.monotonic, until which the trainer may have engines load the copy."""
        self._is_closed = False

    @asynccontextmanager
    async def of(self, version: int, *, lends: bool = False) -> AsyncIterator[Path]:
        """Make the copy a version, and yield its directory, which does not change within the context.

        With ``lends`` it belongs to the trainer afterwards, for COPY_SECONDS or until ``take_back``. A damaged version
        is removed from the volume, so that the trainer writes it again, whole.

        Raises:
            DependencyLostError: the volume has lost the version, has it damaged, or takes longer than COPY_SECONDS,
                without ``lends`` CATCH_UP_COPIES times as long; or the launcher ends.
            ConfigurationError: the node has no room for a copy.
        """
        try:
            async with asyncio.timeout(COPY_SECONDS * (1 if lends else CATCH_UP_COPIES)), self._turn:
                record = await in_background(partial(self._store.record, version))
                await self._wait_until_free(record, lends=lends)
                self._check_open()
                await in_background(partial(self.model.become, record))
                self._readers += 1
                self._lent_until = time.monotonic() + COPY_SECONDS if lends else self._lent_until
        except DAMAGE as error:
            self._check_open()  # what is removed at the end looks damaged
            await in_background(partial(self._store.remove, version))
            raise DependencyLostError(
                f"policy version {version} in {self._store.policy_dir} is damaged: {error}; the trainer writes it anew"
            ) from error
        except (OSError, TimeoutError) as error:
            raise DependencyLostError(
                f"policy version {version} in {self._store.policy_dir} cannot be copied ({str(error) or 'timed out'})"
            ) from error
        try:
            yield self.model.path
        finally:
            self._readers -= 1
            async with self._turn:
                self._turn.notify_all()

    async def take_back(self) -> None:
        """Let the copy become another version, because the trainer has no engine load it any more."""
        self._lent_until = 0.0
        async with self._turn:
            self._turn.notify_all()

    def close(self) -> None:
        """Remove the copy, which becomes no version any more."""
        self._is_closed = True
        self.model.remove()

    async def _wait_until_free(self, record: DeltaRecord, *, lends: bool) -> None:
        """Wait, with the turn, until the copy is the version of a record or may become it."""
        while self.model.identity != record.identity:
            lent = 0.0 if lends else max(self._lent_until - time.monotonic(), 0.0)
            if not self._readers and not lent:
                return
            # Nobody says so when the trainer's time is over.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(lent or None):
                    await self._turn.wait()

    def _check_open(self) -> None:
        if self._is_closed:
            raise DependencyLostError("the launcher ends")


@asynccontextmanager
async def node_copy(settings: RolloutSettings, address: Endpoint | None) -> AsyncIterator[NodeCopy | None]:
    """Yield this node's copy, and serve its route at ``address``; None without PUBLISH_DELTA.

    Raises:
        ConfigurationError: the node has no room for the copy, or the address is taken.
    """
    if address is None:
        yield None
        return
    remedy = (
        "a rollout-server brings its node's copy of the weights up to date there (PUBLISH_DELTA); end the program that "
        "has the port, such as another rollout-server, or unset PUBLISH_DELTA"
    )
    with listen(address.host, address.port, remedy) as listener:
        copy = NodeCopy(settings.policy_dir)
        if (config := read_config(settings.model_name)) is not None:
            check_room(copy.model.path.parent, weight_bytes(settings.model_name, config, ComputeType.BFLOAT16) or 0)
        app = create_app(copy, settings.token)
        try:
            async with serving(app, listener, timeout_graceful_shutdown=DRAIN_SECONDS):
                try:
                    yield copy
                finally:
                    copy.close()
        finally:
            copy.close()  # again, because a request may have been answered meanwhile


def create_app(copy: NodeCopy, token: str | None) -> ASGIApp:
    """Return an application by which the trainer has the copy become a version: ``POST /versions/{version}``.

    It answers with the copy's directory, which stays that version until ``DELETE /versions``.
    """

    async def become(request: Request) -> Response:
        try:
            async with copy.of(request.path_params["version"], lends=True) as path:
                return JsonResponse({"path": str(path)})
        except (DependencyLostError, ConfigurationError) as error:
            return problem_response(409, str(error))

    async def take_back(_: Request) -> Response:
        await copy.take_back()
        return JsonResponse({})

    app = Starlette()
    app.add_route("/versions/{version:int}", become, methods=["POST"])
    app.add_route("/versions", take_back, methods=["DELETE"])
    return ServiceMiddleware(app, service="launcher", token=token, is_ready=lambda: True)
