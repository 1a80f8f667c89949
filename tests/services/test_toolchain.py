"""A GPU node that cannot compile kernels is refused, and an engine finds the tools of its own environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services.core import toolchain
from services.core.endpoints import Endpoint
from services.core.errors import EXIT_CONFIGURATION, ConfigurationError
from services.engines.engine import Engine
from services.engines.placement import EnginePlace
from services.engines.settings import RolloutSettings
from trainer.__main__ import ranks_per_node

ROOT = Path(__file__).parents[2]
TOOLS = ("gcc", "c++", "ninja", "nvcc")
Give = Callable[..., Path]


def program(path: Path, script: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Give:
    """Leave no tool on this machine; return a function that gives an environment's python, with tools of pip."""
    for name in ("CC", "CXX", "CUDA_HOME", "CUDA_PATH", "SGLANG_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(toolchain, "USUAL_HOME", tmp_path / "usr-local-cuda")

    def environment(*, has_toolkit: bool = False, has_headers: bool = True) -> Path:
        venv = tmp_path / "venv"
        include, packages = venv / "include" / "python3.12", venv / "site-packages"
        include.mkdir(parents=True)
        if has_headers:
            (include / "Python.h").touch()
        if has_toolkit:
            program(packages / "nvidia" / "cu13" / "bin" / "nvcc")
        return program(venv / "bin" / "python", f"echo {include}; echo {packages}")

    return environment


def found(tmp_path: Path, *names: str) -> None:
    for name in names:
        program(tmp_path / "bin" / name)


def remedies(python: Path | str = sys.executable, **options: bool) -> list[str]:
    return [remedy.split("`")[0].strip() for remedy in toolchain.missing_tools(str(python), **options).values()]


def test_a_bare_machine_is_told_the_package_of_each_missing_tool(bare: Give, tmp_path: Path) -> None:
    python = bare(has_headers=False)
    c, headers, ninja = (f"apt-get install {name}" for name in ("build-essential", "python3.12-dev", "ninja-build"))
    assert remedies(python) == [c, headers], "of a trainer"
    assert remedies(python, for_engine=True) == [c, headers, c, ninja, ""], "the last one is made by make"
    found(tmp_path, "clang")
    assert remedies(python) == [headers]
    found(tmp_path, *TOOLS)
    assert remedies(python, for_engine=True) == [headers]


def test_a_compiler_that_a_variable_names_must_be_there(bare: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    python = bare()
    monkeypatch.setenv("CC", str(program(python.parent / "my-cc")))
    assert remedies(python) == []
    monkeypatch.setenv("CC", "/no/such/cc")
    assert remedies(python) == ["apt-get install build-essential"]


def test_an_engine_finds_the_ninja_and_nvcc_of_its_environment_whoever_starts_it(bare: Give, tmp_path: Path) -> None:
    python = bare(has_toolkit=True)
    program(python.parent / "ninja")
    found(tmp_path, "gcc", "c++")
    assert remedies(python, for_engine=True) == []
    settings = RolloutSettings.load(model_name="a-model", sglang_python=str(python))
    variables = Engine.command(settings, Endpoint("h", 1), EnginePlace(devices=("0",))).variables()
    assert shutil.which("ninja", path=variables["PATH"]) == str(python.parent / "ninja")
    assert variables["PATH"].split(os.pathsep)[1:] == [str(tmp_path / "bin")]
    assert variables["CUDA_HOME"] == str(tmp_path / "venv/site-packages/nvidia/cu13")


def test_a_relative_interpreter_gives_an_absolute_path(
    bare: Give, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = bare()
    monkeypatch.chdir(tmp_path)
    first = toolchain.engine_variables(str(python.relative_to(tmp_path)))["PATH"].split(os.pathsep)[0]
    assert first == str(python.parent), "ninja runs in another directory"


@pytest.mark.parametrize("place", ["CUDA_HOME", "CUDA_PATH", "PATH", "usual"])
def test_the_cuda_of_the_machine_comes_before_that_of_the_environment(
    bare: Give, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    python = bare(has_toolkit=True)
    home = tmp_path / "usr-local-cuda" if place == "usual" else tmp_path / "toolkit"
    program(home / "bin" / "nvcc")
    if place == "PATH":
        monkeypatch.setenv("PATH", str(home / "bin"))
    elif place != "usual":
        monkeypatch.setenv(place, str(home))
    variables = toolchain.engine_variables(str(python))
    assert "CUDA_HOME" not in variables
    assert toolchain.cuda_home(dict(os.environ) | variables) == home


@pytest.mark.parametrize(
    ("tool", "error"),
    [
        ("nvcc", 'cuda_toolkit.h:41:4: error: #error "CUDA compiler and CUDA toolkit headers are incompatible"'),
        ("c++", "/usr/bin/ld: cannot find -lcudart: No such file or directory"),
    ],
)
def test_an_nvcc_of_another_release_and_a_library_without_its_name_are_named(
    bare: Give, tmp_path: Path, tool: str, error: str
) -> None:
    python = bare(has_toolkit=True)
    found(tmp_path, "gcc", "c++", "ninja")
    broken = tmp_path / "bin" / "c++" if tool == "c++" else tmp_path / "venv/site-packages/nvidia/cu13/bin/nvcc"
    program(broken, f"echo In file included >&2; echo '{error}' >&2; exit 1")
    [problem] = toolchain.missing_tools(str(python), for_engine=True)
    assert error in problem


def test_launcher_and_trainer_refuse_gpus_for_which_they_cannot_compile(
    bare: Give, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = str(bare())
    given = {"MODEL_NAME": "a-model", "SHARED_DIR": str(tmp_path), "ROLLOUT_ENGINE": "sglang", "SGLANG_PYTHON": python}
    variables = os.environ | given | {"SKYPILOT_NUM_GPUS_PER_NODE": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "services.rollout_server"]
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert (ended.returncode, "ninja-build" in ended.stderr) == (EXIT_CONFIGURATION, True), ended.stderr
    Engine.check_installed(RolloutSettings.load(model_name="a-model", sglang_python=python), 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", "1")
    with pytest.raises(ConfigurationError, match="build-essential") as refusal:
        ranks_per_node()
    assert refusal.value.exit_code == EXIT_CONFIGURATION
    monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", "0")
    assert ranks_per_node() == 1


def test_make_asks_before_it_installs_gigabytes(bare: Give) -> None:
    command = [sys.executable, "-S", "-m", "services.core.toolchain"]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert ended.returncode == EXIT_CONFIGURATION
    assert "build-essential" in ended.stderr


def test_the_guide_names_every_package_of_a_refusal(bare: Give) -> None:
    guide = (ROOT / "docs/gpus.md").read_text("utf-8")
    for remedy in remedies(bare(has_headers=False), for_engine=True):
        package = re.sub(r"^python3\.\d+", "python3", remedy.removeprefix("apt-get install "))
        assert package in guide
