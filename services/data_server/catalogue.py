"""The prompts of one split as they are served: rendered once, kept within a bound, the too long ones left out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from services.data_server.prompts import PromptMaker
from services.data_server.sources import Rows
from services.protocol import Split

# Splits up to this size are rendered at the start, a few seconds at most; larger ones as they are asked for.
RENDERED_AT_START = 20_000
_KEPT = 50_000
_BATCH = 256

Record = dict[str, Any]


class Catalogue:
    """Makes and keeps the wire form of prompts; a prompt of too many tokens has none."""

    def __init__(self, name: str, split: Split, rows: Rows, maker: PromptMaker, max_prompt_tokens: int) -> None:
        self._id_prefix = f"{name}/{split.value}/"
        self._rows = rows
        self._maker = maker
        self._max_prompt_tokens = max_prompt_tokens
        self._records: OrderedDict[int, Record | None] = OrderedDict()
        self._too_long: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def too_long(self) -> int:
        """How many prompts with too many tokens were met so far."""
        return len(self._too_long)

    def render_all_if_few(self) -> None:
        """Renders the whole split where it is small, so that no request waits for it."""
        if len(self) <= RENDERED_AT_START:
            for start in range(0, len(self), _BATCH):
                self._render(range(start, min(start + _BATCH, len(self))))

    def record(self, place: int) -> Record | None:
        """The prompt at ``place`` without its epoch and position; None where it has too many tokens."""
        if place not in self._records:
            self._render([place])
        self._records.move_to_end(place)
        return self._records[place]

    def prefetch(self, places: Sequence[int]) -> None:
        """Renders those of ``places`` that are not kept, at once, which costs less than one by one."""
        missing = [place for place in places if place not in self._records]
        if missing:
            self._render(missing)

    def place_of(self, prompt_id: str) -> int | None:
        """The place of a prompt by its id, None for an id that is not of this split."""
        number = prompt_id.removeprefix(self._id_prefix)
        if number == prompt_id or not (number.isascii() and number.isdecimal()) or len(number) > 10:
            return None
        place = int(self._rows.numbers.searchsorted(int(number)))
        return place if place < len(self) and self._rows.numbers[place] == int(number) else None

    def _render(self, places: Sequence[int]) -> None:
        rows = self._rows.take(list(places))
        ids = self._maker.token_ids([row.question for row in rows])
        for place, row, prompt_ids in zip(places, rows, ids, strict=True):
            if len(prompt_ids) > self._max_prompt_tokens:
                self._too_long.add(place)
                self._records[place] = None
                continue
            self._records[place] = {
                "id": f"{self._id_prefix}{row.number}",
                "prompt": self._maker.user_turn(row.question),
                "ground_truth": row.ground_truth,
                "prompt_ids": prompt_ids,
                "messages": self._maker.messages(row.question),
                "category": row.category,
            }
        while len(self._records) > _KEPT:
            self._records.popitem(last=False)
