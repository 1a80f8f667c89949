"""The data-server's routes."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import datasets
import huggingface_hub
from fastapi import FastAPI, Query, Request
from fastapi.responses import Response
from prometheus_client import Counter, Gauge

from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.data_server import sources
from services.data_server.catalogue import Catalogue
from services.data_server.fingerprint import fingerprint
from services.data_server.order import EpochOrder, walk
from services.data_server.prompts import PromptMaker, import_transformers_alone, load_tokenizer
from services.data_server.settings import Curriculum, DataSettings, PromptStyle
from services.data_server.state import ServerState
from services.http.app import JsonResponse, create_service_app, model_response
from services.http.problems import ProblemError
from services.http.query import query_parameters, read_query
from services.protocol import (
    Cursor,
    CursorRequest,
    DataStats,
    PromptBatch,
    PromptsQuery,
    PromptsRequest,
    Split,
    SuccessRatesReply,
    SuccessRatesRequest,
)

log = get_logger(__name__)

SERVED = Counter("data_prompts_served", "Prompts given out.", ["split"])
EPOCH = Gauge("data_epoch", "The epoch of the last prompt given out.", ["split"])
REFUSED_ROWS = Gauge("data_rows_refused", "Rows of the source that were left out.", ["reason"])
TOO_LONG = Gauge("data_prompts_too_long", "Prompts met that have more than MAX_PROMPT_TOKENS tokens.")

MAX_BODY_BYTES = 16 * 2**20
RENDERED_AHEAD = 2048


@dataclass(frozen=True)
class Data:
    """Everything that the routes serve from."""

    source: sources.Source
    catalogues: dict[Split, Catalogue]
    orders: dict[Split, EpochOrder]
    state: ServerState
    curriculum: Curriculum
    fingerprint: dict[str, str]

    def batch(
        self, split: Split, cursor: Cursor, batch_size: int, shard_index: int, shard_count: int
    ) -> tuple[list[dict[str, Any]], Cursor]:
        """The prompts from ``cursor`` on and the cursor after them.

        Raises:
            ProblemError: the cursor is beyond the split, or a whole epoch has no prompt that qualifies.
        """
        catalogue, order = self.catalogues[split], self.orders[split]
        if cursor.position > len(order):
            raise ProblemError(422, f"position {cursor.position} is beyond the {len(order)} prompts of {split.value}")
        if shard_count == 1:
            ahead = order.of(cursor.epoch)[cursor.position : cursor.position + batch_size]
            catalogue.prefetch(ahead.tolist())
        found, after = walk(
            order,
            cursor,
            batch_size,
            lambda place: catalogue.record(place) is not None,
            shard_index=shard_index,
            shard_count=shard_count,
            # Held-out prompts are for evaluation, each once: a batch never runs on into a second round.
            ends_with_epoch=split is Split.TEST,
        )
        if not found and split is Split.TRAIN:
            raise ProblemError(
                422,
                f"no prompt of {split.value} qualifies: all are skipped, of other shards, or longer than "
                f"MAX_PROMPT_TOKENS",
            )
        prompts = [
            {**record, "epoch": epoch, "position": position}
            for place, epoch, position in found
            if (record := catalogue.record(place)) is not None
        ]
        SERVED.labels(split.value).inc(len(prompts))
        EPOCH.labels(split.value).set(after.epoch)
        TOO_LONG.set(sum(c.too_long for c in self.catalogues.values()))
        return prompts, after

    def stats(self) -> dict[str, Any]:
        """The content of GET /stats."""
        train, test = self.catalogues[Split.TRAIN], self.catalogues[Split.TEST]
        return DataStats(
            source=self.source.name,
            train_prompts=len(train),
            test_prompts=len(test),
            refused={**self.source.refused, "too long": train.too_long + test.too_long},
            cursors=self.state.cursors(),
            curriculum=self.curriculum.value,
            fingerprint=self.fingerprint,
        ).model_dump()


def _state_directory(settings: DataSettings, identity: str) -> Path:
    """Where the state is kept: each dataset and order that a run was ever given has its own."""
    digest = hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()
    return settings.data_state_dir or settings.run_dir / "data" / digest


def load(settings: DataSettings, *, own_process: bool = False) -> Data:
    """Loads the dataset and the tokenizer; ConfigurationError where one cannot be had."""
    _quieten_libraries()
    if own_process and settings.model_name is not None:
        import_transformers_alone()
    # First the tokenizer: it fails sooner.
    tokenizer = None if settings.model_name is None else load_tokenizer(settings.model_name)
    source = sources.load(settings)
    train, examples = source.train, []
    if settings.prompt_style is PromptStyle.FEW_SHOT:
        count = settings.few_shot_count
        if len(train) <= count:
            raise ConfigurationError(
                f"FEW_SHOT_COUNT is {count}, but DATASET has {len(train)} training rows; allowed are fewer than these"
            )
        examples = train.take(list(range(count)))
        train = train.select(slice(count, None))
    maker = PromptMaker(settings, source.ground_truth_format, tokenizer, examples)
    catalogues = {
        split: Catalogue(source.name, split, rows, maker, settings.max_prompt_tokens)
        for split, rows in ((Split.TRAIN, train), (Split.TEST, source.test))
    }
    for catalogue in catalogues.values():
        catalogue.render_all_if_few()
        if catalogue.too_long == len(catalogue):
            raise ConfigurationError(
                f"MAX_PROMPT_TOKENS is {settings.max_prompt_tokens}, but every prompt of DATASET "
                f"{settings.dataset!r} is longer; allow more"
            )
    identity = f"{settings.dataset} ({len(train)} prompts, DATA_SEED {settings.data_seed}, {settings.curriculum.value})"
    state = ServerState(_state_directory(settings, identity) if own_process else settings.data_state_dir, identity)
    orders = {
        Split.TRAIN: EpochOrder(
            len(train),
            seed=settings.data_seed,
            shuffle=settings.data_shuffle,
            curriculum=settings.curriculum,
            rates_at_start=lambda epoch: state.rates_at_start(epoch, len(train)),
        ),
        Split.TEST: EpochOrder(len(source.test), seed=0, shuffle=False),
    }
    # The first requests of a run come all at once.
    catalogues[Split.TRAIN].prefetch(orders[Split.TRAIN].of(0)[:RENDERED_AHEAD].tolist())
    for reason, count in source.refused.items():
        REFUSED_ROWS.labels(reason).set(count)
    log.info(
        "loaded",
        dataset=settings.dataset,
        train=len(train),
        test=len(source.test),
        refused=source.refused or None,
        too_long=sum(c.too_long for c in catalogues.values()) or None,
    )
    described = fingerprint(settings, train, source.test, maker)
    return Data(source, catalogues, orders, state, settings.curriculum, described)


def _quieten_libraries() -> None:
    # Each of their retries would be a warning, printed twice; what they end with is in our own error.
    huggingface_hub.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()


def create_app(settings: DataSettings, *, own_process: bool = False) -> FastAPI:
    """The data-server. In a process of its ``own`` it may take shortcuts with imports."""
    held: list[Data] = []

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        held.append(await in_background(lambda: load(settings, own_process=own_process)))
        yield
        held.pop().state.close()

    app = create_service_app(
        "data-server",
        settings=settings,
        lifespan=lifespan,
        stats=lambda: held[0].stats(),
        description=__doc__ or "",
        max_body_bytes=MAX_BODY_BYTES,
    )

    # Read as one model: FastAPI takes more time over eight parameters than the rest of the request needs.
    @app.get("/prompts", response_model=PromptBatch, openapi_extra={"parameters": query_parameters(PromptsQuery)})
    async def get_prompts(request: Request) -> Response:
        """The next prompts.

        With ``epoch`` or ``position`` they depend on these alone. Otherwise the server's own cursor of ``consumer``
        (one a split and shard) moves on; repeating a ``request_id`` gives the same prompts again.
        """
        query = read_query(request, PromptsQuery)
        data, split = held[0], query.split
        shard = (query.shard_index, query.shard_count)
        if query.epoch is not None or query.position is not None:
            cursor = Cursor(epoch=query.epoch or 0, position=query.position or 0)
            return _reply(data, split, *data.batch(split, cursor, query.batch_size, *shard))
        key = _cursor_key(query.consumer, split, *shard)
        before = None if query.request_id is None else data.state.start_of(key, query.request_id)
        start = data.state.cursor(key) if before is None else before
        prompts, after = data.batch(split, start, query.batch_size, *shard)
        if before is None:
            await data.state.advance(key, query.request_id, start, after)
        return _reply(data, split, prompts, after)

    @app.post("/prompts", response_model=PromptBatch)
    async def post_prompts(request: PromptsRequest) -> Response:
        """The prompts at and after a cursor; the server remembers nothing of it."""
        data = held[0]
        found = data.batch(request.split, request.cursor, request.batch_size, request.shard_index, request.shard_count)
        return _reply(data, request.split, *found)

    @app.get("/cursor", response_model=Cursor)
    async def get_cursor(
        consumer: Annotated[str, Query(min_length=1, max_length=200)] = "default", split: Split = Split.TRAIN
    ) -> Response:
        """Where the server's own cursor of a consumer stands."""
        return model_response(held[0].state.cursor(_cursor_key(consumer, split, 0, 1)))

    @app.put("/cursor", response_model=Cursor)
    async def put_cursor(request: CursorRequest) -> Response:
        """Sets where the server's own cursor of a consumer stands."""
        data = held[0]
        size = len(data.orders[request.split])
        if request.cursor.position > size:
            raise ProblemError(422, f"position {request.cursor.position} is beyond the {size} prompts")
        await data.state.set_cursor(_cursor_key(request.consumer, request.split, 0, 1), request.cursor)
        return model_response(request.cursor)

    @app.post("/success_rates", response_model=SuccessRatesReply)
    async def post_success_rates(request: SuccessRatesRequest) -> Response:
        """Records success rates, which order the next epoch where CURRICULUM is set."""
        data = held[0]
        catalogue = data.catalogues[Split.TRAIN]
        rates = {catalogue.place_of(prompt_id): rate for prompt_id, rate in request.success_rates.items()}
        known = {place: rate for place, rate in rates.items() if place is not None}
        await data.state.record_rates(known)
        return model_response(SuccessRatesReply(recorded=len(known), unknown=len(request.success_rates) - len(known)))

    return app


def _cursor_key(consumer: str, split: Split, shard_index: int, shard_count: int) -> str:
    return f"{consumer}/{split.value}" + (f"/{shard_index}of{shard_count}" if shard_count > 1 else "")


def _reply(data: Data, split: Split, prompts: list[dict[str, Any]], after: Cursor) -> Response:
    return JsonResponse(
        {
            "prompts": prompts,
            "cursor": after.model_dump(),
            "total_available": len(data.orders[split]),
        }
    )
