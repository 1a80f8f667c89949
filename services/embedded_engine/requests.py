"""The state that all routes share, the bodies of requests to generate, and the engine's requests made from them."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from fastapi import Request as HttpRequest
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from services.chat.messages import TemplateOptions
from services.embedded_engine.engine import Engine
from services.embedded_engine.loading import Loaded
from services.embedded_engine.sampling import Sampling, stream_key
from services.embedded_engine.scheduler import Request, Sequence, Stopping
from services.engines.settings import EngineSettings
from services.http.problems import ProblemError, invalid_body, printable
from services.http.server import ended_before_client_left
from services.protocol.base import MAX_GROUP_SIZE
from services.weights.policy_store import ADAPTER_NAME

NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1,
    "spaces_between_special_tokens": True,
    "stream_interval": 1,
    "log_metrics": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "tool_choice": "auto",
}
"""The values that change nothing of fields that this engine lacks; nor do empty ones, 0 and false. The router adds some
of them."""
MAX_LENGTH = 2**31 - 1
"""Chat completions without a limit end at the context length."""


@dataclass
class EngineState:
    """The engine, its model, and the routes' memory between requests."""

    settings: EngineSettings
    loaded: Loaded
    engine: Engine
    model_path: str
    """The directory of the weights in use, or MODEL_NAME."""
    started: float = field(default_factory=time.time)
    """Seconds since 1970."""
    adapter_path: str = ""
    """The directory of the LoRA adapter in use, if any."""
    update_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while weights change."""

    async def generate(self, request: Request, http: HttpRequest) -> Request:
        """Have the engine do a request, and abort it if its client leaves.

        Raises:
            QueueFullError: too many requests wait.
            EngineStoppedError: the engine ends.
        """
        self.engine.submit(request)
        done = asyncio.wrap_future(request.done)
        if not await ended_before_client_left(http, done):
            self.engine.abort(lambda sequence: sequence.request is request, "the client left")
        return await done

    def uses_adapter(self, lora_path: str | None) -> bool:
        """Return whether ``lora_path`` of a request names the LoRA adapter, which during a pause may be yet to come.

        Raises:
            ProblemError: 400, no adapter of that name is loaded.
        """
        if not lora_path:
            return False
        is_awaited = self.engine.is_paused and lora_path == ADAPTER_NAME
        if lora_path != self.engine.adapter_name and not is_awaited:
            loaded = self.engine.adapter_name or "none"
            raise ProblemError(400, f"LoRA adapter {printable(lora_path)} is not loaded; loaded is {loaded}")
        return True


def state_of(http: HttpRequest) -> EngineState:
    """Return the state of the application that got this request."""
    state: EngineState = http.app.state.engine
    return state


class RequestBody(BaseModel):
    """A body whose invalid values are answered 400, as SGLang answers them. None stands for a field's default."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True)
    aliases: ClassVar[Collection[str]] = ()
    """The names of fields that have other ones in the body."""

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_with_400(cls, body: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(cls._without_unknown(body) if isinstance(body, dict) else body)
        except ValidationError as error:
            raise invalid_body(error) from error

    @classmethod
    def _without_unknown(cls, body: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of this engine; refuse others that would change the answer."""
        known = {*cls.model_fields, *cls.aliases}
        given = {name: value for name, value in body.items() if value is not None}
        for name in given.keys() - known:
            if given[name] and given[name] != NEUTRAL.get(name):
                remedy = "ask through a session of the gateway" if name in ("stream", "tools") else "leave it out"
                raise ProblemError(400, f"{printable(name)} is not supported by the embedded engine; {remedy}")
        return {name: value for name, value in given.items() if name in known}


class SamplingParams(RequestBody):
    """``sampling_params`` of /generate, with SGLang's defaults."""

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


class GenerateRequest(RequestBody):
    """Body of /generate."""

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    rid: str | None = Field(default=None, min_length=1, max_length=200)
    lora_path: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = Field(default=-1, ge=-1)
    top_logprobs_num: int = Field(default=0, ge=0, le=100)


class ChatRequest(SamplingParams):
    """Body of /v1/chat/completions."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)
    aliases = ("max_completion_tokens", "max_tokens", "seed")

    model: str = ""
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_new_tokens: int = Field(
        default=MAX_LENGTH, ge=0, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    sampling_seed: int | None = Field(default=None, ge=-(2**63), lt=2**64, validation_alias="seed")
    logprobs: bool = False
    chat_template_kwargs: TemplateOptions = Field(default_factory=dict)
    rid: str | None = None
    lora_path: str | None = None


def make_request(
    prompt_ids: list[int],
    params: SamplingParams,
    loaded: Loaded,
    *,
    rid: str | None = None,
    use_adapter: bool = False,
    logprob_start: int | None = None,
    top_logprobs: int = 0,
) -> Request:
    """Return a request for the engine.

    Raises:
        ProblemError: 400, the prompt is empty, too long, or has an id outside the vocabulary.
    """
    vocab_size, context_length = loaded.model.architecture.vocab_size, loaded.model.context_length
    if not prompt_ids:
        raise ProblemError(400, "the prompt has no tokens; send at least one")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        wrong = next(token for token in prompt_ids if not 0 <= token < vocab_size)
        raise ProblemError(400, f"token {wrong} of the prompt is outside the vocabulary of {vocab_size}")
    room = context_length - len(prompt_ids)
    if room < (1 if params.max_new_tokens else 0):
        raise ProblemError(400, f"the prompt has {len(prompt_ids)} tokens; the context length is {context_length}")
    if logprob_start is not None and logprob_start >= len(prompt_ids):
        raise ProblemError(400, f"logprob_start_len {logprob_start} is beyond the prompt's {len(prompt_ids)} tokens")
    # As in SGLang, ignore_eos ignores every stop token, including the request's own.
    ends = frozenset() if params.ignore_eos else loaded.end_ids | frozenset(params.stop_token_ids)
    # Empty strings stop nothing.
    texts = tuple(text for text in ([params.stop] if isinstance(params.stop, str) else params.stop) if text)
    stopping = Stopping(min(params.max_new_tokens, room), ends, texts, params.skip_special_tokens)
    request = Request(rid or uuid.uuid4().hex, prompt_ids, stopping, use_adapter, logprob_start, top_logprobs)
    seed = secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed
    for number in range(params.n):
        key = stream_key(seed, number)
        sampling = Sampling(key, params.temperature, params.top_p, params.top_k, params.min_p)
        request.sequences.append(Sequence(request, number, sampling))
    return request


def completion_text(sequence: Sequence, loaded: Loaded) -> str:
    """Return a completion's text up to the stop token or stop string that ended it."""
    matched = (sequence.finish or {}).get("matched")
    ids = sequence.output_ids[:-1] if isinstance(matched, int) else sequence.output_ids
    text = loaded.decode_text(ids, sequence.request.stopping.skip_special_tokens)
    return text[: text.find(matched)] if isinstance(matched, str) else text
