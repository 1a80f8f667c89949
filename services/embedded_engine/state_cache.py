"""The states of models that transformers computes: of running sequences, and at ends of prefixes for later requests.

A prompt is computed in pieces whose ends follow from its tokens alone. So the state after a piece is the same to the
bit whether a request computes it or finds it kept, and a resumed run samples the same tokens. The states that decoding
leaves are not kept, because many models continue a cache by several tokens in another order of sums than by one: a
completion's tokens are computed once more, as a part of the next turn's prompt.
"""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.embedded_engine.kv_cache import Prefixes, Rows

PIECE = 256
"""The most tokens of a prompt that are computed at once: with fewer, mixtures of experts become slower."""
LEAST = 64
"""The fewest tokens after which the end of a message ends a piece, or for whose sake a state is kept."""


def piece_ends(tokens: Sequence[int], end_ids: Collection[int]) -> list[int]:
    """Return the ends of the pieces in which a prompt is computed: after PIECE tokens, or earlier where a message ends.

    Each but the last depends on the tokens before it only.
    """
    ends, start = [], 0
    for place, token in enumerate(tokens, 1):
        if place - start == PIECE or (token in end_ids and place - start >= LEAST):
            ends.append(place)
            start = place
    return ends if start == len(tokens) else [*ends, len(tokens)]


def kept_pieces(ends: Sequence[int]) -> set[int]:
    """Return the pieces after which a prompt's state is kept: the last but one, and the last if it is long enough."""
    last = len(ends) - 1
    length = ends[last] - (ends[last - 1] if last else 0)
    return set(range(max(0, last - 1), last)) | ({last} if length >= LEAST else set())


@dataclass
class Beginning:
    """The pieces of a prompt, and the state after those that were computed before."""

    ends: list[int]
    keep: Callable[[int, Any, Tensor], None] = lambda *_: None
    """Takes the state after each piece that is computed: its end, the cache, and its hidden states [n, H]."""
    length: int = 0
    """The tokens that need not be computed: all but one where ``hidden`` is given."""
    cache: Any = None
    """The state after those pieces, not to be changed."""
    hidden: Tensor | None = None
    """The last hidden state [1, H] where the whole prompt was computed before."""


@dataclass(frozen=True)
class _Kept:
    """The state after some pieces: the cache, the last hidden state [1, H], and the tokens that it counts as."""

    cache: Any
    hidden: Tensor
    cost: int
    path: frozenset[bytes]
    """The digests of its tokens up to the end of each earlier piece."""


class StatePrefixes(Prefixes):
    """States after pieces of prompts, of at most ``max_tokens`` tokens in all; the least recently used goes first.

    Kept are the state with which a prompt's next turn begins, that of the whole prompt, and that after which a prompt
    departs from an earlier one. A recurrent state can be larger than the keys and values of its tokens, so there are at
    most as many states as sequences may run.
    """

    def __init__(self, max_tokens: int, max_states: int, end_ids: Collection[int]) -> None:
        super().__init__(max_tokens)
        self._least_cost = max_tokens // max_states
        self._end_ids = end_ids
        self._states: OrderedDict[bytes, _Kept] = OrderedDict()

    def clear(self) -> None:
        """See PrefixCache."""
        super().clear()
        self._states.clear()

    def find(self, use_adapter: bool, tokens: Sequence[int]) -> Beginning:
        """See PrefixCache."""
        ends = piece_ends(tokens, self._end_ids)
        keys = _digests(use_adapter, tokens, ends)
        met = [p for p, key in enumerate(keys) if any(key in state.path for state in self._states.values())]
        wanted = kept_pieces(ends) | set(met[-1:])

        def keep(end: int, cache: Any, hidden: Tensor) -> None:
            if (piece := ends.index(end)) in wanted:
                self._keep(keys[: piece + 1], end, cache, hidden)

        beginning = Beginning(ends, keep)
        known = [piece for piece, key in enumerate(keys) if key in self._states]
        if known:
            state = self._states[keys[known[-1]]]
            self._states.move_to_end(keys[known[-1]])
            beginning.length, beginning.cache = ends[known[-1]], state.cache
            if beginning.length == len(tokens):
                beginning.length, beginning.hidden = len(tokens) - 1, state.hidden
        return beginning

    def insert(self, use_adapter: bool, tokens: Sequence[int], read: Callable[[int, int], Any]) -> None:
        """See PrefixCache; nothing is done, since states are kept as they are computed."""

    def shared(self, tokens: Sequence[int], other: Sequence[int]) -> int:
        """See PrefixCache."""
        ends, others = (piece_ends(each, self._end_ids) for each in (tokens, other))
        kept = [others[piece] for piece in kept_pieces(others)]
        common = max((end for end in kept if end in ends and tokens[:end] == other[:end]), default=0)
        return min(common, len(tokens) - 1)

    def _keep(self, keys: list[bytes], length: int, cache: Any, hidden: Tensor) -> None:
        cost = max(length, self._least_cost)
        if keys[-1] in self._states or cost > self.max_tokens:
            return
        self._states[keys[-1]] = _Kept(copy.deepcopy(cache), hidden[-1:].clone(), cost, frozenset(keys[:-1]))
        self.num_tokens += cost
        while self.num_tokens > self.max_tokens:
            self.num_tokens -= self._states.popitem(last=False)[1].cost


def _digests(use_adapter: bool, tokens: Sequence[int], ends: Sequence[int]) -> list[bytes]:
    """Return a digest of the tokens up to each end."""
    digest = hashlib.blake2b(bytes([use_adapter]), digest_size=16)
    digests = []
    for start, end in zip([0, *ends], ends, strict=False):
        digest.update(array("q", tokens[start:end]).tobytes())
        digests.append(digest.digest())
    return digests


@dataclass
class Batch:
    """Completions of one prompt, of equal length: their cache as the model keeps it, and the row of each."""

    cache: Any
    rows: list[int]

    def select(self, places: list[int]) -> None:
        """Keep the sequences at ``places`` of the batch, each as often as it is named."""
        self.cache.reorder_cache(torch.tensor(places))
        self.rows = [self.rows[place] for place in places]


class StateCache(Rows):
    """The caches of the running sequences, in batches. Memory is taken as sequences grow."""

    def __init__(
        self, max_tokens: int, max_rows: int, *, joins: bool, keeps: bool = False, end_ids: Collection[int] = ()
    ) -> None:
        """Make an empty cache.

        Args:
            max_tokens: tokens of all running sequences.
            max_rows: running sequences.
            joins: the completions of a prompt are one batch.
            keeps: states are kept for later requests, of half as many tokens.
            end_ids: the tokens that end a message.
        """
        super().__init__(max_tokens, max_rows)
        self.prefixes = StatePrefixes(max_tokens // 2 if keeps else 0, max_rows, end_ids)
        self.batches: list[Batch] = []
        self._joins = joins

    def occupy(self, *, has_memory: bool) -> None:
        """See KVCache."""
        self.has_memory = has_memory
        self.truncate(0)
        torch.cuda.empty_cache()

    def ensure(self, length: int, used_rows: int, used_length: int) -> None:
        """See KVCache."""
        if (wanted := self.whole_length(length)) > self.row_length or not used_rows:
            self.row_length = wanted

    def move(self, source: int, target: int, length: int) -> None:
        """See KVCache."""
        renamed = {target: -1, source: target}
        for batch in self.batches:
            batch.rows = [renamed.get(row, row) for row in batch.rows]

    def read(self, row: int, start: int, stop: int) -> Any:
        """See KVCache; it is always the whole row."""
        held = next(batch for batch in self.batches if row in batch.rows)
        batch = copy.deepcopy(held)
        if len(batch.rows) > 1:
            batch.select([batch.rows.index(row)])
        return batch.cache

    def write(self, rows: slice, content: Any) -> None:
        """See KVCache."""
        count = rows.stop - rows.start
        if self._joins and count > 1:
            batch = Batch(copy.deepcopy(content), [rows.start])
            batch.select([0] * count)
            batch.rows = [*range(rows.start, rows.stop)]
            self.batches.append(batch)
        else:
            self.batches += [Batch(copy.deepcopy(content), [row]) for row in range(rows.start, rows.stop)]

    def storer(self, rows: Sequence[slice]) -> Callable[[int, Any], None]:
        """See KVCache; it takes a sequence's number and cache."""
        return lambda number, state: self.write(rows[number], state)

    def truncate(self, count: int) -> None:
        """See KVCache."""
        for batch in self.batches:
            places = [place for place, row in enumerate(batch.rows) if 0 <= row < count]
            if places and len(places) < len(batch.rows):
                batch.select(places)
            elif not places:
                batch.rows = []
        self.batches = [batch for batch in self.batches if batch.rows]

    def clear(self) -> None:
        """See KVCache."""
        self.truncate(0)
