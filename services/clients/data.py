"""The client of data-server."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from services.core.endpoints import Task
from services.http.client import ServiceClient
from services.protocol import prompts as wire


class DataClient(ServiceClient):
    """The data-server: prompts with their ground truths."""

    task = Task.DATA_SERVER

    async def prompts(
        self,
        batch_size: int,
        split: wire.Split | str = wire.Split.TRAIN,
        cursor: wire.Cursor | None = None,
        consumer: str = "trainer",
        request_id: str | None = None,
        source: str = "",
    ) -> wire.PromptBatch:
        """Return the next ``batch_size`` prompts of ``source`` and the cursor after them.

        With a ``cursor``, the reply depends on the cursor alone. Without one, the server advances its own cursor of
        ``consumer``; a ``request_id`` that it has answered before gets the same prompts again.
        """
        if cursor is not None:
            request = wire.PromptsRequest(batch_size=batch_size, split=wire.Split(split), source=source, cursor=cursor)
            return await self.call("POST", "/prompts", wire.PromptBatch, request)
        params = {
            "batch_size": batch_size,
            "split": wire.Split(split).value,
            "source": source,
            "consumer": consumer,
            # A repeated request must not use up a second batch.
            "request_id": request_id or uuid.uuid4().hex,
        }
        return await self.call("GET", "/prompts", wire.PromptBatch, params=params)

    async def cursor(self, consumer: str) -> wire.Cursor:
        """Return the server's own cursor of ``consumer`` in the training split."""
        params = {"consumer": consumer, "split": wire.Split.TRAIN.value}
        return await self.call("GET", "/cursor", wire.Cursor, params=params)

    async def set_cursor(self, consumer: str, cursor: wire.Cursor) -> wire.Cursor:
        """Set the server's own cursor of ``consumer`` in the training split."""
        request = wire.CursorRequest(consumer=consumer, cursor=cursor)
        return await self.call("PUT", "/cursor", wire.Cursor, request)

    async def record_success_rates(self, success_rates: Mapping[str, float]) -> wire.SuccessRatesReply:
        """Report the share of right completions by prompt id to the curriculum."""
        request = wire.SuccessRatesRequest(success_rates=dict(success_rates))
        return await self.call("POST", "/success_rates", wire.SuccessRatesReply, request)

    async def stats(self) -> wire.DataStats:
        """Return the server's statistics."""
        return await self.call("GET", "/stats", wire.DataStats)
