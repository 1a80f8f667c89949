"""Run the replay buffer: ``python -m services.replay_buffer``."""

from __future__ import annotations

import sys

from services import endpoints, scaffold
from services.replay_buffer.app import create_app
from services.replay_buffer.settings import ReplaySettings

if __name__ == "__main__":
    sys.exit(scaffold.run(create_app, endpoints.Task.REPLAY_BUFFER, endpoints.REPLAY_PORT, ReplaySettings))
