"""Run the gateway: ``python -m services.gateway``."""

from __future__ import annotations

import sys
from functools import partial

from services.core import endpoints
from services.gateway.app import create_app
from services.gateway.settings import GatewaySettings
from services.http.server import run_service

if __name__ == "__main__":
    sys.exit(run_service(partial(create_app, own_process=True), endpoints.Task.GATEWAY, GatewaySettings))
