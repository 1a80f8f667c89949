"""The process of a service: it listens, serves until a signal, drains, and exits with 0."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import types
from collections.abc import Callable, Generator, Mapping
from types import FrameType
from typing import TypeVar

import uvicorn
from fastapi import FastAPI

from services.core import endpoints, logs
from services.core.errors import ConfigurationError, exit_code_of
from services.core.settings import Settings
from services.http.connections import server_config
from services.http.lifecycle import Lifecycle

SettingsT = TypeVar("SettingsT", bound=Settings)

log = logs.get_logger(__name__)

DRAIN_SECONDS = 5
"""Longest time that a request in flight may take after SIGTERM; callers allow a service 10 s to end."""


class _Server(uvicorn.Server):
    """Uvicorn's server, except that the process drains and exits with 0 at a signal instead of dying of it."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle
        lifecycle.on_failure = self._stop

    def _stop(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle the signals while the server runs."""
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain the service."""
        asyncio.get_event_loop().call_soon_threadsafe(self._lifecycle.draining.set)
        super().handle_exit(sig, frame)


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Serve ``app`` on a listening socket until SIGTERM or SIGINT, or until its lifecycle fails.

    Raises:
        Exception: the error that the lifecycle failed with.
    """
    lifecycle: Lifecycle = app.state.lifecycle
    config = server_config(app, lifespan="on", timeout_graceful_shutdown=DRAIN_SECONDS, timeout_keep_alive=30)
    _Server(config, lifecycle).run(sockets=[listener])
    if lifecycle.failure is not None:
        raise lifecycle.failure


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket.

    Raises:
        ConfigurationError: the address is taken, is not an address of this machine, or has an impossible port.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"cannot listen on {host}:{port} ({reason}); free it, or give another --host or --port"
        ) from error


def run_service(
    app_factory: Callable[[SettingsT], FastAPI],
    task: endpoints.Task,
    settings_class: type[SettingsT],
    flags: Mapping[str, str] = types.MappingProxyType({}),
) -> int:
    """Read a service's command line and settings, serve, and return the exit code.

    The service listens at ``--host`` and ``--port``, by default at its address in the job group
    (endpoints.bind_address). ``flags`` adds flags for settings: ``{"batch-size": "head_batch_size"}`` lets
    ``--batch-size`` win over HEAD_BATCH_SIZE.
    """
    parser = argparse.ArgumentParser(prog=f"python -m services.{task.value.replace('-', '_')}")
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, help=f"default {endpoints.PORTS[task][0]}; 0: any free port")
    for flag, name in flags.items():
        description = settings_class.model_fields[name].description
        parser.add_argument(f"--{flag}", dest=name, help=f"{description} (also {name.upper()})".replace("%", "%%"))
    arguments = parser.parse_args()

    def main() -> None:
        settings = settings_class.load(**{name: getattr(arguments, name) for name in flags.values()})
        logs.configure(task.value, settings.log_level)
        default = endpoints.bind_address(task)
        host = arguments.host or default.host
        listener = listen(host, default.port if arguments.port is None else arguments.port)
        app = app_factory(settings)
        log.info("listening", host=host, port=listener.getsockname()[1])
        serve(app, listener)
        log.info("drained")

    return exit_code_of(main)
