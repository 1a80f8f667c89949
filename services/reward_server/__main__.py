"""Run the reward-server: ``python -m services.reward_server``."""

from __future__ import annotations

import sys

from services.core import endpoints
from services.http.server import run_service
from services.reward_server.app import create_app
from services.reward_server.settings import RewardSettings

if __name__ == "__main__":
    sys.exit(run_service(create_app, endpoints.Task.REWARD_SERVER, RewardSettings))
