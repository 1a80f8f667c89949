"""What the documents point to exists: links, paths, make's targets, the hooks of the pre-commit configuration."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PATH = re.compile(r"(?:services|trainer|scripts|tests|docs|evaluation)/[\w./-]*")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_its_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_paths_that_it_names_exist(page):
    for quoted in re.findall(r"`([^`\n]+)`", page.read_text()):
        if PATH.fullmatch(quoted) and "<" not in quoted:
            assert (ROOT / quoted).exists(), quoted


def test_contributing_names_the_targets_that_make_has():
    commands = re.findall(r"^make ([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert {"test", "coverage", "docs"} <= set(commands)
    targets = re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(commands) <= set(targets)


def test_pre_commit_takes_its_configuration_and_its_hooks_are_make_checks_commands():
    configuration = ROOT / ".pre-commit-config.yaml"
    subprocess.run([sys.executable, "-m", "pre_commit", "validate-config", configuration], check=True)
    entries = [hook["entry"] for repo in yaml.safe_load(configuration.read_text())["repos"] for hook in repo["hooks"]]
    makefile = (ROOT / "Makefile").read_text()
    for entry in entries:
        tool = re.search(r"-m (ruff check|ruff format|mypy)", entry)
        assert tool is not None, entry
        assert f"$(RUN) -m {tool[1]}" in makefile, entry
