"""What tests of several parts share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.models import made_once

ROOT = Path(__file__).parents[1]

# Models here are so small that a second thread only waits for the first. Before torch is imported; processes that tests
# start inherit it. A model that is not there is an error at once, not a time-out.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class _ByFile(LoadFileScheduling):
    """Tests of a file run in one process, for the sake of what they share; those of the cluster share runs, too."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/cluster" if nodeid.startswith("tests/cluster/") else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """Which process runs which tests."""
    return _ByFile(config, log)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A directory with the tiny model. Not to be written to."""
    return made_once("tiny-model", [ROOT / "scripts/tiny_model.py"], "scripts.tiny_model")
