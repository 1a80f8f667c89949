"""A job of several sources in both modes: every step has exactly its groups of each source, whoever is killed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from services.core.sources import Schedule
from tests.e2e.system import System
from trainer.reporting.group_records import GroupRecords

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, BATCH = 40, 4
RATIOS = {"minus": 1, "plus": 2, "times": 0.3}
MIX = """
- name: plus
  ratio: 2
  arithmetic_operations: +
- name: minus
  ratio: 1
  arithmetic_operations: "-"
  group_size: 4
- name: times
  ratio: 0.3
  arithmetic_operations: "*"
  max_new_tokens: 2
"""


def trained(system: System) -> list[list[tuple[str, int, int]]]:
    """Return source, epoch and position of the groups of each step, in their order."""
    records = GroupRecords(system.run_dir)
    prompts = [[found.group.prompt for found in records.groups(step)] for step in records.steps]
    return [[(prompt.source, prompt.epoch, prompt.position) for prompt in of_step] for of_step in prompts]


@pytest.mark.parametrize(
    ("job_group", "killed"),
    [
        ("jobgroup.yaml", {9: "data-server-0", 20: "ppo-trainer-0"}),
        ("jobgroups/async.yaml", {9: "data-server-0", 20: "collector-0"}),
        ("jobgroups/async.yaml", {20: "ppo-trainer-0"}),
    ],
)
def test_every_step_has_its_groups_of_each_source_whoever_is_killed(
    tiny_model: Path, tmp_path: Path, job_group: str, killed: dict[int, str]
) -> None:
    (tmp_path / "mix.yaml").write_text(MIX)
    is_async = "async" in job_group
    nodes = {"rollout-server": 1, "ppo-trainer": 1} | ({"collector": 2} if is_async else {})
    options = [option for task, count in nodes.items() for option in ("--num-nodes", f"{task}={count}")]
    settings = {
        "SOURCES": str(tmp_path / "mix.yaml"),
        "ARITHMETIC_DIGITS": "2",
        "BATCH_SIZE": str(BATCH),
        "REPLAY_GROUPS": "0",
        "EVAL_PROMPTS": "0",
        "CHECKPOINT_EVERY": "8",
        "RECORD_GROUPS": "all",
    }
    system = System(tmp_path, tiny_model, *options, job_group=job_group, MAX_STEPS=str(STEPS), **settings)
    for step, node in killed.items():
        system.wait_for_step(step)
        system.kill(node)
    assert system.wait() == 0, system.text
    steps, schedule = trained(system), Schedule(RATIOS)
    assert len(steps) == STEPS
    for number, groups in enumerate(steps):
        expected = schedule.counts(BATCH * number, BATCH * (number + 1))
        assert Counter(source for source, _, _ in groups) == Counter(expected), f"step {number + 1}"
    for source in RATIOS:
        places = [place for groups in steps for name, *place in groups if name == source]
        if is_async:
            assert len({*map(tuple, places)}) == len(places), f"a prompt of {source} was trained on twice"
        else:
            assert places == [[0, position] for position in range(len(places))], f"the order of {source}"
    rewards = [name for record in system.metrics() for name in record if name.startswith("reward_mean/")]
    assert set(rewards) == {f"reward_mean/{source}" for source in RATIOS}
    assert system.summary()["sources"].keys() == RATIOS.keys()
    assert system.processes() == []
    if not is_async:
        (tmp_path / "mix.yaml").write_text(MIX.replace("ratio: 2", "ratio: 3"))
        run_id = system.run_dir.name
        other = System(tmp_path, tiny_model, *options, run_id=run_id, MAX_STEPS=str(STEPS + 1), **settings)
        assert other.wait() == 78, other.text
        assert "cannot continue from" in other.text, other.text
        assert "plus: settings ratio 2 then, ratio 3 now" in other.text, other.text
        assert len(system.metrics()) == STEPS
