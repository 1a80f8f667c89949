"""The documents are true: links, paths, functions, settings, make targets and hooks exist, and the map is complete."""

import importlib
import re
import subprocess
import sys
from fnmatch import fnmatch
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from trainer.algorithm.methods import ADVANTAGES, LOSSES, Aggregation, ImportanceCorrection
from trainer.config import TrainerSettings

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PATH = re.compile(r"(?:services|trainer|scripts|tests|docs|evaluation)/[\w./-]*")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_have_targets(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for target, anchor in re.findall(r"\]\(([^):#\s]*)#([^)\s]+)\)", page.read_text()):
        assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_paths_exist(page):
    for quoted in re.findall(r"`([^`\n]+)`", page.read_text()):
        if PATH.fullmatch(quoted) and "<" not in quoted:
            assert (ROOT / quoted).exists(), quoted


def mapped() -> set[str]:
    """Return the paths in the tables of docs/architecture.md; a cell's further paths are relative to its first."""
    paths: set[str] = set()
    for cell in re.findall(r"^\| (`[^|]*?) \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE):
        first, *others = re.findall(r"`([\w./*-]+)`", cell)
        folder = Path(first).parent
        paths |= {first, *(str(folder / other) for other in others)}
    return {path.rstrip("/") for path in paths}


def test_the_map_has_every_module_and_package_and_nothing_else():
    paths = mapped()
    there = {
        str(child.relative_to(ROOT))
        for folder in ("services", "trainer")
        for child in (ROOT / folder).iterdir()
        if (child.suffix == ".py" and not child.name.startswith("__")) or (child / "__init__.py").exists()
    }
    text = (ROOT / "docs/architecture.md").read_text()
    assert {
        path for path in there if not any(fnmatch(path, row) for row in paths) and f"`{path}/`" not in text
    } == set()
    assert {path for path in paths if not list(ROOT.glob(path))} == set()


def test_the_algorithm_names_functions_and_settings_that_exist():
    text = (ROOT / "docs/algorithm.md").read_text()
    elsewhere = re.findall(r"`(\w[\w.]*)` in\s+`(trainer/[\w/]+)\.py`", text)
    assert len(elsewhere) > 8
    for function, path in elsewhere:
        assert callable(attrgetter(function)(importlib.import_module(path.replace("/", ".")))), function
    names = [path.stem for path in (ROOT / "trainer/algorithm").glob("*.py")]
    algorithm = [importlib.import_module(f"trainer.algorithm.{name}") for name in names]
    own = set(re.findall(r"\(`([a-z]+_\w+)`(?! in)", text)) - {"replay_groups_left_out", "teacher_missing"}
    assert len(own) > 2
    assert {name for name in own if not any(callable(getattr(module, name, None)) for module in algorithm)} == set()
    settings = set(re.findall(r"`([A-Z]{2,}(?:_[A-Z]+)+)", text))
    assert len(settings) > 12
    assert {name for name in settings if name.lower() not in TrainerSettings.model_fields} == set()


@pytest.mark.parametrize("choices", [ADVANTAGES, LOSSES, list(Aggregation), list(ImportanceCorrection)])
def test_the_algorithm_has_a_formula_for_every_choice(choices):
    text = (ROOT / "docs/algorithm.md").read_text()
    for choice in choices:
        assert re.search(rf"^(\| `|    AGGREGATION=){choice}\b", text, re.MULTILINE), choice


@pytest.mark.parametrize(
    ("setting", "choices"),
    [
        *(("advantage", ADVANTAGES), ("loss", LOSSES)),
        *(("aggregation", Aggregation), ("importance_correction", ImportanceCorrection)),
    ],
)
def test_a_settings_text_names_every_choice(setting, choices):
    text = TrainerSettings.model_fields[setting].description
    assert [choice for choice in choices if f"`{choice}`" not in text] == []


def test_contributing_names_every_target_that_tests_and_none_that_make_lacks():
    commands = set(re.findall(r"^(?:\| `)?make ([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    targets = set(re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"coverage", "docs", *(target for target in targets if target.startswith("test"))} <= commands
    assert commands <= targets


def test_pre_commit_takes_its_configuration_and_its_hooks_are_make_checks_commands():
    configuration = ROOT / ".pre-commit-config.yaml"
    subprocess.run([sys.executable, "-m", "pre_commit", "validate-config", configuration], check=True)
    entries = [hook["entry"] for repo in yaml.safe_load(configuration.read_text())["repos"] for hook in repo["hooks"]]
    makefile = (ROOT / "Makefile").read_text()
    for entry in entries:
        tool = re.search(r"-m (ruff check|ruff format|mypy)", entry)
        assert tool is not None, entry
        assert f"$(RUN) -m {tool[1]}" in makefile, entry
