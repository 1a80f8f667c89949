"""Run the data-server: ``python -m services.data_server``."""

from __future__ import annotations

import sys
from functools import partial

from services.core import endpoints
from services.data_server.app import create_app
from services.data_server.settings import DataSettings
from services.http.server import run_service

if __name__ == "__main__":
    sys.exit(run_service(partial(create_app, own_process=True), endpoints.Task.DATA_SERVER, DataSettings))
