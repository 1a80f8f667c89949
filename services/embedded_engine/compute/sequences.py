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
    """When a sequence ends."""

    max_new_tokens: int
    token_ids: frozenset[int]
    texts: tuple[str, ...] = ()
    skip_special_tokens: bool = True


@dataclass(eq=False)
class Sequence:
    """One completion in the making.

    ``versions`` has a pair (weight version, index of the first token sampled with it) whenever the version changed.
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
    finish: dict[str, Any] | None = None

    @property
    def id(self) -> str:
        """The request's id, with the completion's number where there are several."""
        return self.request.rid if len(self.request.sequences) == 1 else f"{self.request.rid}-{self.number}"

    @property
    def length(self) -> int:
        """Tokens so far, the prompt's included."""
        return len(self.request.prompt_ids) + len(self.output_ids)


@dataclass(eq=False)
class Request:
    """A prompt with its completions.

    ``logprob_start`` asks for the log-probabilities of prompt tokens from there on (``input_logprobs``: the first entry
    is None). ``on_progress`` is called in the engine's thread after every token and at the end of each completion;
    ``done`` is resolved when all completions have ended.
    """

    rid: str
    prompt_ids: list[int]
    stopping: Stopping
    logprob_start: int | None = None
    top_logprobs: int = 0
    on_progress: Callable[[Sequence], None] | None = None
    sequences: list[Sequence] = field(default_factory=list)
    input_logprobs: list[float | None] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    done: Future[Request] = field(default_factory=Future)

    @property
    def longest(self) -> int:
        """Tokens that a completion may have at most, the prompt's included."""
        return len(self.prompt_ids) + self.stopping.max_new_tokens


@dataclass(frozen=True)
class KeptPrompt:
    """A computed prompt whose completions do not all run yet: its keys and values, and its last logits [1, V]."""

    keys_values: Tensor
    logits: Tensor


@dataclass(eq=False)
class Waiting:
    """Sequences that continue the same tokens and wait for a place: a fresh prompt's, or a single interrupted one."""

    request: Request
    tokens: list[int]
    sequences: list[Sequence]
    kept: KeptPrompt | None = None
    is_admitted: bool = False
    """Whether some of the completions run already."""
