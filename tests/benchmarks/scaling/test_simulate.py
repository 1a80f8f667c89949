"""The simulated collector and learner keep to the rules of the real ones."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling.plan import MAX_STALENESS
from benchmarks.scaling.simulate import Pipeline, flow
from trainer.config import TrainerSettings

EVEN = Pipeline(batch=8, concurrency=8, max_staleness=4, group_seconds=30.0, spread=0.2, step_seconds=30.0)

pipelines = st.builds(
    Pipeline,
    batch=st.integers(1, 16),
    concurrency=st.integers(1, 64),
    max_staleness=st.integers(0, 6),
    group_seconds=st.floats(1, 100),
    spread=st.floats(0, 0.5),
    step_seconds=st.floats(1, 100),
)


@given(pipelines)
def test_nothing_stale_is_trained_on_and_nobody_is_faster_than_their_work(pipeline):
    found = flow(pipeline, steps=20)
    assert found.stalest <= pipeline.max_staleness
    assert found.step_seconds >= pipeline.step_seconds * (1 - 1e-9)
    assert 0 <= found.idle < 1


def test_a_slow_collector_is_what_the_learner_waits_for():
    found = flow(replace(EVEN, step_seconds=5.0))
    assert found.step_seconds == pytest.approx(30, rel=0.05)
    assert found.idle == pytest.approx(25 / 30, rel=0.05)


def test_a_slow_learner_never_waits_and_trains_on_older_groups():
    found, quick = flow(replace(EVEN, step_seconds=200.0)), flow(replace(EVEN, step_seconds=5.0))
    assert found.step_seconds == pytest.approx(200)
    assert found.idle == 0
    assert quick.staleness < found.staleness <= EVEN.max_staleness


def test_more_prompts_in_flight_are_more_groups_of_older_versions():
    one, two = flow(replace(EVEN, step_seconds=5.0)), flow(replace(EVEN, step_seconds=5.0, concurrency=16))
    assert two.step_seconds == pytest.approx(one.step_seconds / 2, rel=0.05)
    assert two.staleness > one.staleness


def test_without_staleness_a_step_is_the_sum():
    found = flow(replace(EVEN, max_staleness=0, spread=0.0))
    assert found.step_seconds == pytest.approx(EVEN.group_seconds + EVEN.step_seconds)
    assert found.staleness == 0


def test_the_plans_bound_is_the_settings_default():
    assert TrainerSettings.model_fields["max_staleness"].default == MAX_STALENESS
