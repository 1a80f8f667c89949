"""What the OpenAI routes take, and how it becomes a prompt and sampling parameters.

Fields that OpenAI clients send and that change nothing here (user, store, metadata, ...) are ignored; those that would
change the answer and that the engine does not have are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jinja2
from pydantic import BaseModel, ConfigDict, Field
from transformers import PreTrainedTokenizerBase

from services.embedded_engine.http.sglang_wire import SamplingParams, read_sampling
from services.http.problems import ProblemError

# What completions without max_tokens may have, as OpenAI's text completions have it.
DEFAULT_TEXT_TOKENS = 16
MAX_LENGTH = 2**31 - 1

_REFUSED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "audio": (None,),
    "functions": (None, []),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "echo": (None, False),
    "response_format": (None, {"type": "text"}),
    "regex": (None,),
    "ebnf": (None,),
    "min_tokens": (None, 0),
}


class StreamOptions(BaseModel):
    """What a stream has besides its text."""

    include_usage: bool = False


class OpenAIRequest(BaseModel):
    """What chat and text completions have in common; ``top_k`` and below are SGLang's additions."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str = ""
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    rid: str | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """How the engine is to sample.

        Raises:
            ProblemError: 400, a field is not supported or a value not allowed.
        """
        for name, neutral in _REFUSED.items():
            if (self.model_extra or {}).get(name) not in neutral:
                raise ProblemError(400, f"{name} is not supported by the embedded engine; leave it out")
        names = ("n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return read_sampling(
            {
                **given,
                "max_new_tokens": max_new_tokens,
                "sampling_seed": self.seed,
                "ignore_eos": self.ignore_eos,
                "skip_special_tokens": self.skip_special_tokens,
            }
        )


class ChatRequest(OpenAIRequest):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model is told of.

        Raises:
            ProblemError: 400, a call is demanded, which would need constrained decoding.
        """
        if self.tool_choice in ("none",):
            return None
        if self.tool_choice not in (None, "auto"):
            raise ProblemError(400, "tool_choice is 'auto' or 'none' here: the embedded engine cannot force a call")
        return self.tools or None

    def dropped_by(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return what the request has and the model's chat template has no place for: ``tools``, ``tool_calls``."""
        given = {
            "tools": self.offered_tools is not None,
            "tool_calls": any(message.get("tool_calls") for message in self.messages),
        }
        template = tokenizer.get_chat_template(tools=self.offered_tools)
        return [name for name, is_given in given.items() if is_given and name not in template]

    def params(self) -> SamplingParams:
        """How the engine is to sample; without a limit up to the context length."""
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return self.sampling(MAX_LENGTH if limit is None else limit)

    def prompt_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The conversation through the model's chat template, up to where the assistant answers.

        Raises:
            ProblemError: 400, there is no template or it refuses the conversation.
        """
        if tokenizer.chat_template is None:
            raise ProblemError(400, "this model has no chat template; use /v1/completions")
        messages = [_for_template(message) for message in self.messages]
        try:
            ids = tokenizer.apply_chat_template(
                messages,
                tools=self.offered_tools,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **(self.chat_template_kwargs or {}),
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise ProblemError(400, f"the model's chat template does not take this conversation: {error}") from error
        assert isinstance(ids, list)
        return ids


class CompletionRequest(OpenAIRequest):
    """Body of /v1/completions: one prompt or several, each text or token ids."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)

    def params(self) -> SamplingParams:
        """How the engine is to sample."""
        return self.sampling(DEFAULT_TEXT_TOKENS if self.max_tokens is None else self.max_tokens)

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Token ids of each prompt."""
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        tokens = [one for one in given if isinstance(one, int)]
        if tokens:
            return [tokens]
        texts_or_ids = [one for one in given if not isinstance(one, int)]
        return [tokenizer(one)["input_ids"] if isinstance(one, str) else one for one in texts_or_ids]


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: plain text content, arguments of calls as objects, no developer role."""
    role = message.get("role")
    if not isinstance(role, str):
        raise ProblemError(400, "every message needs a role")
    fitted = {**message, "role": "system" if role == "developer" else role, "content": _text(message.get("content"))}
    if message.get("tool_calls"):
        fitted["tool_calls"] = [_call_for_template(call) for call in message["tool_calls"]]
    return fitted


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise ProblemError(400, "the content of a message is text or a list of text parts; nothing else is read")
    return "".join(texts)


def _call_for_template(call: Any) -> dict[str, Any]:
    try:
        function = dict(call["function"])
        if isinstance(function["arguments"], str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    except (KeyError, TypeError, ValueError) as error:
        raise ProblemError(400, f"a tool call of a message is not readable: {error!r}") from error
    return {**call, "function": function}
