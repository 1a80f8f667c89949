"""Run the replay buffer: ``python -m services.replay_buffer``."""

from __future__ import annotations

import sys

from services.core import endpoints
from services.http.server import run_service
from services.replay_buffer.app import create_app
from services.replay_buffer.settings import ReplaySettings

if __name__ == "__main__":
    sys.exit(run_service(create_app, endpoints.Task.REPLAY_BUFFER, ReplaySettings))
