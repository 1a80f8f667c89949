"""The queue of fresh groups, and the number of prompts that collectors may have in flight."""

from __future__ import annotations

from typing import Any

import pytest

from services.http.problems import ProblemError
from services.protocol.replay import AcknowledgeRequest, AdmissionRequest, LeaseRequest
from services.replay_buffer import fresh_queue
from services.replay_buffer.fresh_queue import REJOIN_SECONDS, SILENT_SECONDS, Admission, Asking


def acknowledge(parts: Any, lease_id: str, keep: bool = True) -> tuple[int, int]:
    reply = parts.queue.acknowledge(AcknowledgeRequest(lease_id=lease_id, keep=keep))
    return reply.acknowledged, reply.lost


def test_first_in_first_out_and_each_once(buffer: Any, group: Any) -> None:
    parts = buffer()
    parts.queue.enqueue([group(f"g{i}") for i in range(5)], None)
    first, names = parts.lease(2)
    assert names == ["g0", "g1"]
    second, names = parts.lease(2)
    assert names == ["g2", "g3"]
    assert acknowledge(parts, first) == (2, 0)
    assert acknowledge(parts, first) == (0, 0)
    assert acknowledge(parts, second, keep=False) == (2, 0)
    assert list(parts.stored()) == ["g0", "g1"]
    assert parts.waiting() == ["g4"]
    assert parts.lease(9)[1] == ["g4"]
    assert parts.lease(9) == (None, [])


def test_a_lease_that_runs_out_returns_its_groups_to_their_places(buffer: Any, group: Any, clock: Any) -> None:
    parts = buffer()
    parts.queue.enqueue([group(f"g{i}") for i in range(4)], None)
    parts.lease(1, lease_seconds=10)
    parts.lease(1, lease_seconds=100)
    clock.now += 11
    assert parts.lease(1, lease_seconds=200)[1] == ["g0"]
    clock.now += 90
    assert parts.lease(9)[1] == ["g1", "g2", "g3"]
    assert parts.store.counts["leases_expired"] == 2


def test_a_consumer_that_starts_again_gets_what_its_killed_process_had_leased(buffer: Any, group: Any) -> None:
    parts = buffer()
    parts.queue.enqueue([group(f"g{i}") for i in range(4)], None)
    parts.lease(2, request_id="killed")
    other, _ = parts.lease(1, consumer="another")
    lease, names = parts.lease(2, request_id="first", starts=True)
    assert names == ["g0", "g1"]
    assert parts.lease(2, request_id="first", starts=True) == (lease, names), "a repeated request ends not its own"
    assert acknowledge(parts, other) == (1, 0)
    assert parts.waiting() == ["g3"]


def test_a_late_acknowledgement_counts_for_what_nobody_else_has_taken(buffer: Any, group: Any, clock: Any) -> None:
    parts = buffer()
    parts.queue.enqueue([group(f"g{i}") for i in range(3)], None)
    slow, _ = parts.lease(3, lease_seconds=10)
    clock.now += 11
    other, names = parts.lease(1)
    assert names == ["g0"]
    assert acknowledge(parts, slow) == (2, 1)
    assert acknowledge(parts, other) == (1, 0)
    assert sorted(parts.stored()) == ["g0", "g1", "g2"]
    assert parts.queue.counts() == (0, 0)


def test_too_old_groups_are_dropped_and_counted(buffer: Any, group: Any) -> None:
    parts = buffer()
    parts.queue.enqueue([group(f"g{i}", version=i) for i in range(6)], None)
    reply = parts.queue.lease(LeaseRequest(max_groups=2, min_policy_version=3), take_fewer=True)
    assert b'"dropped_stale":3' in reply
    assert parts.waiting() == ["g5"]
    assert parts.store.counts["dropped_stale"] == 3
    # Dropped is dropped: the same group does not come in again.
    assert parts.queue.enqueue([group("g1")], None).duplicates == 1


def test_leases_survive_a_restart_so_that_nothing_is_handed_out_twice(buffer: Any, group: Any, clock: Any) -> None:
    parts = buffer()
    parts.queue.enqueue([group(f"g{i}", version=i) for i in range(4)], [float(i) for i in range(4)])
    lease_id, _ = parts.lease(2, lease_seconds=50)
    parts = buffer()
    assert parts.waiting() == ["g2", "g3"]
    assert parts.queue.counts() == (2, 2)
    assert acknowledge(parts, lease_id) == (2, 0)
    assert parts.stored() == {"g0": 0.0, "g1": 1.0}
    lease_id, _ = parts.lease(1, lease_seconds=50)
    clock.now += 60
    parts = buffer()
    assert parts.lease(9)[1] == ["g2", "g3"]


def test_a_full_queue_refuses_and_says_when_to_come_again(
    buffer: Any, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh_queue, "QUEUE_CAPACITY", 3)
    parts = buffer()
    parts.queue.enqueue([group("a"), group("b")], None)
    with pytest.raises(ProblemError, match="capacity of 3") as refusal:
        parts.queue.enqueue([group("c"), group("d")], None)
    assert (refusal.value.status_code, refusal.value.headers) == (429, {"Retry-After": "1"})
    assert parts.waiting() == ["a", "b"]
    lease_id, _ = parts.lease(2)
    acknowledge(parts, lease_id)
    assert parts.queue.enqueue([group("c"), group("d")], None).added == 2


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


def test_after_a_restart_all_collectors_are_heard_before_one_is_admitted(clock: Any) -> None:
    admission = Admission(is_restart=True, clock=clock)
    first = ask(admission, 0)
    admission.admit(waiting=0, leased=0)
    assert first.places == 0
    clock.now += REJOIN_SECONDS
    ask(admission, 1, in_flight=BOUND - 1)
    admission.admit(waiting=0, leased=0)
    assert first.places == 1, "the other one has the rest in flight"
