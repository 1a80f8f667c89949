"""The trainer's HTTP service on port 8004: the run page, health, metrics and the position of the run."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI

from services.core.endpoints import STATUS_PORT, Task, bind_address
from services.core.logs import get_logger
from services.http.app import create_service_app
from services.http.server import listen, server_config
from services.run_page.components import ComponentMonitor
from services.run_page.directory import Run
from services.run_page.progress import Activity, ReportTimer, in_words
from services.run_page.routes import PUBLIC, add_run_page
from trainer.checkpoints.state import RunState
from trainer.config import TrainerSettings
from trainer.reporting.step_metrics import StepClock

log = get_logger(__name__)

BEFORE = {"accuracy_before", "accuracy_before_low", "accuracy_before_high", "eval_reward_before"}
"""The fields of the run's state that the page shows as step 0."""


@dataclass
class RunStatus:
    """The position of the run. The loop updates it, and GET /stats shows it."""

    clock: StepClock = field(default_factory=StepClock)
    step: int = 0
    total_steps: int = 0
    policy_version: int = 0
    state: RunState | None = None
    """The state of the run, with the accuracy before training; None until it is known."""
    metrics: dict[str, float] = field(default_factory=dict)
    activity: Activity = field(default_factory=Activity)
    refusals: list[dict[str, Any]] = field(default_factory=list)
    """The failed proofs of workers, oldest first; see UnprovenError."""

    def begin(self, phase: str, what: str) -> None:
        """Enter a phase; ``what`` says in words what the run does in it."""
        self.clock.enter(phase)
        self.activity.begin(what)

    def position(self) -> dict[str, Any]:
        """Return the phase, the steps, the policy version and the activity."""
        return {
            "phase": self.clock.phase,
            "step": self.step,
            "total_steps": self.total_steps,
            "policy_version": self.policy_version,
            "activity": self.activity.shown(),
            "workers_refused": self.refusals,
            **(self.state.model_dump(include=BEFORE) if self.state is not None else {}),
        }

    def stats(self) -> dict[str, Any]:
        """Return the content of GET /stats: the position and the newest step's metrics."""
        return {**self.position(), "metrics": self.metrics}


def create_status_app(settings: TrainerSettings, status: RunStatus) -> FastAPI:
    """Return the application of the status service."""
    watch = ComponentMonitor(settings.token, settings.services)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(watch.run())
        try:
            yield
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    def now() -> dict[str, Any]:
        return {**status.position(), "components": watch.components()}

    app = create_service_app(
        Task.TRAINER.value, settings=settings, lifespan=lifespan, stats=status.stats, public=PUBLIC
    )
    add_run_page(app, [Run(settings.run_dir, settings.run_id)], now=now, asks_token=settings.token is not None)
    return app


async def log_activity(status: RunStatus) -> None:
    """Log an activity that lasts, at intervals, until cancelled."""
    report_timer = ReportTimer()
    while True:
        await asyncio.sleep(1.0)
        if report_timer.is_due(status.activity.since, is_early=not status.metrics):
            log.info(in_words(status.activity.shown()))


def listen_for_status() -> socket.socket:
    """Return the socket of the status page.

    Raises:
        ConfigurationError: its address is taken.
    """
    address = bind_address(Task.TRAINER, STATUS_PORT)
    return listen(address.host, address.port)


async def serve_status(settings: TrainerSettings, status: RunStatus, listener: socket.socket) -> None:
    """Serve the status page until cancelled."""
    server = uvicorn.Server(server_config(create_status_app(settings, status), lifespan="on"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise
