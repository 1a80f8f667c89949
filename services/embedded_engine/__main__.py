"""Run the embedded engine: ``python -m services.embedded_engine --host H --port P``."""

from __future__ import annotations

import argparse
import sys

from services.core import endpoints, logs, memory
from services.core.errors import exit_code_of
from services.embedded_engine.http.app import SERVICE, create_app
from services.embedded_engine.settings import EngineSettings
from services.http.server import listen, serve


def main() -> None:
    """Read the command line and the environment, and serve until a signal."""
    default = endpoints.bind_address(endpoints.Task.ROLLOUT_SERVER, endpoints.ENGINE_PORT)
    parser = argparse.ArgumentParser(prog="python -m services.embedded_engine")
    parser.add_argument("--host", default=default.host, help="address to listen on")
    parser.add_argument("--port", type=int, default=default.port, help="port to listen on, default 30001")
    address = parser.parse_args()
    settings = EngineSettings.load()
    logs.configure(SERVICE, settings.log_level)
    if settings.keep_memory:
        memory.keep()
    listener = listen(address.host, address.port)
    app = create_app(settings)
    logs.get_logger(__name__).info("listening", host=address.host, port=listener.getsockname()[1])
    serve(app, listener)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
