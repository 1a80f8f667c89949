"""The bodies of OpenAI's routes, and the prompts that they describe.

Fields that OpenAI clients send and that change nothing here (user, store, metadata, ...) are ignored; fields that would
change the answer and that the engine lacks are refused.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from transformers import PreTrainedTokenizerBase

from services.chat.messages import TemplateOptions, for_template
from services.embedded_engine.http.requests import SamplingParams
from services.http.problems import ProblemError

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
        given = {
            "tools": self.offered_tools is not None,
            "tool_calls": any(message.get("tool_calls") for message in self.messages),
        }
        template = tokenizer.get_chat_template(tools=self.offered_tools)
        return [name for name, is_given in given.items() if is_given and name not in template]

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
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if not given:
            raise ProblemError(400, "prompt is an empty list; send at least one prompt")
        tokens = [one for one in given if isinstance(one, int)]
        if tokens:
            return [tokens]
        texts_or_ids = [one for one in given if not isinstance(one, int)]
        return [tokenizer(one)["input_ids"] if isinstance(one, str) else one for one in texts_or_ids]
