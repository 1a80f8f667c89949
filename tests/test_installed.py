"""Installed from its wheel, the project is one package, and `grpo` works beside packages of a user's with its names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts.grpo import COMMANDS
from services.core.errors import EXIT_CONFIGURATION

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
OUR_NAMES = ("services", "trainer", "evaluation", "benchmarks", "local_runner", "recipes", "scripts", "toys")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
OF_A_USER = ("secrets.env", "questions.env", "my_rewards.py", "mine.yaml")
"""Files of somebody's own in a checkout."""


def run(*command: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COLUMNS")}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=kept | variables, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel and the source distribution, built from a copy, since building leaves files in the directory."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for entry in ROOT.iterdir():
        if entry.name in (*OUR_NAMES, "jobgroups", "examples") or entry.is_file():
            subprocess.run(["cp", "-r", entry, source], check=True)
    for folder in (source, source / "examples", source / "jobgroups"):
        for name in OF_A_USER:
            (folder / name).write_text("TOKEN = 'of-a-user'\n")
    for kind in ("sdist", "wheel"):
        built = run(sys.executable, "-c", BUILD.format(kind=kind), made, cwd=source)
        assert built.returncode == 0, built.stderr
        assert "absent from the `packages`" not in built.stderr
    return made


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    return next(distributions.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and with the packages of this environment except for this project."""
    folder = tmp_path_factory.mktemp("venv")
    assert run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder).returncode == 0
    [packages] = folder.glob("lib/python*/site-packages")
    install = (sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--no-deps", "--no-index")
    done = run(*install, "--no-compile", "--disable-pip-version-check", wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's directory, whose packages have this project's names and cannot be imported by mistake."""
    for name in OUR_NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('{name} of the user')\n")
    return tmp_path


def test_the_wheel_has_one_package_and_all_files_of_the_programs(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in names} == {"skypilot_grpo"}
    files = [
        path for name in OUR_NAMES for path in (ROOT / name).rglob("*") if path.is_file() and path.suffix != ".pyc"
    ]
    rooted = subprocess.run(["git", "ls-files", "*.yaml", "*.env"], cwd=ROOT, capture_output=True, text=True).stdout
    files += [ROOT / name for name in rooted.split() if "/" not in name and not name.startswith(".")]
    files += [ROOT / "__init__.py", *(ROOT / "jobgroups").glob("*.yaml"), ROOT / "constraints.txt"]
    wanted = {f"skypilot_grpo/{path.relative_to(ROOT)}" for path in files}
    assert wanted - names == set()
    assert not {name for name in names if name.endswith(".pyc")}


def test_nothing_of_a_users_own_in_the_root_is_packed(distributions, wheel):
    [source] = distributions.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        of_source = archive.getnames()
    for names in (of_source, zipfile.ZipFile(wheel).namelist()):
        packed = {Path(name).name for name in names}
        assert not packed & set(OF_A_USER)
        assert {"demo.env", "jobgroup.yaml", "setup.py"} <= packed


def test_commands_start_beside_packages_of_the_same_names(environment, home):
    """All of them in one process."""
    program = environment / "bin/grpo"
    (home / "all_commands.py").write_text(
        "import contextlib, runpy, sys\n"
        f"for command in {[*COMMANDS]}:\n"
        f"    sys.argv = [{str(program)!r}, command, '--help']\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    done = run(environment / "bin/python", "all_commands.py", cwd=home, TERM="dumb")
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f"Usage: grpo {command} " in done.stdout


def test_a_run_is_planned_with_the_projects_job_group_one_node_each(environment, home):
    done = run(environment / "bin/grpo", "run", "--small", "--dry-run", "--env", "DATASET=arithmetic", cwd=home)
    assert done.returncode == 0, done.stderr
    assert re.search(r"ppo-trainer 1,.*rollout-server 1", re.sub(r"[│\s]+", " ", done.stdout)), done.stdout


def test_python_imports_nothing_but_the_standard_library_and_refuses_a_wrong_setting(environment, home):
    (home / "program.py").write_text(
        "import sys\nfrom skypilot_grpo import train\n"
        f"assert not {{*{OUR_NAMES}, 'torch', 'pandas'}} & sys.modules.keys()\n"
        "def one(response): return 1.0\n"
        "train(learning_rat=1, dataset=[{'question': '1+1=', 'answer': '2'}], reward_fn=one)\n"
    )
    done = run(environment / "bin/python", "program.py", cwd=home)
    refusal = "ValueError: LEARNING_RAT is read by no component; the nearest setting is LEARNING_RATE"
    assert refusal in done.stderr.splitlines()[-1], done.stderr


def test_an_installed_program_says_which_extra_to_install(environment, home, wheel):
    (home / "math_verify.py").write_text("")
    (home / "typer.py").write_text("raise ModuleNotFoundError('No module named typer', name='typer')")
    done = run(environment / "bin/grpo", "status", cwd=home)
    assert done.returncode == EXIT_CONFIGURATION
    [line] = done.stderr.splitlines()
    assert line.startswith("error: grpo status needs typer, which is not installed; run: ")
    # Not from an index, which may not have it.
    assert line.endswith(f" -m pip install 'skypilot-grpo[local] @ {wheel.as_uri()}'")
    [record] = environment.glob("lib/python*/site-packages/skypilot_grpo-*.dist-info/direct_url.json")
    kept = record.read_text()
    record.unlink()
    of_index = run(environment / "bin/grpo", "status", cwd=home).stderr
    record.write_text(kept)
    assert of_index.endswith(" -m pip install 'skypilot-grpo[local]'\n")
