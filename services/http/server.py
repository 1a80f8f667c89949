"""The process of a service: it listens, serves until a signal, drains, and exits with 0."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import types
from collections.abc import Callable, Generator, Mapping
from types import FrameType
from typing import TypeVar, get_args

import uvicorn
from fastapi import FastAPI
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from services.core import endpoints, logs
from services.core.errors import ConfigurationError, exit_code_of
from services.core.leftovers import end_leftovers
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
    short_flags: Mapping[str, str] = types.MappingProxyType({}),
) -> int:
    """Read a service's command line and settings, serve, and return the exit code.

    The service listens at ``--host`` and ``--port``, by default at its address in the job group
    (endpoints.bind_address). Each setting has a flag that wins over its variable; ``short_flags`` gives settings a
    second flag: ``{"batch-size": "head_batch_size"}``.
    """
    # Without abbreviations, because a flag that is cut off or misspelt must not set another setting.
    parser = argparse.ArgumentParser(prog=f"python -m services.{task.value.replace('-', '_')}", allow_abbrev=False)
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, help=f"default {endpoints.PORTS[task][0]}; 0: any free port")
    names = _add_setting_flags(parser, settings_class, short_flags)
    arguments = parser.parse_args()

    def main() -> None:
        # As variables, because SkyPilot's SDK, the log and child processes read theirs by themselves.
        given = {name.upper(): getattr(arguments, name) for name in names}
        os.environ.update({variable: value for variable, value in given.items() if value is not None})
        settings = settings_class.load()
        logs.configure(task.value, settings.log_level)
        end_leftovers()
        default = endpoints.bind_address(task)
        host = arguments.host or default.host
        listener = listen(host, default.port if arguments.port is None else arguments.port)
        app = app_factory(settings)
        log.info("listening", host=host, port=listener.getsockname()[1])
        serve(app, listener)
        log.info("drained")

    return exit_code_of(main)


def _add_setting_flags(
    parser: argparse.ArgumentParser, settings_class: type[Settings], short_flags: Mapping[str, str]
) -> list[str]:
    """Add a flag for each setting except secrets, whose values every user of the machine could read; return names."""
    names = [name for name, field in settings_class.model_fields.items() if SecretStr not in _types(field)]
    group = parser.add_argument_group("settings", "Each flag wins over the variable in its brackets.")
    # The service's own settings come before those that all services share.
    for name in sorted(names, key=lambda name: name in Settings.model_fields):
        flags = [f"--{flag}" for flag, setting in short_flags.items() if setting == name]
        text = f"{settings_class.model_fields[name].description} [{name.upper()}]".replace("%", "%%")
        group.add_argument(*flags, f"--{name.replace('_', '-')}", dest=name, help=text, metavar="VALUE")
    return names


def _types(field: FieldInfo) -> tuple[object, ...]:
    return (field.annotation, *get_args(field.annotation))
