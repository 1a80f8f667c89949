"""The routes of the run page: the page itself, and what it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.middleware.gzip import GZipMiddleware

from services.http.app import JsonResponse
from services.http.problems import ProblemError
from services.run_page.directory import RewardCounts, RunDirectory
from services.run_page.lines import Position
from services.run_page.samples import Query as SampleQuery
from services.run_page.samples import Spread

STATIC = Path(__file__).parent / "static"
FILES = tuple(sorted(path.name for path in STATIC.iterdir() if path.suffix in (".js", ".css")))
PUBLIC = ("/", *(f"/static/{name}" for name in FILES))
"""The page and its parts. They contain no data, so that a browser may load them and then ask for the token."""

# Everything comes from here, and nothing in what a model wrote can run.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
GZIP_BYTES = 4096

Now = Callable[[], dict[str, Any]]
"""The state of the run now: phase, step, total_steps, policy_version, components; accuracy_before, once known."""


class RunOverview(BaseModel):
    """A run, its settings and its outcome. ``settings`` are the trainer's; ``components`` has everybody's."""

    name: str
    path: str
    settings: dict[str, Any]
    components: dict[str, dict[str, Any]]
    summary: dict[str, Any]


class RunsReply(BaseModel):
    """Reply of GET /api/runs. ``live`` says that GET /api/now tells what goes on in the first of them."""

    live: bool
    runs: list[RunOverview]


class MetricsReply(BaseModel):
    """Reply of GET /api/metrics. Pass ``file`` and ``offset`` for the next; ``restarted``: forget the former."""

    file: str
    offset: int
    more: bool
    restarted: bool
    unreadable: int
    columns: dict[str, list[float | None]]
    reward_counts: list[RewardCounts | None]


class GroupsQuery(BaseModel):
    """Query of GET /api/groups. Bounds include their ends; ``before`` continues a search."""

    model_config = ConfigDict(extra="forbid")

    run: str
    source: Literal["training", "evaluation"] = "training"
    before: int | None = Field(default=None, ge=0)
    limit: int = Field(default=10, ge=1, le=100)
    text: str = Field(default="", max_length=1000)
    step_from: int | None = None
    step_to: int | None = None
    reward_from: float | None = Field(default=None, allow_inf_nan=False)
    reward_to: float | None = Field(default=None, allow_inf_nan=False)
    spread: Spread = "any"
    prompt_key: str = Field(default="", pattern="^([0-9a-f]{16})?$")
    recurring: bool = False


class GroupsReply(BaseModel):
    """Reply of GET /api/groups: groups, newest first; ``before`` is null when the search is through."""

    groups: list[dict[str, Any]]
    before: int | None
    searched_to_step: int | None
    total: int


def add_run_page(app: FastAPI, runs: Callable[[], list[RunDirectory]], *, now: Now | None, asks_token: bool) -> None:
    """Adds the page at ``/`` and its routes at ``/api/``.

    Args:
        app: made with ``public=PUBLIC``.
        runs: the runs to show; the first is the one that ``now`` is about.
        now: what goes on, for a run that is under way; None without.
        asks_token: whether the page is to ask for the token.
    """
    _add_page(app, asks_token=asks_token)

    def find(name: str) -> RunDirectory:
        run = next((run for run in runs() if run.name == name), None)
        if run is None:
            raise ProblemError(404, f"no run {name!r} here; there are {[run.name for run in runs()]}")
        return run

    @app.get("/api/runs", response_model=RunsReply, tags=["run page"])
    async def get_runs() -> Response:
        """The runs that are shown."""
        found = await asyncio.to_thread(lambda: [_overview(run) for run in runs()])
        return JsonResponse({"live": now is not None, "runs": found})

    @app.get("/api/now", tags=["run page"], response_model=dict[str, Any])
    async def get_now() -> Response:
        """Where the run stands and how its components are; null where no run is under way."""
        return JsonResponse(now() if now is not None else None)

    @app.get("/api/metrics", response_model=MetricsReply, tags=["run page"])
    async def get_metrics(run: str, file: str = "", offset: Annotated[int, Query(ge=0)] = 0) -> Response:
        """Metrics of the steps after a position in metrics.jsonl, by column."""
        directory = find(run)
        read = await asyncio.to_thread(directory.metrics, Position(file, offset))
        return JsonResponse(
            {
                "file": read.end.file,
                "offset": read.end.offset,
                "more": read.more,
                "restarted": read.restarted,
                "unreadable": read.unreadable,
                "columns": read.columns,
                "reward_counts": read.reward_counts,
            }
        )

    @app.get("/api/groups", response_model=GroupsReply, tags=["run page"])
    async def get_groups(query: Annotated[GroupsQuery, Query()]) -> Response:
        """Groups of samples.jsonl, or of evaluations.jsonl, with their completions, searched from the newest on."""
        directory = find(query.run)
        wanted = SampleQuery(**query.model_dump(exclude={"run", "source"}))
        index = directory.samples if query.source == "training" else directory.evaluations
        found = await asyncio.to_thread(index.search, wanted)
        return JsonResponse(
            {
                "groups": found.groups,
                "before": found.before,
                "searched_to_step": found.searched_to_step,
                "total": found.total,
            }
        )

    app.add_middleware(GZipMiddleware, minimum_size=GZIP_BYTES, compresslevel=3)


def _add_page(app: FastAPI, *, asks_token: bool) -> None:
    page = (STATIC / "page.html").read_text()
    if asks_token:
        page = page.replace('data-asks-token="false"', 'data-asks-token="true"')

    @app.get("/", response_class=Response, include_in_schema=False)
    async def get_page() -> Response:
        return Response(page, media_type="text/html", headers=HEADERS)

    @app.get("/static/{name}", response_class=FileResponse, include_in_schema=False)
    async def get_static(name: str) -> Response:
        if name not in FILES:
            raise ProblemError(404, f"no file {name!r} here; there are {', '.join(FILES)}")
        return FileResponse(STATIC / name, headers=HEADERS)


def _overview(run: RunDirectory) -> dict[str, Any]:
    return {
        "name": run.name,
        "path": str(run.path),
        "settings": run.settings(),
        "components": run.components(),
        "summary": run.summary(),
    }
