"""Runs the embedded engine: ``python -m services.embedded_engine --host H --port P``."""

from __future__ import annotations

import argparse
import sys

from services.core import logs, memory
from services.core.errors import exit_code_of
from services.embedded_engine.http.app import SERVICE, create_app
from services.http.server import listen, serve
from services.rollout_server.engines import Binds
from services.rollout_server.settings import RolloutSettings


def main() -> None:
    """Reads the command line and the environment, and serves until a signal."""
    parser = argparse.ArgumentParser(prog="python -m services.embedded_engine")
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, help="port to listen on, default 30001")
    arguments = parser.parse_args()
    settings = RolloutSettings.load()
    logs.configure(SERVICE, settings.log_level)
    if settings.keep_memory:
        memory.keep()
    default = Binds.of(settings).engine
    host = arguments.host or default.host
    listener = listen(host, default.port if arguments.port is None else arguments.port)
    app = create_app(settings)
    logs.get_logger(__name__).info("listening", host=host, port=listener.getsockname()[1])
    serve(app, listener)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
