"""The queue, the admission and the store of a run of several sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.protocol.groups import Group
from services.protocol.replay import AcknowledgeRequest, AdmissionRequest
from services.replay_buffer.fresh_queue import Admission, Asking


def of(made: Group, source: str) -> Group:
    return made.model_copy(update={"prompt": made.prompt.model_copy(update={"source": source})})


def test_a_lease_takes_groups_of_its_source_alone_and_leaves_the_stale_ones_of_others(
    buffer: Callable[..., Any], group: Callable[..., Group]
) -> None:
    parts = buffer()
    parts.queue.enqueue([of(group("a1", version=1), "a"), of(group("b1", version=1), "b")], None)
    parts.queue.enqueue([of(group("b2", version=3), "b"), of(group("a2", version=3), "a")], None)
    assert parts.lease(4, source="b", min_policy_version=2)[1] == ["b2"]
    assert parts.waiting() == ["a1", "a2"]
    assert (parts.queue.counts("a"), parts.queue.counts("b"), parts.queue.counts()) == ((2, 0), (0, 1), (2, 1))
    assert parts.lease(4)[1] == ["a1", "a2"], "without a source any group will do"


def test_a_draw_of_a_source_is_by_its_priorities_alone_also_after_a_restart_and_a_snapshot(
    buffer: Callable[..., Any], group: Callable[..., Group]
) -> None:
    parts = buffer()
    parts.store.add([of(group(f"a{n}"), "a") for n in range(4)], [100.0] * 4)
    parts.store.add([of(group(f"b{n}"), "b") for n in range(3)], [0.25, 0.0, 0.25])
    parts.store.add([of(group("b3"), "b")], None)
    assert parts.stored()["b3"] == 0.25, "a new group has the highest priority of its source"
    drawn = parts.sample(3, source="b", seed=1)
    assert sorted(drawn) == ["b0", "b2", "b3"], "b1 has no priority"
    parts.store.save("here")
    again = buffer()
    assert again.sample(3, source="b", seed=1) == drawn
    again.store.restore("here")
    assert again.sample(3, source="b", seed=1) == drawn
    assert again.sample(3, source="c") == []


def ask(admission: Admission, source: str, in_flight: int = 0, bound: int = 4, batch: int = 2) -> Asking:
    return admission.ask(
        AdmissionRequest(
            collector=f"collector-0-{source}",
            in_flight=in_flight,
            most=8,
            batch_size=batch,
            max_staleness=9,
            bound=bound,
            source=source,
            wait_seconds=5,
        )
    )


def test_a_source_s_groups_take_no_place_of_another_s(clock: Any) -> None:
    admission = Admission(clock=clock)
    ask(admission, "slow", in_flight=4)
    fast = ask(admission, "fast")
    assert admission.awaited == {"slow", "fast"}
    admission.admit(4, 0, "slow")
    admission.admit(0, 0, "fast")
    assert fast.places == 4
    assert admission.awaited == {"slow"}, "its groups fill its own places"
    assert admission.in_flight() == {"collector-0-slow": 4, "collector-0-fast": 4}
    admission.finish("collector-0-fast", 4)
    full = ask(admission, "fast")
    admission.admit(4, 0, "fast")
    assert full.places == 0, "what waits for the trainer fills the places of a fast source"


def test_a_group_keeps_its_source_on_its_way_from_the_queue_into_the_store(
    buffer: Callable[..., Any], group: Callable[..., Group]
) -> None:
    parts = buffer()
    parts.queue.enqueue([of(group("a1"), "a"), of(group("b1"), "b")], None)
    lease, _ = parts.lease(2)
    parts.queue.acknowledge(AcknowledgeRequest(lease_id=lease))
    assert (parts.sample(2, source="a"), parts.sample(2, source="b")) == (["a1"], ["b1"])
    assert sorted(buffer().sample(2)) == ["a1", "b1"]
