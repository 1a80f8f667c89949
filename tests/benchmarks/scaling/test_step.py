"""The model of a step gives back the rates that made it, and predicts recorded runs that it was not fitted to."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling.__main__ import FITTED, UNSEEN, fitted, run
from benchmarks.scaling.step import Measured, Rates, Seconds, Work, fit, mean, read

pytestmark = pytest.mark.leaving

RATES = Rates(0.05, 0.002, 0.001, 0.01, 2.0, 0.1)
METRICS = {
    "step": 2,
    "completions": 64.0,
    "prompt_tokens": 336.0,
    "completion_tokens": 667.0,
    "length_max": 12.0,
    "trained_tokens": 1272.0,
    "seconds_generate": 3.0,
    "seconds_score": 0.2,
    "seconds_store": 0.1,
    "seconds_train": 17.0,
    "seconds_publish": 2.0,
    "seconds_step": 22.5,
}

works = st.builds(
    Work,
    completions=st.floats(8, 512),
    tokens=st.floats(200, 55000),
    longest=st.floats(8, 512),
    trained_tokens=st.floats(100, 50000),
)


def steps_of(*work: Work) -> list[Measured]:
    return [Measured(one, RATES.seconds(one)) for one in work]


SHORT = Work(64, 1003, 12, 1272)
LONG = Work(12, 1191, 96, 688)


def test_fitting_gives_back_the_rates_of_what_they_made():
    assert asdict(fit(steps_of(SHORT, LONG))) == pytest.approx(asdict(RATES))


@given(st.lists(works, min_size=1, max_size=5))
def test_no_rate_is_negative_whatever_was_measured(found):
    assert all(rate >= 0 for rate in asdict(fit(steps_of(*found))).values())


def test_a_step_that_trained_on_nothing_says_nothing_about_training():
    idle = Measured(replace(LONG, trained_tokens=0.0), replace(RATES.seconds(LONG), train=0.0))
    assert asdict(fit([*steps_of(SHORT, LONG), idle])) == pytest.approx(asdict(RATES))


def test_metrics_are_read_with_every_second_of_the_step(tmp_path):
    lines = ({"step": 0, "accuracy": 0.1}, METRICS | {"step": 1, "seconds_train": 99.0}, METRICS)
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (step,) = read(tmp_path / "metrics.jsonl")
    assert step.work == SHORT
    assert step.seconds == Seconds(3.0, pytest.approx(0.3), 17.0, 2.0, pytest.approx(0.2))
    assert step.seconds.total == pytest.approx(22.5)


def test_runs_of_ones_own_are_fitted_and_predicted(tmp_path):
    (tmp_path / "mine.jsonl").write_text(f"{json.dumps(METRICS)}\n")
    found = run(["check", "--fit", str(tmp_path / "mine.jsonl"), "--against", str(tmp_path / "mine.jsonl")])
    assert "not seen: mine, 1 steps" in found
    assert "total             22.50     22.50    +0%" in found


@pytest.mark.parametrize(("path", "error"), [(UNSEEN[0], 0.15), (UNSEEN[1], 0.35)], ids=["unseen", "more-nodes"])
def test_recorded_runs_are_predicted_that_it_was_not_fitted_to(path, error):
    rates, unseen = fitted(), read(path)
    predicted = mean([rates.seconds(step.work) for step in unseen])
    seen = mean([step.seconds for step in unseen])
    assert predicted.total == pytest.approx(seen.total, rel=error)
    assert predicted.generate == pytest.approx(seen.generate, rel=0.35)
    assert predicted.train == pytest.approx(seen.train, rel=0.35)


def test_no_run_is_both_fitted_and_predicted():
    works = [step.work for path in (*FITTED, *UNSEEN) for step in read(path)]
    assert len(set(works)) == len(works) == 11
