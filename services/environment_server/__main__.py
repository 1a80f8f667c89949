"""Run the environment server: ``python -m services.environment_server``."""

from __future__ import annotations

import sys

from services.core import endpoints
from services.environment_server.app import create_app
from services.environment_server.settings import EnvironmentSettings
from services.http.server import run_service

if __name__ == "__main__":
    sys.exit(
        run_service(
            create_app,
            endpoints.Task.ENVIRONMENT_SERVER,
            EnvironmentSettings,
            {"eval-head-url": "eval_head_endpoint"},
        )
    )
