"""Questions as what the model sees: instruction, style, chat template, token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from services.core.errors import ConfigurationError, first_line
from services.data_server.dataset_rows import TOO_LONG, Refusal, Row, instruction_of
from services.data_server.settings import DataSettings, PromptStyle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "What is 12 + 345?\n#### 357"
_WORTH_THREADS = 128
"""A fast tokenizer spreads a list over threads. For fewer texts, waiting for the threads costs more than it gains."""


class PromptMaker:
    """A renderer of questions as messages, text and token ids, by the settings."""

    def __init__(
        self,
        settings: DataSettings,
        instruction: str | None,
        tokenizer: PreTrainedTokenizerBase | None,
        examples: Sequence[Row],
    ) -> None:
        """Make the renderer; ``instruction`` is the dataset's, which INSTRUCTION replaces.

        Raises:
            ConfigurationError: the style needs a chat template and the tokenizer has none.
        """
        self._tokenizer = tokenizer
        self._system = settings.system_prompt
        self._style = settings.prompt_style
        self._template_args = settings.chat_template_args
        self._examples = examples
        self._most = settings.max_prompt_tokens
        self._instruction = instruction_of(settings, instruction)
        has_template = tokenizer is not None and bool(tokenizer.chat_template)
        if self._style is PromptStyle.CHAT and tokenizer is not None and not has_template:
            raise ConfigurationError(
                f"the tokenizer of MODEL_NAME {settings.model_name!r} has no chat template; set PROMPT_STYLE=plain or "
                f"few_shot, or give a chat model"
            )
        self._uses_chat = self._style is not PromptStyle.PLAIN and (
            has_template or (tokenizer is None and self._style is PromptStyle.CHAT)
        )
        self._ends = 0 if tokenizer is None or self._uses_chat else _tokens_behind(tokenizer)

    def user_turn(self, question: str) -> str:
        """Return the question with the instruction."""
        return f"{question}\n{self._instruction}" if self._instruction else question

    def messages(self, question: str) -> list[dict[str, str]]:
        """Return the conversation up to the answer: one user turn where the style is not a chat."""
        turns: list[dict[str, str]] = []
        if self._uses_chat:
            if self._system:
                turns.append({"role": "system", "content": self._system})
            for example in self._examples:
                turns.append({"role": "user", "content": self.user_turn(example.question)})
                turns.append({"role": "assistant", "content": example.answer})
        turns.append({"role": "user", "content": self.user_turn(question)})
        return turns

    def text(self, question: str) -> str:
        """Return the whole prompt as text, before tokenisation.

        Raises:
            ConfigurationError: the chat template raises.
        """
        if self._uses_chat and self._tokenizer is not None:
            try:
                rendered: str = self._tokenizer.apply_chat_template(
                    self.messages(question), add_generation_prompt=True, tokenize=False, **self._template_args
                )
            except Exception as error:  # A template can raise anything.
                remedy = "write SYSTEM_PROMPT as INSTRUCTION, or give" if self._system else "give"
                raise ConfigurationError(
                    f"MODEL_NAME's chat template refuses the prompt: {first_line(error)}; {remedy} PROMPT_STYLE=plain, "
                    "CHAT_TEMPLATE_ARGS or another model"
                ) from error
            return rendered
        parts = [self._system] if self._system else []
        if self._style is PromptStyle.FEW_SHOT:
            parts += [f"Question: {self.user_turn(row.question)}\nAnswer: {row.answer}" for row in self._examples]
            parts.append(f"Question: {self.user_turn(question)}\nAnswer:")
        else:
            parts.append(self.user_turn(question))
        return "\n\n".join(parts)

    def token_ids(self, questions: Sequence[str]) -> list[list[int]]:
        """Return the token ids of whole prompts, without an end token; empty lists without a tokenizer."""
        if self._tokenizer is None:
            return [[] for _ in questions]
        texts = [self.text(question) for question in questions]
        # A chat template writes its own special tokens.
        options = {"add_special_tokens": not self._uses_chat}
        ids: list[list[int]]
        if len(texts) >= _WORTH_THREADS:
            ids = self._tokenizer(texts, **options)["input_ids"]
        else:
            ids = [self._tokenizer(text, **options)["input_ids"] for text in texts]
        return [of_text[: len(of_text) - self._ends] for of_text in ids]

    def fields(self, rows: Sequence[Row]) -> list[dict[str, Any] | Refusal]:
        """Return the fields of each row's prompt that a tokenizer and a template make, or why there are none."""
        ids = self.token_ids([row.question for row in rows])
        return [
            {"prompt": self.user_turn(row.question), "prompt_ids": of_row, "messages": self.messages(row.question)}
            if len(of_row) <= self._most
            else Refusal(TOO_LONG, f"row {row.number}: {len(of_row)} tokens; raise MAX_PROMPT_TOKENS={self._most}")
            for row, of_row in zip(rows, ids, strict=True)
        ]

    def digest(self) -> str:
        """Return a digest of everything that turns a question into a prompt: equal digests mean equal prompts.

        The digest does not cover a rendered prompt, because a template may write the date.
        """
        tokenizer = self._tokenizer
        content = (
            (self._style.value, self._uses_chat, self._system, self._instruction),
            [(row.question, row.answer) for row in self._examples],
            None if tokenizer is None else tokenizer.chat_template if self._uses_chat else "",
            None if tokenizer is None else tokenizer(_PROBE, add_special_tokens=not self._uses_chat)["input_ids"],
            *([f"{self._ends} tokens less"] if self._ends else []),
            *([json.dumps(self._template_args, sort_keys=True)] if self._template_args else []),
        )
        return hashlib.blake2b(ascii(content).encode(), digest_size=8).hexdigest()


def _tokens_behind(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens that a tokenizer appends to a text, such as an end token."""
    bare, whole = (tokenizer(_PROBE, add_special_tokens=special)["input_ids"] for special in (False, True))
    more = len(whole) - len(bare)
    return next((more - start for start in range(more) if whole[start : start + len(bare)] == bare), 0)
