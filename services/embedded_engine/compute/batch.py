"""The sequences that run and wait, and what one turn of the engine does with them. For the engine's thread only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from prometheus_client import Counter, Gauge
from torch import Tensor

from services.embedded_engine.compute import sequences as state
from services.embedded_engine.compute.kv_cache import KVCache
from services.embedded_engine.compute.model import Model
from services.embedded_engine.compute.sampling import Sampler, log_softmax_of

# By SGLang's names where it has one, so that the same dashboards show both engines.
GENERATED = Counter("sglang:generation_tokens", "Completion tokens sampled.")
PROMPT_TOKENS = Counter("sglang:prompt_tokens", "Prompt tokens computed.")
STEPS = Counter("engine_steps", "Decoding steps.")
FINISHED = Counter("engine_completions", "Completions that ended, by finish reason.", ["finish_reason"])
RUNNING = Gauge("sglang:num_running_reqs", "Sequences being decoded.")

# Logits of a long prompt are computed in pieces: 128 rows of 150,000 float32 are 77 MB.
LOGITS_ROWS = 128


@dataclass(frozen=True)
class Limits:
    """What bounds the engine's work."""

    max_running: int
    max_waiting: int
    prefill_tokens: int


class Batch:
    """Running sequences, one in each of the cache's first rows, and the queue of those that wait for a row."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        limits: Limits,
        version: str,
        decode_text: Callable[[Sequence[int], bool], str],
        on_all_admitted: Callable[[], None],
    ) -> None:
        """Makes an empty batch.

        Args:
            model: computes.
            cache: of the running sequences.
            limits: how much is taken on.
            version: of the model's weights; set anew with them.
            decode_text: token ids, and whether to leave special tokens out, to text.
            on_all_admitted: called when an entry leaves the queue.
        """
        self.model = model
        self.version = version
        self.waiting: deque[state.Waiting] = deque()
        self.running: list[state.Sequence] = []
        self.requests: set[state.Request] = set()
        """All whose completions have not all ended."""
        self._cache = cache
        self._limits = limits
        self._decode_text = decode_text
        self._on_all_admitted = on_all_admitted
        self._sampler: Sampler | None = None
        self._is_poisoned = False
        self._generated = self._prompted = self._steps = 0

    def add(self, waiting: state.Waiting) -> None:
        """Puts a request at the end of the queue."""
        self.requests.add(waiting.request)
        self.waiting.append(waiting)

    def decode(self) -> None:
        """Computes and samples one token of every running sequence."""
        sequences = self.running
        positions = [sequence.length - 1 for sequence in sequences]
        tokens = torch.tensor([sequence.output_ids[-1] for sequence in sequences], device=self.model.device)
        logits = self.model.decode(
            tokens, torch.tensor(positions, device=self.model.device), self._cache, max(positions) + 1
        )
        if self._sampler is None:
            self._sampler = Sampler([sequence.sampling for sequence in sequences], self.model.device)
        self._take(sequences, logits, self._sampler)
        STEPS.inc()
        self._steps += 1
        self._remove_finished()

    def counts(self) -> dict[str, int]:
        """Totals since the start."""
        return {"generated_tokens": self._generated, "prompt_tokens": self._prompted, "steps": self._steps}

    def _take(self, sequences: Sequence[state.Sequence], logits: Tensor, sampler: Sampler) -> None:
        """Samples a token for each of ``sequences``, the rows of ``logits``."""
        places = np.array([len(sequence.output_ids) for sequence in sequences], dtype=np.uint64)
        tokens, logprobs = sampler.sample(logits, places)
        for row, (sequence, token, logprob) in enumerate(
            zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True)
        ):
            if logprob != logprob:
                self._is_poisoned = True
                self._finish(sequence, {"type": "abort", "message": "the model's logits are not finite"})
                continue
            if not sequence.versions or sequence.versions[-1][0] != self.version:
                sequence.versions.append((self.version, len(sequence.output_ids)))
            sequence.output_ids.append(token)
            sequence.logprobs.append(logprob)
            if sequence.request.top_logprobs:
                sequence.top_logprobs.append(_top_logprobs(logits[row], sequence.request.top_logprobs))
            reason = self._finish_reason(sequence, token)
            if reason is not None:
                self._finish(sequence, reason)
            elif sequence.request.on_progress is not None:
                sequence.request.on_progress(sequence)
        GENERATED.inc(len(sequences))
        self._generated += len(sequences)

    def _finish_reason(self, sequence: state.Sequence, token: int) -> dict[str, Any] | None:
        stopping = sequence.request.stopping
        if token in stopping.token_ids:
            return {"type": "stop", "matched": token}
        if stopping.texts:
            # Each token is at least a byte, so a text that ends with the newest token is within these.
            tail = max(len(text.encode()) for text in stopping.texts) + 1
            end = self._decode_text(sequence.output_ids[-tail:], stopping.skip_special_tokens)
            for text in stopping.texts:
                if text in end:
                    return {"type": "stop", "matched": text}
        if len(sequence.output_ids) >= stopping.max_new_tokens:
            return {"type": "length", "length": stopping.max_new_tokens}
        return None

    def _finish(self, sequence: state.Sequence, reason: dict[str, Any]) -> None:
        sequence.finish = reason
        FINISHED.labels(reason["type"]).inc()
        if sequence.request.on_progress is not None:
            sequence.request.on_progress(sequence)
        if all(other.finish is not None for other in sequence.request.sequences):
            self.requests.discard(sequence.request)
            sequence.request.done.set_result(sequence.request)

    def _remove_finished(self) -> None:
        """Frees the rows of finished sequences; the last row moves into each hole."""
        running = self.running
        for row in range(len(running) - 1, -1, -1):
            if running[row].finish is None:
                continue
            last = running.pop()
            if row < len(running):
                running[row] = last
                # The newest token is not in the cache yet.
                self._cache.move(len(running), row, last.length - 1)
            self._sampler = None
        if self._is_poisoned and not running:
            self._cache.clear()
            self._is_poisoned = False
        RUNNING.set(len(running))

    def abort(self, matches: Callable[[state.Sequence], bool], reason: str) -> int:
        """Ends the sequences that match with what they have; returns how many there were."""
        finish = {"type": "abort", "message": reason}
        ended = 0
        kept_waiting: deque[state.Waiting] = deque()
        for waiting in self.waiting:
            doomed = [sequence for sequence in waiting.sequences if matches(sequence)]
            waiting.sequences = [sequence for sequence in waiting.sequences if sequence not in doomed]
            for sequence in doomed:
                self._finish(sequence, finish)
            ended += len(doomed)
            if waiting.sequences:
                kept_waiting.append(waiting)
            else:
                self._on_all_admitted()
        self.waiting = kept_waiting
        for sequence in self.running:
            if matches(sequence):
                self._finish(sequence, finish)
                ended += 1
        self._remove_finished()
        return ended

    def retract(self) -> None:
        """Has all running sequences wait, at the head of the queue, to be computed anew with their tokens so far."""
        for sequence in reversed(self.running):
            tokens = sequence.request.prompt_ids + sequence.output_ids
            self.waiting.appendleft(state.Waiting(sequence.request, tokens, [sequence]))
        self.running.clear()
        self._sampler = None

    def forget_kept(self) -> None:
        """Forgets computed prompts of which completions still wait; they are computed anew."""
        for waiting in self.waiting:
            waiting.kept = None

    # --- letting prompts in ------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Lets in as many waiting sequences as fit, computes their prompts, and samples their first tokens."""
        admitted = self._choose()
        if not admitted:
            return
        longest = max((waiting.request.longest for waiting, taken in admitted if taken), default=0)
        if longest:
            used = max((sequence.length for sequence in self.running), default=0)
            self._cache.ensure(longest, len(self.running), used)
        computed = [(waiting, taken) for waiting, taken in admitted if waiting.kept is None]
        rows: dict[int, slice] = {}
        start = len(self.running)
        for waiting, taken in admitted:
            rows[id(waiting)] = slice(start, start + len(taken))
            start += len(taken)
        logits = self._prefill([(waiting, rows[id(waiting)]) for waiting, _ in computed])
        for waiting, taken in admitted:
            self._begin(waiting, taken, rows[id(waiting)], logits.get(id(waiting)))
        self._sampler = None
        self._remove_finished()

    def _choose(self) -> list[tuple[state.Waiting, list[state.Sequence]]]:
        """Takes from the queue, in order, what fits into free rows and the budget of prompt tokens."""
        chosen: list[tuple[state.Waiting, list[state.Sequence]]] = []
        used, budget = len(self.running), self._limits.prefill_tokens
        longest = self._cache.row_length if self.running else 0
        while self.waiting:
            waiting = self.waiting[0]
            cost = 0 if waiting.kept else len(waiting.tokens)
            if chosen and cost > budget:
                break
            if waiting.request.stopping.max_new_tokens == 0:
                taken: list[state.Sequence] = []
            else:
                longest = max(longest, waiting.request.longest)
                free = min(self._cache.capacity(longest), self._limits.max_running) - used
                if free <= 0:
                    break
                taken = waiting.sequences[:free]
                used += len(taken)
                waiting.sequences = waiting.sequences[free:]
            budget -= cost
            chosen.append((waiting, taken))
            if taken and waiting.sequences:
                break
            self.waiting.popleft()
        return chosen

    def _prefill(self, admitted: Sequence[tuple[state.Waiting, slice]]) -> dict[int, Tensor]:
        """Computes prompts into cache rows; the logits [1, V] after each, by the id of its Waiting."""
        if not admitted:
            return {}
        cache = self._cache

        def store(layer: int, number: int, keys: Tensor, values: Tensor) -> None:
            rows = admitted[number][1]
            if rows.stop > rows.start:
                cache.keys[layer][rows, :, : keys.shape[1]] = keys
                cache.values[layer][rows, :, : values.shape[1]] = values

        hidden = self.model.prefill([waiting.tokens for waiting, _ in admitted], store)
        PROMPT_TOKENS.inc(len(hidden))
        self._prompted += len(hidden)
        ends = np.cumsum([len(waiting.tokens) for waiting, _ in admitted]).tolist()
        last = self.model.logits(hidden[[end - 1 for end in ends]])
        for (waiting, _), end in zip(admitted, ends, strict=True):
            if waiting.request.logprob_start is not None and not waiting.request.input_logprobs:
                waiting.request.input_logprobs = self._input_logprobs(
                    waiting.request, hidden[end - len(waiting.tokens) : end]
                )
        return {id(waiting): last[row : row + 1] for row, (waiting, _) in enumerate(admitted)}

    def _begin(self, waiting: state.Waiting, taken: list[state.Sequence], rows: slice, logits: Tensor | None) -> None:
        """Starts sequences whose prompt is computed or kept: their first token comes from the prompt's logits."""
        if not taken:
            for sequence in waiting.sequences:
                self._finish(sequence, {"type": "length", "length": 0})
            self._on_all_admitted()
            return
        if waiting.kept is not None:
            self._cache.write(rows, waiting.kept.keys_values)
            logits = waiting.kept.logits
        assert logits is not None
        if not waiting.is_admitted or waiting.kept is None:
            cached = len(waiting.tokens)
            for sequence in taken[1:]:
                sequence.cached_tokens = cached
        else:
            for sequence in taken:
                sequence.cached_tokens = len(waiting.tokens)
        if waiting.sequences:
            if waiting.kept is None:
                waiting.kept = state.KeptPrompt(self._cache.read(rows.start, len(waiting.tokens)), logits.clone())
            waiting.is_admitted = True
        else:
            self._on_all_admitted()
        sampler = Sampler([sequence.sampling for sequence in taken], self.model.device)
        self.running.extend(taken)
        self._take(taken, logits.repeat(len(taken), 1), sampler)

    def _input_logprobs(self, request: state.Request, hidden: Tensor) -> list[float | None]:
        """Log-probabilities of a prompt's tokens from ``logprob_start`` on; the first has none."""
        assert request.logprob_start is not None
        start = request.logprob_start
        found: list[float | None] = [None]
        targets = torch.tensor(request.prompt_ids[start + 1 :], device=hidden.device)
        sources = hidden[start : len(request.prompt_ids) - 1]
        for rows, tokens in zip(sources.split(LOGITS_ROWS), targets.split(LOGITS_ROWS), strict=True):
            if len(rows):
                found += log_softmax_of(self.model.logits(rows), tokens).tolist()
        return found


def _top_logprobs(logits: Tensor, count: int) -> list[tuple[float, int]]:
    values, tokens = (logits - torch.logsumexp(logits, -1)).topk(min(count, len(logits)))
    return list(zip(values.tolist(), tokens.tolist(), strict=True))
