"""The trainer sets torch's allocator before CUDA starts, unless the user has set it under either of its names."""

from __future__ import annotations

import os

import pytest

from trainer.__main__ import set_allocator

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({NAMES[0]: "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({NAMES[1]: "max_split_size_mb:64"}, None),
    ],
    ids=["unset", "new name", "former name"],
)
def test_segments_are_expandable_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    set_allocator()
    assert os.environ.get(NAMES[0]) == expected
