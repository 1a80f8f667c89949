"""Serves applications on real ports, for browsers and for clients that take URLs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn
from fastapi import FastAPI

from services.scaffold import listen


@contextmanager
def served(app: FastAPI, port: int = 0) -> Iterator[str]:
    """The URL of ``app``, which a thread serves within the context, on a free port unless one is given."""
    listener = listen("127.0.0.1", port)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline, "the application did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


@contextmanager
def served_ready(app: FastAPI) -> Iterator[str]:
    """As ``served``, once the application says that it is healthy."""
    with served(app) as url:
        deadline = time.monotonic() + 30
        while httpx.get(f"{url}/health", trust_env=False).status_code != 200:
            assert time.monotonic() < deadline, "the application does not get healthy"
            time.sleep(0.05)
        yield url
