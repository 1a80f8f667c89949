from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.http.problems import ProblemError
from services.protocol.replay import AcknowledgeRequest


def picture(parts: Any) -> tuple[Any, ...]:
    """All that a client could tell: contents, priorities, order, queue, and what seeds draw."""
    return (
        list(parts.stored().items()),
        parts.waiting(),
        [parts.sample(5, seed=seed) for seed in range(3)],
        parts.store.groups.newest_version(),
        [parts.group(name) for name in [*parts.stored(), *parts.waiting()]],
    )


def test_a_run_that_goes_on_from_a_snapshot_is_the_run_that_went_on_without(buffer: Any, group: Any) -> None:
    """The same adds, draws, leases and priorities after a restore give the same answers."""

    def go_on(parts: Any) -> list[Any]:
        seen: list[Any] = []
        for step in range(12):
            parts.store.add([group(f"s{step}-{i}", version=step + 10) for i in range(3)], [step + 1.0] * 3)
            drawn = parts.sample(4, seed=step, exponent=0.7)
            seen += [drawn, parts.sample(2, exponent=0.0, seed=step)]
            parts.store.update_priorities({name: 0.5 + len(name) for name in drawn})
            parts.queue.enqueue([group(f"f{step}", version=step + 10)], None)
            lease_id, names = parts.lease(2)
            seen.append(names)
            parts.queue.acknowledge(AcknowledgeRequest(lease_id=lease_id, keep=step % 2 == 0))
        return [*seen, picture(parts)]

    options = {"capacity": 12}
    parts = buffer(**options)
    parts.store.add([group(f"g{i}", version=i) for i in range(12)], [float(i + 1) for i in range(12)])
    parts.store.save("checkpoint")
    undisturbed = go_on(parts)
    parts.store.restore("checkpoint")
    assert go_on(parts) == undisturbed
    parts = buffer(**options)
    parts.store.restore("checkpoint")
    assert go_on(parts) == undisturbed


def test_after_a_restore_groups_added_since_can_be_added_again_and_earlier_ones_not(buffer: Any, group: Any) -> None:
    parts = buffer(capacity=2)
    parts.store.add([group("gone"), group("a"), group("b")], None)
    parts.store.save("s")
    parts.store.add([group("c")], None)
    parts.store.restore("s")
    reply = parts.store.add([group("c"), group("gone"), group("a")], None)
    assert (reply.added, reply.duplicates) == (1, 2)


def test_leases_end_with_a_restore(buffer: Any, group: Any) -> None:
    parts = buffer()
    parts.store.save("empty")
    parts.queue.enqueue([group("a")], None)
    lease_id, _ = parts.lease(1)
    parts.store.restore("empty")
    assert parts.queue.acknowledge(AcknowledgeRequest(lease_id=lease_id)).acknowledged == 0
    assert parts.stored() == {}
    assert parts.queue.enqueue([group("a")], None).added == 1


def test_an_unknown_label_is_refused_and_the_known_ones_told(buffer: Any) -> None:
    parts = buffer()
    parts.store.save("step-10")
    with pytest.raises(ProblemError, match=r"'step-11'.*step-10") as refusal:
        parts.store.restore("step-11")
    assert refusal.value.status_code == 404


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 30)),
        st.tuples(st.just("enqueue"), st.integers(0, 30)),
        st.tuples(st.just("take"), st.booleans()),
        st.tuples(st.just("priority"), st.integers(0, 30)),
        st.tuples(st.just("save"), st.sampled_from("ab")),
        st.tuples(st.just("restore"), st.sampled_from("ab")),
        st.tuples(st.just("drop"), st.sampled_from("ab")),
        st.tuples(st.just("reopen"), st.none()),
    ),
    max_size=25,
)


@given(operations)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_leaves_snapshots_exact_and_nothing_behind(
    buffer: Any, group: Any, tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, Any]]
) -> None:
    directory = tmp_path_factory.mktemp("history")
    options: dict[str, Any] = {"capacity": 5}
    parts = buffer(directory, **options)
    pictures: dict[str, Any] = {}
    for operation, argument in history:
        match operation:
            case "add":
                parts.store.add([group(f"g{argument}", version=argument)], None)
            case "enqueue":
                parts.queue.enqueue([group(f"g{argument}", version=argument)], None)
            case "take":
                lease_id, names = parts.lease(2)
                if names:
                    parts.queue.acknowledge(AcknowledgeRequest(lease_id=lease_id, keep=argument))
            case "priority":
                parts.store.update_priorities({f"g{argument}": argument + 0.5})
            case "save":
                parts.store.save(argument)
                pictures[argument] = picture(parts)
            case "restore" if argument in pictures:
                parts.store.restore(argument)
                assert picture(parts) == pictures[argument]
            case "drop":
                parts.store.drop(argument)
                pictures.pop(argument, None)
            case "reopen":
                before = picture(parts)
                parts = buffer(directory, **options)
                assert picture(parts) == before
    for label in list(pictures):
        parts.store.drop(label)
    assert parts.contents() == len(parts.stored()) + sum(parts.queue.counts())
