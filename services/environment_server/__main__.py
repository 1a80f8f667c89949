"""Run the environment server: ``python -m services.environment_server``."""

from __future__ import annotations

import sys

from services.core.endpoints import Task
from services.environment_server.app import create_app
from services.environment_server.settings import EnvironmentSettings
from services.http.server import run_service

SHORT_FLAGS = {"eval-head-url": "eval_head_endpoint"}

if __name__ == "__main__":
    sys.exit(run_service(create_app, Task.ENVIRONMENT_SERVER, EnvironmentSettings, SHORT_FLAGS))
