"""Run the gateway: ``python -m services.gateway``."""

from __future__ import annotations

import sys
from functools import partial

from services.core import endpoints
from services.gateway.app import create_app
from services.gateway.settings import GatewaySettings
from services.http.server import run_service

SWITCH_SECONDS = 0.0005
"""The time for which a thread that computes lets another one wait for the interpreter. The thread that writes to the
disk waits for it at each commit; Python's own value is 5 ms."""

if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_SECONDS)
    sys.exit(run_service(partial(create_app, own_process=True), endpoints.Task.GATEWAY, GatewaySettings))
