"""The thread that runs the model.

It repeats: do what was asked from outside, let waiting prompts in, compute one token of every running sequence. All
state belongs to this thread; other threads put calls into its inbox, which it makes between two steps. A change of
weights waits until nothing runs, during which nothing is let in, unless generation is paused: then it is made at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from prometheus_client import Counter, Gauge
from torch import Tensor

from services.logs import get_logger
from services.rollout_server.embedded import sequences as state
from services.rollout_server.embedded.cache import KVCache
from services.rollout_server.embedded.model import Model, Weights
from services.rollout_server.embedded.sampling import Sampler, log_softmax_of

log = get_logger(__name__)
T = TypeVar("T")

GENERATED = Counter("engine_generated_tokens", "Completion tokens sampled.")
PROMPT_TOKENS = Counter("engine_prompt_tokens", "Prompt tokens computed.")
STEPS = Counter("engine_steps", "Decoding steps.")
FINISHED = Counter("engine_completions", "Completions that ended, by finish reason.", ["finish_reason"])
RUNNING = Gauge("engine_running_sequences", "Sequences being decoded.")
WAITING = Gauge("engine_waiting_requests", "Requests with completions that do not run yet.")

# Logits of a long prompt are computed in pieces: 128 rows of 150,000 float32 are 77 MB.
LOGITS_ROWS = 128

PauseMode = Literal["abort", "retract", "in_place"]


class QueueFullError(Exception):
    """As many requests wait as may wait."""


class EngineStoppedError(Exception):
    """The engine ends or has failed; the request was not done."""


class NotIdleError(Exception):
    """What was asked for cannot be done while sequences run."""


@dataclass(frozen=True)
class Limits:
    """What bounds the engine's work."""

    max_running: int
    max_waiting: int
    prefill_tokens: int


class Engine:
    """Decodes all running sequences together, in a thread of its own."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        limits: Limits,
        version: str,
        decode_text: Callable[[Sequence[int], bool], str],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Makes an engine; ``start`` runs it.

        Args:
            model: computes.
            cache: of the running sequences.
            limits: how much it takes on.
            version: of the model's weights.
            decode_text: token ids, and whether to leave special tokens out, to text.
            on_failure: called in the engine's thread with an error that ended it.
        """
        self.model = model
        self.version = version
        self.is_paused = False
        self._cache = cache
        self._limits = limits
        self._decode_text = decode_text
        self._on_failure = on_failure
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._changes: deque[Callable[[], None]] = deque()
        self._waiting: deque[state.Waiting] = deque()
        self._running: list[state.Sequence] = []
        self._requests: set[state.Request] = set()
        self._sampler: Sampler | None = None
        self._is_poisoned = False
        self._is_stopping = False
        self._failure: Exception | None = None
        self._count = 0
        self._count_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- from any thread ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its step; what is not done ends with EngineStoppedError."""

        def end() -> None:
            self._is_stopping = True

        self._inbox.put(end)
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request: state.Request) -> None:
        """Takes a request on; ``request.done`` is resolved when it is.

        Raises:
            QueueFullError: ``max_waiting`` requests wait already.
            EngineStoppedError: the engine has ended.
        """
        if self._failure is not None or self._is_stopping:
            raise EngineStoppedError("the engine is stopping")
        with self._count_lock:
            if self._count >= self._limits.max_waiting:
                raise QueueFullError(f"{self._count} requests wait already")
            self._count += 1
        WAITING.set(self._count)
        waiting = state.Waiting(request, request.prompt_ids, list(request.sequences))

        def wait() -> None:
            self._requests.add(request)
            self._waiting.append(waiting)

        self._inbox.put(wait)

    def abort(self, matches: Callable[[state.Sequence], bool], reason: str) -> Future[int]:
        """Ends the sequences that match with what they have; the result is how many there were."""
        return self.between_steps(lambda: self._abort(matches, reason))

    def pause(self, mode: PauseMode) -> Future[int]:
        """Stops decoding until ``resume``; the result is how many sequences were running.

        ``abort`` ends all sequences, ``retract`` has them wait and be computed anew, ``in_place`` leaves them as they
        are.
        """
        return self.between_steps(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        """Goes on decoding."""

        def resume() -> None:
            self.is_paused = False

        return self.between_steps(resume)

    def flush(self) -> Future[None]:
        """Forgets what is kept of prompts; NotIdleError while sequences run."""

        def flush() -> None:
            if self._running:
                raise NotIdleError(f"{len(self._running)} sequences run; pause with retract or abort, or wait")
            self._forget_kept()

        return self.between_steps(flush)

    def change_weights(self, weights: Weights, version: str, *, keeps_caches: bool) -> Future[int]:
        """Exchanges the weights once nothing runs, or at once if paused; the result is how many sequences are paused.

        With ``keeps_caches`` False it fails with NotIdleError if sequences are paused in place, which need theirs.
        """

        def change() -> int:
            if self._running and not keeps_caches:
                raise NotIdleError(
                    f"{len(self._running)} sequences are paused in place: send flush_cache false to keep their caches, "
                    f"or pause with retract or abort"
                )
            self.model.weights = weights
            self.version = version
            self._forget_kept()
            return len(self._running)

        return self.between_steps(change, is_change=True)

    def between_steps(self, work: Callable[[], T], *, is_change: bool = False) -> Future[T]:
        """Has the engine's thread do ``work`` before its next step; a change of weights waits as described above."""
        future: Future[T] = Future()

        def do() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            # Carried over to whoever waits for the future.
            except Exception as error:  # noqa: BLE001
                future.set_exception(error)

        if self._failure is not None or self._is_stopping:
            future.set_exception(EngineStoppedError("the engine is stopping"))
        else:
            self._inbox.put((lambda: self._changes.append(do)) if is_change else do)
        return future

    def stats(self) -> dict[str, Any]:
        """What runs and waits, roughly: read while the thread works."""
        return {
            "running": len(self._running),
            "waiting": self._count,
            "paused": self.is_paused,
            "weight_version": self.version,
            "cache_tokens": self._cache.max_tokens,
            "cache_row_tokens": self._cache.row_length,
            "generated_tokens": int(GENERATED._value.get()),
            "steps": int(STEPS._value.get()),
        }

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._is_stopping:
                    self._turn()
        # A failure here is the engine's end: every waiting request is told, and so is the process.
        except Exception as error:
            self._failure = error
            log.exception("the engine failed", error=repr(error))
        finally:
            self._is_stopping = True
            self._end_everything(self._failure or EngineStoppedError("the engine is stopping"))
        if self._failure is not None:
            self._on_failure(self._failure)

    def _turn(self) -> None:
        """Messages, then one step if there is something to compute."""
        can_step = not self.is_paused and (self._running or (self._waiting and not self._changes))
        if not can_step and not (self._changes and (self.is_paused or not self._running)):
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()
        while self._changes and (self.is_paused or not self._running):
            self._changes.popleft()()
        if self.is_paused or self._is_stopping:
            return
        if self._waiting and not self._changes:
            self._admit()
        if self._running:
            self._decode()

    def _decode(self) -> None:
        sequences = self._running
        positions = [sequence.length - 1 for sequence in sequences]
        tokens = torch.tensor([sequence.output_ids[-1] for sequence in sequences], device=self.model.device)
        logits = self.model.decode(
            tokens, torch.tensor(positions, device=self.model.device), self._cache, max(positions) + 1
        )
        if self._sampler is None:
            self._sampler = Sampler([sequence.sampling for sequence in sequences], self.model.device)
        self._take(sequences, logits, self._sampler)
        STEPS.inc()
        self._remove_finished()

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
            self._requests.discard(sequence.request)
            sequence.request.done.set_result(sequence.request)

    def _remove_finished(self) -> None:
        """Frees the rows of finished sequences; the last row moves into each hole."""
        running = self._running
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

    # --- letting prompts in ------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Lets in as many waiting sequences as fit, computes their prompts, and samples their first tokens."""
        admitted = self._choose()
        if not admitted:
            return
        longest = max((waiting.request.longest for waiting, taken in admitted if taken), default=0)
        if longest:
            used = max((sequence.length for sequence in self._running), default=0)
            self._cache.ensure(longest, len(self._running), used)
        computed = [(waiting, taken) for waiting, taken in admitted if waiting.kept is None]
        rows: dict[int, slice] = {}
        start = len(self._running)
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
        used, budget = len(self._running), self._limits.prefill_tokens
        longest = self._cache.row_length if self._running else 0
        while self._waiting:
            waiting = self._waiting[0]
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
            self._waiting.popleft()
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
        ends = np.cumsum([len(waiting.tokens) for waiting, _ in admitted]).tolist()
        last = self.model.logits(hidden[[end - 1 for end in ends]])
        for (waiting, _), end in zip(admitted, ends, strict=True):
            if waiting.request.logprob_start is not None and not waiting.is_admitted:
                waiting.request.input_logprobs = self._input_logprobs(
                    waiting.request, hidden[end - len(waiting.tokens) : end]
                )
        return {id(waiting): last[row : row + 1] for row, (waiting, _) in enumerate(admitted)}

    def _begin(self, waiting: state.Waiting, taken: list[state.Sequence], rows: slice, logits: Tensor | None) -> None:
        """Starts sequences whose prompt is computed or kept: their first token comes from the prompt's logits."""
        if not taken:
            for sequence in waiting.sequences:
                self._finish(sequence, {"type": "length", "length": 0})
            self._count_down()
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
            self._count_down()
        sampler = Sampler([sequence.sampling for sequence in taken], self.model.device)
        self._running.extend(taken)
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

    # --- what is asked from outside ----------------------------------------------------------------------------------

    def _abort(self, matches: Callable[[state.Sequence], bool], reason: str) -> int:
        finish = {"type": "abort", "message": reason}
        ended = 0
        kept_waiting: deque[state.Waiting] = deque()
        for waiting in self._waiting:
            doomed = [sequence for sequence in waiting.sequences if matches(sequence)]
            waiting.sequences = [sequence for sequence in waiting.sequences if sequence not in doomed]
            for sequence in doomed:
                self._finish(sequence, finish)
            ended += len(doomed)
            if waiting.sequences:
                kept_waiting.append(waiting)
            else:
                self._count_down()
        self._waiting = kept_waiting
        for sequence in self._running:
            if matches(sequence):
                self._finish(sequence, finish)
                ended += 1
        self._remove_finished()
        return ended

    def _pause(self, mode: PauseMode) -> int:
        running = len(self._running)
        if mode == "abort":
            self._abort(lambda _: True, "generation was paused with mode abort")
        elif mode == "retract":
            for sequence in reversed(self._running):
                tokens = sequence.request.prompt_ids + sequence.output_ids
                self._waiting.appendleft(state.Waiting(sequence.request, tokens, [sequence]))
            with self._count_lock:
                self._count += running
            self._running.clear()
            self._sampler = None
        self.is_paused = True
        return running

    def _forget_kept(self) -> None:
        for waiting in self._waiting:
            waiting.kept = None

    def _count_down(self) -> None:
        with self._count_lock:
            self._count -= 1
        WAITING.set(self._count)

    def _end_everything(self, error: Exception) -> None:
        while not self._inbox.empty():
            self._inbox.get()()
        while self._changes:
            self._changes.popleft()()
        for request in self._requests:
            request.done.set_exception(error)


def _top_logprobs(logits: Tensor, count: int) -> list[tuple[float, int]]:
    values, tokens = (logits - torch.logsumexp(logits, -1)).topk(min(count, len(logits)))
    return list(zip(values.tolist(), tokens.tolist(), strict=True))
