"""What SGLang's native routes take and give, as far as the embedded engine has them."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.embedded_engine.compute.engine import PauseMode
from services.embedded_engine.compute.sampling import Sampling, stream_key
from services.embedded_engine.compute.sequences import Request, Stopping
from services.embedded_engine.compute.sequences import Sequence as Completion
from services.http.problems import ProblemError, printable
from services.protocol import MAX_GROUP_SIZE, StrictModel

# Fields of SGLang that change nothing at these values and are refused at others.
_NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_new_tokens": (0, None),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, []),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "spaces_between_special_tokens": (True, None),
    "no_stop_trim": (False, None),
    "stream_interval": (None, 1),
}
_NEUTRAL: tuple[Any, ...] = (None, False, 0, "", [], {})
_WITHOUT_MEANING = frozenset({"return_text_in_logprobs", "log_metrics", "stream", "modalities", "priority"})


class SamplingParams(StrictModel):
    """``sampling_params`` of /generate, with SGLang's defaults."""

    n: int = Field(default=1, ge=1, le=MAX_GROUP_SIZE)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_new_tokens: int = Field(default=128, ge=0)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop strings; empty ones stop nothing."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in texts if text)


class GenerateRequest(BaseModel):
    """Body of /generate."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: dict[str, Any] | None = None
    rid: str | None = Field(default=None, min_length=1, max_length=200)
    return_logprob: bool = False
    logprob_start_len: int = Field(default=-1, ge=-1)
    top_logprobs_num: int = Field(default=0, ge=0, le=100)
    stream: bool = False


class UpdateFromDisk(BaseModel):
    """Body of /update_weights_from_disk."""

    model_path: str
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class InitGroup(BaseModel):
    """Body of /init_weights_update_group. ``rank_offset`` is this worker's rank: it has but one."""

    master_address: str
    master_port: int = Field(ge=1, le=65_535)
    rank_offset: int = Field(ge=1)
    world_size: int = Field(ge=2)
    group_name: str = "weight_update_group"
    backend: str = Field(default="gloo", pattern="^(gloo|nccl)$")


class DestroyGroup(BaseModel):
    """Body of /destroy_weights_update_group."""

    group_name: str = "weight_update_group"


class BeginUpdate(BaseModel):
    """Body of /begin_weight_update: all of the model's weights will come."""

    selector: Literal["all"] = "all"


class UpdateFromDistributed(StrictModel):
    """Body of /update_weights_from_distributed."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: Literal[False] = False
    weight_version: str | None = None
    load_format: None = None


class PauseRequest(BaseModel):
    """Body of /pause_generation."""

    mode: PauseMode = "abort"


class AbortRequest(BaseModel):
    """Body of /abort_request."""

    rid: str = ""
    abort_all: bool = False


@dataclass(frozen=True)
class PromptLimits:
    """What a prompt may be."""

    vocab_size: int
    context_length: int
    end_ids: frozenset[int]


def read_sampling(given: Mapping[str, Any] | None) -> SamplingParams:
    """Reads ``sampling_params``.

    Raises:
        ProblemError: 400, a key is unknown or a value is not allowed.
    """
    content = dict(given or {})
    for name, neutral in _NEUTRAL_SAMPLING.items():
        if name in content and content.pop(name) not in neutral:
            raise ProblemError(400, f"sampling_params.{name} is not supported by the embedded engine; leave it out")
    try:
        return SamplingParams.model_validate({name: value for name, value in content.items() if value is not None})
    except ValidationError as error:
        problems = [
            f"sampling_params.{'.'.join(printable(str(part)) for part in problem['loc'])}: {problem['msg']}"
            for problem in error.errors()[:3]
        ]
        raise ProblemError(400, "; ".join(problems)) from error


def refuse_unsupported(body: GenerateRequest) -> None:
    """Refuses fields of /generate that would change the answer and that this engine does not have.

    Raises:
        ProblemError: 400, with the field's name.
    """
    if body.stream:
        raise ProblemError(400, "the embedded engine streams on /v1/chat/completions and /v1/completions only")
    for name, value in (body.model_extra or {}).items():
        if name not in _WITHOUT_MEANING and value not in _NEUTRAL:
            raise ProblemError(400, f"{printable(name)} is not supported by the embedded engine; leave it out")


def make_request(
    prompt_ids: list[int],
    params: SamplingParams,
    limits: PromptLimits,
    *,
    rid: str | None = None,
    logprob_start: int | None = None,
    top_logprobs: int = 0,
    on_progress: Callable[[Completion], None] | None = None,
) -> Request:
    """A request for the engine.

    Raises:
        ProblemError: 400, the prompt is empty, too long, or has an id outside the vocabulary.
    """
    if not prompt_ids:
        raise ProblemError(400, "the prompt has no tokens; send input_ids with at least one")
    if min(prompt_ids) < 0 or max(prompt_ids) >= limits.vocab_size:
        wrong = next(token for token in prompt_ids if not 0 <= token < limits.vocab_size)
        raise ProblemError(400, f"token {wrong} of the prompt is outside the vocabulary of {limits.vocab_size}")
    room = limits.context_length - len(prompt_ids)
    if room < (1 if params.max_new_tokens else 0):
        raise ProblemError(
            400, f"the prompt has {len(prompt_ids)} tokens; the context length is {limits.context_length} tokens"
        )
    if logprob_start is not None and logprob_start >= len(prompt_ids):
        raise ProblemError(400, f"logprob_start_len {logprob_start} is beyond the prompt's {len(prompt_ids)} tokens")
    # As SGLang does: ignore_eos ignores every stop token, the request's own among them.
    ends = frozenset() if params.ignore_eos else limits.end_ids | frozenset(params.stop_token_ids or ())
    stopping = Stopping(min(params.max_new_tokens, room), ends, params.stop_texts, params.skip_special_tokens)
    request = Request(
        rid or uuid.uuid4().hex,
        prompt_ids,
        stopping,
        logprob_start=logprob_start,
        top_logprobs=top_logprobs,
        on_progress=on_progress,
    )
    seed = secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed
    request.sequences = [
        Completion(
            request,
            number,
            Sampling(stream_key(seed, number), params.temperature, params.top_p, params.top_k, params.min_p),
        )
        for number in range(params.n)
    ]
    return request


def completion_text(sequence: Completion, decode_text: Callable[[Sequence[int], bool], str]) -> str:
    """A completion's text, without the stop token or stop string that ended it."""
    ids, finish = sequence.output_ids, sequence.finish or {}
    matched = finish.get("matched")
    if isinstance(matched, int):
        ids = ids[:-1]
    text = decode_text(ids, sequence.request.stopping.skip_special_tokens)
    if isinstance(matched, str):
        text = text[: text.find(matched)]
    return text


def generate_reply(
    request: Request, weight_version: str, decode_text: Callable[[Sequence[int], bool], str], *, with_logprobs: bool
) -> list[dict[str, Any]]:
    """The records of /generate, one a completion."""
    seconds = time.perf_counter() - request.started
    return [
        {
            "text": completion_text(sequence, decode_text),
            "output_ids": sequence.output_ids,
            "meta_info": _meta(sequence, weight_version, seconds, with_logprobs=with_logprobs),
        }
        for sequence in request.sequences
    ]


def _meta(sequence: Completion, weight_version: str, seconds: float, *, with_logprobs: bool) -> dict[str, Any]:
    request, count = sequence.request, len(sequence.output_ids)
    ends = [start for _, start in sequence.versions[1:]] + [count]
    meta: dict[str, Any] = {
        "id": sequence.id,
        "finish_reason": sequence.finish,
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": count,
        "cached_tokens": sequence.cached_tokens,
        # Of the last token; what is told without tokens is the engine's own.
        "weight_version": sequence.versions[-1][0] if sequence.versions else weight_version,
        "weight_versions": [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(sequence.versions, ends, strict=bool(sequence.versions))
        ],
        "e2e_latency": seconds,
    }
    if with_logprobs:
        meta["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(sequence.logprobs, sequence.output_ids, strict=True)
        ]
        if request.logprob_start is not None:
            tokens = request.prompt_ids[request.logprob_start :]
            # A request that was aborted before its prompt was computed has none.
            is_computed = bool(request.input_logprobs)
            meta["input_token_logprobs"] = [
                [logprob, token, None] for logprob, token in zip(request.input_logprobs, tokens, strict=is_computed)
            ]
        if request.top_logprobs:
            meta["output_top_logprobs"] = [
                [[logprob, token, None] for logprob, token in place] for place in sequence.top_logprobs
            ]
    return meta
