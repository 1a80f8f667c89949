"""Request bodies and sampling parameters, with SGLang's names, and the engine's requests made from them."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from transformers import PreTrainedTokenizerBase

from services.chat.messages import TemplateOptions, for_template
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
    def _refuse_with_400(cls, body: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(_without_neutral(body) if isinstance(body, dict) else body)
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


def _without_neutral(body: dict[str, Any]) -> dict[str, Any]:
    for name in UNSUPPORTED.keys() & body.keys():
        if body[name] is not None and body[name] not in UNSUPPORTED[name]:
            raise unsupported(name)
    return {name: value for name, value in body.items() if value is not None and name not in UNSUPPORTED}


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


DEFAULT_TEXT_TOKENS = 16
"""The longest text completion without max_tokens, as OpenAI has it."""
MAX_LENGTH = 2**31 - 1
"""Chat completions without a limit end at the context length."""


class StreamOptions(BaseModel):
    """The options of a stream."""

    include_usage: bool = False


class OpenAIRequest(SamplingParams):
    """The fields that chat and text completions have in common; some of SamplingParams are SGLang's additions."""

    model_config = ConfigDict(extra="ignore")

    model: str = ""
    sampling_seed: int | None = Field(default=None, ge=-(2**63), lt=2**64, validation_alias="seed")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    rid: str | None = None
    lora_path: str | None = None

    @property
    def adapter(self) -> str | None:
        """The name of the LoRA adapter: after a colon in ``model``, as in SGLang, or ``lora_path``."""
        return self.model.partition(":")[2] or self.lora_path


class ChatRequest(OpenAIRequest):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_new_tokens: int = Field(
        default=MAX_LENGTH, ge=0, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    tools: list[dict[str, Any]] = Field(default_factory=list)
    # The embedded engine cannot force a call, which would need constrained decoding.
    tool_choice: Literal["auto", "none"] = "auto"
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    chat_template_kwargs: TemplateOptions = Field(default_factory=dict)

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model is offered."""
        return None if self.tool_choice == "none" else self.tools or None

    def dropped_by(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return the parts, ``tools`` or ``tool_calls``, for which the model's chat template has no place."""
        parts = {
            "tools": self.offered_tools is not None,
            "tool_calls": any(message.get("tool_calls") for message in self.messages),
        }
        template = tokenizer.get_chat_template(tools=self.offered_tools)
        return [name for name, is_present in parts.items() if is_present and name not in template]

    def prompt_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the conversation in the model's chat template, up to the beginning of the assistant's answer.

        Raises:
            ProblemError: 400, the model has no template, or the template refuses the conversation.
        """
        if tokenizer.chat_template is None:
            raise ProblemError(400, "this model has no chat template; use /v1/completions")
        messages = [for_template(message) for message in self.messages]
        try:
            ids: list[int] = tokenizer.apply_chat_template(
                messages,
                tools=self.offered_tools,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **self.chat_template_kwargs,
            )
        except Exception as error:  # A template can raise anything.
            raise ProblemError(400, f"the model's chat template does not take this conversation: {error}") from error
        return ids


class CompletionRequest(OpenAIRequest):
    """Body of /v1/completions: one prompt or several, each text or token ids."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_new_tokens: int = Field(default=DEFAULT_TEXT_TOKENS, ge=0, validation_alias="max_tokens")
    logprobs: int | None = Field(default=None, ge=0, le=20)

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Return the token ids of each prompt.

        Raises:
            ProblemError: 400, there is none.
        """
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if not prompts:
            raise ProblemError(400, "prompt is an empty list; send at least one prompt")
        tokens = [one for one in prompts if isinstance(one, int)]
        if tokens:
            return [tokens]
        texts_or_ids = [one for one in prompts if not isinstance(one, int)]
        return [tokenizer(one)["input_ids"] if isinstance(one, str) else one for one in texts_or_ids]
