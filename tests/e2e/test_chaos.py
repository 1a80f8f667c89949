"""The developers' tool for faults: plans of a seed, what a certificate calls wrong, a whole job group."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from services.core.files import write_json
from services.protocol.groups import joined, pack_sequences
from tests.chaos import KILL, STOP, Fault, Strike, certify, main, plan, task_of
from tests.e2e.system import SETTINGS

KILLS = {"ppo-trainer-0": 3, "ppo-trainer-1": 3, "reward-server-0": 1, "router-0": 0}


def test_a_plan_keeps_to_its_seed_its_times_its_nodes_and_the_kills_that_each_task_survives() -> None:
    assert plan(0, 5.0, 300.0, (KILL, STOP), KILLS) != plan(1, 5.0, 300.0, (KILL, STOP), KILLS)
    assert Counter(fault.kind for fault in plan(0, 5.0, 300.0, (KILL,), KILLS)) == {KILL: 4}
    for seed in range(20):
        faults = plan(seed, 5.0, 300.0, (KILL, STOP), KILLS)
        assert faults == plan(seed, 5.0, 300.0, (KILL, STOP), KILLS)
        assert all(number * 5 <= fault.at <= (number + 1) * 5 for number, fault in enumerate(faults))
        kills = Counter(task_of(fault.node) for fault in faults if fault.kind == KILL)
        assert kills["ppo-trainer"] <= 3
        assert kills["reward-server"] <= 1
        assert kills["router"] == 0
        for start in range(0, len(faults), len(KILLS)):
            assert {fault.node for fault in faults[start : start + len(KILLS)]} == KILLS.keys()


def record(run_dir: Path, step: int, group: str) -> None:
    """Write the record of a step that trained on a group."""
    computed = {"ranks": 1, "replicas": 1, "device": "cpu", "processor": "AVX2", "threads": 1}
    computed |= {"compute_type": "float32", "torch": "2", "transformers": "5"}
    head: dict[str, Any] = {"step": step, "policy_version": step, "position": 0, "total_steps": 9, "tokenizer": "t"}
    head |= {"groups": [{"group_id": group, "weight": 1.0, "is_replayed": False}]}
    head |= {"settings": {}, "computation": computed}
    (run_dir / "groups").mkdir(exist_ok=True)
    (run_dir / "groups" / f"step-{step:06d}").write_bytes(joined([pack_sequences(head, [])]))


def test_a_certificate_names_what_a_fault_has_broken(tmp_path: Path) -> None:
    run_dir, quiet = tmp_path / "run", tmp_path / "quiet"
    for path in (run_dir, quiet):
        (path / "model").mkdir(parents=True)
        (path / "model/model.safetensors").write_text("weights")
        write_json(path / "summary.json", {"device": "cpu"})
    write_json(run_dir / "runner.json", {"exit_code": 0, "reason": "done", "restarts": {"worker": 1}})
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    record(run_dir, 1, "one")
    record(run_dir, 2, "two")
    strikes = [Strike(Fault(1.0, "worker-0", KILL), 2.0)]

    def problems(*strikes: Strike) -> list[str]:
        return [problem.partition(":")[0] for problem in certify(run_dir, strikes, quiet)["problems"]]

    assert certify(run_dir, strikes, quiet)["weights_equal"] is True
    assert problems(*strikes) == []
    record(run_dir, 2, "one")
    assert problems(*strikes) == ["groups trained twice"]
    (run_dir / "model/model.safetensors").write_text("others")
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 1}\n')
    write_json(run_dir / "runner.json", {"exit_code": 1, "reason": "failed"})
    assert problems() == [
        "no fault came before the end of the run; give a shorter --every",
        "the run did not succeed",
        "metrics.jsonl lacks steps, or has some twice",
        "groups trained twice",
        "other weights than those of quiet",
    ]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1800)  # for a hang; the two runs take about four minutes
def test_a_run_whose_every_component_is_killed_has_the_weights_of_the_quiet_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    variables = SETTINGS | {"MODEL_NAME": str(tiny_model), "EVAL_PROMPTS": "0", "CHECKPOINT_EVERY": "3"}
    variables["MAX_STEPS"] = "40"
    settings = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    arguments = ["--every", "1", "--length", "5", "--fault", "kill", "--shared-dir", str(tmp_path)]
    assert main(["jobgroup.yaml", *arguments, "--small", *settings]) == 0
    certificate = json.loads((tmp_path / "runs/disturbed/chaos.json").read_text())
    components = {"ppo-trainer", "data-server", "rollout-server", "reward-server", "replay-buffer"}
    assert Counter(task_of(strike["fault"]["node"]) for strike in certificate["faults"]) == dict.fromkeys(components, 1)
    assert certificate["restarts"].keys() == components
    assert (certificate["trained_twice"], certificate["groups"]) == ([], 40 * 8)
    assert certificate["weights_equal"] is True
