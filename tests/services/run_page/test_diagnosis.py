"""What rules find in the rows of a run: each in rows that have its fault, and none in the same rows without it."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from services.run_page.diagnosis import Diagnosis, Finding, History, question_key
from services.run_page.directory import Run
from services.run_page.rules import DOUBT, NOTE, WRONG
from tests.local_runner.in_process import call

TURNS = "session a-1 reached its limit of 3 turns (AGENT_MAX_TURNS)"


def rows(count: int, facts: dict[str, Any] | None = None, **columns: Any) -> list[dict[str, Any]]:
    """Return rows of a healthy run with other columns; one that is a list has a value for each row."""
    usual = {"reward_mean": 0.5, "reward_counts": [[0.0, 16], [1.0, 16]], "trained_tokens": 90.0, "length_mean": 8.0}
    return [
        {"step": n + 1, "facts": facts or {}}
        | usual
        | {name: value[n] if name in LISTS else value for name, value in columns.items()}
        for n in range(count)
    ]


LISTS = ("reward_mean", "length_mean", "entropy_all")
FALLING = [0.8 - 0.03 * n for n in range(20)]
LONGER = [4.0] * 6 + [40.0] * 6
HIGH = [[1.0, 32]]

FAULTS: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "none rewarded": ("nothing learned", rows(3, trained_tokens=0.0, reward_counts=[[0.0, 32]]), {}),
    "none scored": ("nothing learned", rows(3, trained_tokens=0.0, reward_counts=[]), {}),
    "all equal": ("nothing learned", rows(3, trained_tokens=0.0), {}),
    "lost": ("reward falls", rows(6, reward_mean=[0.44, *[0.0] * 5]), {}),
    "falls": ("reward falls", rows(20, reward_mean=FALLING), {}),
    "over a limit": ("failures", rows(1, failures=[["limit", 4, TURNS]]), {}),
    "grows": ("length", rows(12, length_mean=LONGER, reward_mean=[0.5] * 12), {}),
    "settled": ("entropy", rows(11, entropy_all=[0.8, *[None] * 9, 0.001], reward_counts=[[0.0, 30], [1.0, 2]]), {}),
    "unlearned": ("worse than before", rows(1, accuracy=0.3, accuracy_high=0.4), {"accuracy_before": 0.5}),
    "no critic": ("critic", rows(50, explained_variance=-0.1), {}),
    "no teacher": ("teacher", rows(3, teacher_k1=9.0, teacher_overlap=0.1), {}),
    "starves": (
        "source starves",
        rows(20, **{"groups/a": 4, "zero_variance_groups/a": 4, "groups/b": 4, "zero_variance_groups/b": 1}),
        {},
    ),
    "calls unread": ("tool calls unread", rows(3, {"tools": [8, 1, 7, 8, 2, 0, 0]}), {}),
    "no need": ("tools unneeded", rows(5, {"tools": [10, 5, 0, 5, 4.5, 5, 3.0]}), {}),
    "two beginnings": ("prompts", rows(3, {"prompt": [8, 8], "examples": {"prompt": ["a"]}}), {}),
    "held out": (
        "held-out prompts",
        rows(1, {"prompts": [[0, 0, question_key("1+1=", "2"), ""]]}),
        {"held_out": frozenset([question_key("1+1=", "2")])},
    ),
    "refused": ("worker refused", rows(1, workers_refused=1.0, served_version=3.0, policy_version=7.0), {}),
    "served": ("served version", rows(3, served_version=0.0, policy_version=7.0), {}),
    "stale tokens": ("mismatch", rows(3, kl_behaviour=0.7, staleness_max=2.0), {}),
}


def findings(run: list[dict[str, Any]], **known: Any) -> list[Finding]:
    """Return what is found in rows, given the other fields of ``History``."""
    diagnosis = Diagnosis(History(**known))
    for row in run:
        diagnosis.add(row)
    return diagnosis.findings()


@pytest.mark.parametrize("name", FAULTS)
def test_a_rule_finds_its_fault_and_no_other_does(name: str) -> None:
    rule, faulty, known = FAULTS[name]
    [found] = findings(faulty, **known)
    assert (found.rule, found.last_step) == (rule, len(faulty))
    assert found.severity in (WRONG, DOUBT)
    assert all((found.evidence, found.remedy, found.certainty))


@pytest.mark.parametrize(
    ("healthy", "known"),
    [
        (rows(40, reward_mean=[0.5] * 40), {}),
        (rows(6, reward_mean=[0.44, *[0.0] * 4, 0.3]), {}),
        (rows(10, reward_mean=[0.01, *[0.0] * 9]), {}),
        (rows(20, reward_mean=FALLING[::-1]), {}),
        (rows(2, trained_tokens=0.0), {}),
        (rows(3, kl_behaviour=0.03, staleness_max=2.0), {}),
        (rows(3, kl_behaviour=2e-5), {}),
        (rows(1, accuracy=0.4, accuracy_high=0.55), {"accuracy_before": 0.5}),
        (rows(3, served_version=7.0, policy_version=7.0, workers_refused=0.0), {}),
    ],
)
def test_nothing_is_found_in_rows_that_are_as_usual(healthy: list[dict[str, Any]], known: dict[str, Any]) -> None:
    assert findings(healthy, **known) == []


def test_what_is_often_intended_is_a_note() -> None:
    done = [*rows(5), *rows(9, trained_tokens=0.0, reward_counts=HIGH)[5:]]
    done[-1]["reward_mean"] = 1.0
    follows = rows(3, {"length": [8, 7.8]})
    few = rows(1, failures=[["limit", 1, TURNS]], reward_counts=[[0.0, 99]])
    assert [(f.rule, f.severity) for run in (done, follows, few) for f in findings(run)] == [
        ("nothing learned", NOTE),
        ("reward follows length", NOTE),
        ("failures", NOTE),
    ]


def test_a_doubt_that_does_not_come_again_is_a_note_and_keeps_its_steps_and_three_samples() -> None:
    diagnosis = Diagnosis(History())
    broken = rows(3, {"prompt": [8, 8], "examples": {"prompt": ["a", "b"]}})
    for row in broken:
        diagnosis.add(row)
    [found] = diagnosis.findings()
    assert (found.severity, found.first_step, found.last_step) == (DOUBT, 1, 3)
    assert found.samples == ("step 1: a", "step 1: b", "step 2: a")
    for row in rows(40)[3:]:
        diagnosis.add(row)
    [later] = diagnosis.findings()
    assert (later.severity, later.first_step) == (NOTE, 1)


def test_the_command_says_what_is_wrong_with_a_copied_run_and_its_code_counts_no_notes(tmp_path, capsys) -> None:
    def diagnose(lines: list[dict[str, Any]], *options: str) -> tuple[int, str]:
        (tmp_path / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
        return call("diagnose", tmp_path, *options), capsys.readouterr().out

    faulty = rows(3, trained_tokens=0.0)
    code, text = diagnose(faulty, "--json")
    [found] = json.loads(text)
    assert (code, found["rule"], found["first_step"]) == (3, "nothing learned", 1)
    assert Finding(**{**found, "samples": tuple(found["samples"])}) == Run(tmp_path).findings()[0]
    assert diagnose(faulty)[0] == 3
    assert diagnose(rows(1, {"length": [40, 39]}))[0] == 0
    assert diagnose([])[0] == 78
