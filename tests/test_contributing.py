"""CONTRIBUTING.md's lists of what to change are complete: what is there stands in the places that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.data_server import dataset_rows, generators, settings
from services.data_server.settings import DataSettings
from trainer.algorithm import methods, policy_losses
from trainer.config import TrainerSettings
from trainer.config.objective import Objective

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = dict(re.findall(r"^### (.+)\n((?:(?!^##).*\n)*)", PAGE, re.MULTILINE))
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|Dockerfile|jobgroup\.yaml|pyproject\.toml)`")

# An example of each kind, by a text that stands where something of the kind is named, and places that need none.
EXAMPLES = {
    "A service": (r"Task\.REPLAY_BUFFER|REPLAY_BUFFER =|services\.replay_buffer|\[data,reward,replay", "Makefile"),
    "A loss or an advantage": (r"\"cispo\"|def cispo|`cispo` \(", ""),
    "A reward": (r"\bexact_match\b", ""),
    "A dataset": (r'"arithmetic"', ""),
    "A metric": (r'"grad_norm"', ""),
    "A way of rolling out": (r"Rollout\.PROGRAM|PROGRAM = \"program\"", ""),
    "A rollout engine": (r"EngineKind\.EMBEDDED|EMBEDDED =", ""),
    "A scheduler of evaluations": (r"SchedulerName\.RAY|\bRAY =|on_ray\(", ""),
    "An environment": (r'"guessing"', ""),
}
PRODUCT = ("services", "trainer", "evaluation", "local_runner", "scripts", "jobgroups")
SUFFIXES = {".py", ".js", ".yaml", ".toml"}


def named(section: str) -> set[str]:
    return set(PATH.findall(SECTIONS[section]))


def test_there_is_a_list_for_everything_that_can_be_added():
    assert SECTIONS.keys() == EXAMPLES.keys()


@pytest.mark.parametrize("section", EXAMPLES)
def test_its_places_exist(section):
    text = SECTIONS[section]
    assert [path for path in named(section) if not (ROOT / path).exists()] == []
    pairs = re.findall(r"((?:`\w+`(?:, | or | and )?)+) of\s+`([\w/.]+\.(?:py|js))`", text)
    assert pairs or section == "A scheduler of evaluations"
    missing = [
        (name, path)
        for names, path in pairs
        for name in re.findall(r"`(\w+)`", names)
        if not re.search(rf"\b{name}\b", (ROOT / path).read_text())
    ]
    assert missing == []


@pytest.mark.parametrize("section", EXAMPLES)
def test_an_example_stands_in_no_other_place(section):
    text, besides = EXAMPLES[section]
    own = re.compile(r"services/(?:replay_buffer|clients)/")
    files = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    files += [ROOT / name for name in ("jobgroup.yaml", "pyproject.toml", "Dockerfile", "Makefile")]
    places = {str(path.relative_to(ROOT)) for path in files if re.search(text, path.read_text())}
    places = {place for place in places if not own.match(place)} - {besides}
    assert len(places) > 1
    assert places - named(section) == set()


def test_a_loss_that_is_added_in_its_two_places_is_one(monkeypatch):
    monkeypatch.setitem(policy_losses.LOSS_FUNCTIONS, "halved", policy_losses.clipped)
    with pytest.raises(ValueError, match="LOSS is 'halved'"):
        TrainerSettings(loss="halved")
    monkeypatch.setitem(methods.LOSSES, "halved", methods.LOSSES["clipped"])
    assert Objective(TrainerSettings(loss="halved", clip_low=0.1)) is not None


def test_a_dataset_that_is_added_in_its_two_places_is_one(monkeypatch):
    given = DataSettings(dataset="arithmetic", dataset_held_out="0.5")
    monkeypatch.setattr(settings, "GENERATORS", (*settings.GENERATORS, "sums"))
    monkeypatch.setitem(generators.TABLES, "sums", generators.TABLES["arithmetic"])
    added = dataset_rows.load(given.model_copy(update={"dataset": "sums"}))
    assert added.name == "sums"
    assert len(added.train) == len(dataset_rows.load(given).train) > 0
