"""Recorded runs: the right rule names each fault within its steps, and none finds anything in healthy runs.

``python -m tests.museum.record`` makes the recordings anew.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from services.run_page.diagnosis import Diagnosis, History
from services.run_page.rules import NOTE, RULES
from tests.museum.faults import EXHIBITS
from tests.museum.healthy import HEALTHY
from tests.museum.record import RECORDINGS, rows_of

RUNS: dict[str, dict[str, Any]] = {one["name"]: one for one in map(orjson.loads, RECORDINGS.read_bytes().splitlines())}


def history(name: str) -> History:
    run = RUNS[name]
    return History(run["settings"], run["accuracy_before"], frozenset(run["held_out"]))


@pytest.mark.parametrize("name", [name for name in EXHIBITS if name in RUNS])
def test_the_rule_of_a_fault_finds_it_in_time(name: str) -> None:
    exhibit, diagnosis = EXHIBITS[name], Diagnosis(history(name))
    for row in rows_of(RUNS[name]):
        diagnosis.add(row)
        found = {finding.rule: finding for finding in diagnosis.findings()}
        if exhibit.rule in found:
            assert row["step"] <= exhibit.within
            assert found[exhibit.rule].first_step <= row["step"]
            break
    else:
        pytest.fail(f"{sorted(found)}, not {exhibit.rule}")


@pytest.mark.parametrize("name", [name for name in HEALTHY if name in RUNS])
def test_nothing_is_found_in_a_healthy_run(name: str) -> None:
    diagnosis = Diagnosis(history(name))
    for row in rows_of(RUNS[name]):
        diagnosis.add(row)
    assert [str(finding) for finding in diagnosis.findings() if finding.severity != NOTE] == []


def test_there_are_enough_recordings_and_every_exhibit_names_a_rule() -> None:
    names = [rule.name for rule in RULES]
    assert len({*names}) == len(names)
    assert {exhibit.rule for exhibit in EXHIBITS.values()} - {""} <= {*names}
    assert len(RUNS.keys() & EXHIBITS.keys()) >= 35
    assert len(RUNS.keys() & HEALTHY.keys()) >= 30
