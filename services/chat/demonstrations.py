"""The tokens of a conversation that are learned as they are: exactly those that the model would have sampled.

The gateway's rules apply, as if an agent had held the conversation: each message of the assistant is sampled after the
prompt that the chat template makes of the messages before it, and its end token is the last one sampled. A conversation
whose earlier turns the template renders differently later on, such as without their reasoning, begins a new branch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from services.chat.prompts import ChatPrompts
from services.protocol.prompts import Demonstration

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
                "the model's chat template ignores tools; leave the column `tools` out, or give a model whose template "
                "has them"
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
                suffix = self._prompts.after_end(parts[0], self._prompts.encode("".join(parts)))
                branches[-1].add(suffix, is_trained=False)
            else:
                branches.append(Branch(self._prompts.encode(self._prompts.render(messages[:number], tools, {}))))
            branches[-1].add(given, is_trained=False)
            branches[-1].add(sampled, is_trained=True)
            before = number
        if not branches:
            raise UnfitConversationError(
                "no message of the assistant after another message, so that nothing is trained; add one, or leave the "
                "row out"
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
                completion=self._prompts.decode(branch.ids[n:]),
                completion_ids=branch.ids[n:],
                loss_mask=branch.mask[n:],
            )
            for branch in branches
        ]
