"""Tests of services/core/files.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.core.files import atomic_write


@pytest.mark.parametrize("content", ["größer\n", "größer\n".encode()])
def test_a_file_is_replaced_whole(tmp_path: Path, content: bytes | str) -> None:
    path = tmp_path / "state.json"
    path.write_text("old and longer\n")
    atomic_write(path, content)
    assert path.read_text() == "größer\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    path.write_text("old")

    def fail(partial: Path, _content: bytes) -> int:
        partial.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
