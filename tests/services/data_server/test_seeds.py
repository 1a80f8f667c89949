from __future__ import annotations

from services.data_server import sources
from services.data_server.settings import DataSettings


def test_seeds_are_digits_and_held_out_ones_are_others() -> None:
    source = sources.load(DataSettings(dataset="seeds"))
    train, test = (
        {row.ground_truth for row in rows.take(list(range(len(rows))))} for rows in (source.train, source.test)
    )
    assert (len(train), len(test)) == (10_000, 1_000)
    assert all(seed.isdecimal() for seed in train | test)
    assert not train & test
    assert source.instruction is None
