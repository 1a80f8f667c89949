"""The two libraries that pretend to be a CUDA device, compiled for the torch of this environment."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
USERS_OF_THE_RUNTIME = ("torch_cuda", "torch_cpu", "torch_python", "c10_cuda")
USERS_OF_THE_DRIVER = ("caffe2_nvrtc",)


def build(directory: Path) -> Path:
    """Compile ``runtime.so`` and ``libcuda.so.1`` unless they are there; return their folder below ``directory``.

    Ends the process with a message if gcc or the CUDA build of torch is missing.
    """
    try:
        made = directory / f"torch-{version('torch')}"
        packages = Path(sysconfig.get_paths()["purelib"])
        headers = next((packages / "nvidia").rglob("cuda_runtime_api.h")).parent
    except (PackageNotFoundError, StopIteration):
        sys.exit("No CUDA build of torch is installed in this environment: `make test-cuda` makes one that has it.")
    missing = [program for program in ("gcc", "nm") if shutil.which(program) is None]
    if missing:
        sys.exit(f"The pretended CUDA device needs {' and '.join(missing)}; on Debian: apt-get install gcc libc6-dev")
    source, driver = HERE / "runtime.c", made / "libcuda.so.1"
    newest = max(path.stat().st_mtime for path in HERE.glob("*.[cp]*"))
    if driver.exists() and driver.stat().st_mtime > newest:
        return made
    made.mkdir(parents=True, exist_ok=True)
    runtime = _imported(packages, USERS_OF_THE_RUNTIME, "cuda")
    # Triton compiles and loads its own launchers, so their calls stand in a source file.
    triton = packages / "triton" / "backends" / "nvidia"
    calls = set(re.findall(r"\bcu[A-Z]\w+(?=\()", (triton / "driver.c").read_text()))
    # torch's headers lack crt/host_defines.h, which Triton has.
    includes = [f"-I{headers}", f"-I{triton / 'include'}"]
    _compile(made / "runtime.so", _successes(runtime), source, *includes)
    # The driver last: its presence says that both are complete.
    functions = _imported(packages, USERS_OF_THE_DRIVER, "cu[A-Z]") | calls
    _compile(driver, _successes(functions), HERE / "driver.c", *includes, "-Wl,-soname,libcuda.so.1")
    return made


def _imported(packages: Path, users: Iterable[str], prefix: str) -> set[str]:
    """Return the functions with a prefix that torch's libraries import."""
    paths = [str(packages / "torch" / "lib" / f"lib{name}.so") for name in users]
    listed = subprocess.run(["nm", "-D", "--undefined-only", *paths], capture_output=True, text=True, check=True).stdout
    return set(re.findall(rf" U ({prefix}\w+)", listed))


def _successes(functions: Iterable[str]) -> str:
    """Return C code of functions that return 0, success.

    They are weak symbols, so a function in a source file takes the place of its namesake here.
    """
    return "".join(f"__attribute__((weak)) int {name}() {{ return 0; }}\n" for name in sorted(functions))


def _compile(output: Path, code: str, *options: object) -> None:
    command = ["gcc", "-w", "-shared", "-fPIC", "-x", "c", "-", *map(str, options), "-o", str(output)]
    subprocess.run(command, input=code, text=True, check=True)
