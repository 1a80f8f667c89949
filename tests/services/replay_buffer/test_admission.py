"""The number of prompts that collectors may have in flight, without HTTP and with a clock that stands still."""

from __future__ import annotations

from typing import Any

import pytest

from services.protocol.replay import AdmissionRequest
from services.replay_buffer.admission import REUNION_SECONDS, SILENT_SECONDS, Admission, Asking

BATCH, STALENESS = 4, 2
BOUND = BATCH * STALENESS


@pytest.fixture
def admission(clock: Any) -> Admission:
    return Admission(clock=clock)


def ask(admission: Admission, number: int, in_flight: int = 0, most: int = BATCH, staleness: int = STALENESS) -> Asking:
    return admission.ask(
        AdmissionRequest(
            collector=f"collector-{number}",
            in_flight=in_flight,
            most=most,
            batch_size=BATCH,
            max_staleness=staleness,
            wait_seconds=5,
        )
    )


def test_two_dozen_collectors_share_the_places_in_the_order_they_asked(admission: Admission) -> None:
    asked = [ask(admission, number) for number in range(24)]
    admission.admit(waiting=0, leased=0)
    assert [asking.places for asking in asked] == [1] * BOUND + [0] * (24 - BOUND)
    admission.finish("collector-3", 1)
    admission.admit(waiting=0, leased=1)
    assert asked[BOUND].places == 1, "it asked first of those that wait"
    assert sum(admission.in_flight().values()) == BOUND


def test_groups_that_wait_for_the_trainer_take_places_and_those_it_trains_on_do_not(admission: Admission) -> None:
    first = ask(admission, 0)
    admission.admit(waiting=BOUND - 1, leased=BATCH)
    assert first.places == 1
    second = ask(admission, 0, in_flight=1)
    admission.admit(waiting=BOUND - 1, leased=BATCH)
    assert second.places == 0
    admission.admit(waiting=BOUND - 1 - BATCH, leased=BATCH)
    assert second.places == BATCH


def test_without_staleness_a_batch_is_begun_when_the_last_one_has_been_trained_on(admission: Admission) -> None:
    asked = ask(admission, 0, staleness=0)
    admission.admit(waiting=0, leased=BATCH)
    assert asked.places == 0
    admission.admit(waiting=0, leased=0)
    assert asked.places == BATCH


def test_a_collector_takes_no_more_than_its_share_while_others_are_there(admission: Admission) -> None:
    ask(admission, 0)
    ask(admission, 1, most=0)
    admission.admit(waiting=0, leased=0)
    more = ask(admission, 0, in_flight=BATCH)
    admission.admit(waiting=0, leased=0)
    assert more.places == 0
    assert admission.in_flight() == {"collector-0": BATCH, "collector-1": 0}


def test_the_places_of_a_collector_that_fell_silent_go_to_the_others(admission: Admission, clock: Any) -> None:
    for number in (0, 1):
        ask(admission, number, in_flight=BATCH, most=0)
    clock.now += SILENT_SECONDS
    third = ask(admission, 1, in_flight=BATCH)
    admission.admit(waiting=0, leased=0)
    assert third.places == 0
    clock.now += 5
    admission.admit(waiting=0, leased=0)
    assert third.places == BATCH


def test_a_collector_that_asks_again_says_what_it_has_and_waits_once(admission: Admission) -> None:
    before = ask(admission, 0, in_flight=7)
    again = ask(admission, 0, in_flight=BOUND - 1)
    admission.admit(waiting=0, leased=0)
    assert (before.places, again.places) == (0, 1)


def test_after_a_restart_all_collectors_are_heard_before_one_is_admitted(clock: Any) -> None:
    admission = Admission(is_restart=True, clock=clock)
    first = ask(admission, 0)
    admission.admit(waiting=0, leased=0)
    assert first.places == 0
    clock.now += REUNION_SECONDS
    ask(admission, 1, in_flight=BOUND - 1)
    admission.admit(waiting=0, leased=0)
    assert first.places == 1, "the other one has the rest in flight"
