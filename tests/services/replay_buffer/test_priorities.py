from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.replay_buffer.store import PriorityIndex

priority = st.floats(0, 1e12, allow_nan=False)


def index_of(priorities: list[float], versions: list[int] | None = None) -> PriorityIndex:
    """Records of sequence numbers 0, 1, ... at positions 1, 2, ..."""
    index = PriorityIndex()
    for i, value in enumerate(priorities):
        assert index.add(i, 0 if versions is None else versions[i], value) == i + 1
    return index


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def drawn(index: PriorityIndex, count: int, seed: int = 0, exponent: float = 1.0) -> list[int]:
    return [draw.sequence for draw in index.draw(count, rng(seed), exponent=exponent)]


def test_the_chance_of_a_record_to_be_in_a_draw_is_exactly_its_share_up_to_1() -> None:
    index = index_of([1.0, 2.0, 3.0, 14.0, 9.0], [1, 1, 1, 1, 0])
    random, draws = rng(2), 5_000
    counts = np.zeros(4)
    # Twice 14 in 20 is more than 1, so the others share the second place.
    chances = [1 / 6, 2 / 6, 3 / 6, 1.0]
    for _ in range(draws):
        for draw in index.draw(2, random, exponent=1.0, least_version=1):
            counts[draw.sequence] += 1
            assert draw.probability == pytest.approx(chances[draw.sequence] / 2)
    for count, chance in zip(counts, chances, strict=True):
        assert count / draws == pytest.approx(chance, abs=4 * np.sqrt(chance / draws))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_expected_gradient_of_corrected_draws_is_that_of_uniform_draws(count: int) -> None:
    gradients, priorities = np.array([0.63, 0.31, 0.06] * 4), [0.16, 0.68, 0.16] * 4
    index, random = index_of(priorities), rng(3)
    found = {d.sequence: d for _ in range(300) for d in index.draw(count, random, exponent=1.0, correction=1.0)}
    assert len(found) == len(priorities)
    expectation = sum(d.probability * d.weight * gradients[sequence] for sequence, d in found.items())
    assert expectation == pytest.approx(gradients.mean())


@given(st.lists(priority, max_size=40), st.integers(1, 50), st.floats(0, 10))
def test_only_records_that_have_weight_are_drawn_each_once(values: list[float], count: int, exponent: float) -> None:
    draws = index_of(values).draw(count, rng(), exponent=exponent)
    weighty = np.flatnonzero(np.array(values) ** exponent)
    assert len(draws) == len({draw.sequence for draw in draws}) == min(count, len(weighty))
    assert {draw.sequence for draw in draws} <= set(weighty.tolist())
    assert all(0 <= draw.probability <= 1 and draw.weight == pytest.approx(1) for draw in draws)


def test_excluded_and_old_records_are_not_drawn_and_do_not_count() -> None:
    index = index_of([1.0] * 6, [0, 1, 2, 3, 4, 5])
    assert {d.sequence for d in index.draw(9, rng(), exponent=1.0, exclude=[6])} == {0, 1, 2, 3, 4}
    draws = index.draw(9, rng(), exponent=1.0, least_version=3, exclude=[6])
    assert {d.sequence for d in draws} == {3, 4}
    assert all(d.probability == 0.5 for d in draws)
    assert index.remove_oldest(4) == [0, 1, 2, 3]
    assert (sorted(drawn(index, 9)), len(index)) == ([4, 5], 2)


def test_the_same_contents_and_seed_give_the_same_draws_after_other_changes() -> None:
    values = [float(i % 7 + 1) for i in range(100)]
    index = index_of(values)
    before = drawn(index, 20, 5, 0.7)
    index.set_priority(41, 50.0)
    drawn(index, 10, 6, 0.7)
    index.set_priority(41, 40 % 7 + 1)
    assert drawn(index, 20, 5, 0.7) == before
    # Positions may have gaps.
    reloaded = PriorityIndex([(3 * i, i, 0, 0, value) for i, value in enumerate(values)])
    assert drawn(reloaded, 20, 5, 0.7) == before
