"""Recorded answers are selected by an expression, and come out token for token, each once, or as pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.core.errors import ConfigurationError
from services.protocol import group_file
from services.protocol.episodes import EpisodeFigures
from services.protocol.groups import Group, GroupFormatError, TokenSequence
from services.protocol.rewards import FinishReason, RewardResult
from tests.sequences import make_group, trained_sequence
from tests.trainer.reporting.test_group_records import fields_of, has_room, settings
from trainer.algorithm.packing import TrainingGroup
from trainer.reporting.group_records import GroupRecorder, GroupRecords
from trainer.reporting.group_selection import FIELDS, Account, Answer, Expression, choose, groups_of, pairs_of, select

FIELD_VALUES: dict[str, Any] = dict.fromkeys(FIELDS) | {
    "reward": 0.5,
    "components": {"math": 1.0, "format": None},
    "source": "countdown",
    "row": {"level": 3, "tags": ["a", "b"]},
    "id": "countdown/train/17",
    "prompt": "1 + 1 =",
    "step": 12,
    "tokens": 40,
    "finish": "stop",
    "rank": 2,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reward >= 0.5 and source == 'countdown'", True),
        ("reward > 0.5 or not source == 'countdown'", False),
        ("0 < reward <= 0.5 < 1", True),
        ("0 < reward < 0.5 < 1", False),
        ("components['math'] == 1", True),
        ("components['format'] >= 0", False),
        ("not components['format'] < 0", True),
        ("components['format'] is None and components['math'] is not None", True),
        ("components['format'] + 1 > 0 or components['format'] < 0", False),
        ("-components['format'] == None", True),
        ("step % 4 == 0 and tokens * 2 - 10 <= 70 and tokens / 4 + 1 == 11", True),
        ("source in ('gsm8k', 'countdown') and 'zebra' not in source", True),
        ("'a' in row['tags'] and row['level'] in [3, 4]", True),
        ("category in ('x', None) and 'x' in category", False),
        ("seat is None and rank != 1", True),
        ("'+' in prompt", True),
        ("True", True),
    ],
)
def test_an_expression_is_what_python_makes_of_it_and_none_is_no_number(text: str, expected: bool) -> None:
    assert Expression(text).holds(FIELD_VALUES) is expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("reward >=", "cannot be read: invalid syntax"),
        ("rewards >= 1", "'rewards' is not a name; the nearest is reward; there are reward, components"),
        ("print('x')", "\"print\\('x'\\)\" is not allowed"),
        ("source.upper == 'X'", "'source.upper' is not allowed"),
        ("[x for x in components]", "is not allowed"),
        ("(lambda: 1)", "is not allowed"),
        ("(reward := 2)", "is not allowed"),
        ("9 ** 9 ** 9", "is not allowed"),
        ("f'{reward}'", "is not allowed"),
        ("__import__", "'__import__' is not a name"),
        ("reward = 1", "cannot be read"),
        ("'a' * 9 > 1", "cannot be computed for countdown/train/17"),
        ("reward > 'x'", "cannot be computed for countdown/train/17"),
        ("reward / 0 > 1", "cannot be computed for countdown/train/17"),
        ("reward['x'] > 1", "is not an entry of components or row"),
    ],
)
def test_what_is_no_condition_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Expression(text).holds(FIELD_VALUES)


def test_a_key_that_no_answer_has_is_known() -> None:
    expression = Expression("components['maths'] == 1 or row['level'] > 2")
    assert expression.holds(FIELD_VALUES)
    assert expression.unknown_keys == ["components['maths']"]
    expression.holds(FIELD_VALUES | {"components": {"maths": None}})
    assert expression.unknown_keys == []


def answer(ids: Sequence[int], reward: float | None, **fields: Any) -> TokenSequence:
    result = RewardResult(reward=reward, status="scored" if reward is not None else "error")
    changes = {"result": result, "completion": " ".join(map(str, ids)), **fields}
    return trained_sequence(ids, [-0.25] * len(ids)).model_copy(update=changes)


def group(step: int, number: int, *answers: TokenSequence, split: str = "train", **fields: Any) -> Group:
    named = {"id": f"sums/{split}/{number}", "prompt": f"{number} + {number} =", "prompt_ids": [7, number]}
    return make_group(group_id=f"{step}-{number}", sequences=answers, **(named | fields))


def record(directory: Path, *steps: Sequence[Group], replayed: Sequence[Group] = ()) -> GroupRecords:
    """Record the groups of each step; the last step replays ``replayed``, too."""
    recorder = GroupRecorder(settings(directory, "all"), 0, has_room)
    for step, groups in enumerate(steps, start=1):
        trained = [TrainingGroup(g.prompt_ids, g.sequences, g.group_id) for g in groups]
        again = replayed if step == len(steps) else ()
        trained += [TrainingGroup(g.prompt_ids, g.sequences, g.group_id, is_replayed=True) for g in again]
        recorder.write(step, trained, [*groups, *again], **fields_of(step))
    return GroupRecords(directory / "runs" / "r")


def selected(records: GroupRecords, text: str = "True", held_out: Sequence[str] = ()) -> tuple[list[Answer], Account]:
    account = Account()
    return [*select(records, Expression(text), frozenset(held_out), account)], account


def test_the_groups_of_a_selection_have_its_answers_equal_to_the_bit(tmp_path: Path) -> None:
    episodes = [
        *(answer([3 + n], 1.0, episode=0, turns=None, messages=[]) for n in range(2)),
        answer([5, 5], 0.0, episode=1),
    ]
    figures = {0: EpisodeFigures(turns=2, tool_calls=0, unparsed_tool_calls=0, branches=0, calls_repeated=0)}
    first = group(1, 0, answer([1, 2], 1.0), answer([1, 3], 0.0), source="a", row=b'{"level": 2}')
    second = group(1, 1, *episodes, episode_figures=figures, episodes_failed={"error": 2})
    third = group(2, 0, answer([9], 0.25), answer([8], 1.0, seat=1))
    records = record(tmp_path, [first, second], [third], replayed=[second])

    answers, account = selected(records, "reward >= 1")
    [one, two, three] = groups_of(records, answers)
    assert one == first.model_copy(update={"sequences": first.sequences[:1]})
    assert two.sequences == second.sequences[:2]
    assert three.sequences == third.sequences[1:]
    assert (account.seen, account.right) == ({"a": 2, "": 4}, {"a": 1, "": 2}), "a replayed group counts once"

    def found(text: str) -> list[list[int]]:
        return [s.completion_ids.tolist() for g in groups_of(records, selected(records, text)[0]) for s in g.sequences]

    assert found("turns == 2 and length == 3 and tokens == 2") == [[3], [4]]
    assert found("row['level'] == 2 and rank == 2 and group_mean == 0.5") == [[1, 3]]
    assert found("step == 2 and version == 0 and group_size == 1 and rank == 1") == [[9], [8]], "by seat"
    assert found("completion == '8' and seat == 1 and finish == 'stop'") == [[8]]

    file = tmp_path / "selected"
    head = group_file.GroupFileHead(run="r", tokenizer=records.head(1).tokenizer, where="reward >= 1")
    file.write_bytes(b"".join(group_file.parts(head, groups_of(records, answers))))
    read_head, read = group_file.read(file)
    assert read_head == head
    assert read_head.tokenizer == "digest"
    assert [*read] == [one, two, three]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(GroupFormatError, match="damaged"):
        list(group_file.read(file)[1])
    with pytest.raises(GroupFormatError, match="was not written by `grpo groups`"):
        group_file.read(next(records.directory.iterdir()))


def test_answers_that_must_not_be_learned_are_left_out_and_counted(tmp_path: Path) -> None:
    records = record(
        tmp_path,
        [
            group(1, 0, answer([1], 1.0), answer([2], None), answer([3], 1.0, finish_reason=FinishReason.ABORT)),
            group(1, 1, answer([1], 1.0), split="test"),
            group(1, 2, answer([1], 1.0)),
            group(1, 3, answer([4], 1.0, finish_reason=FinishReason.LENGTH), answer([4, 5], 1.0)),
            group(1, 4, answer([6], 1.0), id="hub/test/train/4"),
        ],
    )
    answers, account = selected(records, held_out=["2 + 2 ="])
    kept = choose(answers, 9, account)
    assert [(a.group_id, a.episode) for a in kept] == [("1-0", 0), ("1-3", 1), ("1-4", 0)]
    assert account.left_out == {"without a reward": 2, "held-out prompts": 2, "cut off at a limit": 1}


def test_a_prompt_has_its_best_and_newest_different_answers(tmp_path: Path) -> None:
    records = record(
        tmp_path,
        [group(1, 0, answer([1], 0.5), answer([2], 1.0), answer([2], 1.0)), group(1, 1, answer([2], 0.1))],
        [group(2, 0, answer([3], 1.0), answer([1, 1], 1.0), answer([4], 0.75))],
    )
    answers, account = selected(records)
    kept = choose(answers, 3, account)
    assert [(a.group_id, a.episode) for a in kept] == [("1-0", 1), ("1-1", 0), ("2-0", 0), ("2-0", 1)]
    assert account.left_out["equal to another"] == 1
    assert account.left_out["more than --per-prompt of a prompt"] == 2
    assert account.kept == {"": 4}
    assert [[a.group_id for a in choose(answers, k, Account())] for k in (1, 9)] == [
        ["1-1", "2-0"],
        ["1-0", "1-0", "1-1", "2-0", "2-0", "2-0"],
    ]


def messages(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


def text_of(group: Group) -> str | None:
    return None if group.prompt.messages else group.prompt.prompt


def pairs(records: GroupRecords, text: str = "True", per_prompt: int = 4) -> tuple[list[dict[str, Any]], Account]:
    answers, account = selected(records, text)
    return [*pairs_of(records, answers, per_prompt, account, text_of)], account


def test_a_pair_is_the_best_and_the_worst_of_a_group_after_the_same_messages(tmp_path: Path) -> None:
    cut = {"finish_reason": FinishReason.LENGTH}
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 ="}]}
    records = record(
        tmp_path,
        [
            group(1, 0, answer([1], 0.5), answer([2], 1.0), answer([3], 0.0, **cut)),
            group(1, 1, answer([1], 1.0), answer([2], 0.0), **chat),
            group(1, 2, answer([1], 1.0), answer([2], 1.0)),
            group(1, 3, answer([1], 1.0, **cut), answer([2], 0.0)),
        ],
        [group(2, 0, answer([2], 1.0), answer([3], 0.0)), group(2, 1, answer([4], 1.0), answer([2], 0.0), **chat)],
    )
    found, account = pairs(records)
    assert found == [
        {"prompt": "0 + 0 =", "chosen": "2", "rejected": "3"},
        {
            "prompt": chat["messages"],
            "chosen": [{"role": "assistant", "content": "1"}],
            "rejected": [{"role": "assistant", "content": "2"}],
        },
        {
            "prompt": chat["messages"],
            "chosen": [{"role": "assistant", "content": "4"}],
            "rejected": [{"role": "assistant", "content": "2"}],
        },
    ]
    expected = {"groups without two rewards": 1, "groups whose best answer was cut off": 1, "equal to another": 1}
    assert +account.left_out == expected
    assert len(pairs(records, per_prompt=1)[0]) == 2
    assert [pair["rejected"] for pair in pairs(records, "id == 'sums/train/0' and finish == 'stop'")[0]] == ["1", "3"]


def test_a_pair_of_episodes_differs_in_one_answer_of_the_model_alone(tmp_path: Path) -> None:
    def episode(number: int, reward: float, *contents: str, **fields: Any) -> TokenSequence:
        made = answer([number], reward, episode=number, **fields)
        talk = make_group(sequences=[{**made.model_dump(), "messages": messages(*contents)}]).sequences[0]
        return made.model_copy(update={"messages": talk.messages})

    same = ("hello", "hi", "how much?")
    records = record(
        tmp_path,
        [
            group(1, 0, episode(0, 1.0, *same, "two"), episode(1, 0.0, *same, "")),
            group(1, 1, episode(0, 1.0, "hello", "a", "b", "c"), episode(1, 0.0, "hello", "x", "b", "c")),
            group(1, 2, episode(0, 1.0, *same, "two… 12 more characters"), episode(1, 0.0, *same, "three")),
            group(1, 3, *(episode(0, 1.0, *same, "two") for _ in range(2)), episode(1, 0.0, *same, "three")),
            group(
                1,
                4,
                *(episode(n, n * 1.0, *same, f"{n}", seat=0) for n in range(2)),
                *(episode(n, n * 1.0, *same, f"{n}", seat=1) for n in range(2, 4)),
            ),
        ],
    )
    found, account = pairs(records)
    assert found[0] == {
        "prompt": messages(*same),
        "chosen": [{"role": "assistant", "content": "two"}],
        "rejected": [{"role": "assistant", "content": ""}],
    }
    assert [(pair["chosen"][0]["content"], pair["rejected"][0]["content"]) for pair in found[1:]] == [
        ("1", "0"),
        ("3", "2"),
    ]
    assert +account.left_out == {"groups of longer or shortened conversations": 3}
