from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.data_server.batches import EpochOrder, walk
from services.data_server.settings import Curriculum
from services.protocol.prompts import Cursor


def order(size: int, **options: object) -> EpochOrder:
    return EpochOrder(size, **{"seed": 0, "curriculum": Curriculum.OFF, **options})  # type: ignore[arg-type]


def test_every_epoch_is_a_permutation_of_its_own_and_the_same_for_the_same_seed() -> None:
    first = order(1000)
    orders = [first.of(epoch).tolist() for epoch in range(3)]
    assert all(sorted(places) == list(range(1000)) for places in orders)
    assert orders[0] != orders[1] != orders[2]
    assert [order(1000).of(epoch).tolist() for epoch in range(3)] == orders
    assert order(1000, seed=1).of(0).tolist() != orders[0]
    assert order(10, curriculum=Curriculum.SOURCE).of(5).tolist() == list(range(10))


@given(
    size=st.integers(1, 60),
    batch=st.integers(1, 17),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_from_any_cursor_each_unused_prompt_comes_once_before_the_epoch_ends(
    size: int, batch: int, epoch: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, size - 1))
    skip = data.draw(st.lists(st.integers(0, size - 1), max_size=size, unique=True))
    short = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    cursor = Cursor(epoch=epoch, position=position, skip=skip)
    places = order(size)
    seen: list[int] = []
    while cursor.epoch == epoch:
        prompts, cursor = walk(places, cursor, batch, lambda place: place in short)
        seen += [p for place, e, p in prompts if e == epoch]
        assert all(places.of(e)[p] == place for place, e, p in prompts)
        if not prompts:
            break
    expected = [p for p in range(position, size) if p not in skip and int(places.of(epoch)[p]) in short]
    assert seen == expected
