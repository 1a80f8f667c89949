"""Runs the environment server: ``python -m services.environment_server``."""

from __future__ import annotations

import sys

from services import endpoints, scaffold
from services.environment_server.app import create_app
from services.environment_server.settings import EnvironmentSettings

if __name__ == "__main__":
    sys.exit(
        scaffold.run(
            create_app,
            endpoints.Task.ENVIRONMENT_SERVER,
            endpoints.ENVIRONMENT_PORT,
            EnvironmentSettings,
            {"environment": "environment"},
        )
    )
