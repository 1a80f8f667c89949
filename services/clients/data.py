"""The client of data-server."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from services.core.endpoints import Task
from services.http.client import ServiceClient
from services.protocol.prompts import (
    Cursor,
    CursorRequest,
    DataStats,
    PromptBatch,
    PromptsRequest,
    Split,
    SuccessRatesReply,
    SuccessRatesRequest,
)


class DataClient(ServiceClient):
    """The data-server: prompts with their ground truths."""

    task = Task.DATA_SERVER

    async def prompts(
        self,
        batch_size: int,
        split: Split | str = Split.TRAIN,
        cursor: Cursor | None = None,
        consumer: str = "trainer",
        request_id: str | None = None,
        source: str = "",
    ) -> PromptBatch:
        """Return the next ``batch_size`` prompts of ``source`` and the cursor after them.

        With a ``cursor``, the reply depends on the cursor alone. Without one, the server advances its own cursor of
        ``consumer``; a ``request_id`` that it has answered before gets the same prompts again.
        """
        if cursor is not None:
            request = PromptsRequest(batch_size=batch_size, split=Split(split), source=source, cursor=cursor)
            return await self.call("POST", "/prompts", PromptBatch, request)
        params = {
            "batch_size": batch_size,
            "split": Split(split).value,
            "source": source,
            "consumer": consumer,
            # A repeated request must not use up a second batch.
            "request_id": request_id or uuid.uuid4().hex,
        }
        return await self.call("GET", "/prompts", PromptBatch, params=params)

    async def cursor(self, consumer: str) -> Cursor:
        """Return the server's own cursor of ``consumer`` in the training split."""
        params = {"consumer": consumer, "split": Split.TRAIN.value}
        return await self.call("GET", "/cursor", Cursor, params=params)

    async def set_cursor(self, consumer: str, cursor: Cursor) -> Cursor:
        """Set the server's own cursor of ``consumer`` in the training split."""
        request = CursorRequest(consumer=consumer, cursor=cursor)
        return await self.call("PUT", "/cursor", Cursor, request)

    async def record_success_rates(self, success_rates: Mapping[str, float]) -> SuccessRatesReply:
        """Report the share of right completions by prompt id to the curriculum."""
        request = SuccessRatesRequest(success_rates=dict(success_rates))
        return await self.call("POST", "/success_rates", SuccessRatesReply, request)

    async def stats(self) -> DataStats:
        """Return the server's statistics."""
        return await self.call("GET", "/stats", DataStats)
