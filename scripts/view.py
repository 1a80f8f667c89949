"""``grpo view``: the run page over one run, or over several to compare.

A run under way is shown up to its last step. Nothing is written.
"""

from __future__ import annotations

import threading
import webbrowser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import typer
from fastapi import FastAPI

from services.core import logs
from services.core.settings import Settings
from services.http.app import create_service_app
from services.http.server import listen, serve
from services.run_page.directory import Run, find_run, find_runs
from services.run_page.routes import PUBLIC, add_run_page

NAMES = "Ids or directories, or a directory of runs. Default: the newest run below runs/."


def create_view_app(settings: Settings, runs: list[Run]) -> FastAPI:
    """Return the application that shows ``runs``."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield

    app = create_service_app("run-view", settings=settings, lifespan=lifespan, public=PUBLIC, description=__doc__ or "")
    add_run_page(app, runs, asks_token=settings.token is not None)
    return app


def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help=NAMES)] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8005,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve the run page over runs until Ctrl-C."""

    settings = Settings.load()
    logs.configure("run-view", "warning")
    runs = find_runs(names) if names else [find_run(None)]
    listener = listen(host, port)
    url = f"http://{host}:{listener.getsockname()[1]}"
    print(f"{len(runs)} runs at {url}" if len(runs) > 1 else f"{runs[0].name} at {url}", flush=True)
    if open_browser:
        # Opening a browser may block, and its request waits in the listener's queue until the page is served.
        threading.Thread(target=webbrowser.open, args=[url], daemon=True).start()
    serve(create_view_app(settings, runs), listener)
