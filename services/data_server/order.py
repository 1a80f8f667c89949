"""The order of prompts within each epoch, and how a cursor walks along it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from services.data_server.settings import Curriculum
from services.http.problems import ProblemError
from services.protocol import Cursor

Places = np.ndarray[Any, np.dtype[np.int32]]
Rates = np.ndarray[Any, np.dtype[np.float32]]

# The chance of a prompt that its success rate speaks against entirely, relative to the best one.
_LEAST_WEIGHT = 0.05
_KEPT_EPOCHS = 4
# The largest number that a cursor takes.
_LAST_EPOCH = 2**31 - 1


class EpochOrder:
    """A permutation of the prompts of a split for each epoch: the same for the same seed, epoch and success rates."""

    def __init__(
        self,
        size: int,
        *,
        seed: int,
        shuffle: bool,
        curriculum: Curriculum = Curriculum.OFF,
        rates_at_start: Callable[[int], Rates | None] = lambda epoch: None,
    ) -> None:
        """Makes the order of ``size`` prompts.

        ``rates_at_start`` gives the success rates (NaN where none is known, shape [size]) as they were when an epoch
        was begun; it is asked only with a curriculum, and must answer alike each time.
        """
        self._size = size
        self._seed = seed
        self._shuffle = shuffle
        self._curriculum = curriculum
        self._rates_at_start = rates_at_start
        self._orders: OrderedDict[int, Places] = OrderedDict()

    def __len__(self) -> int:
        return self._size

    def of(self, epoch: int) -> Places:
        """Which prompt stands at each position of ``epoch``, shape [size]."""
        if epoch not in self._orders:
            self._orders[epoch] = self._make(epoch)
            if len(self._orders) > _KEPT_EPOCHS:
                self._orders.popitem(last=False)
        self._orders.move_to_end(epoch)
        return self._orders[epoch]

    def _make(self, epoch: int) -> Places:
        if not self._shuffle:
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
    # A prompt that was never tried counts as one of success rate one half.
    known = np.where(np.isnan(rates), 0.5, rates).astype(np.float64)
    wanted = {
        Curriculum.BALANCED: 4 * known * (1 - known),
        Curriculum.EASY_FIRST: known,
        Curriculum.HARD_FIRST: 1 - known,
    }[curriculum]
    return _LEAST_WEIGHT + (1 - _LEAST_WEIGHT) * wanted


def walk(
    order: EpochOrder,
    cursor: Cursor,
    count: int,
    qualifies: Callable[[int], bool],
    *,
    shard_index: int = 0,
    shard_count: int = 1,
    ends_with_epoch: bool = False,
) -> tuple[list[tuple[int, int, int]], Cursor]:
    """The next ``count`` prompts from ``cursor`` on: (place, epoch, position) of each, and the cursor after them.

    Positions in ``cursor.skip`` and those of other shards are passed over, and so is what does not qualify. A walk goes
    on into the next epoch unless it ``ends_with_epoch``; it gives up after a whole epoch in which nothing was found.

    Raises:
        ProblemError: 422, it would go on into an epoch that no cursor can name.
    """
    found: list[tuple[int, int, int]] = []
    epoch, position, skip = cursor.epoch, cursor.position, set(cursor.skip)
    passed_over = 0
    while len(found) < count and passed_over < len(order):
        if position >= len(order):
            epoch, position, skip = _after(epoch), 0, set()
            if ends_with_epoch and (found or cursor.position < len(order)):
                break
        place = int(order.of(epoch)[position])
        if position % shard_count == shard_index and position not in skip and qualifies(place):
            found.append((place, epoch, position))
            passed_over = 0
        else:
            passed_over += 1
        position += 1
    if position >= len(order):
        epoch, position, skip = _after(epoch), 0, set()
    return found, Cursor(epoch=epoch, position=position, skip=sorted(s for s in skip if s >= position))


def _after(epoch: int) -> int:
    if epoch >= _LAST_EPOCH:
        raise ProblemError(422, f"the batch goes on beyond epoch {_LAST_EPOCH}, the last that there is; begin earlier")
    return epoch + 1
