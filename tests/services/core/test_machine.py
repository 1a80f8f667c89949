"""The GPUs, cores and memory of a machine, and the type of numbers that engine and trainer choose on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from services.core import machine
from services.core.endpoints import NODE_RANK_VARIABLE
from services.core.errors import ConfigurationError
from services.core.machine import (
    CORES_VARIABLE,
    THREADS_VARIABLE,
    Compute,
    ComputeType,
    decide_compute,
    threads,
)
from services.embedded_engine.loading import load
from services.engines.settings import EngineSettings, RolloutSettings
from services.evaluation_head.settings import HeadSettings
from services.evaluation_head.torch_policy import TorchPolicy
from services.reward_server.reward_model import RewardModel
from tests.tolerance import BOTH_TYPES
from tests.waiting import LIMIT_SECONDS
from trainer.config import TrainerSettings
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks


@pytest.mark.parametrize(
    ("build", "driver", "visible", "said"),
    [
        (None, "580.65.06", None, "torch built for processors only"),
        ("13.0", None, "0", r"CUDA_VISIBLE_DEVICES 0, driver not found, torch built for CUDA 13.0"),
    ],
)
def test_missing_gpus_are_told_with_driver_and_build(
    monkeypatch: pytest.MonkeyPatch, build: str | None, driver: str | None, visible: str | None, said: str
) -> None:
    monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", "2")
    monkeypatch.setattr(machine, "driver_version", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigurationError, match=f"is 2, but torch sees 1 CUDA devices.*{said}"):
        machine.check_cuda(1, build)
    machine.check_cuda(2, build)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:17:33 UTC 2025",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)",
    ],
)
def test_the_drivers_version_is_read_from_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str) -> None:
    (tmp_path / "version").write_text(line + "\nGCC version:  gcc version 12.3.0\n")
    monkeypatch.setattr(machine, "DRIVER_FILE", tmp_path / "version")
    assert machine.driver_version() == "580.65.06"


@pytest.mark.parametrize(
    "start",
    [
        lambda: load(EngineSettings.load(model_name="no/model")),
        lambda: TorchPolicy("policy", Path("no-file"), HeadSettings.load()),
        lambda: RewardModel("no/model"),
    ],
    ids=["embedded engine", "evaluation head", "reward model"],
)
def test_no_program_computes_on_the_processor_of_a_node_with_gpus(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[], object]
) -> None:
    monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", "64")
    with pytest.raises(ConfigurationError, match="SKYPILOT_NUM_GPUS_PER_NODE is 64, but torch sees"):
        start()


@pytest.fixture
def machine_with_16_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CORES_VARIABLE, THREADS_VARIABLE, NODE_RANK_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


@pytest.mark.usefixtures("machine_with_16_cores")
@pytest.mark.parametrize(
    ("variables", "processes", "expected"),
    [
        ({}, 1, 16),
        ({}, 2, 8),
        ({}, 5, 3),
        ({}, 99, 1),
        ({CORES_VARIABLE: "2"}, 2, 1),
        # A pod has the cores that it asked for.
        ({CORES_VARIABLE: "4"}, 1, 4),
        ({CORES_VARIABLE: "3.5"}, 1, 3),
        ({CORES_VARIABLE: "0.5"}, 1, 1),
        ({CORES_VARIABLE: "64"}, 1, 16),
        # The user's number of threads wins, except for the one thread that Ray sets on SkyPilot's nodes.
        ({THREADS_VARIABLE: "5"}, 2, 5),
        ({THREADS_VARIABLE: "5", NODE_RANK_VARIABLE: "0"}, 2, 5),
        ({THREADS_VARIABLE: "1"}, 1, 1),
        ({THREADS_VARIABLE: "1", NODE_RANK_VARIABLE: "0", CORES_VARIABLE: "8"}, 1, 8),
        ({THREADS_VARIABLE: "1", NODE_RANK_VARIABLE: "0", CORES_VARIABLE: "8"}, 2, 4),
    ],
)
def test_processes_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], processes: int, expected: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert threads(processes=processes) == expected


needs_glibc = pytest.mark.skipif(sys.platform != "linux", reason="the C library is asked for this on Linux only")

MIB = 2**20
# Blocks that glibc would give back at once, below and above what is kept.
PROGRAM = """
import psutil
from services.core import machine

def resident():
    return psutil.Process().memory_info().rss

{before}
at_first = resident()
blocks = [bytearray(b"x" * {size}) for _ in range({count})]
filled = resident()
del blocks
freed = resident()
machine.release_memory()
print(filled - at_first, freed - at_first, resident() - at_first)
"""


def grown(before: str, size: int, count: int) -> tuple[int, int, int]:
    """Bytes by which a process has grown: with its blocks, when they are freed, and after ``release``."""
    code = PROGRAM.format(before=before, size=size, count=count)
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    filled, freed, released = map(int, output.split())
    return filled, freed, released


@needs_glibc
@pytest.mark.parametrize(
    ("before", "size", "is_kept"),
    [
        ("machine.keep_freed_memory()", 40 * MIB, True),
        ("machine.keep_freed_memory()", 80 * MIB, False),
        ("", 40 * MIB, False),
    ],
    ids=["kept", "large", "by default"],
)
def test_what_is_freed_is_kept_until_it_is_released_if_a_process_asked_for_that(
    before: str, size: int, is_kept: bool
) -> None:
    filled, freed, released = grown(before, size, 4)
    assert filled > 3.8 * size
    assert (freed > 3.8 * size) if is_kept else (freed < 0.5 * size)
    assert released < 0.5 * size


@pytest.mark.parametrize(
    ("setting", "node", "keeps"),
    [(True, 1, True), (False, 2**60, False), ("auto", 2**60, True), ("auto", 2**20, False)],
    ids=["true", "false", "auto on a large node", "auto on a node that is nearly full"],
)
def test_freed_memory_is_kept_where_a_process_is_small_beside_its_node(
    monkeypatch: pytest.MonkeyPatch, setting: machine.KeepMemory, node: int, keeps: bool
) -> None:
    monkeypatch.setattr(machine, "host_memory", lambda: node)
    assert machine.keeps_memory(setting) is keeps


@pytest.mark.parametrize(
    ("has_device", "library", "is_warned"),
    [(False, None, False), (True, None, True), (True, "libibverbs.so.1", False)],
    ids=["no InfiniBand", "InfiniBand without its library", "InfiniBand"],
)
def test_a_node_on_which_nccl_would_use_tcp_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_device: bool, library: str | None, is_warned: bool
) -> None:
    monkeypatch.setattr(machine, "INFINIBAND", tmp_path if has_device else tmp_path / "none")
    monkeypatch.setattr("ctypes.util.find_library", lambda name: library)
    caution = machine.network_caution()
    assert (caution is not None and "install libibverbs1" in caution) == is_warned


@pytest.mark.parametrize("is_mounted", [True, False])
def test_a_program_finds_the_driver_where_gke_mounts_it(tmp_path: Path, is_mounted: bool) -> None:
    if is_mounted:
        (tmp_path / "libcuda.so.1").touch()
    program = (
        "import os, sys; from pathlib import Path; from services.core import machine; "
        "machine.DRIVER_LIBRARIES = Path(sys.argv[1]); machine.use_mounted_driver(); "
        "print(os.getpid(), os.environ.get('LD_LIBRARY_PATH'), sys.argv[1:])"
    )
    environment = os.environ | {"LD_LIBRARY_PATH": "/opt/libraries"}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), "two words"], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        said, _ = process.communicate(timeout=LIMIT_SECONDS)
    paths = f"/opt/libraries:{tmp_path}" if is_mounted else "/opt/libraries"
    assert said.split(" ", 2) == [str(process.pid), paths, f"{[str(tmp_path), 'two words']}\n"]


def test_a_containers_limit_counts_where_it_is_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "CGROUP_FILES", (tmp_path / "another", limit))
    whole = machine.host_memory()
    limit.write_text("1000000\n")
    assert machine.host_memory() == 1000000
    limit.write_text("max\n")
    assert machine.host_memory() == whole > 1000000
    monkeypatch.setenv(machine.POD_MEMORY_VARIABLE, "2000000")
    assert machine.host_memory() == 2000000, "what a pod asked for, which the kernel does not limit it to"


WITH, WITHOUT = {"avx512_bf16": True}, {"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}


@pytest.mark.parametrize(
    ("wanted", "device", "has_instructions", "chosen", "reason"),
    [
        ("auto", "cpu", True, "bfloat16", "X=auto on a processor with bfloat16 instructions"),
        ("auto", "cpu", False, "float32", "X=auto on a processor without bfloat16 instructions"),
        ("auto", "cuda", False, "bfloat16", "X=auto on a GPU"),
        ("float32", "cuda", True, "float32", "X=float32"),
        ("bfloat16", "cpu", False, "bfloat16", "X=bfloat16"),
    ],
)
def test_auto_is_bfloat16_where_the_hardware_multiplies_it(
    wanted: str, device: str, has_instructions: bool, chosen: str, reason: str
) -> None:
    decided = decide_compute("X", ComputeType(wanted), device=device, multiplies_bfloat16=has_instructions, threads=3)
    assert decided == Compute(device, ComputeType(chosen), 3, reason)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU decides before the processor does")
@pytest.mark.parametrize("capabilities", [WITH, WITHOUT], ids=["with instructions", "without"])
@pytest.mark.parametrize("wanted", ["auto", *BOTH_TYPES])
def test_engine_and_trainer_compute_in_the_same_type_and_say_it_in_the_same_line(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, Any], wanted: str
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities)
    kind = ("bfloat16" if capabilities is WITH else "float32") if wanted == "auto" else wanted
    with structlog.testing.capture_logs() as lines:
        engine = load(RolloutSettings.load(model_name=str(tiny_model), engine_dtype=wanted))
        with join_ranks() as ranks:
            policy = load_policy(TrainerSettings.load(model_name=str(tiny_model), compute_type=wanted), ranks)
    assert engine.model.dtype == engine.model.weights.embedding.dtype == getattr(torch, kind)
    assert policy.compute is not None
    assert policy.compute.compute_type == kind
    engines, trainers = (line for line in lines if line["event"] == "computing")
    assert engines["reason"].startswith(f"ENGINE_DTYPE={wanted}")
    assert trainers.pop("reason") == engines.pop("reason").replace("ENGINE_DTYPE", "COMPUTE_TYPE")
    expected = {"device": "cpu", "compute_type": kind, "threads": torch.get_num_threads()}
    assert engines == trainers == {"event": "computing", "log_level": "info", **expected}
