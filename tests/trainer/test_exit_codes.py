"""What the trainer's exit code tells SkyPilot: 33 for what a restart may cure, 78 for what would fail alike."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts.local import spec
from scripts.local.nodes import allocate
from services.errors import EXIT_CONFIGURATION, EXIT_RECOVERABLE

ROOT = Path(__file__).parents[2]
SECONDS = 200


def run_trainer(directory: Path, num_nodes: int, settings: Mapping[str, str]) -> list[tuple[int, str]]:
    """Exit code and output of every node of a trainer whose services are nowhere."""
    group = spec.load(ROOT / "jobgroup.yaml", spec.Overrides(num_nodes={"ppo-trainer": num_nodes}))
    with allocate(group) as addresses:
        environment = os.environ | {
            "SHARED_DIR": str(directory),
            "RUN_ID": "test",
            "SERVICE_DEADLINE_SECONDS": "1",
            "JOBGROUP_ENDPOINTS": addresses.variable,
            "SKYPILOT_NODE_IPS": "\n".join(addresses.hosts["ppo-trainer"]),
            "SKYPILOT_NUM_NODES": str(num_nodes),
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
            "OMP_NUM_THREADS": "1",
            **settings,
        }
        nodes = [
            subprocess.Popen(
                [sys.executable, "-m", "trainer"],
                cwd=ROOT,
                env=environment | {"SKYPILOT_NODE_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(num_nodes)
        ]
        try:
            outputs = [node.communicate(timeout=SECONDS)[0] for node in nodes]
        finally:
            for node in nodes:
                node.kill()
        return [(node.returncode, output) for node, output in zip(nodes, outputs, strict=True)]


@pytest.mark.parametrize("num_nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_service_that_stays_away_is_recoverable(tiny_model, tmp_path, num_nodes):
    ended = run_trainer(tmp_path, num_nodes, {"MODEL_NAME": str(tiny_model)})
    assert [code for code, _ in ended] == [EXIT_RECOVERABLE] * num_nodes, ended
    assert "is not healthy after 1 s" in ended[0][1]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"LEARNING_RATE": "-1"}, "LEARNING_RATE"),
        pytest.param({"PUBLISH_TRANSPORT": "carrier-pigeon"}, "PUBLISH_TRANSPORT", marks=pytest.mark.slow),
        pytest.param({"BATCH_SIZE": "2", "UPDATES_PER_BATCH": "3"}, "UPDATES_PER_BATCH", marks=pytest.mark.slow),
        pytest.param({"MODEL_NAME": "no/such/directory"}, "no/such/directory", marks=pytest.mark.slow),
    ],
)
def test_what_is_wrongly_configured_is_not(tiny_model, tmp_path, settings, said):
    # The last is found by the ranks, the others before there are any.
    num_nodes = 2 if "MODEL_NAME" in settings else 1
    ended = run_trainer(tmp_path, num_nodes, {"MODEL_NAME": str(tiny_model), "HF_HUB_OFFLINE": "1"} | settings)
    assert [code for code, _ in ended] == [EXIT_CONFIGURATION] * num_nodes, ended
    assert any(line.startswith("error: ") and said in line for line in ended[0][1].splitlines()), ended
