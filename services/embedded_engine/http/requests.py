"""Request bodies and sampling parameters, with SGLang's names, and the engine's requests made from them."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from services.embedded_engine.compute.loading import Loaded
from services.embedded_engine.compute.sampling import Sampling, stream_key
from services.embedded_engine.compute.sequences import Request, Sequence, Stopping
from services.http.problems import ProblemError, printable
from services.protocol.base import MAX_GROUP_SIZE

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_new_tokens": (0,),
    "min_tokens": (0,),
    "stop_regex": ([],),
    "no_stop_trim": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "custom_params": ({},),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag", "audio"), ()),
}
"""SGLang's and OpenAI's fields that this engine lacks, each with the values, besides None, that change nothing."""


class RequestBody(BaseModel):
    """A body whose invalid values are answered 400, as SGLang answers them. None stands for a field's default."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_with_400(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(_without_neutral(given) if isinstance(given, dict) else given)
        except ValidationError as error:
            problems = [
                f"{'.'.join(printable(str(part)) for part in problem['loc'])}: {problem['msg']}"
                for problem in error.errors()[:3]
            ]
            raise ProblemError(400, "; ".join(problems)) from error


class SamplingParams(RequestBody):
    """``sampling_params`` of /generate, with SGLang's defaults."""

    model_config = ConfigDict(extra="forbid")

    n: int = Field(default=1, ge=1, le=MAX_GROUP_SIZE)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_new_tokens: int = Field(default=128, ge=0)
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop strings; empty ones stop nothing."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop
        return tuple(text for text in texts if text)


def _without_neutral(given: dict[str, Any]) -> dict[str, Any]:
    for name in UNSUPPORTED.keys() & given.keys():
        if given[name] is not None and given[name] not in UNSUPPORTED[name]:
            raise unsupported(name)
    return {name: value for name, value in given.items() if value is not None and name not in UNSUPPORTED}


def unsupported(name: str) -> ProblemError:
    """Return the refusal of a field that would change the answer and that this engine lacks."""
    return ProblemError(400, f"{printable(name)} is not supported by the embedded engine; leave it out")


def make_request(
    prompt_ids: list[int],
    params: SamplingParams,
    loaded: Loaded,
    *,
    rid: str | None = None,
    use_adapter: bool = False,
    logprob_start: int | None = None,
    top_logprobs: int = 0,
    on_progress: Callable[[Sequence], None] | None = None,
) -> Request:
    """Return a request for the engine.

    Raises:
        ProblemError: 400, the prompt is empty, too long, or has an id outside the vocabulary.
    """
    vocab_size, context_length = loaded.model.architecture.vocab_size, loaded.model.context_length
    if not prompt_ids:
        raise ProblemError(400, "the prompt has no tokens; send input_ids with at least one")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        wrong = next(token for token in prompt_ids if not 0 <= token < vocab_size)
        raise ProblemError(400, f"token {wrong} of the prompt is outside the vocabulary of {vocab_size}")
    room = context_length - len(prompt_ids)
    if room < (1 if params.max_new_tokens else 0):
        raise ProblemError(
            400, f"the prompt has {len(prompt_ids)} tokens; the context length is {context_length} tokens"
        )
    if logprob_start is not None and logprob_start >= len(prompt_ids):
        raise ProblemError(400, f"logprob_start_len {logprob_start} is beyond the prompt's {len(prompt_ids)} tokens")
    # As in SGLang, ignore_eos ignores every stop token, including the request's own.
    ends = frozenset() if params.ignore_eos else loaded.end_ids | frozenset(params.stop_token_ids)
    request = Request(
        rid or uuid.uuid4().hex,
        prompt_ids,
        Stopping(min(params.max_new_tokens, room), ends, params.stop_texts, params.skip_special_tokens),
        use_adapter=use_adapter,
        logprob_start=logprob_start,
        top_logprobs=top_logprobs,
        on_progress=on_progress,
    )
    seed = secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed
    for number in range(params.n):
        key = stream_key(seed, number)
        sampling = Sampling(key, params.temperature, params.top_p, params.top_k, params.min_p)
        request.sequences.append(Sequence(request, number, sampling))
    return request
