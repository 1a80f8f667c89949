"""The programs with which GPU nodes compile kernels: where engines find them, and which of them a machine lacks.

Triton compiles C against Python.h before its first kernel, in the trainer and in SGLang. SGLang and FlashInfer compile
CUDA with ninja and nvcc while an engine starts. ``check_tools`` refuses a node that cannot do that, before minutes of
loading; the launcher of engines and the trainer call it, `grpo doctor` shows the same list, and the Makefile calls it
before it installs gigabytes. Nothing here needs a package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

from services.core.errors import ConfigurationError, exit_code_of

COMPILERS, NINJA = "apt-get install build-essential", "apt-get install ninja-build"
TOOLKIT = (
    "`make one-gpu` installs it in .venv-engine, after `rm -f .venv-engine/.engine` also again; or install NVIDIA's "
    "toolkit of CUDA 13.0, and name its directory in CUDA_HOME"
)
"""The remedies for missing tools; docs/gpus.md has the packages of Debian and Ubuntu."""
CUDA_HOMES = ("CUDA_HOME", "CUDA_PATH")
USUAL_HOME = Path("/usr/local/cuda")
PROBE_SECONDS = 60
_PATHS = "import sysconfig; print(*(sysconfig.get_paths('posix_prefix')[n] for n in ('include', 'purelib')), sep='\\n')"


def engine_variables(python: str) -> dict[str, str]:
    """Return the variables that let an engine of an interpreter find its ninja, and nvcc where the machine has none.

    pip installs ninja beside the interpreter, which a launcher starts by its path, so that PATH lacks the directory.
    The directory of NVIDIA's packages counts only as a last resort: what a machine has of its own comes first.
    """
    directory = str(Path(shutil.which(python) or python).absolute().parent)  # not resolved: a venv's python is a link
    paths = os.environ.get("PATH", os.defpath)
    variables = {} if directory in paths.split(os.pathsep) else {"PATH": directory + os.pathsep + paths}
    packaged = _python_paths(python)[1] / "nvidia" / "cu13"
    if not (cuda_home(dict(os.environ)) / "bin" / "nvcc").exists() and (packaged / "bin" / "nvcc").exists():
        variables["CUDA_HOME"] = str(packaged)
    return variables


def cuda_home(environment: dict[str, str]) -> Path:
    """Return the directory in which SGLang and FlashInfer look for CUDA: the variables', that of PATH's nvcc, or the
    usual one."""
    named = next((environment[name] for name in CUDA_HOMES if environment.get(name)), None)
    if named is not None:
        return Path(named)
    program = shutil.which("nvcc", path=environment.get("PATH"))
    return Path(program).parents[1] if program else USUAL_HOME


def missing_tools(python: str = sys.executable, *, for_engine: bool = False) -> dict[str, str]:
    """Return the tools that this machine lacks to compile kernels, each with its remedy; empty if it has all.

    Args:
        python: the interpreter of the trainer or the engine.
        for_engine: whether SGLang compiles, which needs ninja and CUDA, too.

    Raises:
        ConfigurationError: the interpreter cannot be run.
    """
    environment = dict(os.environ) | (engine_variables(python) if for_engine else {})
    path = environment.get("PATH")
    missing = {}
    compilers = [environment["CC"]] if environment.get("CC") else ["gcc", "clang"]
    if not any(shutil.which(name, path=path) for name in compilers):
        missing["a C compiler (gcc)"] = COMPILERS
    include = _python_paths(python)[0]
    if not (include / "Python.h").exists():
        missing[f"Python.h in {include}"] = f"apt-get install {include.name}-dev"
    if not for_engine:
        return missing
    compiler = shutil.which(environment.get("CXX", "c++"), path=path)
    if compiler is None:
        missing["a C++ compiler (c++)"] = COMPILERS
    if shutil.which("ninja", path=path) is None:
        missing["ninja"] = NINJA
    home = cuda_home(environment)
    if not (home / "bin" / "nvcc").exists():
        missing["nvcc of CUDA 13.0"] = TOOLKIT
    elif compiler is not None and (problem := _cuda_problem(home, compiler)):
        missing[f"a whole CUDA in {home} ({problem})"] = TOOLKIT
    return missing


def check_tools(python: str = sys.executable, *, for_engine: bool = False) -> None:
    """Check that this machine has the tools to compile kernels; see ``missing_tools``.

    Raises:
        ConfigurationError: it lacks some; the message has them and the package of each.
    """
    if missing := missing_tools(python, for_engine=for_engine):
        lacks = "; ".join(f"{tool}: {remedy}" for tool, remedy in missing.items())
        raise ConfigurationError(f"kernels for GPUs are compiled by {python} on this machine, which lacks {lacks}")


def _cuda_problem(home: Path, compiler: str) -> str | None:
    """Return the first error of preprocessing and linking as SGLang and FlashInfer do; None if both work.

    CUDA's headers refuse an nvcc of another release, and packages have libraries without the names that linkers want.
    """
    libraries = [f"-L{home}/lib64", f"-L{home}/lib64/stubs", "-lcudart", "-lcuda"]
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "probe.cu"
        source.write_text("#include <cuda_bf16.h>\n#include <cuda/std/version>\n")
        for command in (
            [f"{home}/bin/nvcc", "-ccbin", compiler, "-E", str(source), "-o", f"{directory}/probe.ii"],
            [compiler, "-shared", "-x", "c++", os.devnull, *libraries, "-o", f"{directory}/probe.so"],
        ):
            ended = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
            if ended.returncode:
                lines = ended.stderr.strip().splitlines() or [f"{command[0]} ends with {ended.returncode}"]
                return next((line for line in lines if "error" in line or "cannot find" in line), lines[0])
    return None


def run_python(python: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script by an interpreter, and return what it prints.

    Raises:
        ConfigurationError: the interpreter cannot be run.
    """
    try:
        return subprocess.run(
            [python, "-c", script], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except OSError as error:
        raise ConfigurationError(f"SGLANG_PYTHON={python} cannot be run ({error}); name an interpreter") from error


@cache
def _python_paths(python: str) -> tuple[Path, Path]:
    """Return the directories of an interpreter's C headers and of its packages."""
    if python == sys.executable:
        paths = sysconfig.get_paths("posix_prefix")
        return Path(paths["include"]), Path(paths["purelib"])
    include, packages = run_python(python, _PATHS).stdout.splitlines()
    return Path(include), Path(packages)


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: check_tools(*sys.argv[1:2], for_engine=len(sys.argv) > 1)))
