"""The client of data-server."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from services.clients.base import ServiceClient
from services.core import endpoints
from services.protocol import (
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

    service = endpoints.Task.DATA_SERVER
    port = endpoints.DATA_PORT

    async def prompts(
        self,
        batch_size: int,
        split: Split | str = Split.TRAIN,
        cursor: Cursor | None = None,
        consumer: str = "trainer",
        *,
        shard: tuple[int, int] = (0, 1),
    ) -> PromptBatch:
        """The next ``batch_size`` prompts and the cursor after them.

        With a ``cursor`` the answer depends on it alone (and on ``shard``: index and count); without one, the server
        moves its own cursor of ``consumer`` on.
        """
        if cursor is not None:
            request = PromptsRequest(
                batch_size=batch_size, split=Split(split), cursor=cursor, shard_index=shard[0], shard_count=shard[1]
            )
            return await self.http.post_json("/prompts", request, PromptBatch)
        params = {
            "batch_size": batch_size,
            "split": Split(split).value,
            "consumer": consumer,
            # A repeated request must not use up a second batch.
            "request_id": uuid.uuid4().hex,
            "shard_index": shard[0],
            "shard_count": shard[1],
        }
        return await self.http.get_json("/prompts", PromptBatch, params=params)

    async def cursor(self, consumer: str) -> Cursor:
        """Where the server's own cursor of ``consumer`` stands in the training split."""
        return await self.http.get_json("/cursor", Cursor, params={"consumer": consumer, "split": Split.TRAIN.value})

    async def set_cursor(self, consumer: str, cursor: Cursor) -> Cursor:
        """Sets where the server's own cursor of ``consumer`` stands in the training split."""
        request = CursorRequest(consumer=consumer, cursor=cursor)
        response = await self.http.request("PUT", "/cursor", payload=request)
        return Cursor.model_validate_json(response.content)

    async def record_success_rates(self, success_rates: Mapping[str, float]) -> SuccessRatesReply:
        """Tells the curriculum the share of right completions by prompt id."""
        request = SuccessRatesRequest(success_rates=dict(success_rates))
        return await self.http.post_json("/success_rates", request, SuccessRatesReply)

    async def stats(self) -> DataStats:
        """What the server holds."""
        return await self.http.get_json("/stats", DataStats)
