"""A node whose engine confirms versions and keeps those of version 0: real processes of a whole job group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.core.errors import EXIT_CONFIGURATION
from tests.e2e.system import System

# The limit is for a hang; the run takes about half a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STALE = """
import os, sys
if "services.embedded_engine" in sys.orig_argv and os.environ.get("SKYPILOT_NODE_RANK") == "1":
    from services.embedded_engine.engine import Engine
    change = Engine.change_weights
    def keep(self, weights, version):
        return change(self, weights if version == "0" else self._scheduler.model.weights, version)
    Engine.change_weights = keep
"""


def test_a_stale_node_gets_the_version_again_and_ends_the_run(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STALE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    # Two nodes of the trainer share the policy's shards.
    run = System(tmp_path, tiny_model, EVAL_PROMPTS="0", BATCH_SIZE="4", MIN_WORKERS="2")
    assert run.wait() == EXIT_CONFIGURATION, run.text
    summary = run.summary()
    assert summary["status"] == "failed"
    refused = summary["workers_refused"]
    assert [each["confirmed"] for each in refused] == [refused[0]["confirmed"]] * len(refused)
    assert refused[0]["served"] == 0
    assert len({each["worker"] for each in refused}) == 1
    assert len(refused) == 2
    assert run.processes() == []
