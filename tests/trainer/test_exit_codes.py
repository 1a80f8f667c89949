"""The trainer's exit codes, by which SkyPilot restarts it: restarts after 33 are free, those after any other code are
counted, and after 78 a restart would fail in the same way."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import trainer.run
from local_runner import spec
from local_runner.nodes import allocate
from services.core import machine
from services.core.errors import EXIT_CONFIGURATION, EXIT_FAILED, EXIT_PEER_LOST, EXIT_RECOVERABLE, DependencyLostError
from tests.waiting import LIMIT_SECONDS
from trainer import __main__ as program
from trainer.model.ranks import PeerLostError

ROOT = Path(__file__).parents[2]


@contextmanager
def start_trainer(
    directory: Path, num_nodes: int, settings: Mapping[str, str]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a trainer whose services are nowhere on every node, and kill what still runs at the end."""
    group = spec.load(ROOT / "jobgroup.yaml", spec.Overrides(num_nodes={"ppo-trainer": num_nodes}))
    with allocate(group) as addresses:
        environment = os.environ | {
            "SHARED_DIR": str(directory),
            "RUN_ID": "test",
            "SERVICE_DEADLINE_SECONDS": "1",
            "ENGINE_START_SECONDS": "1",
            "JOBGROUP_ENDPOINTS": addresses.variable,
            "SKYPILOT_NODE_IPS": "\n".join(addresses.hosts["ppo-trainer"]),
            "SKYPILOT_NUM_NODES": str(num_nodes),
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
            "SKYPILOT_POD_CPU_CORE_LIMIT": "1",
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
            yield nodes
        finally:
            for node in nodes:
                node.kill()


@pytest.mark.slow
def test_a_service_that_never_comes_up_uses_up_restarts(tiny_model, tmp_path):
    with start_trainer(tmp_path, 1, {"MODEL_NAME": str(tiny_model)}) as [node]:
        output, _ = node.communicate(timeout=LIMIT_SECONDS)
    assert node.returncode == EXIT_FAILED, output
    assert any(line.startswith("error: ") and "after 2 s" in line for line in output.splitlines()), output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "variables", [{"SKYPILOT_NODE_IPS": "a\nb", "SKYPILOT_NUM_NODES": "2"}, {"RANK": "0"}], ids=str
)
def test_a_wrong_setting_ends_launcher_and_rank_with_a_line(monkeypatch, capfd, variables):
    for name, value in ({"LEARNING_RATE": "-1", "SKYPILOT_NODE_RANK": "0"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(program, "kill_stale_processes", lambda: None)
    monkeypatch.setattr(program, "launch_ranks", lambda *_, **__: pytest.fail("launched"))
    assert program.main() == EXIT_CONFIGURATION
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: LEARNING_RATE")


@pytest.mark.parametrize(
    ("ranks", "node"),
    [
        ({EXIT_PEER_LOST}, EXIT_PEER_LOST),
        ({EXIT_RECOVERABLE}, EXIT_RECOVERABLE),
        ({EXIT_RECOVERABLE, EXIT_PEER_LOST}, EXIT_RECOVERABLE),
        # What one rank met by itself may come back after every restart, whatever its end did to the others.
        ({EXIT_FAILED, EXIT_PEER_LOST}, EXIT_FAILED),
        ({EXIT_FAILED, EXIT_RECOVERABLE}, EXIT_FAILED),
        ({-9, EXIT_PEER_LOST}, 137),
        ({-9, EXIT_FAILED}, 137),
        ({EXIT_CONFIGURATION, EXIT_FAILED, EXIT_PEER_LOST, 137}, EXIT_CONFIGURATION),
    ],
)
def test_a_nodes_code_is_that_of_the_rank_that_failed_by_itself(ranks, node):
    assert program.node_code(ranks) == node


def test_the_ranks_of_a_node_share_its_cores(monkeypatch):
    numbers: list[int] = []

    def lose(*_: Any) -> None:
        raise DependencyLostError("gone")

    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(machine, "cores", lambda: 12)
    monkeypatch.setattr(trainer.run, "join_ranks", lose)
    monkeypatch.setattr(trainer.run.torch, "set_num_threads", numbers.append)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert program.main() == EXIT_RECOVERABLE
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert program.main() == EXIT_RECOVERABLE
    assert numbers == [3, 12]


def test_a_rank_that_lost_its_peers_lets_them_end_first(monkeypatch):
    pauses: list[float] = []

    def lose(*_: Any) -> None:
        raise PeerLostError("rank 1 of 2 lost the others")

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(trainer.run, "join_ranks", lose)
    monkeypatch.setattr(program.time, "sleep", pauses.append)
    assert program.main() == EXIT_PEER_LOST
    assert pauses == [program.PEER_LOST_SECONDS]


@pytest.mark.slow
def test_the_other_node_of_a_killed_rank_is_not_recoverable_for_free(tiny_model, tmp_path):
    settings = {"MODEL_NAME": str(tiny_model), "ENGINE_START_SECONDS": "600"}
    with start_trainer(tmp_path, 2, settings) as (first, second):
        assert first.stdout is not None
        assert any("policy loaded" in line for line in first.stdout)
        [rank] = psutil.Process(first.pid).children()
        rank.kill()
        killed = time.monotonic()
        assert first.wait(LIMIT_SECONDS) == 137
        assert second.wait(LIMIT_SECONDS) == EXIT_PEER_LOST
        assert time.monotonic() - killed >= program.PEER_LOST_SECONDS
        assert second.stdout is not None
        assert "error: rank 1 of 2 lost the others" in second.stdout.read()


class FullLog(io.TextIOBase):
    """A log on a full disk."""

    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_that_cannot_be_written_does_not_change_the_exit_code(monkeypatch):
    def lose(*_: Any) -> None:
        raise DependencyLostError("replay-buffer did not answer")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "stderr", FullLog())
    monkeypatch.setattr(trainer.run, "join_ranks", lose)
    assert program.main() == EXIT_RECOVERABLE
