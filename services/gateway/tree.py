"""The calls of an episode as a tree of turns, and the sequences of tokens that are trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.protocol import groups
from services.protocol.groups import TokenSequence
from services.protocol.sessions import TraceSequence


@dataclass(eq=False)
class Turn:
    """A turn that an engine sampled: a node of the tree."""

    call: Call
    completion: TokenSequence
    message: dict[str, Any]
    """The turn as the agent got it."""
    key: bytes
    """The key of the conversation up to and with this turn."""
    unparsed_calls: int
    calls: list[Call] = field(default_factory=list)
    """The calls that continue this turn."""

    @property
    def path(self) -> list[Turn]:
        """The turns from the first one to this one."""
        path = [self]
        while (parent := path[-1].call.parent) is not None:
            path.append(parent)
        return path[::-1]

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages of the conversation up to and with this turn."""
        return [message for turn in self.path for message in (*turn.call.messages, turn.message)]

    def has_thoughts_of(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the thoughts in ``messages``, which have the turn's key, are those of its conversation.

        An agent may leave out the model's own.
        """
        given = iter(messages)
        for turn in self.path:
            for own in (*turn.call.messages, turn.message):
                thought = _thought(next(given))
                if thought != _thought(own) and (thought or own is not turn.message):
                    return False
        return True

    @property
    def held_ids(self) -> list[int]:
        """The tokens of the conversation up to and with this turn."""
        return [
            token for turn in self.path for token in (*turn.call.added_ids, *turn.completion.completion_ids.tolist())
        ]


@dataclass(eq=False)
class Call:
    """A request of the agent that was answered; its ``turns`` are the choices of the reply."""

    name: str
    """The request's digest, and its number among the calls of that digest where this is not 0."""
    parent: Turn | None
    """The held turn that the request continues; None where it begins a conversation."""
    added_ids: list[int]
    """The prompt's tokens after those of ``parent``."""
    messages: list[dict[str, Any]]
    """The request's messages after those of ``parent``."""
    sampling: dict[str, Any]
    reply: dict[str, Any]
    offers_tools: bool = False
    turns: list[Turn] = field(default_factory=list)

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens of the whole prompt."""
        return [*(self.parent.held_ids if self.parent else ()), *self.added_ids]

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the engine sampled for all choices."""
        return sum(turn.completion.tokens for turn in self.turns)

    def record(self) -> dict[str, Any]:
        """Return the call as plain data, from which ``restored`` makes it again."""
        parent = None if self.parent is None else [self.parent.call.name, self.parent.call.turns.index(self.parent)]
        turns = [
            {
                "completion": turn.completion.model_dump(mode="json", exclude={"arrays"}, exclude_none=True),
                "message": turn.message,
                "key": turn.key.hex(),
                "unparsed_calls": turn.unparsed_calls,
            }
            for turn in self.turns
        ]
        fields = ("name", "added_ids", "messages", "sampling", "reply", "offers_tools")
        return {name: getattr(self, name) for name in fields} | {"parent": parent, "turns": turns}


@dataclass
class Tree:
    """All calls of an episode."""

    calls: dict[str, Call] = field(default_factory=dict)
    """By name, in the order in which they were answered."""
    beginnings: list[Call] = field(default_factory=list)
    _turns: dict[bytes, list[Turn]] = field(default_factory=dict)

    @property
    def turns(self) -> Iterator[Turn]:
        """All turns, in the order in which they were sampled."""
        return (turn for call in self.calls.values() for turn in call.turns)

    @property
    def branches(self) -> int:
        """The number of calls at a place where another call was before."""
        places = [self.beginnings, *(turn.calls for turn in self.turns)]
        return sum(max(len(calls) - 1, 0) for calls in places)

    def add(self, call: Call) -> None:
        """Add a call that was answered."""
        self.calls[call.name] = call
        (self.beginnings if call.parent is None else call.parent.calls).append(call)
        for turn in call.turns:
            self._turns.setdefault(turn.key, []).append(turn)

    def restore(self, record: dict[str, Any]) -> Call:
        """Add a call from its record, in the order in which the calls were answered, and return it."""
        parent = None if record["parent"] is None else self.calls[record["parent"][0]].turns[record["parent"][1]]
        fields = ("name", "added_ids", "messages", "sampling", "reply", "offers_tools")
        call = Call(parent=parent, **{name: record[name] for name in fields if name in record})
        for turn in record["turns"]:
            completion, key = TokenSequence.model_validate(turn["completion"]), bytes.fromhex(turn["key"])
            call.turns.append(Turn(call, completion, turn["message"], key, turn["unparsed_calls"]))
        self.add(call)
        return call

    def deepest(self, keys: Sequence[bytes], messages: Sequence[Mapping[str, Any]]) -> tuple[Turn | None, int]:
        """Return the deepest turn that a conversation continues, and the number of its messages up to that turn.

        ``keys`` are those of the conversation by number of its ``messages`` (ChatRequest.fitted).
        """
        for count in range(len(keys) - 1, 0, -1):
            for turn in self._turns.get(keys[count], ()):
                if turn.has_thoughts_of(messages[:count]):
                    return turn, count
        return None, 0

    def paths(self) -> Iterator[list[Turn]]:
        """Yield the turns from a first one to a leaf, depth first, for each leaf."""
        stack = [[turn] for turn in _choices(self.beginnings)]
        while stack:
            path = stack.pop()
            continued = [[*path, turn] for turn in _choices(path[-1].calls)]
            if continued:
                stack.extend(continued)
            else:
                yield path

    def sequences(self) -> list[TraceSequence]:
        """Return one sequence for each leaf; the first one with a turn is trained on it, the others have it as context.

        Tokens that nobody sampled have the policy version of the turn after them.
        """
        trained: set[Turn] = set()
        places: dict[tuple[Turn | None, tuple[int, ...]], int] = {}
        numbers: dict[Call, tuple[int, int]] = {}
        for number, call in enumerate(self.calls.values()):
            numbers[call] = number, places.setdefault((call.parent, tuple(call.added_ids)), len(places))
        return [_sequence(path, trained, numbers) for path in self.paths()]


def _thought(message: Mapping[str, Any]) -> str:
    return str(message.get("reasoning_content") or "").strip()


def _choices(calls: Iterable[Call]) -> list[Turn]:
    """Return the turns of ``calls``, the last one first, as a stack wants them."""
    return [turn for call in calls for turn in call.turns][::-1]


def _sequence(path: list[Turn], trained: set[Turn], numbers: Mapping[Call, tuple[int, int]]) -> TraceSequence:
    parts: list[tuple[Any, Any, Any, Any]] = []  # token ids, log-probabilities, loss mask, policy versions
    turns: list[groups.Turn] = []
    place = 0
    for number, turn in enumerate(path):
        completion, is_trained = turn.completion, turn not in trained
        added = np.array(turn.call.added_ids if number else [], np.int32)
        version = completion.policy_versions[0] if completion.tokens else 0
        parts.append((added, np.zeros(len(added)), np.zeros(len(added), bool), np.full(len(added), version)))
        mask = np.full(completion.tokens, is_trained)
        parts.append((completion.completion_ids, completion.logprobs, mask, completion.policy_versions))
        first, end = place + len(added), place + len(added) + completion.tokens
        if is_trained and completion.tokens:
            call, number_of_turn = numbers[turn.call]
            turns.append(groups.Turn(number=number_of_turn, call=call, start=first, end=end))
        trained.add(turn)
        place = end
    ids, logprobs, mask, versions = (np.concatenate(column) for column in zip(*parts, strict=True))
    last = path[-1]
    return TraceSequence(
        prompt_ids=path[0].call.added_ids,
        completion_ids=ids,
        logprobs=logprobs,
        loss_mask=mask,
        policy_versions=versions,
        finish_reason=last.completion.finish_reason,
        text=last.message["content"] or "",
        messages=[message for turn in path for message in (*turn.call.messages, {**turn.message, "sampled": True})],
        turns=turns,
    )
