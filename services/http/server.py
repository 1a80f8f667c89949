"""The HTTP server of every service: its process, uvicorn's configuration, and clients that leave.

The process listens, serves until a signal, drains, and exits with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import types
from collections.abc import AsyncIterator, Callable, Mapping
from types import FrameType
from typing import Any, TypeVar, get_args

import uvicorn
from fastapi import FastAPI
from pydantic import SecretStr
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.core import endpoints, logs
from services.core.errors import ConfigurationError, exit_code_of
from services.core.processes import kill_stale_processes
from services.core.settings import Settings
from services.http.app import Lifecycle

log = logs.get_logger(__name__)


SettingsT = TypeVar("SettingsT", bound=Settings)


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

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain the service."""
        asyncio.get_event_loop().call_soon_threadsafe(self._lifecycle.draining.set)
        super().handle_exit(sig, frame)
        self._captured_signals.clear()  # Uvicorn would raise them again at the end.


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Serve ``app`` on a listening socket until SIGTERM or SIGINT, or until its lifecycle fails.

    Raises:
        Exception: the error that the lifecycle failed with.
    """
    lifecycle: Lifecycle = app.state.lifecycle
    config = server_config(app, lifespan="on", timeout_graceful_shutdown=DRAIN_SECONDS)
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
        is_dual = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=is_dual)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        remedy = "free it, or give another --host or --port"
        raise ConfigurationError(f"cannot listen on {host}:{port} ({reason}); {remedy}") from error


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
        flags = {name.upper(): getattr(arguments, name) for name in names}
        os.environ.update({variable: value for variable, value in flags.items() if value is not None})
        settings = settings_class.load()
        logs.configure(task.value, settings.log_level)
        kill_stale_processes()
        endpoints.ask_directly()
        default = endpoints.bind_address(task)
        host = arguments.host or default.host
        listener = listen(host, default.port if arguments.port is None else arguments.port)
        app = app_factory(settings)
        log.info("listening", host=host, port=listener.getsockname()[1])
        if settings.token is None and host in ("0.0.0.0", "::"):
            log.warning("whoever reaches this port may use the service; set JOBGROUP_TOKEN to ask for a token")
        serve(app, listener)
        log.info("drained")

    return exit_code_of(main)


def _add_setting_flags(
    parser: argparse.ArgumentParser, settings_class: type[Settings], short_flags: Mapping[str, str]
) -> list[str]:
    """Add a flag for each setting except secrets, whose values every user of the machine could read; return names."""
    fields = settings_class.model_fields.items()
    names = [name for name, field in fields if SecretStr not in (field.annotation, *get_args(field.annotation))]
    group = parser.add_argument_group("settings", "Each flag wins over the variable in its brackets.")
    # The service's own settings come before those that all services share.
    for name in sorted(names, key=lambda name: name in Settings.model_fields):
        flags = [f"--{flag}" for flag, setting in short_flags.items() if setting == name]
        text = f"{settings_class.model_fields[name].description} [{name.upper()}]".replace("%", "%%")
        group.add_argument(*flags, f"--{name.replace('_', '-')}", dest=name, help=text, metavar="VALUE")
    return names


# SGLang's router tries gRPC with each new worker.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n"

MAX_HEAD_BYTES = 64 * 2**10
"""Bytes that may come before a request's headers are whole, or between pieces of its body."""
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
REQUEST_SECONDS = 60.0
"""Time for the headers of a request, and for each next piece of its body."""


class _Protocol(HttpToolsProtocol):
    """A connection that refuses HTTP/2 without uvicorn's warning, and bounds a request's headers in bytes and time."""

    _limit: asyncio.TimerHandle | None = None
    _unparsed = 0
    """Bytes since the last headers, or the last piece of a body, that were whole."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._set_limit()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait for a request."""
        super().connection_lost(exc)
        self._set_limit()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        if self.scope is None and data.startswith(_HTTP2_PREFACE):
            self.send_400_response("HTTP/2 is not spoken here; send HTTP/1.1")
            return
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        self._set_limit()

    def on_headers_complete(self) -> None:
        """Begin to count anew."""
        super().on_headers_complete()
        self._unparsed = 0

    def on_body(self, body: bytes) -> None:
        """Begin to count anew."""
        super().on_body(body)
        self._unparsed = 0

    def _set_limit(self) -> None:
        """Limit the wait for the client: once for the whole headers, and again for each piece of a body."""
        is_open = self in self.connections  # No longer when it is lost, or has become a WebSocket.
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self._limit is not None:
            if is_open and not is_answering:
                return
            self._limit.cancel()
            self._limit = None
        if is_open and not (is_answering and not self.cycle.more_body):
            self._limit = self.loop.call_later(REQUEST_SECONDS, self._close_late)

    def _close_late(self) -> None:
        self._limit = None
        # The service is late, not the client: it has not read the body yet.
        if self.flow.read_paused or (self.cycle is not None and self.cycle.waiting_for_100_continue):
            self._set_limit()
        else:
            self.transport.close()


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    """Return the uvicorn configuration of a service; ``options`` are passed on to uvicorn."""
    return uvicorn.Config(
        app,
        http=_Protocol,
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        # Longer than clients keep idle connections (KEEP_ALIVE_SECONDS): else one side closes what the other uses.
        **{"timeout_keep_alive": 30} | options,
    )


@contextlib.asynccontextmanager
async def serving(app: Any, path: str | None = None, **options: Any) -> AsyncIterator[str]:
    """Serve an application within this event loop on a free port of 127.0.0.1; yield that port's URL.

    With ``path`` it is served on a new UNIX socket of that path, which every user may connect to.
    """
    with _listener(path) as listener:
        server = uvicorn.Server(server_config(app, lifespan="off", **options))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]  # Ctrl-C is ours
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield path or f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


def _listener(path: str | None) -> socket.socket:
    if path is None:
        return socket.create_server(("127.0.0.1", 0), backlog=512)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o666)
    listener.listen(512)
    return listener


async def ended_before_client_left(request: Request, work: asyncio.Future[Any]) -> bool:
    """Wait until ``work`` ends or the client of ``request`` disconnects; return whether ``work`` has ended."""
    gone = asyncio.create_task(_disconnection(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
    return work.done()


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
