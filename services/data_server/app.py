"""The data-server's routes."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import Response

from services.core.sources import Source
from services.core.tasks import in_background
from services.data_server.batches import Batches
from services.data_server.settings import DataSettings
from services.http.app import create_service_app
from services.http.json_body import JsonResponse, JsonRoute
from services.http.problems import unknown_source
from services.protocol import prompts as wire

router = APIRouter(route_class=JsonRoute)


def create_app(settings: DataSettings, *, own_process: bool = False) -> FastAPI:
    """Make the data-server. With ``own_process`` it keeps its state in the run directory, else in memory."""

    def load() -> _Sources:
        return _Sources(settings.of_sources(lambda own, source: Batches.load(own, source, own_process=own_process)))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.batches = await in_background(load)
        yield
        for batches in app.state.batches.values():
            batches.state.close()

    app = create_service_app(
        "data-server",
        settings=settings,
        lifespan=lifespan,
        stats=lambda: _stats(app.state.batches).model_dump(),
        description=__doc__ or "",
    )
    app.include_router(router)
    return app


class _Sources(dict[str, Batches]):
    """The batches of each source, by its name."""

    def __missing__(self, name: str) -> Batches:
        raise unknown_source(name, self)


async def _loaded(request: Request) -> _Sources:
    # FastAPI would call a function without `async` in a thread, which takes longer than the answer.
    batches: _Sources = request.app.state.batches
    return batches


Loaded = Annotated[_Sources, Depends(_loaded)]


@router.get("/prompts", response_model=wire.PromptBatch)
async def get_prompts(sources: Loaded, query: Annotated[wire.PromptsQuery, Query()]) -> Response:
    """Return the next prompts.

    With ``epoch`` or ``position`` they depend on these alone. Otherwise the server's own cursor of ``consumer``
    (one for each split) moves on; repeating a ``request_id`` returns the same prompts again.
    """
    split, batches = query.split, sources[query.source]
    if query.epoch is not None or query.position is not None:
        cursor = wire.Cursor(epoch=query.epoch or 0, position=query.position or 0)
        return _reply(batches, split, *batches.batch(split, cursor, query.batch_size))
    key = _cursor_key(query)
    before = None if query.request_id is None else batches.state.start_of(key, query.request_id)
    start = before or batches.state.cursor(key)
    prompts, after = batches.batch(split, start, query.batch_size)
    if before is None:
        batches.state.advance(key, query.request_id, start, after)
    return _reply(batches, split, prompts, after)


@router.post("/prompts", response_model=wire.PromptBatch)
async def post_prompts(request: wire.PromptsRequest, sources: Loaded) -> Response:
    """Return the prompts at and after a cursor; the server's own cursors do not move."""
    batches = sources[request.source]
    return _reply(batches, request.split, *batches.batch(request.split, request.cursor, request.batch_size))


@router.get("/cursor")
async def get_cursor(sources: Loaded, query: Annotated[wire.CursorQuery, Query()]) -> wire.Cursor:
    """Return the server's own cursor of a consumer."""
    return sources[query.source].state.cursor(_cursor_key(query))


@router.put("/cursor")
async def put_cursor(request: wire.CursorRequest, sources: Loaded) -> wire.Cursor:
    """Set the server's own cursor of a consumer."""
    batches = sources[request.source]
    batches.check(request.split, request.cursor)
    batches.state.set_cursor(_cursor_key(request), request.cursor)
    return request.cursor


@router.post("/success_rates")
async def post_success_rates(request: wire.SuccessRatesRequest, sources: Loaded) -> wire.SuccessRatesReply:
    """Record success rates, by which some values of CURRICULUM order the next epoch of their source."""
    recorded = 0
    for batches in sources.values():
        catalogue = batches.dataset.catalogues[wire.Split.TRAIN]
        places = {prompt_id: catalogue.place_of(prompt_id) for prompt_id in request.success_rates}
        rates = {place: request.success_rates[prompt_id] for prompt_id, place in places.items() if place is not None}
        if rates:
            batches.state.record_rates(rates)
        recorded += len(rates)
    return wire.SuccessRatesReply(recorded=recorded, unknown=len(request.success_rates) - recorded)


def _cursor_key(query: wire.CursorQuery) -> str:
    return f"{query.consumer}/{query.split.value}"


def _reply(batches: Batches, split: wire.Split, prompts: list[dict[str, Any]], after: wire.Cursor) -> Response:
    total = len(batches.orders[split])
    return JsonResponse({"prompts": prompts, "cursor": after.model_dump(), "total_available": total})


def _stats(sources: Mapping[str, Batches]) -> wire.DataStats:
    """Return the content of GET /stats: sums over the sources, and the statistics of each."""
    own = {name: batches.stats() for name, batches in sources.items()}
    if "" in own:
        return own[""]
    refused: Counter[str] = Counter()
    for stats in own.values():
        refused.update(stats.refused)
    declared = [batches.source for batches in sources.values()]
    return wire.DataStats(
        source=", ".join(own),
        train_prompts=sum(own[source.name].train_prompts for source in declared if not source.eval_only),
        test_prompts=sum(stats.test_prompts for stats in own.values()),
        rows=sum(stats.rows for stats in own.values()),
        refused=dict(refused),
        cursors={f"{name}: {key}": cursor for name, stats in own.items() for key, cursor in stats.cursors.items()},
        curriculum=", ".join(sorted({stats.curriculum for stats in own.values()} - {"off"})) or "off",
        fingerprint={f"{source.name}: settings": _declaration(source) for source in declared}
        | {f"{name}: {part}": line for name, stats in own.items() for part, line in stats.fingerprint.items()},
        sources=own,
    )


def _declaration(source: Source) -> str:
    """Return ratio and own variables of a source, without those of its prompts, which its other lines describe."""
    of_prompts = DataSettings.model_fields.keys() - {"reward_fn", "agent_columns"}
    own = {name: text for name, text in sorted(source.settings.items()) if name not in of_prompts}
    ratio = "eval_only" if source.eval_only else f"ratio {source.ratio:g}"
    return ", ".join([ratio, *(f"{name.upper()} {text}" for name, text in own.items())])
