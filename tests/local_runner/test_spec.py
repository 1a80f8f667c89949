"""Job groups that the local runner reads from YAML or refuses."""

from pathlib import Path

import pytest

from local_runner import spec
from services.core.errors import ConfigurationError

GROUP = """
name: group
execution: parallel
primary_tasks: [ppo-trainer]
termination_delay: {default: 30s, replay-buffer: 2m}
---
name: replay-buffer
run: serve
---
name: ppo-trainer
num_nodes: 2
resources:
  accelerators: {H100: 4}
  job_recovery: {max_restarts_on_errors: 3, recover_on_exit_codes: [33]}
envs: {MODEL_NAME: default, BATCH_SIZE: 4}
secrets: {TOKEN: ""}
volumes: {/shared: weights}
run: train
"""


def load(tmp_path, text, **overrides):
    path = tmp_path / "group.yaml"
    path.write_text(text)
    return spec.load(path, spec.Overrides(**overrides))


def test_a_task_has_what_the_file_says(tmp_path):
    group = load(tmp_path, GROUP)
    replay, trainer = group.tasks
    assert (group.name, replay.name, trainer.name) == ("group", "replay-buffer", "ppo-trainer")
    assert (replay.is_primary, trainer.is_primary) == (False, True)
    assert (replay.termination_delay, trainer.termination_delay) == (120, 30)
    assert (trainer.num_nodes, trainer.gpus_per_node, trainer.run) == (2, 4, "train")
    assert (trainer.max_restarts_on_errors, trainer.recover_on_exit_codes) == (3, {33})
    assert trainer.environment == {"MODEL_NAME": "default", "BATCH_SIZE": "4", "TOKEN": ""}
    assert trainer.mounts == {"/shared": "weights"}
    assert (replay.max_restarts_on_errors, replay.num_nodes, replay.gpus_per_node) == (0, 1, 0)


def test_overrides_win_and_reach_every_task(tmp_path):
    group = load(
        tmp_path,
        GROUP,
        environment={"BATCH_SIZE": "8", "NEW": "x"},
        secrets={"TOKEN": "t"},
        num_nodes={"ppo-trainer": 1},
    )
    replay, trainer = group.tasks
    assert replay.environment == {"BATCH_SIZE": "8", "NEW": "x", "TOKEN": "t"}
    assert trainer.environment == {"MODEL_NAME": "default", "BATCH_SIZE": "8", "NEW": "x", "TOKEN": "t"}
    assert trainer.num_nodes == 1


@pytest.mark.parametrize(
    ("accelerators", "count"), [("H100", 1), ("H100:2", 2), ("{A10: 8}", 8), ("[A100:4, H100:2]", 4), ("L4:0.5", 1)]
)
def test_gpus_are_counted_as_skypilot_writes_them(tmp_path, accelerators, count):
    text = GROUP.replace("{H100: 4}", accelerators)
    assert load(tmp_path, text).tasks[1].gpus_per_node == count


@pytest.mark.parametrize(("text", "seconds"), [("30", 30), ("30s", 30), ("2m", 120), ("1h", 3600), (45, 45)])
def test_durations_are_read_as_skypilot_writes_them(text, seconds):
    assert spec.seconds(text) == seconds


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("execution: parallel", "execution: parallel\nprimary_task: [x]", "unknown header keys"),
        ("execution: parallel\n", "", "execution: parallel"),
        ("name: group", "name: a b", "the header's name"),
        ("[ppo-trainer]", "[trainer]", r"primary_tasks names \['trainer'\]"),
        ("default: 30s", "default: soon", "termination_delay: 'soon' is not a duration"),
        ("replay-buffer: 2m", "replay: 2m", r"termination_delay names \['replay'\]"),
        ("max_restarts_on_errors", "max_restarts", "job_recovery of task ppo-trainer takes"),
        ("run: serve", "run: serve\nrun: twice", "'run' is there twice"),
        ("run: serve", "setup: serve", "task replay-buffer has no `run`"),
        ("name: replay-buffer", "name: ppo-trainer", "different names"),
        ("MODEL_NAME: default", "MODEL_NAME: null", r"needs \['MODEL_NAME'\]; give --env MODEL_NAME=VALUE"),
        ('TOKEN: ""', "TOKEN: null", r"needs \['TOKEN'\]; give --secret TOKEN=VALUE"),
        ("num_nodes: 2", "num_nodes: 0", "has 0 nodes"),
        ("run: serve", "run: [", "is not YAML"),
    ],
)
def test_an_invalid_job_group_is_refused(tmp_path, old, new, said):
    assert old in GROUP
    with pytest.raises(ConfigurationError, match=said):
        load(tmp_path, GROUP.replace(old, new, 1))


def test_a_name_alone_takes_its_value_from_the_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret=1")
    assert spec.assignments(["HF_TOKEN", "A=b=c", "EMPTY="], "--env") == {
        "HF_TOKEN": "secret=1",
        "A": "b=c",
        "EMPTY": "",
    }


def test_a_file_of_variables_is_read_as_by_skypilot(tmp_path):
    path = tmp_path / "settings.env"
    path.write_text("# a comment\nA=b=c\n\nTEXT=two words\nQUOTED='x y'\nEMPTY=\n")
    assert spec.env_file(path) == {"A": "b=c", "TEXT": "two words", "QUOTED": "x y", "EMPTY": ""}
    path.write_text("A=1\nALONE\n")
    with pytest.raises(ConfigurationError, match=r"\['ALONE'\] have no value; expected NAME=VALUE"):
        spec.env_file(path)


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (lambda path: spec.load(path, spec.Overrides(num_nodes={"trainer": 1})), "trainer; the nearest is ppo-trainer"),
        (lambda path: spec.load(path.with_name("absent.yaml")), r"absent\.yaml"),
        (lambda _: spec.counts(["ppo-trainer"]), "TASK=COUNT"),
        (lambda _: spec.counts(["ppo-trainer=0"]), "TASK=COUNT"),
        (lambda _: spec.counts(["ppo-trainer=two"]), "TASK=COUNT"),
        (lambda _: spec.env_file(Path("absent.env")), r"absent\.env"),
        (lambda _: spec.assignments(["ABSENT"], "--env"), "--env ABSENT"),
        (lambda _: spec.assignments(["=x"], "--env"), "NAME=VALUE"),
    ],
)
def test_a_wrong_option_is_named(tmp_path, refused, named):
    (tmp_path / "group.yaml").write_text(GROUP)
    with pytest.raises(ConfigurationError, match=named):
        refused(tmp_path / "group.yaml")
