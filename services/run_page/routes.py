"""The routes of the run page: the page itself, and its data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query
from fastapi.responses import FileResponse, Response
from starlette.middleware.gzip import GZipMiddleware

from services.http.problems import ProblemError
from services.run_page.directory import Run, RunOverview
from services.run_page.records import GroupsFound, GroupsQuery, Metrics, Position, read_metrics

STATIC = Path(__file__).parent / "static"
FILES = {path.name: path for path in sorted(STATIC.iterdir()) if path.suffix in (".js", ".css")}
PUBLIC = ("/", *(f"/static/{name}" for name in FILES))
"""The paths of the page and its parts, which contain no data: a browser loads them and then asks for the token."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""The page loads from this server only, so that nothing in a model's completions can run."""
GZIP_BYTES = 4096

Now = Callable[[], dict[str, Any]]
"""Returns a live run's phase, activity, step, total_steps, policy_version, components, and the fields of step 0."""


class RunGroupsQuery(GroupsQuery):
    """Query of GET /api/groups."""

    run: str
    source: Literal["training", "evaluation"] = "training"


@dataclass(frozen=True)
class RunsReply:
    """Reply of GET /api/runs. ``live`` says that the first run is under way, as GET /api/now describes."""

    live: bool
    runs: list[RunOverview]


def add_run_page(app: FastAPI, runs: Sequence[Run], *, asks_token: bool, now: Now | None = None) -> None:
    """Add the page at ``/`` and its routes at ``/api/``.

    Args:
        app: made with ``public=PUBLIC``.
        runs: the runs to show, a live run first and alone.
        asks_token: whether the page asks for the token.
        now: returns the state of the live run; None without one.
    """
    # A browser would otherwise find the modules one import after another.
    preloads = "".join(f'<link rel="modulepreload" href="static/{name}">' for name in FILES if name.endswith(".js"))
    page = (STATIC / "page.html").read_text("utf-8").replace("</head>", f"{preloads}</head>")
    add_page(app, "/", page, FILES, asks_token=asks_token)
    _add_runs(app, runs, now)
    _add_steps(app, {run.name: run for run in runs})
    app.add_middleware(GZipMiddleware, minimum_size=GZIP_BYTES, compresslevel=3)


def _add_runs(app: FastAPI, runs: Sequence[Run], now: Now | None) -> None:
    def overviews() -> list[RunOverview]:
        live = None if now is None else "succeeded" if now()["phase"] == "finished" else "running"
        return [run.overview(live, is_alone=len(runs) == 1) for run in runs]

    @app.get("/api/runs", tags=["run page"])
    async def get_runs() -> RunsReply:
        """Return the runs to show."""
        return RunsReply(now is not None, await asyncio.to_thread(overviews))

    @app.get("/api/now", tags=["run page"])
    async def get_now() -> dict[str, Any] | None:
        """Return the state of the live run and its components; null without a live run."""
        return now() if now is not None else None


def _add_steps(app: FastAPI, runs: Mapping[str, Run]) -> None:
    def find(name: str) -> Run:
        if name not in runs:
            raise ProblemError(404, f"no run {name!r} here; there are {list(runs)}")
        return runs[name]

    @app.get("/api/metrics", tags=["run page"])
    async def get_metrics(run: str, file: str = "", offset: Annotated[int, Query(ge=0)] = 0) -> Metrics:
        """Return the metrics of the steps after a position in metrics.jsonl, by column."""
        return await asyncio.to_thread(read_metrics, find(run).path / "metrics.jsonl", Position(file, offset))

    @app.get("/api/groups", tags=["run page"])
    async def get_groups(query: Annotated[RunGroupsQuery, Query()]) -> GroupsFound:
        """Return groups of samples.jsonl or evaluations.jsonl with their completions, the newest first."""
        run = find(query.run)
        index = run.samples if query.source == "training" else run.evaluations
        return await asyncio.to_thread(index.search, query)


def add_page(app: FastAPI, path: str, page: str, files: Mapping[str, Path], *, asks_token: bool) -> None:
    """Add an HTML page at ``path``, which may ask for the token, and its files by name at ``/static/``."""
    page = page.replace('data-asks-token="false"', f'data-asks-token="{str(asks_token).lower()}"')

    @app.get(path, response_class=Response, include_in_schema=False)
    async def get_page() -> Response:
        return Response(page, media_type="text/html", headers=HEADERS)

    @app.get("/static/{name}", response_class=FileResponse, include_in_schema=False)
    async def get_static(name: str) -> Response:
        if name not in files:
            raise ProblemError(404, f"no file {name!r} here; there are {', '.join(files)}")
        return FileResponse(files[name], headers=HEADERS)
