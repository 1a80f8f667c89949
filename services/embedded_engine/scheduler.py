"""The scheduler: running and queued sequences, and the prefill and decode steps of the engine.

Only the engine's thread may call it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from prometheus_client import Counter, Gauge
from torch import Tensor

from services.embedded_engine.loading import Cache, Loaded
from services.embedded_engine.sampling import Sampler, Sampling, log_softmax_of, top_logprobs

# SGLang's names where it has the metric, so that the same dashboards show both engines.
GENERATED = Counter("sglang:generation_tokens", "Completion tokens sampled.")
PROMPT_TOKENS = Counter("sglang:prompt_tokens", "Prompt tokens computed.")
CACHED_TOKENS = Counter("sglang:cached_tokens", "Prompt tokens taken from the prefix cache.")
STEPS = Counter("engine_steps", "Decoding steps.")
FINISHED = Counter("engine_completions", "Completions that ended, by finish reason.", ["finish_reason"])
RUNNING = Gauge("sglang:num_running_reqs", "Sequences being decoded.")

FIRST_VERSION = "0"
"""The version of the weights that the engine starts with."""
PREFILL_TOKENS = 2048
"""Prompt tokens computed between two decode steps: more would let the running sequences wait noticeably."""
LOGITS_ROWS = 128
"""Rows of logits computed at once for a long prompt: 128 rows of 150,000 float32 take 77 MB."""
SHARED_TOKENS = 32
"""A prompt waits a step for another one's prefill if that saves it at least this many tokens, as in SGLang."""


LONG_TOKENS = 2048
"""A group's completions of at least so many tokens are the first pieces of longer ones, which clients continue."""


@dataclass(frozen=True)
class Stopping:
    """The conditions that end a sequence."""

    max_new_tokens: int
    token_ids: frozenset[int]
    texts: tuple[str, ...] = ()
    skip_special_tokens: bool = True


@dataclass(eq=False)
class Sequence:
    """One completion while it is generated.

    ``versions`` gets a pair (weight version, index of the first token sampled with it) whenever the version changed.
    ``finish`` is SGLang's finish_reason once the completion has ended.
    """

    request: Request
    number: int
    sampling: Sampling
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed for this sequence."""
    generation: int = -1
    """The generation of the prefix cache in which its keys and values in the cache were begun."""
    finish: dict[str, Any] | None = None

    @property
    def id(self) -> str:
        """The request's id, with the completion's number if there are several."""
        return self.request.rid if len(self.request.sequences) == 1 else f"{self.request.rid}-{self.number}"

    @property
    def length(self) -> int:
        """The number of tokens so far, including the prompt's."""
        return len(self.request.prompt_ids) + len(self.output_ids)


@dataclass(eq=False)
class Request:
    """A prompt with its completions.

    ``use_adapter`` asks for the LoRA adapter that is loaded when a token is computed. ``logprob_start`` asks for the
    log-probabilities of the prompt's tokens from that index on (``input_logprobs``, whose first entry is None). The
    engine's thread resolves ``done`` when all completions have ended.
    """

    rid: str
    prompt_ids: list[int]
    stopping: Stopping
    use_adapter: bool = False
    logprob_start: int | None = None
    top_logprobs: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    input_logprobs: list[float | None] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    done: Future[Request] = field(default_factory=Future)

    @property
    def longest(self) -> int:
        """The largest possible length of a sequence in tokens, including the prompt's."""
        return len(self.prompt_ids) + self.stopping.max_new_tokens


@dataclass(frozen=True)
class CachedPrompt:
    """The result of a prefill for the completions that do not run yet: a row of the cache, and the logits [1, V]."""

    row: Any
    logits: Tensor


@dataclass(eq=False)
class QueueEntry:
    """Sequences that continue the same tokens and wait for cache rows: a new prompt's, or a single preempted one."""

    request: Request
    tokens: list[int]
    sequences: list[Sequence]
    cached: CachedPrompt | None = None
    """The prefill of ``tokens``, once some of the completions run."""


class Scheduler:
    """The running sequences, one in each of the cache's first rows, and a queue of sequences that wait for a row."""

    def __init__(self, loaded: Loaded, prefill_tokens: int) -> None:
        self.model = loaded.model
        self.version = FIRST_VERSION
        """The version of the model's weights; whoever changes the weights sets it."""
        self.queue: deque[QueueEntry] = deque()
        self.running: list[Sequence] = []
        self.unfinished: set[Request] = set()
        """All requests with a completion that has not ended."""
        self._cache = loaded.cache
        self._prefixes = loaded.cache.prefixes
        self._decode_text = loaded.decode_text
        self._prefill_tokens = prefill_tokens
        self._sampler: Sampler | None = None
        self._has_nonfinite_cache = False
        self._totals = {"generated_tokens": 0, "prompt_tokens": 0, "steps": 0}

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self.unfinished.add(request)
        self.queue.append(QueueEntry(request, request.prompt_ids, list(request.sequences)))

    def counts(self) -> dict[str, int]:
        """Return totals since the start, and the tokens of the prefix cache."""
        return self._totals | {"prefix_cache_tokens": self._prefixes.num_tokens}

    def abort(self, matches: Callable[[Sequence], bool], reason: str) -> int:
        """End the sequences that match, with their tokens so far; return their number."""
        finish = {"type": "abort", "message": reason}
        aborted = [sequence for sequence in self.running if matches(sequence)]
        for entry in self.queue:
            aborted += filter(matches, entry.sequences)
            entry.sequences = [sequence for sequence in entry.sequences if not matches(sequence)]
        self.queue = deque(entry for entry in self.queue if entry.sequences)
        for sequence in aborted:
            self._finish(sequence, finish)
        self._remove_finished()
        return len(aborted)

    def preempt(self) -> None:
        """Move all running sequences to the head of the queue, to be computed anew with their tokens so far."""
        for sequence in reversed(self.running):
            tokens = sequence.request.prompt_ids + sequence.output_ids
            self.queue.appendleft(QueueEntry(sequence.request, tokens, [sequence]))
        self.running.clear()
        self._cache.truncate(0)
        self._sampler = None

    def drop_caches(self) -> None:
        """Drop the prefix cache and the prefill of prompts with queued completions, so that they are computed anew."""
        self._prefixes.clear()
        for entry in self.queue:
            entry.cached = None

    # --- decode ------------------------------------------------------------------------------------------------------

    def decode(self) -> None:
        """Compute and sample one token of every running sequence."""
        sequences = self.running
        positions = [sequence.length - 1 for sequence in sequences]
        tokens = torch.tensor([sequence.output_ids[-1] for sequence in sequences], device=self.model.device)
        places = torch.tensor(positions, device=self.model.device)
        use_adapter = [sequence.request.use_adapter for sequence in sequences]
        logits = self.model.decode(tokens, places, self._cache, max(positions) + 1, use_adapter)
        if self._sampler is None:
            self._sampler = Sampler([sequence.sampling for sequence in sequences], self.model.device)
        self._sample(sequences, logits, self._sampler)
        STEPS.inc()
        self._totals["steps"] += 1
        self._remove_finished()

    def _sample(self, sequences: list[Sequence], logits: Tensor, sampler: Sampler) -> None:
        """Sample a token for each of ``sequences`` from its row of ``logits`` [B, V]."""
        positions = np.array([len(sequence.output_ids) for sequence in sequences], dtype=np.uint64)
        tokens, logprobs = sampler.sample(logits, positions)
        drawn = zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True)
        for row, (sequence, token, logprob) in enumerate(drawn):
            if logprob != logprob:
                self._has_nonfinite_cache = True
                self._prefixes.clear()
                self._finish(sequence, {"type": "abort", "message": "the model's logits are not finite"})
                continue
            if not sequence.versions or sequence.versions[-1][0] != self.version:
                sequence.versions.append((self.version, len(sequence.output_ids)))
            sequence.output_ids.append(token)
            sequence.logprobs.append(logprob)
            if sequence.request.top_logprobs:
                sequence.top_logprobs.append(top_logprobs(logits[row], sequence.request.top_logprobs))
            reason = self._finish_reason(sequence, token)
            if reason is not None:
                self._finish(sequence, reason)
        GENERATED.inc(len(sequences))
        self._totals["generated_tokens"] += len(sequences)

    def _finish_reason(self, sequence: Sequence, token: int) -> dict[str, Any] | None:
        stopping = sequence.request.stopping
        if token in stopping.token_ids:
            return {"type": "stop", "matched": token}
        if stopping.texts:
            # Each token is at least a byte, so these tokens contain any stop text that ends with the newest one.
            tail = max(len(text.encode()) for text in stopping.texts) + 1
            end = self._decode_text(sequence.output_ids[-tail:], stopping.skip_special_tokens)
            for text in stopping.texts:
                if text in end:
                    return {"type": "stop", "matched": text}
        if len(sequence.output_ids) >= stopping.max_new_tokens:
            return {"type": "length", "length": stopping.max_new_tokens}
        return None

    def _finish(self, sequence: Sequence, reason: dict[str, Any]) -> None:
        sequence.finish = reason
        FINISHED.labels(reason["type"]).inc()
        request = sequence.request
        if all(other.finish is not None for other in request.sequences):
            self.unfinished.discard(request)
            request.done.set_result(request)

    def _remove_finished(self) -> None:
        """Free the rows of finished sequences; the last row moves into each hole."""
        running = self.running
        for row in range(len(running) - 1, -1, -1):
            if running[row].finish is None:
                continue
            self._keep_ended(running[row], row)
            last = running.pop()
            if row < len(running):
                running[row] = last
                # The newest token is not in the cache yet.
                self._cache.move(len(running), row, last.length - 1)
            self._sampler = None
        self._cache.truncate(len(running))
        if self._has_nonfinite_cache and not running:
            self._cache.clear()
            self._has_nonfinite_cache = False
        RUNNING.set(len(running))

    def _keep_ended(self, sequence: Sequence, row: int) -> None:
        request = sequence.request
        # Nobody continues a short completion of a group, and keys and values of replaced weights are of no use.
        is_continued = len(request.sequences) == 1 or len(sequence.output_ids) >= LONG_TOKENS
        if is_continued and sequence.generation == self._prefixes.generation:
            # The newest token is not in the cache yet.
            self._keep(request.use_adapter, request.prompt_ids + sequence.output_ids[:-1], row)

    def _keep(self, use_adapter: bool, tokens: list[int], row: int) -> None:
        """Keep the keys and values of tokens that a row begins with, for what continues them."""
        if self._prefixes.max_tokens:
            self._prefixes.insert(use_adapter, tokens, lambda start, stop: self._cache.read(row, start, stop))

    # --- prefill -----------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Take as many sequences from the queue as fit, compute their prompts, and sample their first tokens."""
        admissions = choose(self.queue, self._cache, len(self.running), self._prefill_tokens)
        if not admissions:
            return
        longest = max((admission.entry.request.longest for admission in admissions if admission.sequences), default=0)
        if longest:
            used = max((sequence.length for sequence in self.running), default=0)
            self._cache.ensure(longest, len(self.running), used)
        logits = self._prefill([admission for admission in admissions if admission.entry.cached is None])
        for admission in admissions:
            self._start(admission, logits.get(admission.entry))
        self._sampler = None
        self._remove_finished()

    def _prefill(self, admissions: list[Admission]) -> dict[QueueEntry, Tensor]:
        """Compute prompts into their cache rows; return the logits [1, V] after each prompt."""
        if not admissions:
            return {}
        entries = [admission.entry for admission in admissions]
        tokens = [admission.entry.tokens[admission.num_cached :] for admission in admissions]
        hidden = self.model.prefill(
            tokens,
            self._cache.storer([admission.rows for admission in admissions]),
            [entry.request.use_adapter for entry in entries],
            [admission.prefix for admission in admissions],
        )
        PROMPT_TOKENS.inc(len(hidden))
        CACHED_TOKENS.inc(sum(admission.num_cached for admission in admissions))
        self._totals["prompt_tokens"] += len(hidden)
        ends = np.cumsum([len(computed) for computed in tokens]).tolist()
        last = self.model.logits(hidden[[end - 1 for end in ends]])
        for entry, end in zip(entries, ends, strict=True):
            request = entry.request
            if request.logprob_start is not None and not request.input_logprobs:
                states = hidden[end - len(entry.tokens) : end]
                request.input_logprobs = self._input_logprobs(request.prompt_ids, request.logprob_start, states)
        return dict(zip(entries, last.split(1), strict=True))

    def _start(self, admission: Admission, logits: Tensor | None) -> None:
        """Start sequences: the logits after the prompt, just computed or cached, give their first tokens."""
        entry, started, rows = admission.entry, admission.sequences, admission.rows
        is_fresh = entry.cached is None
        if not started:
            for sequence in entry.sequences:
                self._finish(sequence, {"type": "length", "length": 0})
            return
        for place, sequence in enumerate(started):
            sequence.generation = self._prefixes.generation
            if not sequence.output_ids:
                # The first sequence of a fresh prefill paid for the prompt.
                sequence.cached_tokens = admission.num_cached if is_fresh and place == 0 else len(entry.tokens)
        if entry.cached is not None:
            self._cache.write(rows, entry.cached.row)
            logits = entry.cached.logits
        assert logits is not None
        if entry.sequences and entry.cached is None:
            entry.cached = CachedPrompt(self._cache.read(rows.start, 0, len(entry.tokens)), logits.clone())
        sampler = Sampler([sequence.sampling for sequence in started], self.model.device)
        self.running.extend(started)
        self._sample(started, logits.repeat(len(started), 1), sampler)
        if is_fresh and started[0].generation == self._prefixes.generation:
            self._keep(entry.request.use_adapter, entry.tokens, rows.start)

    def _input_logprobs(self, prompt_ids: list[int], start: int, hidden: Tensor) -> list[float | None]:
        """Return the log-probabilities of a prompt's tokens from ``start`` on; the first token has none."""
        logprobs: list[float | None] = [None]
        targets = torch.tensor(prompt_ids[start + 1 :], device=hidden.device)
        sources = hidden[start : len(prompt_ids) - 1]
        for rows, tokens in zip(sources.split(LOGITS_ROWS), targets.split(LOGITS_ROWS), strict=True):
            if len(rows):
                logprobs += log_softmax_of(self.model.logits(rows), tokens).tolist()
        return logprobs


@dataclass(frozen=True)
class Admission:
    """Sequences of a queue entry, the cache rows that they get, and the cached keys and values of its tokens."""

    entry: QueueEntry
    sequences: list[Sequence]
    rows: slice
    prefix: Any
    """The answer of ``find`` of the prefixes; None if it was not asked."""

    @property
    def num_cached(self) -> int:
        """The number of tokens that need no prefill."""
        length: int = self.prefix.length if self.prefix is not None else 0
        return length


def choose(queue: deque[QueueEntry], cache: Cache, running: int, budget: int) -> list[Admission]:
    """Take entries from the queue, in order, as far as rows and prompt tokens allow.

    Args:
        queue: the entries.
        cache: its first ``running`` rows are in use, and its prefixes need no prefill.
        running: number of running sequences.
        budget: prompt tokens to compute at most.
    """
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
        admission = Admission(entry, entry.sequences[:free], rows, _find_prefix(cache, entry))
        cost = 0 if entry.cached else len(entry.tokens) - admission.num_cached
        shares = cache.prefixes.max_tokens > 0 and any(_shares_more(cache, admission, other) for other in chosen)
        if chosen and (cost > budget or shares):
            break
        entry.sequences = entry.sequences[free:]
        budget -= cost
        chosen.append(admission)
        used = rows.stop
        if free and entry.sequences:
            break
        queue.popleft()
    return chosen


def _find_prefix(cache: Cache, entry: QueueEntry) -> Any:
    """Return what is kept of an entry's tokens, if it may be used."""
    if entry.cached is not None or entry.request.logprob_start is not None or not cache.prefixes.max_tokens:
        return None
    return cache.prefixes.find(entry.request.use_adapter, entry.tokens)


def _shares_more(cache: Cache, admission: Admission, other: Admission) -> bool:
    """Return whether ``admission`` could take many more tokens from the prefix cache after the prefill of ``other``."""
    entry, before = admission.entry, other.entry
    if entry.cached or entry.request.logprob_start is not None or not other.sequences:
        return False
    if entry.request.use_adapter != before.request.use_adapter:
        return False
    return cache.prefixes.shared(entry.tokens, before.tokens) - admission.num_cached >= SHARED_TOKENS
