"""The prompts of one split as they are served: rendered once, kept within a bound, overlong ones left out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from services.data_server.prompts import PromptMaker
from services.data_server.sources import Rows
from services.protocol.prompts import Split

RENDERED_AT_START = 20_000
"""A split of up to this size is rendered at the start, in a few seconds; a larger one as its prompts are asked for."""
_KEPT = 50_000
_BATCH = 256

Record = dict[str, Any]


class Catalogue:
    """A split's prompts in their wire form, rendered when they are needed. A prompt of too many tokens has no form."""

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
        """Number of prompts met so far that have too many tokens."""
        return len(self._too_long)

    def render_all_if_few(self) -> None:
        """Render the whole split where it is small, so that no request waits for it."""
        if len(self) <= RENDERED_AT_START:
            for start in range(0, len(self), _BATCH):
                self.prefetch(range(start, min(start + _BATCH, len(self))))

    def record(self, place: int) -> Record | None:
        """Return the prompt at ``place`` without its epoch and position; None where it has too many tokens."""
        self.prefetch([place])
        self._records.move_to_end(place)
        return self._records[place]

    def prefetch(self, places: Sequence[int]) -> None:
        """Render those of ``places`` that are not kept, in one go, which costs less than one by one."""
        missing = [place for place in places if place not in self._records]
        if not missing:
            return
        rows = self._rows.take(missing)
        ids = self._maker.token_ids([row.question for row in rows])
        for place, row, prompt_ids in zip(missing, rows, ids, strict=True):
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

    def place_of(self, prompt_id: str) -> int | None:
        """Return the place of a prompt by its id, None for an id that is not of this split."""
        number = prompt_id.removeprefix(self._id_prefix)
        if number == prompt_id or not (number.isascii() and number.isdecimal()) or len(number) > 10:
            return None
        place = int(self._rows.numbers.searchsorted(int(number)))
        return place if place < len(self) and self._rows.numbers[place] == int(number) else None
