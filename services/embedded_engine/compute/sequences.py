"""Requests and their sequences, as the engine's thread sees them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from services.embedded_engine.compute.sampling import Sampling


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
    engine's thread calls ``on_progress`` after every token and at the end of each
    completion, and resolves ``done`` when all completions have ended.
    """

    rid: str
    prompt_ids: list[int]
    stopping: Stopping
    use_adapter: bool = False
    logprob_start: int | None = None
    top_logprobs: int = 0
    on_progress: Callable[[Sequence], None] | None = None
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
    """The result of a prefill for the completions that do not run yet: keys and values, and the last logits [1, V]."""

    keys_values: Tensor
    logits: Tensor


@dataclass(eq=False)
class QueueEntry:
    """Sequences that continue the same tokens and wait for cache rows: a new prompt's, or a single preempted one."""

    request: Request
    tokens: list[int]
    sequences: list[Sequence]
    cached: CachedPrompt | None = None
    """The prefill of ``tokens``, once some of the completions run."""
