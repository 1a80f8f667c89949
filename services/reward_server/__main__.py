"""Runs the reward-server: ``python -m services.reward_server``."""

from __future__ import annotations

import sys

from services import endpoints, scaffold
from services.reward_server.app import create_app
from services.reward_server.settings import RewardSettings

if __name__ == "__main__":
    sys.exit(scaffold.run(create_app, endpoints.Task.REWARD_SERVER, endpoints.REWARD_PORT, RewardSettings))
