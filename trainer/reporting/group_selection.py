"""The selection of recorded answers by an expression, as token-exact groups or as pairs of preferences; needs no torch.

An answer is an episode with all its sequences; a completion is an episode of one. An expression is one of Python's, of
names, constants, comparisons, arithmetic, ``and``, ``or``, ``not``, ``in`` and ``[...]``; nothing in it can be called.
None is no number: it is neither less nor more than anything, and sums with it are None.
"""

from __future__ import annotations

import ast
import difflib
import operator
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import orjson

from services.core.errors import ConfigurationError
from services.protocol.groups import Group, TokenSequence
from services.protocol.prompts import Split
from services.protocol.rewards import FinishReason
from trainer.reporting.group_records import GroupRecords

FIELDS = {
    "reward": "the reward",
    "components": 'values of the reward functions, as in components["math"]; None where one does not apply',
    "source": "the name of the source, empty without SOURCES",
    "category": "the prompt's category, or None",
    "row": 'the columns of the dataset\'s row that the reward reads, as in row["level"]',
    "id": "the prompt's id",
    "prompt": "the text of the prompt",
    "completion": "the text of the answer, of an episode that of its last sequence",
    "step": "the step that trained on it",
    "version": "the oldest policy version that sampled a token",
    "tokens": "tokens that the policy sampled",
    "length": "tokens of the longest sequence, with its prompt",
    "finish": '"stop", or "length" if it was cut off',
    "turns": "turns of an episode",
    "seat": "the seat of a game, or None",
    "rank": "1 for the best answer of its group, of its seat in a game; equal rewards have one rank",
    "group_mean": "the mean reward of these answers",
    "group_size": "the number of these answers",
}
"""The names in an expression."""

_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, among: one in among,
    ast.NotIn: lambda one, among: one not in among,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_ALLOWED = (
    *(ast.Constant, ast.Name, ast.Tuple, ast.List, ast.Subscript, ast.Load, ast.Expression),
    *(ast.Compare, ast.BinOp, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub),
    *_OPERATORS,
)
_CUT = re.compile(r"… \d+ more (characters|messages)$")
"""The end of a message whose rest was not recorded."""


class Expression:
    """A condition on an answer."""

    def __init__(self, text: str) -> None:
        """Parse ``text``.

        Raises:
            ConfigurationError: it is no expression, or names something unknown.
        """
        self.text = text
        self._keys: dict[str, bool] = {}
        """Keys that the expression reads, and whether an answer had them."""
        try:
            self._tree = ast.parse(text.strip(), mode="eval")
        except SyntaxError as error:
            raise ConfigurationError(f"{text!r} cannot be read: {error.msg} at character {error.offset}") from error
        for node in ast.walk(self._tree):
            if not isinstance(node, _ALLOWED):
                what = ast.get_source_segment(text.strip(), node) if isinstance(node, ast.expr) else type(node).__name__
                raise ConfigurationError(
                    f"{text!r}: {what!r} is not allowed; write comparisons of names, with and, or, not, in, + - * / %"
                )
            if isinstance(node, ast.Name) and node.id not in FIELDS:
                near = difflib.get_close_matches(node.id, FIELDS, 1)
                hint = f"; the nearest is {near[0]}" if near else ""
                raise ConfigurationError(f"{text!r}: {node.id!r} is not a name{hint}; there are {', '.join(FIELDS)}")

    def holds(self, answer: Mapping[str, Any]) -> bool:
        """Return whether the condition holds for the fields of an answer.

        Raises:
            ConfigurationError: two values cannot be compared.
        """
        try:
            return bool(self._value(self._tree.body, answer))
        except (TypeError, ZeroDivisionError) as error:
            raise ConfigurationError(f"{self.text!r} cannot be computed for {answer['id']}: {error}") from error

    @property
    def unknown_keys(self) -> list[str]:
        """The keys that the expression has read and no answer had."""
        return sorted(key for key, is_known in self._keys.items() if not is_known)

    def _value(self, node: ast.expr, answer: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name):
                return answer[name]
            case ast.Tuple(items) | ast.List(items):
                return [self._value(item, answer) for item in items]
            case ast.BoolOp(op, values):
                decide = all if isinstance(op, ast.And) else any
                return decide(self._value(value, answer) for value in values)
            case ast.UnaryOp(op, operand):
                value = self._value(operand, answer)
                return not value if isinstance(op, ast.Not) else None if value is None else -value
            case ast.Subscript(of, key):
                return self._item(self._value(of, answer), self._value(key, answer), ast.unparse(node))
            case ast.BinOp(left, op, right):
                pair = self._value(left, answer), self._value(right, answer)
                return None if None in pair else _OPERATORS[type(op)](*pair)
            case ast.Compare(left, ops, comparators):
                values = [self._value(one, answer) for one in (left, *comparators)]
                return all(_compare(op, *pair) for op, pair in zip(ops, pairwise(values), strict=True))
        raise AssertionError(f"{type(node).__name__} is allowed, but has no value")

    def _item(self, values: Any, key: Any, text: str) -> Any:
        if not isinstance(values, dict):
            raise TypeError(f"{text} is not an entry of components or row")
        self._keys[text] = self._keys.get(text, False) or key in values
        return values.get(key)


def _compare(op: ast.cmpop, one: Any, other: Any) -> bool:
    if (isinstance(op, _ORDER) and None in (one, other)) or (isinstance(op, ast.In | ast.NotIn) and other is None):
        return False
    return bool(_OPERATORS[type(op)](one, other))


@dataclass
class Account:
    """The answers of a selection, counted."""

    seen: Counter[str] = field(default_factory=Counter)
    """By source."""
    right: Counter[str] = field(default_factory=Counter)
    """Those with a reward of 1 or more, by source."""
    kept: Counter[str] = field(default_factory=Counter)
    """By source."""
    left_out: Counter[str] = field(default_factory=Counter)
    """By reason; those for which the expression does not hold are not among them."""


@dataclass(frozen=True)
class Answer:
    """A recorded answer that a condition selects, without its tokens."""

    step: int
    group_id: str
    episode: int
    """Its place among the episodes of its group."""
    prompt_id: str
    seat: int | None
    source: str
    reward: float
    tokens: int
    """The hash of the tokens of prompt and answer."""
    was_cut: bool
    """True when it did not end by itself."""


def select(
    records: GroupRecords, expression: Expression, held_out: frozenset[str], account: Account
) -> Iterator[Answer]:
    """Yield the answers for which the expression holds, and count the others.

    Left out are aborted answers and those without a reward, and prompts that are held out: those of the test split, and
    those whose text is among ``held_out``.

    Raises:
        ConfigurationError: a record cannot be read, or the expression does not fit an answer.
    """
    groups: set[str] = set()
    for step in records.steps:
        for recorded in records.groups(step):
            group, prompt = recorded.group, recorded.group.prompt
            if group.group_id in groups:
                continue
            groups.add(group.group_id)
            is_held_out = prompt.prompt in held_out or prompt.id.split("/")[-2:-1] == [Split.TEST.value]
            for number, fields in _answers(group, step, account):
                account.seen[prompt.source] += 1
                account.right[prompt.source] += fields["reward"] >= 1
                if is_held_out:
                    account.left_out["held-out prompts"] += 1
                elif expression.holds(fields):
                    tokens = (np.array(group.prompt_ids + s.completion_ids.tolist()) for s in group.episodes[number])
                    yield Answer(
                        step,
                        group.group_id,
                        number,
                        prompt.id,
                        fields["seat"],
                        prompt.source,
                        fields["reward"],
                        hash(tuple(ids.tobytes() for ids in tokens)),
                        was_cut=fields["finish"] == FinishReason.LENGTH.value,
                    )


def _answers(group: Group, step: int, account: Account) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the numbers of a group's scored answers, with the fields that an expression reads."""
    answers = [*enumerate(group.episodes)]
    scored = [
        (number, sequences)
        for number, sequences in answers
        if sequences[0].reward is not None and all(s.finish_reason is not FinishReason.ABORT for s in sequences)
    ]
    account.left_out["without a reward"] += len(answers) - len(scored)
    row = orjson.loads(group.prompt.row) if group.prompt.row else {}
    for number, sequences in scored:
        first = sequences[0]
        rewards = [others[0].reward or 0.0 for _, others in scored if others[0].seat == first.seat]
        figures = (group.episode_figures or {}).get(-1 if first.episode is None else first.episode)
        was_cut = any(s.finish_reason is FinishReason.LENGTH for s in sequences)
        yield (
            number,
            {
                "reward": first.reward,
                "components": first.scoring.components,
                "source": group.prompt.source,
                "category": group.prompt.category,
                "row": row,
                "id": group.prompt.id,
                "prompt": group.prompt.prompt,
                "completion": sequences[-1].completion,
                "step": step,
                "version": min(s.oldest_version for s in sequences),
                "tokens": sum(s.trained_tokens for s in sequences),
                "length": len(group.prompt_ids) + max(s.tokens for s in sequences),
                "finish": (FinishReason.LENGTH if was_cut else FinishReason.STOP).value,
                "turns": 1 if figures is None else figures.turns,
                "seat": first.seat,
                "rank": 1 + sum(reward > (first.reward or 0.0) for reward in rewards),
                "group_mean": statistics.fmean(rewards),
                "group_size": len(rewards),
            },
        )


def choose(answers: Sequence[Answer], per_prompt: int, account: Account) -> list[Answer]:
    """Return at most ``per_prompt`` answers of each prompt: those of highest reward, and of these the newest.

    Answers that were cut off, and equal ones, are left out and counted. The order is that of ``answers``.
    """
    of_prompt: defaultdict[str, list[Answer]] = defaultdict(list)
    known: set[int] = set()
    for answer in sorted(answers, key=lambda answer: (-answer.reward, -answer.step)):
        kept = of_prompt[answer.prompt_id]
        if answer.was_cut:
            account.left_out["cut off at a limit"] += 1
        elif answer.tokens in known:
            account.left_out["equal to another"] += 1
        elif len(kept) == per_prompt:
            account.left_out["more than --per-prompt of a prompt"] += 1
        else:
            kept.append(answer)
            known.add(answer.tokens)
            account.kept[answer.source] += 1
    chosen = {(a.group_id, a.episode) for kept in of_prompt.values() for a in kept}
    return [answer for answer in answers if (answer.group_id, answer.episode) in chosen]


def groups_of(records: GroupRecords, answers: Sequence[Answer]) -> Iterator[Group]:
    """Yield the groups of the answers, each with these answers' sequences only, step by step."""
    for group, numbers in _with_numbers(records, answers):
        sequences = [s for number in sorted(numbers) for s in group.episodes[number]]
        alone = {"sequences": sequences, "episode_figures": None, "episodes_failed": None, "failure_examples": None}
        yield group.model_copy(update=alone)


def pairs_of(
    records: GroupRecords,
    answers: Sequence[Answer],
    per_prompt: int,
    account: Account,
    text_of: Callable[[Group], str | None],
) -> Iterator[dict[str, Any]]:
    """Yield the best and the worst answer of each group as a preference: ``prompt``, ``chosen`` and ``rejected``.

    These are messages, or texts where ``text_of`` returns the prompt as a text, so that a trainer tokenises them again.
    Only answers of the same seat are compared. Groups whose answers have one reward are left out, as are those whose
    best answer was cut off, and episodes in which the answers are not all that differs.
    """
    known: set[str] = set()
    of_prompt: Counter[str] = Counter()
    rewards = {(a.group_id, a.episode): a for a in answers}
    for group, numbers in _with_numbers(records, answers):
        seats = {rewards[group.group_id, number].seat for number in numbers}
        for seat in sorted(seats, key=str):
            of_seat = [a for n in sorted(numbers) if (a := rewards[group.group_id, n]).seat == seat]
            best, worst = max(of_seat, key=lambda a: a.reward), min(of_seat, key=lambda a: a.reward)
            texts = _pair(group, best.episode, worst.episode, text_of)
            if best.reward == worst.reward:
                reason = "groups without two rewards"
            elif best.was_cut:
                reason = "groups whose best answer was cut off"
            elif texts is None:
                reason = "groups of longer or shortened conversations"
            elif (text := repr(texts)) in known:
                reason = "equal to another"
            elif of_prompt[group.prompt.id] == per_prompt:
                reason = "more than --per-prompt of a prompt"
            else:
                known.add(text)
                of_prompt[group.prompt.id] += 1
                account.kept[group.prompt.source] += 1
                yield texts
                continue
            account.left_out[reason] += 1


def _with_numbers(records: GroupRecords, answers: Sequence[Answer]) -> Iterator[tuple[Group, set[int]]]:
    """Yield the groups of the answers with the numbers of these answers' episodes, step by step."""
    wanted: defaultdict[int, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for answer in answers:
        wanted[answer.step][answer.group_id].add(answer.episode)
    for step, groups in sorted(wanted.items()):
        for recorded in records.groups(step):
            if recorded.group.group_id in groups:
                yield recorded.group, groups[recorded.group.group_id]


def _pair(group: Group, best: int, worst: int, text_of: Callable[[Group], str | None]) -> dict[str, Any] | None:
    """Return a preference; None if the answers are not one message of the assistant each after the same messages."""
    first, second = (group.episodes[number] for number in (best, worst))
    if len(first) > 1 or len(second) > 1:
        return None
    if first[0].messages is None and (text := text_of(group)) is not None:
        return {"prompt": text, "chosen": first[0].completion, "rejected": second[0].completion}
    talks = [_conversation(group, sequence) for (sequence,) in (first, second)]
    shared = [*takewhile(lambda pair: pair[0] == pair[1], zip(*talks, strict=False))]
    rests = [talk[len(shared) :] for talk in talks]
    if any([message["role"] for message in rest] != ["assistant"] for rest in rests):
        return None
    if any(_CUT.search(message["content"]) or "tool_calls" in message for talk in talks for message in talk):
        return None
    return {"prompt": [one for one, _ in shared], "chosen": rests[0], "rejected": rests[1]}


def _conversation(group: Group, sequence: TokenSequence) -> list[dict[str, Any]]:
    if sequence.messages is None:
        messages = [message.model_dump() for message in group.prompt.messages]
        return [*messages, {"role": "assistant", "content": sequence.completion}]
    return [
        {"role": m.role, "content": m.content, **({"tool_calls": m.tool_calls} if m.tool_calls else {})}
        for m in sequence.messages
    ]
