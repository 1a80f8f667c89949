"""The thread that runs the model.

It repeats one step: make the calls from outside, admit queued requests, decode one token of every running sequence. All
state belongs to this thread; other threads put calls into its inbox, and it makes them between two steps. A change of
weights waits until nothing runs, and nothing is admitted meanwhile; while generation is paused it is made at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

import torch
from prometheus_client import Gauge

from services.core.logs import get_logger
from services.embedded_engine.adapters import AnyAdapter
from services.embedded_engine.loading import Loaded
from services.embedded_engine.scheduler import PREFILL_TOKENS, Request, Scheduler, Sequence

log = get_logger(__name__)
T = TypeVar("T")

WAITING = Gauge("sglang:num_queue_reqs", "Requests with completions that do not run yet.")
MAX_QUEUED_REQUESTS = 4096
"""Queued requests beyond which the engine refuses more, as many as for SGLang."""

PauseMode = Literal["abort", "retract"]


class QueueFullError(Exception):
    """The queue has as many requests as it may have."""


class EngineStoppedError(Exception):
    """The engine is stopping or has failed; the request was not done."""


class NotIdleError(Exception):
    """The call cannot be made while sequences run."""


class Engine:
    """An engine that decodes all running sequences together, in its own thread. Any thread may call its methods."""

    def __init__(
        self,
        loaded: Loaded,
        on_failure: Callable[[Exception], None],
        *,
        max_queued: int = MAX_QUEUED_REQUESTS,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        """Make an engine; ``start`` runs it.

        Args:
            loaded: the model with its key-value cache and tokenizer.
            on_failure: called in the engine's thread with an error that ended it.
            max_queued: requests that may wait.
            prefill_tokens: prompt tokens computed between two decode steps.
        """
        self.is_paused = False
        self.adapter_name: str | None = None
        """The name of the LoRA adapter that is loaded, if any."""
        self._cache = loaded.cache
        self._scheduler = Scheduler(loaded, prefill_tokens)
        self._on_failure = on_failure
        self._max_queued = max_queued
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._weight_changes: deque[Callable[[], None]] = deque()
        self._is_stopping = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def version(self) -> str:
        """The version of the weights with which the next token is sampled."""
        return self._scheduler.version

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its step; unfinished requests end with EngineStoppedError."""
        self._is_stopping = True
        self._inbox.put(lambda: None)  # so that a thread that waits looks again
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request: Request) -> None:
        """Queue a request; its ``done`` is resolved when all its completions have ended.

        Raises:
            QueueFullError: ``max_queued`` requests wait already.
            EngineStoppedError: the engine has ended.
        """
        if self._is_stopping:
            raise EngineStoppedError("the engine is stopping")
        if (queued := self._num_queued()) >= self._max_queued:
            raise QueueFullError(f"{queued} requests wait already; send it later or elsewhere")

        def add() -> None:
            self._scheduler.add(request)
            if request.use_adapter and not self.is_paused:
                self._abort_without_adapter()

        self._inbox.put(add)

    def abort(self, matches: Callable[[Sequence], bool], reason: str) -> Future[int]:
        """End the sequences that match, with their tokens so far; the result is their number."""
        return self._between_steps(lambda: self._scheduler.abort(matches, reason))

    def pause(self, mode: PauseMode) -> Future[int]:
        """Stop decoding until ``resume``; the result is the number of sequences that ran.

        ``abort`` ends all sequences, and ``retract`` preempts them, so that they are computed anew.
        """

        def pause() -> int:
            running = len(self._scheduler.running)
            if mode == "abort":
                self._scheduler.abort(lambda _: True, "generation was paused with mode abort")
            else:
                self._scheduler.preempt()
            self.is_paused = True
            return running

        return self._between_steps(pause)

    def resume(self) -> Future[None]:
        """Continue decoding."""

        def resume() -> None:
            if not self._cache.has_memory:
                raise NotIdleError("memory is released: send /resume_memory_occupation first")
            self.is_paused = False
            self._abort_without_adapter()

        return self._between_steps(resume)

    def occupy(self, *, has_memory: bool) -> Future[None]:
        """Give the memory of keys and values away, or take it back; the weights stay.

        The result is NotIdleError unless generation is paused, nothing runs, and there is something to change.
        """

        def change() -> None:
            if not self.is_paused or self._scheduler.running or self._cache.has_memory == has_memory:
                raise NotIdleError(
                    "memory is released once, while generation is paused with retract or abort, and then resumed once"
                )
            self._scheduler.drop_caches()
            self._cache.occupy(has_memory=has_memory)

        return self._between_steps(change)

    def flush(self) -> Future[None]:
        """Drop cached keys and values; the result is NotIdleError while sequences run."""

        def flush() -> None:
            if running := len(self._scheduler.running):
                raise NotIdleError(f"{running} sequences run; pause with retract or abort, or wait")
            self._scheduler.drop_caches()

        return self._between_steps(flush)

    def change_weights(self, weights: Any, version: str) -> Future[None]:
        """Exchange the weights, as the model packed them, once nothing runs, or at once if paused."""

        def change() -> None:
            self._scheduler.model.load(weights)
            self._scheduler.version = version
            self._scheduler.drop_caches()

        return self._between_steps(change, changes_weights=True)

    def change_adapter(self, adapter: AnyAdapter | None, name: str) -> Future[None]:
        """Exchange the LoRA adapter, or remove it (None), once nothing runs, or at once if paused.

        Requests for an adapter that is removed end as aborted, unless another is loaded before the pause ends.
        """

        def change() -> None:
            self._scheduler.model.adapter = adapter
            self.adapter_name = name if adapter is not None else None
            self._scheduler.drop_caches()
            if not self.is_paused:
                self._abort_without_adapter()

        return self._between_steps(change, changes_weights=True)

    def change_version(self, version: str) -> Future[None]:
        """Say that the tokens from now on are of ``version``."""

        def change() -> None:
            self._scheduler.version = version

        return self._between_steps(change)

    def drain(self) -> Future[None]:
        """Return a future that is resolved once nothing runs, or at once if paused; new requests wait meanwhile."""
        return self._between_steps(lambda: None, changes_weights=True)

    def stats(self) -> dict[str, Any]:
        """Return the counts of running and waiting work; approximate, because the thread works meanwhile."""
        return {
            "running": len(self._scheduler.running),
            "waiting": self._num_queued(),
            "paused": self.is_paused,
            "weight_version": self.version,
            "cache_tokens": self._cache.max_tokens,
            "cache_row_tokens": self._cache.row_length,
            **self._scheduler.counts(),
        }

    def _abort_without_adapter(self) -> None:
        """End the requests for an adapter that is no longer loaded."""
        if self._scheduler.model.adapter is None:
            self._scheduler.abort(lambda sequence: sequence.request.use_adapter, "the LoRA adapter was unloaded")

    def _num_queued(self) -> int:
        return self._inbox.qsize() + len(self._scheduler.queue)

    def _between_steps(self, work: Callable[[], T], *, changes_weights: bool = False) -> Future[T]:
        """Have the engine's thread do ``work`` before its next step, or once weights may be changed."""
        future: Future[T] = Future()

        def do() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            # Whoever waits for the future gets it.
            except Exception as error:  # noqa: BLE001
                future.set_exception(error)

        if self._is_stopping:
            future.set_exception(EngineStoppedError("the engine is stopping"))
        else:
            self._inbox.put((lambda: self._weight_changes.append(do)) if changes_weights else do)
        return future

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._is_stopping:
                    self._step()
        # A failure ends the engine: every waiting request learns of it, and so does the process.
        except Exception as error:
            self._failure = error
            log.exception("the engine failed", error=repr(error))
        finally:
            self._is_stopping = True
            self._end_everything()
        if self._failure is not None:
            self._on_failure(self._failure)

    def _step(self) -> None:
        """Make the calls from outside and changes of weights, then compute if there is something to compute."""
        if not self._can_compute() and not self._can_change_weights():
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()
        while self._can_change_weights():
            self._weight_changes.popleft()()
        if self._can_compute() and not self._is_stopping:
            if self._scheduler.queue and not self._weight_changes:
                self._scheduler.admit()
            if self._scheduler.running:
                self._scheduler.decode()
        WAITING.set(len(self._scheduler.queue))

    def _can_compute(self) -> bool:
        can_admit = bool(self._scheduler.queue) and not self._weight_changes
        return not self.is_paused and (can_admit or bool(self._scheduler.running))

    def _can_change_weights(self) -> bool:
        return bool(self._weight_changes) and (self.is_paused or not self._scheduler.running)

    def _end_everything(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()
        while self._weight_changes:
            self._weight_changes.popleft()()
        error = EngineStoppedError("the engine is stopping" if self._failure is None else "the engine has failed")
        for request in self._scheduler.unfinished:
            request.done.set_exception(error)
