"""The documents are true: links, paths, functions, settings, make targets and options of commands exist."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from evaluation.settings import EvaluationSettings
from tests.pages import PAGES, ROOT, SKILL, UsageError, check_grpo, commands
from tests.skypilot_facts import check_command
from trainer.config import TrainerSettings

PATH = re.compile(r"(?:services|trainer|scripts|tests|docs|evaluation)/[\w./-]*")


def test_links_have_targets() -> None:
    wrong = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            if target.startswith("https://"):
                continue
            file = page.parent / target if target else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                wrong.append((page.name, target, anchor))
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_named_paths_exist() -> None:
    named = {(page.name, text) for page in PAGES for text in re.findall(r"`([^`\n]+)`", page.read_text())}
    paths = {(page, path) for page, path in named if PATH.fullmatch(path)}
    assert len(paths) > 100
    assert {(page, path) for page, path in paths if not (ROOT / path).exists()} == set()


def test_commands_of_this_project_have_their_options() -> None:
    wrong, count = [], 0
    for page in PAGES:
        for command in commands(page):
            count += command[0].endswith("grpo")
            try:
                check_grpo(command)
            except UsageError as error:
                wrong.append((page.name, command, error.format_message()))
    assert count > 90
    assert wrong == []


def test_commands_of_skypilot_have_their_options() -> None:
    found = [command for page in PAGES for command in commands(page, "cluster") if command[0] == "sky"]
    assert len(found) > 8
    for command in found:
        check_command(shlex.join(command))


# Variables of other programs, placeholders of pages, and states of SkyPilot.
NO_SETTINGS = {"HF_TOKEN", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"}
NO_SETTINGS |= {"NAME", "TRACKIO_DIR", "WANDB_API_KEY", "OPENAI_BASE_URL", "PIP_FIND_LINKS"}
NO_SETTINGS |= {"EPISODE", "ADD", "MY_THRESHOLD", "JOB_ID", "NOT_READY", "FAILED_NO_RESOURCE", "FAILED_SETUP"}
NO_SETTINGS |= {
    "PIP_NO_INDEX",
    "MY_SHARPNESS",
    "GRPO_REWARD_FD",
    "AS_ANSWER",
    "NCCL_CUMEM_ENABLE",
    "CUDA_HOME",
    "CUDA_PATH",
}
NO_SETTINGS |= {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE"}


def test_the_variables_of_guides_and_evaluation_are_settings() -> None:
    known = set(re.findall(r"^\| `([A-Z_0-9]+)` \|", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE))
    wrong = []
    for page in (*ROOT.glob("docs/guides/*.md"), ROOT / "docs/gpus.md", SKILL):
        text = page.read_text()
        named = set(re.findall(r"--env (\w+)=", text)) | set(re.findall(r"^([A-Z_]+)=", text, re.MULTILINE))
        named |= set(re.findall(r"`([A-Z]+(?:_[A-Z]+)+)(?:=[^`]*)?`", text))
        wrong += [(page.name, name) for name in named - NO_SETTINGS - known]
    of_evaluation = set(re.findall(r"\b(EVAL_[A-Z]+(?:_[A-Z]+)*)\b", (ROOT / "docs/evaluation.md").read_text()))
    assert of_evaluation
    fields = {*EvaluationSettings.model_fields, *TrainerSettings.model_fields}
    wrong += [("evaluation.md", name) for name in of_evaluation if name.lower() not in fields]
    assert wrong == []


def test_the_algorithm_names_functions_and_settings_that_exist() -> None:
    text = (ROOT / "docs/algorithm.md").read_text()
    elsewhere = re.findall(r"`(\w[\w.]*)` in\s+`(trainer/[\w/]+)\.py`", text)
    assert len(elsewhere) > 8
    for function, path in elsewhere:
        assert callable(attrgetter(function)(importlib.import_module(path.replace("/", ".")))), function
    settings = set(re.findall(r"`([A-Z]{2,}(?:_[A-Z]+)+)", text))
    assert len(settings) > 12
    assert {name for name in settings if name.lower() not in TrainerSettings.model_fields} == set()


def test_contributing_names_targets_that_make_has() -> None:
    named = set(re.findall(r"^(?:\| `)?make ([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    targets = set(re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named
    assert named <= targets


@pytest.mark.slow
def test_pre_commit_takes_its_configuration_and_its_hooks_are_make_checks_commands() -> None:
    configuration = ROOT / ".pre-commit-config.yaml"
    subprocess.run([sys.executable, "-m", "pre_commit", "validate-config", configuration], check=True)
    entries = [hook["entry"] for repo in yaml.safe_load(configuration.read_text())["repos"] for hook in repo["hooks"]]
    makefile = (ROOT / "Makefile").read_text()
    for entry in entries:
        tool = re.search(r"-m (ruff check|ruff format|mypy)", entry)
        assert tool is not None, entry
        assert f"$(RUN) -m {tool[1]}" in makefile, entry
