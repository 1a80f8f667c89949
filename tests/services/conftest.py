"""Fixtures of the services' tests: an application in this process, or a service in its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI

from tests.adapters import save_adapter
from tests.ports import free_port
from tests.waiting import IDLE_SECONDS, bytes_in, wait_ready, wait_until

REPOSITORY = Path(__file__).parents[2]
Serving = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def serving() -> Serving:
    """``async with serving(app) as client``: run an application with its lifespan, and wait until it is ready."""

    @asynccontextmanager
    async def serve(app: FastAPI, *, token: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
        headers = {"Authorization": f"Bearer {token}"} if token else None
        async with app.router.lifespan_context(app):
            await wait_ready(app)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://service", headers=headers) as client:
                yield client

    return serve


@pytest.fixture(scope="session")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of the tiny model."""
    directory = tmp_path_factory.mktemp("adapters")
    return [save_adapter(tiny_model, directory / str(seed), seed) for seed in (1, 2)]


@dataclass
class RunningService:
    """A service in a process of its own."""

    process: subprocess.Popen[bytes]
    port: int
    log_file: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait_healthy(self) -> None:
        """Wait until the service is healthy; processor time and lines in its log count as progress."""
        wait_until(self._is_healthy, f"{self.url} healthy", progress=self._progress, told=lambda: self.log)

    def _is_healthy(self) -> bool:
        assert self.process.poll() is None, f"the service ended:\n{self.log}"
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", trust_env=False).status_code == 200
        return False

    def _progress(self) -> tuple[int, float]:
        with suppress(psutil.NoSuchProcess):
            return bytes_in(self.log_file), psutil.Process(self.process.pid).cpu_times().user
        return 0, 0.0

    def terminate(self) -> int:
        """End the service by SIGTERM, as SkyPilot does, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(IDLE_SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(IDLE_SECONDS)

    def end(self) -> None:
        """End the service if it runs, first by SIGTERM, so that its coverage is measured."""
        if self.process.poll() is not None:
            return
        try:
            self.terminate()
        except subprocess.TimeoutExpired:
            self.kill()


StartService = Callable[..., RunningService]


def _environment(given: dict[str, str]) -> dict[str, str]:
    ours = ("DATASET", "MODEL_NAME", "REWARD_", "REPLAY_", "DATA_", "JOBGROUP_", "SKYPILOT_", "GATEWAY_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **given}


@pytest.fixture(scope="session")
def start_service_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartService]:
    """``start_service(module, NAME=value, ...)``: start a service as a process, which ends with the session."""
    started: list[RunningService] = []

    def start(*command: str, port: int | None = None, healthy: bool = True, **environment: str) -> RunningService:
        directory = tmp_path_factory.mktemp("service")
        service_port = port or free_port()
        log_file = directory / "log"
        arguments = [*command, "--host", "127.0.0.1", "--port", str(service_port)]
        if not command[0].endswith(".py"):
            arguments = ["-m", *arguments]
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=REPOSITORY,
                env=_environment({"SHARED_DIR": str(directory), **environment}),
                stdout=log,
                stderr=log,
            )
        service = RunningService(process, service_port, log_file)
        started.append(service)
        if healthy:
            service.wait_healthy()
        return service

    yield start
    for service in started:
        service.end()


@pytest.fixture
def start_service(start_service_once: StartService) -> Iterator[StartService]:
    """Like ``start_service_once``, but the services end with the test."""
    started: list[RunningService] = []

    def start(*command: str, **options: Any) -> RunningService:
        service = start_service_once(*command, **options)
        started.append(service)
        return service

    yield start
    for service in started:
        service.end()
