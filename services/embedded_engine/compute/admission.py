"""The choice of queued sequences to start: as many as rows and tokens allow, with what is known of their tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from services.embedded_engine.compute.kv_cache import KVCache
from services.embedded_engine.compute.prefix_cache import PrefixCache, common_length
from services.embedded_engine.compute.sequences import QueueEntry, Sequence

SHARED_TOKENS = 32
"""A prompt waits a step for another one's prefill if that saves it at least so many tokens, as in SGLang."""


@dataclass(frozen=True)
class Admission:
    """Sequences taken from a queue entry, the cache rows that they get, and the keys and values known of its tokens."""

    entry: QueueEntry
    sequences: list[Sequence]
    rows: slice
    prefix: list[Tensor]

    @property
    def num_cached(self) -> int:
        """The number of tokens of the prefix."""
        return sum(part.shape[3] for part in self.prefix)


def choose(
    queue: deque[QueueEntry], cache: KVCache, prefixes: PrefixCache, running: int, budget: int
) -> list[Admission]:
    """Take entries from the queue, in order, as far as rows beside ``running`` and ``budget`` prompt tokens allow."""
    chosen: list[Admission] = []
    used = running
    longest = cache.row_length if running else 0
    while queue:
        entry = queue[0]
        free = 0
        if entry.request.stopping.max_new_tokens:
            longest = max(longest, entry.request.longest)
            free = cache.capacity(longest) - used
            if free <= 0:
                break
        rows = slice(used, used + min(free, len(entry.sequences)))
        admission = Admission(entry, entry.sequences[:free], rows, _find_prefix(prefixes, entry))
        cost = 0 if entry.cached else len(entry.tokens) - admission.num_cached
        if chosen and (cost > budget or any(_shares_more(admission, other) for other in chosen)):
            break
        entry.sequences = entry.sequences[free:]
        budget -= cost
        chosen.append(admission)
        used = rows.stop
        if free and entry.sequences:
            break
        queue.popleft()
    return chosen


def _find_prefix(prefixes: PrefixCache, entry: QueueEntry) -> list[Tensor]:
    """Return known keys and values of an entry's tokens but the last, which is computed for its logits."""
    if entry.cached is not None or entry.request.logprob_start is not None:
        return []
    return prefixes.find(entry.request.use_adapter, entry.tokens[:-1])


def _shares_more(admission: Admission, other: Admission) -> bool:
    """Return whether ``admission`` could take many more tokens from the prefix cache after the prefill of ``other``."""
    entry, before = admission.entry, other.entry
    if entry.cached or entry.request.logprob_start is not None or not other.sequences:
        return False
    if entry.request.use_adapter != before.request.use_adapter:
        return False
    return common_length(entry.tokens[:-1], before.tokens) - admission.num_cached >= SHARED_TOKENS
