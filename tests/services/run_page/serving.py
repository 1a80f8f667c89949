"""Serves applications on real ports, for browsers and for clients that take URLs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI
from pydantic import SecretStr

from scripts.view import create_view_app
from services.core.settings import Settings
from services.http.server import listen
from services.run_page.directory import Run
from tests.waiting import IDLE_SECONDS, wait_until


@contextmanager
def served(app: FastAPI, port: int = 0) -> Iterator[str]:
    """The URL of ``app``, which a thread serves within the context, on a free port unless one is given."""
    listener = listen("127.0.0.1", port)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started, "the application has started", every=0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(IDLE_SECONDS)
        listener.close()


@contextmanager
def served_ready(app: FastAPI, port: int = 0) -> Iterator[str]:
    """As ``served``, once the application says that it is healthy."""
    with served(app, port) as url:
        wait_until(
            lambda: httpx.get(f"{url}/health", timeout=IDLE_SECONDS, trust_env=False).status_code == 200, "health"
        )
        yield url


def view(*runs: Path, token: str | None = None, names: Sequence[str] = ()) -> FastAPI:
    """The page over finished runs, each with its directory's name unless ``names`` are given."""
    settings = Settings(jobgroup_token=SecretStr(token) if token else None)
    directories = zip(names or [run.name for run in runs], runs, strict=True)
    return create_view_app(settings, [Run(run, name) for name, run in directories])
