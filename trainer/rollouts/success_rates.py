"""Success rates of prompts, by which a curriculum of the data-server orders the next epoch."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

from services.clients.data import DataClient
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.http.client import RequestRefusedError
from services.protocol.groups import Group
from services.protocol.rewards import verdicts

log = get_logger(__name__)

RECORD_SECONDS = 10.0
"""The longest wait for the data-server: the order of prompts is not worth more."""


class SuccessRates:
    """A sender of success rates, one batch of prompts a request. A failed request costs only these rates."""

    def __init__(self, data: DataClient, batch_size: int) -> None:
        self.data = data
        self.batch_size = batch_size
        self._rates: dict[str, float] = {}
        self._are_wanted: bool | None = None
        """True if the data-server has a curriculum; None before it was asked."""

    async def record(self, groups: Sequence[Group]) -> None:
        """Collect the rates of scored groups, and send them as soon as they cover one batch of prompts."""
        if self._are_wanted is False:
            return
        self._rates |= {g.prompt.id: rate for g in groups if (rate := success_rate(g)) is not None}
        if len(self._rates) < self.batch_size:
            return
        rates, self._rates = self._rates, {}
        try:
            async with asyncio.timeout(RECORD_SECONDS):
                if self._are_wanted is None:
                    self._are_wanted = (await self.data.stats()).curriculum != "off"
                if self._are_wanted:
                    await self.data.record_success_rates(rates)
        except (DependencyLostError, RequestRefusedError, TimeoutError) as error:
            log.warning("success rates not recorded", prompts=len(rates), reason=str(error) or "timed out")


def success_rate(group: Group) -> float | None:
    """Return the share of right completions among a group's judged ones; None if none was judged."""
    rights = verdicts([first.result for first, *_ in group.episodes if first.result is not None])
    return statistics.fmean(rights) if rights else None
