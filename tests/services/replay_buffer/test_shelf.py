from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.replay_buffer.shelf import Entry, Shelf
from services.replay_buffer.sumtree import SumTree

weights = st.lists(st.floats(0, 1e12, allow_nan=False), min_size=1, max_size=40)


def shelf_of(priorities: list[float], versions: list[int] | None = None) -> Shelf:
    shelf = Shelf()
    for i, priority in enumerate(priorities):
        version = 0 if versions is None else versions[i]
        shelf.put(Entry(f"g{i}", i, i, shelf.next_slot(), version, 0.0), priority)
    return shelf


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


@given(weights, st.data())
def test_a_tree_depends_on_its_leaves_and_not_on_their_history(start: list[float], data: st.DataObject) -> None:
    tree = SumTree(np.array(start))
    leaves = list(start)
    for leaf, weight in data.draw(
        st.lists(st.tuples(st.integers(0, len(start) - 1), st.floats(0, 1e12, allow_nan=False)), max_size=30)
    ):
        tree[leaf] = weight
        leaves[leaf] = weight
    assert tree._nodes == SumTree(np.array(leaves))._nodes


@given(weights, st.floats(0, 1, exclude_max=True))
def test_a_point_finds_a_leaf_that_has_weight(values: list[float], share: float) -> None:
    tree = SumTree(np.array(values))
    if tree.total > 0:
        assert tree[tree.find(share * tree.total)] > 0


def test_a_point_finds_the_leaf_in_whose_share_it_lies() -> None:
    tree = SumTree(np.array([1.0, 0.0, 2.0, 3.0, 4.0]))
    assert tree.total == 10
    assert [tree.find(point) for point in (0, 0.99, 1, 2.99, 3, 5.99, 6, 9.99)] == [0, 0, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("masked", [False, True])
def test_empirical_frequencies_agree_with_the_priorities(exponent: float, masked: bool) -> None:
    """Pearson's chi-squared against eq. 1 of prioritised replay, for single draws."""
    priorities = [0.1, 0.5, 1.0, 2.0, 4.0, 0.3, 1.5, 0.0]
    # With a record too old to be drawn, the other way of drawing is taken.
    versions = [1] * len(priorities) + [0]
    shelf = shelf_of([*priorities, 9.0], versions) if masked else shelf_of(priorities)
    random, draws = rng(1), 20_000
    counts = np.zeros(len(priorities))
    for _ in range(draws):
        drawn = shelf.draw(1, random, exponent=exponent, least_version=1 if masked else 0)[0]
        counts[int(drawn.entry.id[1:])] += 1
    chances = np.array(priorities) ** exponent
    chances /= chances.sum()
    expected = draws * chances
    positive = expected > 0
    assert np.all(counts[~positive] == 0)
    statistic = float((((counts - expected) ** 2)[positive] / expected[positive]).sum())
    # The 99.99th percentile of chi-squared with 7 degrees of freedom; the seed is fixed.
    assert statistic < 29.9


@pytest.mark.parametrize("masked", [False, True])
def test_without_replacement_the_second_draw_follows_the_priorities_of_the_rest(masked: bool) -> None:
    priorities = [1.0, 2.0, 3.0, 4.0]
    shelf = shelf_of([*priorities, 9.0], [1, 1, 1, 1, 0]) if masked else shelf_of(priorities)
    random, draws = rng(2), 20_000
    counts = np.zeros((4, 4))
    for _ in range(draws):
        first, second = shelf.draw(2, random, exponent=1.0, least_version=1 if masked else 0)
        counts[int(first.entry.id[1:]), int(second.entry.id[1:])] += 1
    total = sum(priorities)
    for i, p in enumerate(priorities):
        for j, q in enumerate(priorities):
            chance = 0.0 if i == j else (p / total) * (q / (total - p))
            assert counts[i, j] / draws == pytest.approx(chance, abs=4 * np.sqrt(chance / draws) + 1e-9)


def test_a_batch_has_nobody_twice_and_the_whole_shelf_when_it_asks_for_more() -> None:
    shelf = shelf_of([float(i) for i in range(50)])
    drawn = [d.entry.id for d in shelf.draw(64, rng(), exponent=1.0)]
    assert sorted(drawn) == sorted(f"g{i}" for i in range(1, 50))
    assert len(shelf.draw(64, rng(), exponent=0.0)) == 50
    # The shelf is as it was.
    assert [d.entry.id for d in shelf.draw(64, rng(), exponent=1.0)] == drawn


def test_weights_correct_for_the_chances() -> None:
    shelf = shelf_of([1.0, 1.0, 2.0])
    draws = {d.entry.id: d for d in shelf.draw(3, rng(), exponent=1.0, correction=0.5)}
    assert {name: d.probability for name, d in draws.items()} == {"g0": 0.25, "g1": 0.25, "g2": 0.5}
    expected = {name: (3 * d.probability) ** -0.5 for name, d in draws.items()}
    highest = max(expected.values())
    assert {n: d.weight for n, d in draws.items()} == pytest.approx({n: w / highest for n, w in expected.items()})
    assert all(d.weight == 1.0 for d in shelf.draw(3, rng(), exponent=1.0))


def test_excluded_and_old_records_are_not_drawn_and_do_not_count() -> None:
    shelf = shelf_of([1.0] * 6, [0, 1, 2, 3, 4, 5])
    assert {d.entry.id for d in shelf.draw(9, rng(), exponent=1.0, exclude=["g5", "gone"])} == {
        f"g{i}" for i in range(5)
    }
    draws = shelf.draw(9, rng(), exponent=1.0, least_version=3, exclude=["g5"])
    assert {d.entry.id for d in draws} == {"g3", "g4"}
    assert all(d.probability == 0.5 for d in draws)
    newest = shelf.newest(2, least_version=1, exclude=["g4"])
    assert [d.entry.id for d in newest] == ["g5", "g3"]
    assert [e.id for e in shelf.older_than_version(2)] == ["g0", "g1"]


def test_the_same_contents_and_seed_give_the_same_draws_whatever_came_between() -> None:
    shelf = shelf_of([float(i % 7 + 1) for i in range(100)])
    before = [d.entry.id for d in shelf.draw(20, rng(5), exponent=0.7)]
    entry = shelf.get("g40")
    assert entry is not None
    shelf.set_priority(entry, 50.0)
    shelf.draw(10, rng(6), exponent=0.7)
    shelf.set_priority(entry, 40 % 7 + 1)
    extra = Entry("extra", 999, 999, shelf.next_slot(), 0, 0.0)
    shelf.put(extra, 3.0)
    shelf.remove(extra)
    assert [d.entry.id for d in shelf.draw(20, rng(5), exponent=0.7)] == before
    refilled = Shelf((e, shelf.priority(e)) for e in shelf)
    assert [d.entry.id for d in refilled.draw(20, rng(5), exponent=0.7)] == before


def test_freed_slots_are_used_again_lowest_first() -> None:
    shelf = shelf_of([1.0] * 2000)
    for name in ("g7", "g3", "g1500"):
        entry = shelf.get(name)
        assert entry is not None
        shelf.remove(entry)
    slots = []
    for i in range(4):
        slots.append(shelf.next_slot())
        shelf.put(Entry(f"new{i}", 5000 + i, 5000 + i, slots[-1], 0, 0.0), 1.0)
    assert slots == [3, 7, 1500, 2000]
    assert shelf.highest_priority() == 1.0
    assert Shelf().highest_priority() == 1.0


def test_drawing_does_not_slow_down_with_the_number_of_records() -> None:
    """Sixty-four of 100,000 in far less than one pass over them would take."""
    small, large = shelf_of([1.0] * 1_000), shelf_of([1.0] * 100_000)
    seconds = []
    for shelf in (small, large):
        shelf.draw(64, rng(), exponent=1.0)
        started = time.process_time()
        for seed in range(20):
            shelf.draw(64, rng(seed), exponent=1.0)
        seconds.append(time.process_time() - started)
    assert seconds[1] < 10 * seconds[0]
