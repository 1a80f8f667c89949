"""The fixtures of many tests of the trainer: a tiny model on disk, and a process that is the only rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.tiny import FAMILIES, save_model
from trainer.model.ranks import Ranks, join_ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of the family qwen2."""
    return save_model(tmp_path_factory.mktemp("model"), FAMILIES["qwen2"])


@pytest.fixture
def alone() -> Iterator[Ranks]:
    """The ranks of a run of one process."""
    with join_ranks() as ranks:
        yield ranks
