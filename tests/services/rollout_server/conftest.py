"""The two servers that the same tests run against."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.rollout_server.nodes import SGLANG_PYTHON, Nodes

ENGINES = ["embedded", pytest.param("sglang", marks=pytest.mark.sglang)]


def check_installed(engine: str) -> None:
    if engine == "sglang" and not SGLANG_PYTHON.exists():
        pytest.fail(f"{SGLANG_PYTHON} does not exist; `make test-sglang` installs it")


@pytest.fixture(scope="session", params=ENGINES)
def server(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes]:
    """One rollout node: a router in front of one engine that serves the tiny model."""
    check_installed(request.param)
    # A worker that a test leaves behind with an old version is not to be looked after.
    environment = {"ENGINE_STALE_SECONDS": "1000"}
    nodes = Nodes(tmp_path_factory.mktemp("server"), tiny_model, engine=request.param, environment=environment)
    try:
        yield nodes.start_all()
    finally:
        nodes.stop()
