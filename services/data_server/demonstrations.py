"""Rows that are learned as they are (METHOD=sft), as prompts with the tokens after them.

Those tokens of a conversation are learned that the model would have sampled. The gateway's rules apply, as if an agent
had held the conversation: each message of the assistant is sampled after the prompt that the chat template makes of the
messages before it, and its end token is the last one sampled. A conversation whose earlier turns the template renders
differently later on, such as without their reasoning, begins a new branch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import orjson

from services.chat.messages import content_text, for_template
from services.chat.prompts import ChatPrompts
from services.chat.tokenizers import tokenizer_digest
from services.core.models import context_length
from services.data_server.dataset_rows import TOO_LONG, Refusal, Row
from services.data_server.settings import DataSettings, PromptStyle
from services.http.problems import ProblemError
from services.protocol.prompts import Demonstration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from services.data_server.dataset import PromptMaker

Messages = Sequence[Mapping[str, Any]]
_TOOL = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}


class UnfitConversationError(ValueError):
    """A conversation that cannot be learned; the message says why, and what to do."""


@dataclass
class Branch:
    """Tokens from the beginning of a conversation on, and which of them are trained on."""

    ids: list[int]
    mask: list[bool] = field(default_factory=list)

    def add(self, ids: Sequence[int], *, is_trained: bool) -> None:
        """Append tokens."""
        self.mask += [False] * (len(self.ids) - len(self.mask)) + [is_trained] * len(ids)
        self.ids += ids


class Demonstrator:
    """A renderer of conversations by a chat template."""

    def __init__(self, prompts: ChatPrompts) -> None:
        self._prompts = prompts

    @functools.cached_property
    def renders_tools(self) -> bool:
        """True if the template writes the tools that a model is offered."""
        question = [{"role": "user", "content": "question"}]
        tools = [{"type": "function", "function": _TOOL}]
        return self._prompts.render(question, None, {}) != self._prompts.render(question, tools, {})

    def branches(self, messages: Messages, first: int, tools: list[dict[str, Any]] | None) -> list[Branch]:
        """Return the branches of a conversation, each of which trains tokens that the others do not.

        Args:
            messages: the conversation, as for_template makes it.
            first: the number of the first message that may be trained on.
            tools: the tools that the model is offered.

        Raises:
            UnfitConversationError: the template cannot render it so that its tokens are those of the model.
            ProblemError: the template refuses it.
        """
        if tools and not self.renders_tools:
            raise UnfitConversationError(
                "the model's chat template ignores tools; leave the column `tools` out, or give another model"
            )
        branches: list[Branch] = []
        before = 0
        for number, message in enumerate(messages):
            if number < max(first, 1) or message["role"] != "assistant":
                continue
            answer = self._prompts.answer(messages[: number + 1], tools, {})
            if answer is None:
                raise UnfitConversationError(
                    f"the model's chat template does not render message {number} as the model would have written it "
                    "after the generation prompt; give the message in the template's form, or another model"
                )
            given, sampled = answer
            parts = self._prompts.suffix_parts(messages[before], messages[before + 1 : number], tools, {})
            if branches and parts is not None:
                suffix = self._prompts.after_end(parts[0], self._prompts.codec.encode("".join(parts)))
                branches[-1].add(suffix, is_trained=False)
            else:
                branches.append(Branch(self._prompts.codec.encode(self._prompts.render(messages[:number], tools, {}))))
            branches[-1].add(given, is_trained=False)
            branches[-1].add(sampled, is_trained=True)
            before = number
        if not branches:
            raise UnfitConversationError(
                "no message of the assistant after another message; add the answer, or leave the row out"
            )
        return branches

    def demonstrations(self, branches: Sequence[Branch]) -> tuple[list[int], list[Demonstration]]:
        """Return the prompt that all branches share before their first trained token, and what follows it in each."""
        least = min(branch.mask.index(True) for branch in branches)
        columns = zip(*(branch.ids[:least] for branch in branches), strict=True)
        shared = [ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, columns)]
        n = len(shared)
        return shared, [
            Demonstration(
                completion=self._prompts.codec.decode(branch.ids[n:]),
                completion_ids=branch.ids[n:],
                loss_mask=branch.mask[n:],
            )
            for branch in branches
        ]


class DemonstrationMaker:
    """A renderer of rows to learn as they are, by the settings."""

    def __init__(self, settings: DataSettings, maker: PromptMaker, tokenizer: PreTrainedTokenizerBase) -> None:
        """Make the renderer.

        Args:
            settings: of the data-server; MODEL_NAME is set.
            maker: renders the prompts of rows whose prompt is a text.
            tokenizer: the model's.
        """
        self._maker = maker
        self._tokenizer = tokenizer
        self._is_plain = settings.prompt_style is PromptStyle.PLAIN
        self._prompt = settings.prompt_column or "prompt"
        self._most = settings.max_prompt_tokens
        self._context = context_length(settings.model_name or "", "MODEL_NAME")
        self._prompts = ChatPrompts(tokenizer, settings.chat_template_args)
        self._demonstrator = Demonstrator(self._prompts)

    def fields(self, rows: Sequence[Row]) -> list[dict[str, Any] | Refusal]:
        """Return the fields of each row's prompt that a tokenizer and a template make, or why there are none."""
        return [self._fields(row.number, orjson.loads(row.question)) for row in rows]

    def _fields(self, number: int, row: Mapping[str, Any]) -> dict[str, Any] | Refusal:
        where = f"row {number}, column {'messages' if 'messages' in row else f'{self._prompt} and completion'}"
        is_recorded = "demonstrations" in row and "prompt_ids" in row
        try:
            made = self._recorded(row) if is_recorded else self._rendered(_without_nulls(row))
        except (UnfitConversationError, ProblemError) as error:
            detail = error.detail if isinstance(error, ProblemError) else error
            return Refusal("not to be learned", f"{where}: {detail}")
        tokens = len(made["prompt_ids"]) + max(len(d["completion_ids"]) for d in made["demonstrations"])
        if tokens > self._context:
            remedy = f"the model's context has {self._context}: shorten the row"
        elif tokens > self._most:
            remedy = f"shorten the row, or raise MAX_PROMPT_TOKENS={self._most}"
        else:
            return made
        return Refusal(TOO_LONG, f"{where}: {tokens} tokens; {remedy}")

    def _recorded(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a group that a run has recorded."""
        if row["tokenizer"] != self._digest:
            raise UnfitConversationError(
                f"its tokenizer has the digest {row['tokenizer']}, MODEL_NAME's {self._digest}; give that run's model"
            )
        return {name: row[name] for name in ("prompt", "prompt_ids", "messages", "demonstrations")}

    @functools.cached_property
    def _digest(self) -> str:
        return tokenizer_digest(self._tokenizer)

    def _rendered(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a row with texts."""
        messages, first = self._conversation(row)
        if self._is_plain:
            branches = [self._continued(row)]
        else:
            branches = self._demonstrator.branches(messages, first, _tools(row.get("tools")))
        prompt_ids, demonstrations = self._demonstrator.demonstrations(branches)
        if not prompt_ids:
            raise UnfitConversationError("no token before the first that is trained; begin with a message of the user")
        first = next(n for n, message in enumerate(messages) if n >= max(first, 1) and message["role"] == "assistant")
        return {
            "prompt": messages[first - 1]["content"],
            "prompt_ids": prompt_ids,
            "messages": [{"role": message["role"], "content": message["content"]} for message in messages[:first]],
            "demonstrations": [demonstration.model_dump() for demonstration in demonstrations],
        }

    def _conversation(self, row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
        """Return the messages of a row, and the number of the first that may be trained on."""
        if "messages" in row:
            return _messages(row["messages"]), 0
        missing = [name for name in (self._prompt, "completion") if name not in row]
        if missing:
            raise UnfitConversationError(f"{' and '.join(missing)} missing; give both, or messages")
        prompt, completion = row[self._prompt], row["completion"]
        before = self._maker.messages(prompt) if isinstance(prompt, str) else _messages(prompt)
        after = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else _messages(completion)
        return [*before, *after], len(before)

    def _continued(self, row: Mapping[str, Any]) -> Branch:
        """Return a text after a text, without a template."""
        prompt, completion = row.get(self._prompt), row.get("completion")
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise UnfitConversationError(
                "messages need a chat model; give prompt and completion as texts, or such a model"
            )
        branch = Branch(self._maker.token_ids([prompt])[0])
        end, answer = self._tokenizer.eos_token_id, self._prompts.codec.encode(completion)
        branch.add(answer if answer[-1:] == [end] else [*answer, end], is_trained=True)
        return branch


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return messages in the form of chat templates.

    Raises:
        UnfitConversationError: they are something else.
        ProblemError: one is not readable.
    """
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise UnfitConversationError('not a list of messages; write [{"role": ..., "content": ...}, ...]')
    messages = [for_template(message) for message in value]
    for message in messages:
        content_text(message["content"])
    return messages


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools of a row, which may be JSON as text."""
    try:
        tools = orjson.loads(value) if isinstance(value, str) else value
    except orjson.JSONDecodeError as error:
        raise UnfitConversationError(f"tools are not JSON ({error}); write a list of tools") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UnfitConversationError("tools are not a list of objects; write them as in OpenAI's API")
    return tools or None


def _without_nulls(value: Any) -> Any:
    """Return JSON without the members that are null: Arrow gives an object those that others of its column have."""
    if isinstance(value, dict):
        return {name: _without_nulls(member) for name, member in value.items() if member is not None}
    return [_without_nulls(member) for member in value] if isinstance(value, list) else value
