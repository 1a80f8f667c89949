"""A model's directory is whole or not there."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from trainer.model.saving import DiskFullError, write_whole


def test_a_directory_is_replaced_when_the_new_one_is_whole(tmp_path: Path) -> None:
    model = tmp_path / "model"
    for text in ("old", "new"):

        def write(hidden: Path, text: str = text) -> None:
            (hidden / text).touch()
            assert [path.name for path in tmp_path.glob("model/*")] == ([] if text == "old" else ["old"])

        write_whole(model, write)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["model", "model/new"]


def test_nothing_stays_of_a_directory_that_the_disk_had_no_room_for(tmp_path: Path) -> None:
    def write(hidden: Path) -> None:
        (hidden / "weights").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskFullError, match="the disk is full"):
        write_whole(tmp_path / "model", write)
    assert list(tmp_path.iterdir()) == []
