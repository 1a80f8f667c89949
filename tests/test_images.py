"""The Dockerfile's images have what the nodes' ``setup`` installs, on the images of the job groups."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from local_runner.spec import JOB_GROUPS, load
from scripts.launch.plan import image_part

ROOT = Path(__file__).parents[1]
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
INSTRUCTIONS = [line.split(maxsplit=1) for line in LINES if line and not line.startswith("#")]
TASKS = [
    (task, image_part(described))
    for name in JOB_GROUPS
    for task, described in zip(
        list(yaml.safe_load_all((ROOT / name).read_text()))[1:], load(ROOT / name).tasks, strict=True
    )
]
PARTS = {part for _, part in TASKS}


def stages() -> dict[str, tuple[str, list[list[str]]]]:
    """Return by name each stage's image and its instructions, after those of the stage that it begins from."""
    found: dict[str, tuple[str, list[list[str]]]] = {}
    for instruction, rest in INSTRUCTIONS:
        if instruction == "FROM":
            image, _, name = rest.split()
            begun, its = found.get(image, (image, []))
            found[name] = begun, list(its)
        else:
            assert instruction in {"RUN", "ENV", "COPY", "WORKDIR"}, instruction
            found[name][1].append([instruction, rest])
    return found


def requirements(command: str) -> tuple[set[str], set[str]]:
    """Return the extras and the other requirements that a command installs."""
    [asked] = re.findall(r"""['"]\.\[([\w,-]+)(?:\$\{[^}]*\})?\]['"]""", command)
    return set(asked.split(",")), set(re.findall(r"'([a-z]+==[^']+)'", command))


def test_a_nodes_image_has_what_its_setup_installs() -> None:
    for task, part in TASKS:
        image, its = stages()[part]
        assert task["resources"]["image_id"] == f"docker:{image}"
        [install] = [line for line in task["setup"].splitlines() if "pip install" in line]
        there = [rest for instruction, rest in its if instruction == "RUN" and "'.[" in rest][-1]
        assert all(wanted <= given for wanted, given in zip(requirements(install), requirements(there), strict=True))
        assert ("--constraint constraints.txt" in install) == ("--constraint constraints.txt" in there)


@pytest.mark.parametrize(
    ("installs", "code"),
    [
        ("numpy-2.3.0 skypilot-grpo-1.0", 0),
        ("sglang-0.5.23", 1),
        ("skypilot-grpo-1.0 torch-2.14.1", 1),
        ("nvidia-nccl-cu13-2.30.7 skypilot-grpo-1.0", 1),
        ("sglang-kernel-0.4.5 torchao-0.17.0", 0),
    ],
)
def test_an_image_whose_sglang_torch_or_nccl_pip_would_replace_is_not_built(
    tmp_path: Path, installs: str, code: int
) -> None:
    _, its = stages()["rollout"]
    [check] = [rest for instruction, rest in its if instruction == "RUN" and "--dry-run" in rest]
    pip = f"pip() {{ echo 'Would install {installs}'; }}"
    script = f"{pip}; {check}".replace("/tmp/plan", str(tmp_path / "plan"))
    assert subprocess.run(["sh", "-c", script], capture_output=True, check=False).returncode == code


def test_the_last_step_of_each_image_installs_a_checkout_without_an_index() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [backend] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for name in PARTS:
        _, its = stages()[name]
        assert ["ENV", "PIP_NO_BUILD_ISOLATION=0"] in its
        assert ["RUN", f"pip install --no-cache-dir '{backend}'"] in its
        pip = "/opt/trainer/bin/pip" if name == "colocated" else "pip"
        assert its[-2][1].startswith(f"PIP_NO_INDEX=1 {pip} install --no-deps --force-reinstall . ")
        there = [rest for instruction, rest in its if instruction == "RUN" and "'.[" in rest][-1]
        assert requirements(there)[0] <= extras.keys()


def test_images_leave_out_what_is_not_uploaded() -> None:
    def names(file: str) -> set[str]:
        lines = (ROOT / file).read_text().splitlines()
        return {line.removeprefix("**/").removeprefix("/") for line in lines if line and not line.startswith("#")}

    assert names(".dockerignore") == names(".skyignore")


LIBRARIES = {"libibverbs1", "ibverbs-providers", "librdmacm1"}


def test_the_trainer_has_the_libraries_without_which_nccl_uses_tcp() -> None:
    for name in JOB_GROUPS:
        [trainer] = [task for task in yaml.safe_load_all((ROOT / name).read_text()) if task["name"] == "ppo-trainer"]
        [install] = [line for line in trainer["setup"].splitlines() if "apt-get install" in line]
        assert set(install.split()) >= LIBRARIES
    _, its = stages()["trainer"]
    assert any(set(rest.split()) >= LIBRARIES for instruction, rest in its if instruction == "RUN")
