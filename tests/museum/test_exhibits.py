"""Faults injected into whole jobs in this process: each is named by the right rule, or ends the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.core.errors import ConfigurationError
from services.run_page.directory import Run
from tests.models import ROOT, made_once
from tests.museum.faults import EXHIBITS, WEIGHTS
from tests.museum.record import play

QUICK = (
    *("one seed for a group", "advantages of the wrong sign", "end token not trained", "cursor stands still"),
    "failures swallowed as 0",
)
"""Exhibits of the quick suite, one for each place that a fault may be in: engine, trainer, wire, data, reward."""


@pytest.fixture(scope="module")
def teacher() -> Path:
    return made_once("tiny-teacher", [ROOT / "toys/arithmetic.py"], "tests.museum.teacher")


def check(name: str, run: Run) -> None:
    """Check that the rule has found the fault, in the steps that the exhibit says."""
    exhibit = EXHIBITS[name]
    found = {finding.rule: finding for finding in run.findings()}
    assert exhibit.rule in found, sorted(found)
    assert found[exhibit.rule].first_step <= exhibit.within


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_is_named_within_four_steps(name: str, tmp_path: Path, tiny_model: Path) -> None:
    check(name, play(name, tmp_path, tiny_model, Path(), MAX_STEPS="4", EVAL_PROMPTS="0"))


@pytest.mark.museum
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXHIBITS)
def test_a_fault_is_named_or_ends_its_run(name: str, tmp_path: Path, tiny_model: Path, teacher: Path) -> None:
    try:
        run = play(name, tmp_path, tiny_model, teacher)
    except ConfigurationError:  # Of faults of weights, the proof of a version that fails for all workers.
        assert name in WEIGHTS or not EXHIBITS[name].rule
        return
    if "worker refused" not in {finding.rule for finding in run.findings()}:
        check(name, run)
