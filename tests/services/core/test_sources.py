"""The file of sources is read exactly or refused with its line, and the schedule of their groups keeps every quota."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest

from services.core.errors import ConfigurationError
from services.core.settings import SourcesSettings
from services.core.sources import Schedule, load_sources
from services.data_server.settings import DataSettings


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "mix.yaml"
        path.write_text(text)
        return path

    return write


def test_sources_are_read_with_their_own_settings_and_sorted_by_name(write):
    sources = load_sources(
        write("- name: sums\n  ratio: 2\n  dataset: arithmetic\n- name: held\n  eval_only: true\n  group_size: 3\n")
    )
    assert [source.name for source in sources] == ["held", "sums"]
    assert [source.eval_only for source in sources] == [True, False]
    assert sources[0].settings == {"group_size": "3"}
    assert (sources[1].ratio, sources[1].settings) == (2.0, {"dataset": "arithmetic"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- name: a\n- ratio: 2\n  name: a\n", "two sources are named 'a'; give each its own name"),
        ("- name: a\n  ratio: 0\n", "source 1: ratio is 0; give a number above 0"),
        ("- name: a\n  ratio: .nan\n", "source 1: ratio is nan; give a number above 0"),
        ("- name: a\n  loss: clipped\n", "source 1: 'loss' is not a key of a source; allowed are name, ratio"),
        ("- name: a\n  ratio: 1\n  ratio: 2\n", "'ratio' is there twice"),
        ("- name: A b\n", "source 1: name is 'A b'; give at most 40 lower-case letters"),
        ("- ratio: 1\n", "source 1: name is None; give at most 40 lower-case letters"),
        ("- name: a\n  eval_only: maybe\n", "source 1: eval_only is 'maybe'; give true or false"),
        ("- arithmetic\n", "write a list of sources"),
        ("- name: a\n  eval_only: true\n", "every source is eval_only; train on at least one"),
        ("name: a\n", "write a list of sources"),
        ("", "write a list of sources"),
        ("- name: [\n", "is not YAML"),
    ],
)
def test_a_file_that_is_not_valid_is_refused_with_its_place(write, text, message):
    path = write(text)
    with pytest.raises(ConfigurationError, match=re.escape(message)) as refusal:
        load_sources(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(
    "ratios",
    [
        {"a": 1, "b": 1, "c": 1},
        {"a": 3, "b": 1, "c": 1},
        {"big": 0.9, "small": 0.02, "tiny": 0.001},
        {"a": 0.1, "b": 0.2, "c": 0.3, "d": 7.5, "e": 1 / 3},
    ],
)
def test_at_every_place_each_source_has_had_its_quota_rounded_down_or_up(ratios):
    schedule, counts = Schedule(ratios), dict.fromkeys(ratios, 0)
    shares = {
        name: Fraction(str(ratio)) / sum(Fraction(str(r)) for r in ratios.values()) for name, ratio in ratios.items()
    }
    for place in range(3000):
        counts[schedule.source(place)] += 1
        for name, share in shares.items():
            quota = share * (place + 1)
            assert math.floor(quota) <= counts[name] <= math.ceil(quota), (name, place)


def test_a_schedule_is_the_same_from_any_place_on():
    once, again = Schedule({"a": 0.3, "b": 1, "c": 2.2}), Schedule({"c": 2.2, "b": 1, "a": 0.3})
    expected = [once.source(place) for place in range(500)]
    assert [again.source(place) for place in reversed(range(500))] == expected[::-1]
    # Equal sources take turns by name.
    assert [Schedule({"b": 1, "a": 1}).source(place) for place in range(4)] == ["a", "b", "a", "b"]


class Settings(SourcesSettings):
    """Settings of a component that has a variable which sources may set, and one which is the run's."""

    group_size: int = 8
    curriculum: str = "source"
    log_level: str = "info"


def test_a_source_has_its_own_values_and_the_run_s_others(write):
    settings = Settings.load(
        log_level="debug", sources=write("- name: a\n  group_size: 3\n  curriculum: off\n- name: b\n")
    )
    own = settings.by_source()
    assert {name: (s.group_size, s.curriculum, s.log_level) for name, s in own.items()} == {
        "a": (3, "off", "debug"),
        "b": (8, "source", "debug"),
    }
    assert list(Settings.load().by_source()) == [""]


def test_a_value_that_is_not_allowed_is_refused_with_its_source(write):
    with pytest.raises(ConfigurationError, match=r"mix.yaml, source 'a': GROUP_SIZE is 'many'"):
        Settings.load(sources=write("- name: a\n  group_size: many\n"))


def test_a_copy_of_the_settings_needs_the_file_no_more(write):
    settings = Settings.load(sources=(path := write("- name: a\n  ratio: 3\n- name: b\n  eval_only: true\n")))
    path.unlink()
    copy = settings.model_copy(update={"log_level": "debug"})
    assert list(copy.by_source()) == ["a", "b"]
    assert copy.schedule.counts(0, 5) == {"a": 5}, "b is evaluated only"


def test_a_source_with_its_own_dataset_inherits_nothing_that_describes_another(write):
    settings = DataSettings.load(dataset_config="{}", sources=write("- name: a\n  dataset: seeds\n- name: b\n"))
    assert {name: own.dataset_config for name, own in settings.by_source().items()} == {"a": None, "b": "{}"}
    with pytest.raises(ConfigurationError, match="DATASET_CONFIG"):
        DataSettings.load(dataset_config="{}", sources=write("- name: a\n  dataset: seeds\n"))
