"""Prompts as token ids: a whole conversation, or what continues a turn whose tokens are held.

A sampled token is never tokenised again. The prompt of the next turn is the tokens held so far and a suffix: the close
of the sampled turn as far as the model did not write it itself, the new messages, and the beginning of the next turn.
The suffix is found for any chat template by rendering a short conversation with and without the new messages.
"""

from __future__ import annotations

import asyncio
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from services.chat.answers import Answer, form_of, read_answer, read_plain_answer
from services.chat.tokenizers import TextCodec
from services.http.problems import ProblemError, refuse
from services.protocol.groups import TokenSequence
from services.protocol.rewards import FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Messages = Sequence[Message]
OfferedTools = list[dict[str, Any]] | None
"""The tools that the model is offered, if any."""
Options = Mapping[str, Any]
"""Further variables of the template."""

_USER = {"role": "user", "content": "question"}
_DUMMIES = ("first answer", "another one")
"""Two different texts: the suffix must depend on neither. That is checked once for each shape of a conversation."""
IGNORES_TOOLS = "the model's chat template ignores the tools that the agent offers"
"""The gateway's warning at the first request with tools."""
MAX_SHAPES = 1024
LONG_TEXT = 8192
"""Characters. Tokens of a shorter text take less time than a thread's turn to run."""
_ROLES = frozenset({"system", "user", "assistant", "tool"})
"""The roles that templates write in general."""
_END_OF_THOUGHT = "</think>"
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""The members of a message in which data have its thought apart from its content."""
_GIVEN_THOUGHT = re.compile(r"(<think>)?\s*</think>\s*")
"""An empty thought, or the rest of one that the generation prompt has begun."""


class ChatPrompts:
    """A maker of prompts by a tokenizer's chat template, with its arguments where a request does not give them.

    Texts that cannot fit into ``context`` tokens are refused.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_args: Mapping[str, Any] | None = None,
        context: int = sys.maxsize,
    ) -> None:
        self._tokenizer = tokenizer
        self.codec = TextCodec(tokenizer)
        """The tokens of texts and the texts of tokens, special ones included."""
        self._context = context
        self._form = form_of(tokenizer)
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._template_args = dict(template_args or {})
        added = tokenizer.added_tokens_decoder
        self._special = {*tokenizer.all_special_ids, *(token for token, content in added.items() if content.special)}
        self._independent: set[bytes] = set()
        """The shapes of conversations whose suffix was the same after both dummies."""
        self._close = functools.lru_cache(maxsize=64)(self._render_close)

    async def whole(self, messages: Messages, tools: OfferedTools, options: Options) -> list[int]:
        """Return the token ids of a conversation up to the beginning of the assistant's answer.

        Raises:
            ProblemError: 400, the model has no chat template, or the template refuses the conversation or leaves out
                the content of a message.
        """
        text = self.render(messages, tools, options)
        _check_written(messages, text, lambda changed: self.render(changed, tools, options))
        return await self._encode(text)

    def render(
        self, messages: Messages, tools: OfferedTools, options: Options, *, adds_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation, by default up to the beginning of the assistant's answer.

        Raises:
            ProblemError: 400, the model has no chat template, or the template refuses the conversation.
        """
        if self._tokenizer.chat_template is None:
            raise ProblemError(400, "this model has no chat template")
        try:
            return self._render(messages, tools, options, adds_generation_prompt=adds_generation_prompt)
        except Exception as error:  # A template can raise anything.
            raise ProblemError(400, f"the model's chat template does not take this conversation: {error}") from error

    async def suffix(
        self, turn: Message, completion: TokenSequence, new: Messages, tools: OfferedTools, options: Options
    ) -> list[int] | None:
        """Return the token ids to append to a held turn for its close, ``new`` messages, and the next turn's beginning.

        Args:
            turn: the held turn as for_template makes it.
            completion: its tokens.
            new: the messages after it, as for_template makes them.
            tools: the tools that the model is offered.
            options: further variables of the template.

        Returns:
            None if the template does not render ``turn`` in the same way once the conversation continues.

        Raises:
            ProblemError: 400, the template leaves out the content of a message.
        """
        parts = self.suffix_parts(turn, new, tools, options)
        if parts is None:
            return None
        _check_written(new, parts[1], lambda changed: (self.suffix_parts(turn, changed, tools, options) or parts)[1])
        suffix = await self._encode("".join(parts))
        has_end = completion.finish_reason is FinishReason.STOP and int(completion.completion_ids[-1]) in self._special
        return self.after_end(parts[0], suffix) if has_end else suffix

    def after_end(self, close: str, suffix: list[int]) -> list[int]:
        """Return a suffix that begins with ``close`` after an end token that the model sampled.

        That token stands for the first one of the close.
        """
        return suffix[1:] if close and suffix and suffix[0] in self._special else suffix

    def suffix_parts(
        self, turn: Message, new: Messages, tools: OfferedTools, options: Options
    ) -> tuple[str, str] | None:
        """Return the text of ``suffix``: the whole close of the turn, and what follows it.

        Returns None if the template does not render ``turn`` in the same way once the conversation continues; an empty
        thought that is left out later does not count, because the held tokens keep it.
        """
        shape = _shape(turn, new, tools, options)
        try:
            close, continuation = rendered = self._continued(turn, new, tools, options, _DUMMIES[0])
            if close is None or continuation is None:
                return None
            if shape not in self._independent:
                if self._continued(turn, new, tools, options, _DUMMIES[1]) != rendered:
                    return None
                if len(self._independent) == MAX_SHAPES:
                    self._independent.clear()
                self._independent.add(shape)
        except Exception:  # noqa: BLE001  # ``whole`` finds the reason.
            return None
        return close, continuation

    def answer(self, messages: Messages, tools: OfferedTools, options: Options) -> tuple[list[int], list[int]] | None:
        """Return the tokens of a conversation's last message: those that the template gives, and those of the model.

        The template gives an empty thought before a message without one, which no model would sample. The model's end
        with the end token: the first token of the close if that is special, otherwise the tokenizer's.

        Args:
            messages: the conversation, as for_template makes it.
            tools: the tools that the model is offered.
            options: further variables of the template.

        Returns:
            None if the template renders the message otherwise than after its generation prompt, or not whole.

        Raises:
            ProblemError: see ``render``.
        """
        *before, message = messages
        prompt = self.render(before, tools, options)
        whole = self.render(messages, tools, options, adds_generation_prompt=False)
        close = self._close(_DUMMIES[0], orjson.dumps(options))
        if not whole.startswith(prompt) or close is None:
            return None
        given, text = "", whole[len(prompt) :]
        if (thought := _GIVEN_THOUGHT.match(text)) and _END_OF_THOUGHT not in message["content"]:
            given, text = thought[0], text[thought.end() :]
        parts = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        parts += [str(message.get(name) or "").strip() for name in _THOUGHTS]
        if any(part not in text for part in (message["content"].rpartition(_END_OF_THOUGHT)[2].strip(), *parts)):
            return None
        encode, end = self.codec.encode, self.codec.encode(close)[:1]
        if text.endswith(close):
            end = end if self._special.issuperset(end) and end else [self._tokenizer.eos_token_id]
            sampled = [*encode(text.removesuffix(close)), *end]
        else:  # Calls of tools may have an end token of their own.
            sampled = encode(text)
            while sampled and sampled[-1] not in self._special:
                sampled.pop()
        return (encode(given), sampled) if sampled and sampled[-1] is not None else None

    def _continued(
        self, turn: Message, new: Messages, tools: OfferedTools, options: Options, text: str
    ) -> tuple[str | None, str | None]:
        """Return the turn's close after ``text``, and what follows it; None where the template writes it otherwise."""
        thought = f"<think>\n{text[::-1]}\n{_END_OF_THOUGHT}\n\n" if _has_thought(turn) else ""
        said = {name: value for name, value in turn.items() if name not in _THOUGHTS}
        opening = [_USER, {**said, "content": thought + text}]
        close = self._close(text, orjson.dumps(options))
        before = self._render(opening, tools, options, adds_generation_prompt=False)
        after = self._render([*opening, *new], tools, options, adds_generation_prompt=True)
        return close, _continuation(before, after)

    def _render_close(self, text: str, options: bytes) -> str | None:
        """Return what the template writes after an assistant's ``text``; None if it does not write the text."""
        opening = [_USER, {"role": "assistant", "content": text}]
        rendered = self._render(opening, None, orjson.loads(options), adds_generation_prompt=False)
        _, separator, close = rendered.rpartition(text)
        return close if separator else None

    def _render(
        self, messages: Messages, tools: OfferedTools, options: Options, *, adds_generation_prompt: bool
    ) -> str:
        rendered = self._tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            add_generation_prompt=adds_generation_prompt,
            tokenize=False,
            **self._template_args | dict(options),
        )
        assert isinstance(rendered, str)
        return rendered

    async def _encode(self, text: str) -> list[int]:
        """Return the text's tokens. A thread encodes a long text, without the interpreter, while other calls continue.

        Raises:
            ProblemError: 400, the text cannot fit, however long its tokens; to encode it could take minutes and GBs.
        """
        if len(text) > (self._context + 1) * self._longest_token:
            detail = f"the conversation has {len(text):,} characters; the context length is {self._context:,} tokens"
            refuse(400, f"{detail}: shorten the longest message", "context_length_exceeded")
        encode = self.codec.encode
        return encode(text) if len(text) < LONG_TEXT else await asyncio.to_thread(encode, text)

    def answer_of(
        self, completion: TokenSequence, stop: Sequence[str], prompt_ids: Sequence[int], tools: OfferedTools
    ) -> Answer:
        """Return what a completion says: its thought, its text, and its calls if the model was offered ``tools``.

        Args:
            completion: the tokens.
            stop: the strings that end the text.
            prompt_ids: the prompt's last tokens at least; a template may have begun the turn in them.
            tools: the tools that the model was offered.
        """
        text = self.text(completion, stop)
        if self._form is None:
            end = self.codec.decode(list(prompt_ids[-16:]))  # Long enough for the beginning of a thought.
            return read_plain_answer(text, tools, is_thought=end.rstrip().endswith("<think>"))
        raw = self.text(completion, stop, skip_special_tokens=False)
        answer = read_answer(self._form, raw, text, self.codec.decode(list(prompt_ids)), tools or ())
        is_offered = tools is not None or not (answer.calls or answer.unparsed)
        return answer if is_offered else Answer(text)

    def text(self, completion: TokenSequence, stop: Sequence[str], *, skip_special_tokens: bool = True) -> str:
        """Return a completion's text up to the first stop string."""
        text = self.codec.decode(completion.completion_ids.tolist(), skip_special_tokens=skip_special_tokens)
        return text[: min((text.find(end) for end in stop if end in text), default=len(text))]


def _check_written(messages: Messages, text: str, render: Callable[[Messages], str]) -> None:
    """Raise ProblemError, 400, if ``text``, which ``render`` makes of ``messages``, lacks the content of one of them.

    A template may write a content in another form, such as JSON. So a content that the text does not have as it is may
    only be missing if another content makes the same text. Thoughts may be left out, and the text beside a call, which
    some templates leave out on purpose.
    """
    place = 0
    for number, message in enumerate(messages):
        role, content = message["role"], message["content"].strip()
        if role == "assistant":
            content = "" if message.get("tool_calls") else content.rpartition(_END_OF_THOUGHT)[2].strip()
        if role in _ROLES and (found := text.find(content, place)) >= 0:
            place = found + len(content)
            continue
        if not content or (role in _ROLES and content in text):
            continue
        changed = {**message, "content": f"{message['content']} {_DUMMIES[0]}"}
        try:
            is_missing = render([*messages[:number], changed, *messages[number + 1 :]]) == text
        except ProblemError:  # The template reads the content.
            continue
        if is_missing:
            refuse(400, f"the model's chat template leaves out messages of role {role!r}; give user", "no_place")


def _shape(turn: Message, new: Messages, tools: OfferedTools, options: Options) -> bytes:
    """Return what a conversation has apart from its texts: options, roles, and names of fields."""
    fields = [[message["role"], len(message.get("tool_calls") or ()), *sorted(message)] for message in (turn, *new)]
    return orjson.dumps([fields, _has_thought(turn), tools is None, options])


def _has_thought(turn: Message) -> bool:
    return _END_OF_THOUGHT in turn["content"] or any(map(turn.get, _THOUGHTS))


def _continuation(before: str, after: str) -> str | None:
    """Return what ``after`` has behind ``before``; None if it does not begin with ``before``."""
    for beginning in (before, _EMPTY_THOUGHT.sub("", before)):
        if after.startswith(beginning):
            return after[len(beginning) :]
    return None
