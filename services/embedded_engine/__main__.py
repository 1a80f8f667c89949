"""Run the embedded engine: ``python -m services.embedded_engine --host H --port P``."""

from __future__ import annotations

import argparse
import sys
from types import ModuleType

from services.chat.tokenizers import import_transformers_alone
from services.core import endpoints, logs, machine
from services.core.errors import exit_code_of
from services.core.imports import pause_collection
from services.core.models import model_files
from services.embedded_engine.families import is_known
from services.engines.settings import EngineSettings
from services.http.server import listen, serve


def import_application(model_name: str) -> ModuleType:
    """Import and return the module of the engine's application, in a process of the engine's own.

    Beside torch, transformers would import torch's compiler and distributed tensors, which only models need that
    transformers computes.
    """
    with pause_collection():
        if is_known(model_files(model_name, with_weights=False)):
            import_transformers_alone()
        from services.embedded_engine import app
    return app


def main() -> None:
    """Read the command line and the environment, and serve until a signal."""
    default = endpoints.bind_address(endpoints.Task.ROLLOUT_SERVER, endpoints.ENGINE_PORT)
    parser = argparse.ArgumentParser(prog="python -m services.embedded_engine")
    parser.add_argument("--host", default=default.host, help="address to listen on")
    parser.add_argument("--port", type=int, default=default.port, help="port to listen on, default 30001")
    address = parser.parse_args()
    settings = EngineSettings.load()
    application = import_application(settings.model_name)
    logs.configure(application.SERVICE, settings.log_level)
    if settings.keep_memory:
        machine.keep_freed_memory()
    listener = listen(address.host, address.port)
    app = application.create_app(settings)
    logs.get_logger(__name__).info("listening", host=address.host, port=listener.getsockname()[1])
    serve(app, listener)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
