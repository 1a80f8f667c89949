"""The model of a step gives back the rates that made it, and predicts recorded runs that it was not fitted to."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling.__main__ import FITTED, UNSEEN, measured, run
from benchmarks.scaling.step import Measured, Rates, Run, Seconds, Work, fit, mean

RATES = Rates(0.05, 0.002, 0.002, 0.001, 0.8, 0.01, 2.0, 0.1)
METRICS = {
    "step": 2,
    "groups": 8.0,
    "completions": 64.0,
    "prompt_tokens": 336.0,
    "completion_tokens": 667.0,
    "length_max": 12.0,
    "zero_variance_groups": 1.0,
    "replay_groups": 2.0,
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
    groups=st.just(8.0),
    completions=st.floats(8, 512),
    prompt_tokens=st.floats(100, 5000),
    completion_tokens=st.floats(100, 50000),
    longest=st.floats(8, 512),
    trained_tokens=st.floats(100, 50000),
    updates=st.sampled_from([1.0, 2.0]),
)


def run_of(*work: Work) -> Run:
    return Run("made", "up", tuple(Measured(one, RATES.seconds(one)) for one in work))


SHORT = Work(8, 64, 336, 667, 12, 1272, 2)
LONG = Work(3, 12, 120, 1071, 96, 688, 1)


def test_fitting_gives_back_the_rates_of_what_they_made():
    assert asdict(fit([run_of(SHORT, LONG)])) == pytest.approx(asdict(RATES))


@given(st.lists(works, min_size=1, max_size=5))
def test_no_rate_is_negative_whatever_was_measured(found):
    assert all(rate >= 0 for rate in asdict(fit([run_of(*found)])).values())


def test_a_step_that_trained_on_nothing_says_nothing_about_training():
    idle = Measured(replace(LONG, trained_tokens=0.0, updates=0.0), replace(RATES.seconds(LONG), train=0.0))
    with_idle = replace(run_of(SHORT, LONG), steps=(*run_of(SHORT, LONG).steps, idle))
    assert asdict(fit([with_idle])) == pytest.approx(asdict(RATES))


def test_more_engines_share_tokens_and_not_iterations():
    one, four = RATES.seconds(LONG, 1).generate, RATES.seconds(LONG, 4).generate
    iterations = LONG.longest * RATES.decode_iteration
    assert four - iterations == pytest.approx((one - iterations) / 4)


def test_metrics_are_read_with_every_second_of_the_step():
    (step,) = Run.of_metrics("a", "b", [METRICS, METRICS]).steps
    assert step.work == Work(8, 64, 336, 667, 12, 1272, 2)
    assert step.seconds == Seconds(3.0, pytest.approx(0.3), 17.0, 2.0, pytest.approx(0.2))
    assert step.seconds.total == pytest.approx(22.5)


def test_a_step_without_variance_has_no_update():
    (step,) = Run.of_metrics("a", "b", [METRICS | {"zero_variance_groups": 8.0, "replay_groups": 0.0}], skip=0).steps
    assert step.work.updates == 0


def test_what_is_recorded_is_read_back(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(METRICS)}\n{json.dumps(METRICS)}\n")
    assert run(["record", str(tmp_path), str(tmp_path / "made.json"), "--about", "up"]).endswith("1 steps")
    assert Run.read(tmp_path / "made.json") == Run.of_metrics("made", "up", [METRICS, METRICS])


@pytest.mark.parametrize(("name", "error"), [("unseen", 0.15), ("more-nodes", 0.35)])
def test_recorded_runs_are_predicted_that_it_was_not_fitted_to(name, error):
    rates = fit(measured(FITTED))
    (unseen,) = measured([name])
    predicted = mean([rates.seconds(step.work) for step in unseen.steps])
    seen = mean([step.seconds for step in unseen.steps])
    assert predicted.total == pytest.approx(seen.total, rel=error)
    assert predicted.generate == pytest.approx(seen.generate, rel=0.35)
    assert predicted.train == pytest.approx(seen.train, rel=0.35)


def test_no_run_is_both_fitted_and_predicted():
    assert not set(FITTED) & set(UNSEEN)
    works = [[step.work for step in run.steps] for run in measured([*FITTED, *UNSEEN])]
    assert all(works.count(work) == 1 for work in works)
