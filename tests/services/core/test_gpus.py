"""GPUs that a node should have and torch does not see end every program that would compute on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from services.core import gpus
from services.core.errors import ConfigurationError
from services.embedded_engine.compute.loading import load
from services.embedded_engine.settings import EngineSettings
from services.evaluation_head.settings import HeadSettings
from services.evaluation_head.torch_policy import TorchPolicy
from services.reward_server.reward_model import RewardModel


@pytest.mark.parametrize(
    ("build", "driver", "visible", "remedy"),
    [
        (None, "580.65.06", None, "torch built for processors only.*install a torch that is built for CUDA"),
        ("13.0", "550.54.14", None, r"driver 550.54.14, torch built for CUDA 13.0.*whose driver is new enough"),
        ("13.0", None, None, "driver not found.*LD_LIBRARY_PATH=/usr/local/nvidia/lib64"),
        ("13.0", "580.65.06", "0", "unset CUDA_VISIBLE_DEVICES, which is '0'"),
    ],
)
def test_missing_gpus_are_told_with_driver_build_and_remedy(
    monkeypatch: pytest.MonkeyPatch, build: str | None, driver: str | None, visible: str | None, remedy: str
) -> None:
    monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", "2")
    monkeypatch.setattr(gpus, "driver_version", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigurationError, match=f"is 2, but torch sees 1 CUDA devices.*{remedy}"):
        gpus.check_cuda(1, build)
    gpus.check_cuda(2, build)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:17:33 UTC 2025",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)",
    ],
)
def test_the_drivers_version_is_read_from_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str) -> None:
    (tmp_path / "version").write_text(line + "\nGCC version:  gcc version 12.3.0\n")
    monkeypatch.setattr(gpus, "DRIVER_FILE", tmp_path / "version")
    assert gpus.driver_version() == "580.65.06"


@pytest.mark.parametrize(
    "start",
    [
        lambda: load(EngineSettings.load(model_name="no/model")),
        lambda: TorchPolicy("policy", Path("no-file"), HeadSettings.load()),
        lambda: RewardModel("no/model", max_tokens=8),
    ],
    ids=["embedded engine", "evaluation head", "reward model"],
)
def test_no_program_computes_on_the_processor_of_a_node_with_gpus(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[], object]
) -> None:
    monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", "64")
    with pytest.raises(ConfigurationError, match="SKYPILOT_NUM_GPUS_PER_NODE is 64, but torch sees"):
        start()


def test_a_node_of_a_cluster_says_how_many_gpus_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", "two")
    with pytest.raises(ConfigurationError, match="is 'two'; allowed is a whole number"):
        gpus.promised()
