"""The order of prompts within each epoch, and the walk of a cursor along it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from services.data_server.settings import Curriculum
from services.http.problems import ProblemError
from services.protocol.prompts import Cursor

Places = np.ndarray[Any, np.dtype[np.int32]]
Rates = np.ndarray[Any, np.dtype[np.float32]]

_LEAST_WEIGHT = 0.05
"""Chance of the prompt that the curriculum wants last, relative to the prompt that it wants first."""
_KEPT_EPOCHS = 4
_LAST_EPOCH = 2**31 - 1
"""The largest epoch that a cursor on the wire takes."""


class EpochOrder:
    """A permutation of a split's prompts for each epoch: the same for the same seed, epoch and success rates."""

    def __init__(
        self,
        size: int,
        *,
        seed: int,
        curriculum: Curriculum,
        rates_at_start: Callable[[int], Rates | None] = lambda epoch: None,
    ) -> None:
        """Make the order of ``size`` prompts.

        ``rates_at_start`` returns the success rates (NaN: unknown, shape [size]) at the beginning of an epoch, None
        if all are unknown; it is called only with a curriculum that uses them, and must return the same each time.
        """
        self._size = size
        self._seed = seed
        self._curriculum = curriculum
        self._rates_at_start = rates_at_start
        self.of = lru_cache(_KEPT_EPOCHS)(self._make)
        """Place in the source of the prompt at each position of an epoch, by the epoch: shape [size]."""

    def __len__(self) -> int:
        return self._size

    def _make(self, epoch: int) -> Places:
        if self._curriculum is Curriculum.SOURCE:
            return np.arange(self._size, dtype=np.int32)
        random = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        if self._curriculum is Curriculum.OFF:
            return random.permutation(self._size).astype(np.int32)
        rates = self._rates_at_start(epoch)
        weights = np.ones(self._size) if rates is None else _weights(rates, self._curriculum)
        # Exponential keys give a weighted order without replacement (Efraimidis and Spirakis 2006, algorithm A-ES).
        keys = random.exponential(size=self._size) / weights
        return np.argsort(keys, kind="stable").astype(np.int32)


def _weights(rates: Rates, curriculum: Curriculum) -> np.ndarray[Any, np.dtype[np.float64]]:
    # A prompt that was never tried counts as half solved.
    solved = np.where(np.isnan(rates), 0.5, rates).astype(np.float64)
    preference = {
        Curriculum.BALANCED: 4 * solved * (1 - solved),
        Curriculum.EASY_FIRST: solved,
        Curriculum.HARD_FIRST: 1 - solved,
    }[curriculum]
    return _LEAST_WEIGHT + (1 - _LEAST_WEIGHT) * preference


def walk(
    order: EpochOrder,
    cursor: Cursor,
    count: int,
    qualifies: Callable[[int], bool],
    *,
    ends_with_epoch: bool = False,
) -> tuple[list[tuple[int, int, int]], Cursor]:
    """Return (place, epoch, position) of the next ``count`` prompts from ``cursor`` on, and the cursor after them.

    The walk passes over the positions in ``cursor.skip`` and over places that do not qualify. It continues in the next
    epoch unless it ``ends_with_epoch``, and gives up after a whole epoch without a prompt.

    Raises:
        ProblemError: 422, the walk would continue in an epoch that no cursor can name.
    """
    prompts: list[tuple[int, int, int]] = []
    epoch, position, skip = cursor.epoch, cursor.position, set(cursor.skip)
    passed_over = 0
    while len(prompts) < count and passed_over < len(order):
        if position >= len(order):
            epoch, position, skip = _next_epoch(epoch), 0, set()
            if ends_with_epoch and (prompts or cursor.position < len(order)):
                break
        place = int(order.of(epoch)[position])
        if position not in skip and qualifies(place):
            prompts.append((place, epoch, position))
            passed_over = 0
        else:
            passed_over += 1
        position += 1
    if position >= len(order):
        epoch, position, skip = _next_epoch(epoch), 0, set()
    return prompts, Cursor(epoch=epoch, position=position, skip=sorted(s for s in skip if s >= position))


def _next_epoch(epoch: int) -> int:
    if epoch >= _LAST_EPOCH:
        raise ProblemError(422, f"the batch goes beyond epoch {_LAST_EPOCH}, the last one; begin at an earlier cursor")
    return epoch + 1
