"""SGLang's kernels compile with what the Makefile leaves in an engine's environment, on a machine without CUDA."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HIDDEN = ("/usr/local/cuda", "/usr/bin/ninja", "/usr/local/bin/ninja", "/usr/bin/nvcc", "/usr/local/bin/nvcc")
HIDE = 'for path in $HIDDEN; do mount --bind "$EMPTY" "$path" || mount --bind /dev/null "$path"; done; exec "$@"'
PYTHON = os.environ.get("TOOLCHAIN_PYTHON", "")
VARIABLES = """
import json, sys
from services.core.toolchain import engine_variables, missing_tools
print(json.dumps([engine_variables(sys.argv[1]), missing_tools(sys.argv[1], for_engine=True)]))
"""
InRoom = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.cuda


@pytest.fixture
def in_room(tmp_path: Path) -> InRoom:
    """Return a function that runs a command where neither CUDA nor ninja of the machine can be seen."""
    if not Path(PYTHON).is_file():
        pytest.skip("needs the environment of TOOLCHAIN_PYTHON; run `make test-cuda`")
    (tmp_path / "empty").mkdir()
    namespace = ["unshare", "--mount", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], check=False).returncode:
        pytest.skip("needs unshare and the right to make namespaces")

    def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "HIDDEN": " ".join(path for path in HIDDEN if Path(path).exists()),
            "EMPTY": str(tmp_path / "empty"),
        }
        line = [*namespace, "sh", "-euc", HIDE, "sh", *command]
        return subprocess.run(line, env=environment | variables, capture_output=True, text=True, check=False)

    return run


def found(in_room: InRoom, python: str) -> tuple[dict[str, str], dict[str, str]]:
    ended = in_room(sys.executable, "-c", VARIABLES, python)
    assert ended.returncode == 0, ended.stderr
    variables, missing = json.loads(ended.stdout)
    return variables, missing


def test_nothing_is_missing_and_both_tools_are_those_of_the_environment(in_room: InRoom) -> None:
    variables, missing = found(in_room, PYTHON)
    assert missing == {}
    assert variables["PATH"] == f"{Path(PYTHON).parent}:/usr/bin:/bin"
    assert Path(variables["CUDA_HOME"], "bin", "nvcc").is_file()
    assert in_room("sh", "-c", "command -v ninja || command -v nvcc || ls /usr/local/cuda/bin").returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["9.0", "8.9"])
@pytest.mark.parametrize("kernel", ["activation", "metadata", "cuda_ipc"])
def test_sglangs_kernels_compile_for_hopper_and_ada(
    in_room: InRoom, tmp_path: Path, kernel: str, capability: str
) -> None:
    variables, _ = found(in_room, PYTHON)
    program = str(Path(__file__).with_name("compile_kernels.py"))
    ended = in_room(PYTHON, program, kernel, capability, str(tmp_path / "built"), **variables)
    assert ended.returncode == 0, ended.stderr
    assert Path(ended.stdout.strip()).stat().st_size


@pytest.mark.parametrize("broken", ["lib/libcudart.so", "lib/stubs/libcuda.so", "headers"])
def test_packages_without_the_names_of_a_toolkit_or_of_another_release_are_refused(
    in_room: InRoom, tmp_path: Path, broken: str
) -> None:
    variables, _ = found(in_room, PYTHON)
    home = tmp_path / "cuda"
    shutil.copytree(variables["CUDA_HOME"], home, symlinks=True, copy_function=os.link)
    if broken == "headers":
        header = home / "include" / "cuda_runtime_api.h"
        text = header.read_text().replace("#define CUDART_VERSION  13000", "#define CUDART_VERSION  13050")
        header.unlink()
        header.write_text(text)
    else:
        (home / broken).unlink()
    ended = in_room(sys.executable, "-c", VARIABLES, PYTHON, CUDA_HOME=str(home))
    answer: list[dict[str, Any]] = json.loads(ended.stdout)
    [problem] = answer[1]
    assert ("incompatible" if broken == "headers" else Path(broken).stem.removeprefix("lib")) in problem
