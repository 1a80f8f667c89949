"""``grpo groups``: recorded answers are selected by an expression, and come out token for token, each once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts import groups
from scripts.groups import choose, groups_of, read_answers
from services.core.errors import exit_code_of
from services.protocol.chat import EpisodeFigures
from services.protocol.groups import Group, GroupFormatError, TokenSequence, read_group_file
from services.protocol.rewards import FinishReason, RewardResult
from tests.sequences import make_group, trained_sequence
from tests.trainer.reporting.test_group_records import fields_of, has_room, settings
from trainer.algorithm.packing import TrainingGroup
from trainer.reporting.group_records import GroupRecorder, GroupRecords


def answer(ids: Sequence[int], reward: float | None, **fields: Any) -> TokenSequence:
    result = RewardResult(
        reward=reward, status="scored" if reward is not None else "error", components={"math": reward}
    )
    changes = {"result": result, "completion": " ".join(map(str, ids)), **fields}
    return trained_sequence(ids, [-0.25] * len(ids)).model_copy(update=changes)


def group(step: int, number: int, *answers: TokenSequence, split: str = "train", **fields: Any) -> Group:
    named = {"id": f"sums/{split}/{number}", "prompt": f"{number} + {number} =", "prompt_ids": [7, number]}
    return make_group(group_id=f"{step}-{number}", sequences=answers, **(named | fields))


def record(directory: Path, *steps: Sequence[Group], replayed: Sequence[Group] = ()) -> GroupRecords:
    """Record the groups of each step; the last step replays ``replayed``, too."""
    recorder = GroupRecorder(settings(directory, "all"), 0, has_room)
    for step, of_step in enumerate(steps, start=1):
        trained = [TrainingGroup(g.prompt_ids, g.sequences, g.group_id) for g in of_step]
        again = replayed if step == len(steps) else ()
        trained += [TrainingGroup(g.prompt_ids, g.sequences, g.group_id, is_replayed=True) for g in again]
        recorder.write(step, trained, [*of_step, *again], **fields_of(step))
    return GroupRecords(directory / "runs" / "r")


def kept(records: GroupRecords, where: str = "", per_prompt: int = 9) -> tuple[Any, Any]:
    """Return the group and episode of each answer that is kept, and the number of the others by reason."""
    answers, left_out = read_answers(records)
    chosen = choose(answers, where, per_prompt, left_out)
    return [*zip(chosen["_group"], chosen["_episode"], strict=True)], +left_out


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
    answers, _ = read_answers(records)
    assert len(answers) == 6, "a replayed group counts once"
    [one, two, three] = groups_of(records, choose(answers, "reward >= 1", 9, Counter()))
    assert one == first.model_copy(update={"sequences": first.sequences[:1]})
    assert two.sequences == second.sequences[:2]
    assert three.sequences == third.sequences[1:]
    for where, found in {
        "turns == 2 and length == 3 and tokens == 2": [("1-1", 0)],
        "row_level == 2 and rank == 2 and group_mean == 0.5": [("1-0", 1)],
        "step == 2 and version == 0 and group_size == 1 and rank == 1": [("2-0", 0), ("2-0", 1)],
        "completion == '8' and seat == 1 and finish == 'stop'": [("2-0", 1)],
        "component_math > 0.5 and source in ['a', 'b'] and category.isna()": [("1-0", 0)],
        "seat < 1 or seat > 1": [],
    }.items():
        assert kept(records, where)[0] == found, where


def test_answers_that_must_not_be_learned_are_left_out_and_counted(tmp_path: Path) -> None:
    records = record(
        tmp_path,
        [
            group(1, 0, answer([1], 1.0), answer([2], None), answer([3], 1.0, finish_reason=FinishReason.ABORT)),
            group(1, 1, answer([1], 1.0), split="test"),
            group(1, 3, answer([4], 1.0, finish_reason=FinishReason.LENGTH), answer([4, 5], 1.0)),
            group(1, 4, answer([6], 1.0), id="hub/test/train/4"),
        ],
    )
    assert kept(records) == (
        [("1-0", 0), ("1-3", 1), ("1-4", 0)],
        {"without a reward": 2, "held-out prompts": 1, "cut off at a limit": 1},
    )


def test_a_prompt_has_its_best_and_newest_different_answers(tmp_path: Path) -> None:
    records = record(
        tmp_path,
        [group(1, 0, answer([1], 0.5), answer([2], 1.0), answer([2], 1.0)), group(1, 1, answer([2], 0.1))],
        [group(2, 0, answer([3], 1.0), answer([1, 1], 1.0), answer([4], 0.75))],
    )
    assert kept(records, per_prompt=3) == (
        [("1-0", 1), ("1-1", 0), ("2-0", 0), ("2-0", 1)],
        {"equal to another": 1, "more than --per-prompt of a prompt": 2},
    )
    assert kept(records, per_prompt=1)[0] == [("1-1", 0), ("2-0", 0)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run whose record has two steps, each with a group of two sources with three answers."""
    monkeypatch.chdir(tmp_path)
    of_steps = [
        [group(step, n, *(answer([2 + a, 1], a / 2) for a in range(3)), source=("", "chat")[n]) for n in (0, 1)]
        for step in (1, 2)
    ]
    record(tmp_path, *of_steps)
    run_dir = tmp_path / "runs" / "r"
    (run_dir / "metrics.jsonl").write_text("")
    (run_dir / "config.json").write_text("{}")
    return run_dir


def call(*names: str, **options: Any) -> int:
    return exit_code_of(lambda: groups.main(*names, **options))


def test_a_selection_is_written_and_accounted_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("r", "reward > 0", out=Path("right.groups")) == 0
    assert capsys.readouterr().out.splitlines() == ["answers: 12, kept: 4", "left out: 4 equal to another"]
    head, found = read_group_file(Path("right.groups"))
    assert (head.run, head.where, head.tokenizer) == ("r", "reward > 0", "digest")
    assert [(g.group_id, len(g.sequences)) for g in found] == [("2-0", 2), ("2-1", 2)], "the newest of equal answers"
    Path("right.groups").write_bytes(Path("right.groups").read_bytes()[:-1])
    with pytest.raises(GroupFormatError, match="damaged"):
        list(read_group_file(Path("right.groups"))[1])
    with pytest.raises(GroupFormatError):
        read_group_file(next((run / "groups").iterdir()))


def test_what_cannot_be_selected_ends_with_78_and_names_the_cause(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("reward > 1", {}, "no answer"),
        ("component_x == 1", {}, "component_x"),
        ("reward >", {}, "reward >"),
        ("reward > 'x'", {}, "reward > 'x'"),
        ("print(1)", {}, "print"),
        ("", {"out": Path("nowhere/file")}, "--out nowhere/file"),
    ]
    for where, options, named in refused:
        assert call("r", where, **options) == 78, where
        assert named in " ".join(capfd.readouterr().err.split())
    for path in (run / "groups").iterdir():
        path.unlink()
    assert call("r") == 78
    assert "RECORD_GROUPS says" in " ".join(capfd.readouterr().err.split())
