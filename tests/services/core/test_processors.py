"""The threads that a process computes with: on a node of its own, on SkyPilot's, and where several processes share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.core import processors
from services.core.endpoints import NODE_RANK_VARIABLE
from services.core.processors import CORES_VARIABLE, THREADS_VARIABLE, threads
from services.embedded_engine.compute.loading import load
from services.embedded_engine.settings import EngineSettings
from services.evaluation_head.settings import HeadSettings
from services.evaluation_head.torch_policy import TorchPolicy
from tests.services.evaluation_head.policies import publish_lean


@pytest.fixture(autouse=True)
def machine_with_16_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CORES_VARIABLE, THREADS_VARIABLE, NODE_RANK_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def test_a_process_alone_takes_all_cores() -> None:
    assert threads() == 16


def test_processes_share_the_cores() -> None:
    assert [threads(processes=count) for count in (2, 5, 99)] == [8, 3, 1]


def test_two_processes_on_two_cores_take_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORES_VARIABLE, "2")
    assert threads(processes=2) == 1


@pytest.mark.parametrize(("promised", "expected"), [("4", 4), ("3.5", 3), ("0.5", 1), ("64", 16)])
def test_a_pod_has_the_cores_that_it_asked_for(monkeypatch: pytest.MonkeyPatch, promised: str, expected: int) -> None:
    monkeypatch.setenv(CORES_VARIABLE, promised)
    assert threads() == expected


def test_the_users_number_of_threads_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, "5")
    assert threads(processes=2) == 5
    monkeypatch.setenv(NODE_RANK_VARIABLE, "0")
    assert threads(processes=2) == 5
    monkeypatch.delenv(NODE_RANK_VARIABLE)
    monkeypatch.setenv(THREADS_VARIABLE, "1")
    assert threads() == 1


def test_the_one_thread_that_ray_sets_on_skypilots_nodes_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, "1")
    monkeypatch.setenv(NODE_RANK_VARIABLE, "0")
    monkeypatch.setenv(CORES_VARIABLE, "8")
    assert threads() == 8
    assert threads(processes=2) == 4


def test_torch_computes_with_more_threads_than_the_variable_said_at_its_import() -> None:
    """Ray's variable is there before torch is; what a process sets afterwards counts in all its threads."""
    program = """
import threading, torch
from services.core import processors
torch.set_num_threads(processors.threads(processes=2))
seen = [torch.get_num_threads()]
other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
other.start(); other.join()
print(*seen)
"""
    environment = os.environ | {THREADS_VARIABLE: "1", NODE_RANK_VARIABLE: "0"}
    program = "import os; os.sched_getaffinity = lambda _: set(range(6))\n" + program
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "3"]


def test_models_on_the_processor_take_these_threads(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    """Embedded engine and evaluation head take all cores."""
    publish_lean(tmp_path)
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    load(EngineSettings.load(model_name=str(tiny_model)))
    TorchPolicy("lean", tmp_path, HeadSettings())
    assert numbers == [16, 16]
