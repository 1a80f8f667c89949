"""The beginning and the end of a test process on the pretended device."""

from __future__ import annotations

import os
import sys

import pytest

IS_PRETENDED = "pretend_cuda" in os.environ.get("LD_PRELOAD", "")
EXIT_STATUS = pytest.StashKey[int]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests of this folder in any other process."""
    if not IS_PRETENDED:
        pytest.skip("needs the pretended CUDA device; run `make test-cuda`")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remember the exit status for ``pytest_unconfigure``."""
    session.config.stash[EXIT_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process at once, because threads of the pretended device cannot be joined."""
    if IS_PRETENDED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash.get(EXIT_STATUS, 1))
