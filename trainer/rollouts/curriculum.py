"""Tells the data-server which prompts the policy gets right, where CURRICULUM orders its epochs by that."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence

from services.clients.data import DataClient
from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.http.client import RequestRefusedError
from services.protocol import Group
from services.protocol.pass_at_k import CORRECT

log = get_logger(__name__)

RECORD_SECONDS = 10.0
"""The order of prompts is not worth a longer wait."""


class SuccessRates:
    """Sends the success rates of a batch of groups in one request. One that fails costs these rates, not the run."""

    def __init__(self, data: DataClient, batch_size: int) -> None:
        self.data = data
        self.batch_size = batch_size
        self._rates: dict[str, float] = {}
        self._are_wanted: bool | None = None
        """Whether the data-server has a curriculum; None before it was asked."""

    async def record(self, groups: Sequence[Group]) -> None:
        """Takes up scored groups, and sends what there is once it is of as many prompts as a batch has."""
        if self._are_wanted is False:
            return
        self._rates |= {g.prompt_id: rate for g in groups if (rate := success_rate(g)) is not None}
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
    """The share of right completions among a group's scored ones; None if there are none."""
    rewards = [reward for reward in group.rewards if not math.isnan(reward)]
    return statistics.fmean(reward >= CORRECT for reward in rewards) if rewards else None
