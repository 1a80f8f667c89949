"""Run the evaluation head: ``python -m services.evaluation_head``."""

from __future__ import annotations

import sys

import websockets  # noqa: F401  # uvicorn serves /ws with it, and without it leaves /ws out silently

from services.core import endpoints
from services.evaluation_head.app import create_app
from services.evaluation_head.settings import HeadSettings
from services.http.server import run_service

FLAGS = {
    "policies": "head_policies",
    "batch-size": "head_batch_size",
    "timeout-ms": "head_timeout_ms",
    "device": "head_device",
    "addresses": "game_server_addresses",
}
"""The options of the command line, and their settings."""

if __name__ == "__main__":
    sys.exit(run_service(create_app, endpoints.Task.EVALUATION_HEAD, HeadSettings, FLAGS))
