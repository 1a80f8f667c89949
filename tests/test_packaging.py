"""Each role's extra installs the packages that the role imports, so that a node needs no other extra."""

import ast
import importlib.util
import re
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from services.core.extras import extras_of

ROOT = Path(__file__).parents[1]
LOCAL = ("services", "trainer", "evaluation", "benchmarks", "local_runner", "recipes", "scripts", "toys")

# The first module of each role, and the extras that the role installs.
ROLES = {
    "data": ("services.data_server.__main__", {"data"}),
    "reward": ("services.reward_server.__main__", {"reward"}),
    "replay": ("services.replay_buffer.__main__", {"replay"}),
    "gateway": ("services.gateway.__main__", {"gateway"}),
    "rollout": ("services.rollout_server.__main__", {"rollout"}),
    "trainer": ("trainer.__main__", {"trainer"}),
    "collector": ("trainer.collector", {"collector"}),
    "local": ("local_runner.run", {"local"}),
    "cleaning": ("local_runner.clean", {"local"}),
    "launch": ("scripts.launch.__main__", {"local", "trainer"}),
    "rehearse": ("scripts.rehearse", {"local", "rollout", "trainer"}),
    "chat": ("scripts.chat", {"local", "rollout"}),
    "evaluation": ("scripts.evaluate", {"data", "evaluation", "local"}),
    "trajectories": ("evaluation.trajectories", {"environment", "head", "local"}),
    "head": ("services.evaluation_head.__main__", {"head"}),
    "environment": ("services.environment_server.__main__", {"environment"}),
}

# What a role imports only when a setting asks for it, and installs besides.
OPTIONAL = {
    "cleaning": {"filelock", "huggingface_hub"},
    "collector": {"psutil"},
    "environment": {"reasoning_gym", "torch", "transformers"},
    "evaluation": {"ray", "sky"},
    "head": {"psutil", "sky"},
    "launch": {"sky"},
    "rehearse": {"sky"},
    "local": {"filelock", "huggingface_hub", "pyarrow"},
    "reward": {"reasoning_gym", "torch", "transformers"},
    "rollout": {"sglang"},
    "trainer": {"psutil", "trackio"},
    "trajectories": {"reasoning_gym", "transformers"},
}


@cache
def source(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


@cache
def imports(module: str) -> frozenset[str]:
    """Return the modules that ``module`` imports, at its top or in a function, without imports for type checkers."""
    tree = ast.parse(source(module).read_text())
    skipped = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test).endswith("TYPE_CHECKING")
        for node in ast.walk(branch)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def reached(start: str) -> set[str]:
    """Return all modules of the project that ``start`` imports, directly or indirectly."""
    seen, todo = set(), [start]
    while todo:
        module = todo.pop()
        if module in seen or source(module) is None:
            continue
        seen.add(module)
        parents = [module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)]
        todo += [name for name in (*imports(module), *parents) if name.split(".")[0] in LOCAL]
    return seen


def brought(extras: set[str]) -> set[str]:
    """Return the distributions that the project with ``extras`` requires, directly or indirectly."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chosen = [line for extra in extras for line in project["optional-dependencies"][extra]]
    todo = [Requirement(line) for line in project["dependencies"] + chosen]
    found: set[str] = set()
    while todo:
        wanted = todo.pop()
        key = f"{canonicalize_name(wanted.name)}[{','.join(sorted(wanted.extras))}]"
        if key in found:
            continue
        found |= {key, canonicalize_name(wanted.name)}
        try:
            requires = metadata.requires(wanted.name) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, requires):
            environments = [{"extra": extra} for extra in wanted.extras] or [{"extra": ""}]
            if requirement.marker is None or any(requirement.marker.evaluate(env) for env in environments):
                todo.append(requirement)
    return found


@pytest.mark.slow
def test_an_extra_brings_what_its_role_imports():
    distributions = metadata.packages_distributions()
    for role, (start, extras) in ROLES.items():
        assert source(start) is not None, f"{start} does not exist"
        top_level = {name.split(".")[0] for module in reached(start) for name in imports(module)}
        foreign = top_level - set(sys.stdlib_module_names) - set(LOCAL) - OPTIONAL.get(role, set()) - {"__future__"}
        available = brought(extras)
        missing = {
            name
            for name in foreign
            if importlib.util.find_spec(name) is None
            or not {canonicalize_name(distribution) for distribution in distributions[name]} & available
        }
        assert not missing, f"{start} imports {sorted(missing)}, which extras {sorted(extras)} do not bring"
        assert set(extras_of(start.removesuffix(".__main__"))) == extras, "a program asks for the extras of its role"


def test_services_never_import_the_trainer_and_the_trainer_no_service_package():
    for path in (ROOT / "services").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        assert not {name for name in imports(module) if name.split(".")[0] == "trainer"}, module
    # What cannot be started is no service, such as the page over a run directory, which the trainer shows.
    packages = {path.parent.name for path in (ROOT / "services").glob("*/__main__.py")}
    for path in (ROOT / "trainer").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        reaching = {name for name in imports(module) if name.startswith("services.") and name.split(".")[1] in packages}
        assert not reaching, f"{module} imports {reaching}"


def test_no_pattern_has_a_possessive_group() -> None:
    """Python before 3.11.5 loses the place where a possessive group has failed (gh-106052): `x+1` was the number 1."""
    group = re.compile(r"\)(?:[*+?]|\{\d*,?\d*\})\+(?![\s\w(])")
    found = [
        f"{path}: {line}"
        for package in ("services", "trainer", "evaluation", "local_runner", "scripts")
        for path in sorted((ROOT / package).rglob("*.py"))
        for line in path.read_text("utf-8").splitlines()
        if group.search(line)
    ]
    assert not found
