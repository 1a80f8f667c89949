"""Runs the data-server: ``python -m services.data_server``."""

from __future__ import annotations

import sys

from services import endpoints, scaffold
from services.data_server.app import create_app
from services.data_server.settings import DataSettings

if __name__ == "__main__":
    sys.exit(scaffold.run(create_app, endpoints.Task.DATA_SERVER, endpoints.DATA_PORT, DataSettings))
