"""From a question to the prompt that the model sees: instruction, style, chat template, token ids."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from services.core.errors import ConfigurationError
from services.data_server.settings import DataSettings, GroundTruthFormat, PromptStyle
from services.data_server.sources import Row

# Asks for the form in which the source itself writes its ground truths; every verifier reads it.
INSTRUCTIONS = {
    GroundTruthFormat.HASH: 'Think step by step, then give the final answer on the last line after "####".',
    GroundTruthFormat.BOXED: "Think step by step, then give the final answer within \\boxed{}.",
}


_PROBE = "What is 12 + 345?\n#### 357"

# A fast tokenizer spreads a list over threads; for a few texts, waiting for these costs more than it gains.
_WORTH_THREADS = 128


class Tokenizer(Protocol):
    """What we use of a transformers tokenizer."""

    chat_template: str | None

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        """The conversation as one text."""

    def __call__(self, text: str | list[str], **options: Any) -> Any:
        """Token ids of texts, under ``input_ids``."""


def import_transformers_alone() -> None:
    """Imports transformers as if torch were not installed. For a process of the data-server's own.

    It would import torch wherever that is there: seconds, and hundreds of megabytes that a tokenizer does not need.
    """
    # Read at import: its advice that torch is missing helps nobody here.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # A None makes a module look absent. It goes again, because other libraries take it for the module.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from transformers import AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"]


def load_tokenizer(model_name: str) -> Tokenizer:
    """The tokenizer of a model on the hub, in its cache, or in a directory.

    Raises:
        ConfigurationError: it cannot be had.
    """
    from transformers import AutoTokenizer

    try:
        # Said, since without it a terminal would be asked whether to run code that comes with the model.
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(model_name, trust_remote_code=False)
    # What it raises depends on the hub client, the network and the files: OSError, ValueError, KeyError, ...
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigurationError(
            f"the tokenizer of MODEL_NAME {model_name!r} cannot be loaded from the Hugging Face hub, its cache or a "
            f"directory of that name: {lines[0][:300]}; check the name and the network, or give a directory"
        ) from error
    return tokenizer


class PromptMaker:
    """Makes the messages and token ids of prompts, by the settings."""

    def __init__(
        self, settings: DataSettings, form: GroundTruthFormat, tokenizer: Tokenizer | None, examples: Sequence[Row]
    ) -> None:
        """Raises ConfigurationError where the style needs a chat template and the tokenizer has none."""
        self._tokenizer = tokenizer
        self._system = settings.system_prompt
        self._instruction = instruction_of(settings, form)
        self._style = settings.prompt_style
        self._examples = examples
        has_template = tokenizer is not None and bool(tokenizer.chat_template)
        if self._style is PromptStyle.CHAT and tokenizer is not None and not has_template:
            raise ConfigurationError(
                f"the tokenizer of MODEL_NAME {settings.model_name!r} has no chat template; set PROMPT_STYLE=plain or "
                f"few_shot, or give a chat model"
            )
        self.uses_chat = self._style is not PromptStyle.PLAIN and (
            has_template or (tokenizer is None and self._style is PromptStyle.CHAT)
        )

    def user_turn(self, question: str) -> str:
        """The question with the instruction."""
        return f"{question}\n{self._instruction}" if self._instruction else question

    def messages(self, question: str) -> list[dict[str, str]]:
        """The conversation up to the answer; one user turn where the style is not a chat."""
        turns: list[dict[str, str]] = []
        if self.uses_chat:
            if self._system:
                turns.append({"role": "system", "content": self._system})
            for example in self._examples:
                turns.append({"role": "user", "content": self.user_turn(example.question)})
                turns.append({"role": "assistant", "content": example.answer})
        turns.append({"role": "user", "content": self.user_turn(question)})
        return turns

    def text(self, question: str) -> str:
        """The whole prompt as text, before tokenisation."""
        if self.uses_chat and self._tokenizer is not None:
            rendered: str = self._tokenizer.apply_chat_template(
                self.messages(question), add_generation_prompt=True, tokenize=False
            )
            return rendered
        parts = [self._system] if self._system else []
        if self._style is PromptStyle.FEW_SHOT:
            parts += [f"Question: {self.user_turn(row.question)}\nAnswer: {row.answer}" for row in self._examples]
            parts.append(f"Question: {self.user_turn(question)}\nAnswer:")
        else:
            parts.append(self.user_turn(question))
        return "\n\n".join(parts)

    def digest(self) -> str:
        """Return a digest of everything that makes a prompt of a question: equal digests mean equal prompts.

        Not of a rendered prompt, because a template may write the date.
        """
        tokenizer = self._tokenizer
        content = (
            (self._style.value, self.uses_chat, self._system, self._instruction),
            [(row.question, row.answer) for row in self._examples],
            None if tokenizer is None else tokenizer.chat_template if self.uses_chat else "",
            None if tokenizer is None else tokenizer(_PROBE, add_special_tokens=not self.uses_chat)["input_ids"],
        )
        return hashlib.blake2b(ascii(content).encode(), digest_size=8).hexdigest()

    def token_ids(self, questions: Sequence[str]) -> list[list[int]]:
        """The token ids of whole prompts; empty lists without a tokenizer."""
        if self._tokenizer is None:
            return [[] for _ in questions]
        texts = [self.text(question) for question in questions]
        # A chat template writes its own special tokens.
        options = {"add_special_tokens": not self.uses_chat}
        if len(texts) >= _WORTH_THREADS:
            ids: list[list[int]] = self._tokenizer(texts, **options)["input_ids"]
            return ids
        return [self._tokenizer(text, **options)["input_ids"] for text in texts]


def instruction_of(settings: DataSettings, form: GroundTruthFormat) -> str | None:
    """What is appended to every question."""
    if settings.instruction is not None:
        return None if settings.instruction.lower() == "none" else settings.instruction
    return INSTRUCTIONS.get(form)
