"""The tests of this folder need hosts of their own."""

import pytest

from tests.cluster import network


@pytest.fixture(autouse=True, scope="session")
def hosts() -> None:
    """Skips where this machine cannot have several hosts."""
    if reason := network.why_not():
        pytest.skip(f"several hosts on one machine: {reason}")
