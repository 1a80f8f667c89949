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
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

import torch
from prometheus_client import Gauge

from services.core.logs import get_logger
from services.embedded_engine.compute import sequences as state
from services.embedded_engine.compute.batch import Batch, Limits
from services.embedded_engine.compute.kv_cache import KVCache
from services.embedded_engine.compute.model import Model, Weights

log = get_logger(__name__)
T = TypeVar("T")

WAITING = Gauge("sglang:num_queue_reqs", "Requests with completions that do not run yet.")

PauseMode = Literal["abort", "retract", "in_place"]


class QueueFullError(Exception):
    """As many requests wait as may wait."""


class EngineStoppedError(Exception):
    """The engine ends or has failed; the request was not done."""


class NotIdleError(Exception):
    """What was asked for cannot be done while sequences run."""


class Engine:
    """Decodes all running sequences together, in a thread of its own. Its methods may be called from any thread."""

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
        self.is_paused = False
        self._limits = limits
        self._cache = cache
        self._batch = Batch(model, cache, limits, version, decode_text, on_all_admitted=lambda: self._count(-1))
        self._on_failure = on_failure
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._changes: deque[Callable[[], None]] = deque()
        self._is_stopping = False
        self._failure: Exception | None = None
        self._waiting = 0
        self._waiting_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def version(self) -> str:
        """The version of the weights that the next token is sampled with."""
        return self._batch.version

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
        if self._is_stopping:
            raise EngineStoppedError("the engine is stopping")
        with self._waiting_lock:
            if self._waiting >= self._limits.max_waiting:
                raise QueueFullError(f"{self._waiting} requests wait already")
            self._waiting += 1
        waiting = state.Waiting(request, request.prompt_ids, list(request.sequences))
        self._inbox.put(lambda: self._batch.add(waiting))

    def abort(self, matches: Callable[[state.Sequence], bool], reason: str) -> Future[int]:
        """Ends the sequences that match with what they have; the result is how many there were."""
        return self._between_steps(lambda: self._batch.abort(matches, reason))

    def pause(self, mode: PauseMode) -> Future[int]:
        """Stops decoding until ``resume``; the result is how many sequences were running.

        ``abort`` ends all sequences, ``retract`` has them wait and be computed anew, ``in_place`` leaves them as they
        are.
        """

        def pause() -> int:
            running = len(self._batch.running)
            if mode == "abort":
                self._batch.abort(lambda _: True, "generation was paused with mode abort")
            elif mode == "retract":
                self._count(running)
                self._batch.retract()
            self.is_paused = True
            return running

        return self._between_steps(pause)

    def resume(self) -> Future[None]:
        """Goes on decoding."""

        def resume() -> None:
            self.is_paused = False

        return self._between_steps(resume)

    def flush(self) -> Future[None]:
        """Forgets what is kept of prompts; NotIdleError while sequences run."""

        def flush() -> None:
            if self._batch.running:
                raise NotIdleError(f"{len(self._batch.running)} sequences run; pause with retract or abort, or wait")
            self._batch.forget_kept()

        return self._between_steps(flush)

    def change_weights(self, weights: Weights, version: str, *, keeps_caches: bool) -> Future[int]:
        """Exchanges the weights once nothing runs, or at once if paused; the result is how many sequences are paused.

        With ``keeps_caches`` False it fails with NotIdleError if sequences are paused in place, which need theirs.
        """

        def change() -> int:
            running = len(self._batch.running)
            if running and not keeps_caches:
                raise NotIdleError(
                    f"{running} sequences are paused in place: send flush_cache false to keep their caches, or pause "
                    f"with retract or abort"
                )
            self._batch.model.weights = weights
            self._batch.version = version
            self._batch.forget_kept()
            return running

        return self._between_steps(change, waits=True)

    def drain(self) -> Future[None]:
        """Resolved once nothing runs, or at once if paused; what comes meanwhile waits."""
        return self._between_steps(lambda: None, waits=True)

    def stats(self) -> dict[str, Any]:
        """What runs and waits, roughly: read while the thread works."""
        return {
            "running": len(self._batch.running),
            "waiting": self._waiting,
            "paused": self.is_paused,
            "weight_version": self.version,
            "cache_tokens": self._cache.max_tokens,
            "cache_row_tokens": self._cache.row_length,
            **self._batch.counts(),
        }

    def _between_steps(self, work: Callable[[], T], *, waits: bool = False) -> Future[T]:
        """Has the engine's thread do ``work`` before its next step, or, with ``waits``, once it may change weights."""
        future: Future[T] = Future()

        def do() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            # Carried over to whoever waits for the future.
            except Exception as error:  # noqa: BLE001
                future.set_exception(error)

        if self._is_stopping:
            future.set_exception(EngineStoppedError("the engine is stopping"))
        else:
            self._inbox.put((lambda: self._changes.append(do)) if waits else do)
        return future

    def _count(self, change: int) -> None:
        with self._waiting_lock:
            self._waiting += change
        WAITING.set(self._waiting)

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
            self._end_everything()
        if self._failure is not None:
            self._on_failure(self._failure)

    def _turn(self) -> None:
        """Messages, changes of weights, then one step if there is something to compute."""
        if not self._can_step() and not self._can_change():
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()
        while self._can_change():
            self._changes.popleft()()
        if self._is_stopping or not self._can_step():
            return
        if self._batch.waiting and not self._changes:
            self._batch.admit()
        if self._batch.running:
            self._batch.decode()

    def _can_step(self) -> bool:
        return not self.is_paused and bool(self._batch.running or (self._batch.waiting and not self._changes))

    def _can_change(self) -> bool:
        return bool(self._changes) and (self.is_paused or not self._batch.running)

    def _end_everything(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()
        while self._changes:
            self._changes.popleft()()
        error = EngineStoppedError("the engine is stopping" if self._failure is None else "the engine has failed")
        for request in self._batch.requests:
            request.done.set_exception(error)
