"""Collectors of several sources, whole: every step has exactly its groups of each source, whoever is killed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from services.core.sources import Schedule
from tests.e2e.system import System, one_each
from trainer.reporting.group_records import GroupRecords

# The limit is for a hang; the run takes about two minutes.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, BATCH, COLLECTORS = 24, 4, 4
KILLED = {6: "data-server-0", 12: "collector-2", 18: "ppo-trainer-0"}
RATIOS = {"minus": 1, "plus": 2, "times": 0.3}
MIX = """
- name: plus
  ratio: 2
  dataset_config: {digits: [2], operations: "+", template: "{a}{op}{b}="}
- name: minus
  ratio: 1
  dataset_config: {digits: [2], operations: "-", template: "{a}{op}{b}="}
  group_size: 4
- name: times
  ratio: 0.3
  dataset_config: {digits: [2], operations: "*", template: "{a}{op}{b}="}
  max_new_tokens: 2
"""


def test_every_step_has_its_groups_of_each_source_whoever_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_text(MIX)
    nodes = ("--num-nodes", f"collector={COLLECTORS}", *one_each("rollout-server", "ppo-trainer"))
    settings = {
        "SOURCES": str(tmp_path / "mix.yaml"),
        "DATASET_CONFIG": "",
        "BATCH_SIZE": str(BATCH),
        "REPLAY_GROUPS": "0",
        "EVAL_PROMPTS": "0",
        "CHECKPOINT_EVERY": "4",
        "RECORD_GROUPS": "all",
        "MAX_STEPS": str(STEPS),
    }
    system = System(tmp_path, tiny_model, *nodes, job_group="jobgroups/async.yaml", **settings)
    for step, node in KILLED.items():
        system.wait_for_step(step)
        system.kill(node)
    assert system.wait() == 0, system.text
    records, schedule = GroupRecords(system.run_dir), Schedule(RATIOS)
    steps = [[found.group.prompt for found in records.groups(step)] for step in records.steps]
    assert len(steps) == STEPS
    for number, prompts in enumerate(steps):
        expected = schedule.counts(BATCH * number, BATCH * (number + 1))
        assert Counter(prompt.source for prompt in prompts) == Counter(expected), f"step {number + 1}"
    places = Counter((one.source, one.epoch, one.position) for prompts in steps for one in prompts)
    assert set(places.values()) == {1}, f"a prompt was trained on twice: {places.most_common(3)}"
    rewards = [name for record in system.metrics() for name in record if name.startswith("reward_mean/")]
    assert set(rewards) == {f"reward_mean/{source}" for source in RATIOS}
    assert system.summary()["sources"].keys() == RATIOS.keys()
    assert system.processes() == []
