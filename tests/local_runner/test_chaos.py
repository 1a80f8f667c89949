"""`grpo chaos`: plans of a seed, refusals before anything happens, and faults in the processes of a small run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from local_runner.certificate import Fault
from local_runner.chaos import KILL, STOP, Plan, main
from services.core.errors import ConfigurationError
from services.core.files import write_json
from services.protocol.groups import joined, pack_sequences
from tests.local_runner.runner import Runner, task
from tests.waiting import LIMIT_SECONDS, wait_until

pytestmark = pytest.mark.leaving

KILLS = {"ppo-trainer-0": 3, "ppo-trainer-1": 3, "reward-server-0": 1, "router-0": 0}


def planned(seed: int, *kinds: str) -> list[Fault]:
    plan = Plan(5.0, 300.0, seed, kinds or (KILL, STOP))
    plan.draw(KILLS)
    return plan.faults


def test_a_seed_gives_the_same_plan_twice_and_another_seed_another_one() -> None:
    assert planned(0) == planned(0)
    assert planned(0) != planned(1)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_keeps_to_its_times_its_nodes_and_the_kills_that_each_task_survives(seed: int) -> None:
    faults = planned(seed)
    assert [int(fault.at // 5) for fault in faults if fault.at % 5] == [
        number for number, fault in enumerate(faults) if fault.at % 5
    ]
    kills = Counter(fault.node.rpartition("-")[0] for fault in faults if fault.kind == KILL)
    assert kills["ppo-trainer"] <= 3
    assert kills["reward-server"] <= 1
    assert kills["router"] == 0
    assert all(1 <= fault.seconds <= 5 for fault in faults if fault.kind == STOP)
    for start in range(0, len(faults), len(KILLS)):
        assert {fault.node for fault in faults[start : start + len(KILLS)]} == KILLS.keys()


def test_a_plan_without_stops_ends_with_the_kills() -> None:
    assert Counter(fault.kind for fault in planned(0, KILL)) == {KILL: 4}
    with pytest.raises(ConfigurationError, match="no task survives a kill"):
        Plan(1.0, 60.0, 0, [KILL]).draw({"router-0": 0})


def chaos(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.grpo", "chaos", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )


@pytest.mark.parametrize(
    ("target", "options", "error"),
    [
        ("unknown", {}, "unknown is neither a run below runs/ here"),
        ("unknown.yaml", {}, "there is no file unknown.yaml"),
        ("over", {}, "over does not run on this machine (succeeded)"),
        ("over", {"small": True}, "only a job group takes options"),
        ("over", {"quiet": "failed"}, "--quiet failed: failed; name a run that succeeded"),
        ("jobgroup.yaml", {"every": "10m", "length": "30s"}, "--every is longer than --for"),
        ("jobgroup.yaml", {"every": "0s"}, "--every 0s: it must be longer than 0"),
        ("jobgroup.yaml", {"every": "soon"}, "--every soon: 'soon' is not a duration"),
        ("jobgroup.yaml", {"fault": ["disconnect"]}, "--fault disconnect: the faults are kill and stop"),
        ("jobgroup.yaml", {"env": ["RECORD_GROUPS=off"]}, "RECORD_GROUPS=off: only records show"),
        ("jobgroup.yaml", {"run_id": "over"}, "runs/over exists, and faults need a new run"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, options: dict[str, Any], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, code in {"over": 0, "failed": 1}.items():
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "metrics.jsonl").touch()
        write_json(Path("runs", name, "runner.json"), {"exit_code": code, "failed": "worker-0"})
    with pytest.raises(ConfigurationError, match=re.escape(error)):
        main(target, **options)
    assert sorted(os.listdir("runs")) == ["failed", "over"]


def test_a_run_whose_processes_are_not_known_is_refused(tmp_path: Path) -> None:
    runner = Runner(tmp_path, task("ppo-trainer", "touch up; sleep 600"))
    runner.wait_for("up")
    nodes = json.loads((runner.run_dir / "nodes.json").read_text())
    (runner.run_dir / "nodes.json").write_text(json.dumps(nodes | {"mark": ""}))
    done = chaos(tmp_path, "test")
    runner.process.terminate()
    runner.end()
    assert (done.returncode, "has no processes that this command can find" in done.stderr) == (78, True)


RECOVERS = {"job_recovery": {"recover_on_exit_codes": [33]}}
MAIN = """
mkdir -p runs/test/model
echo weights > runs/test/model/model.safetensors
echo '{"step": 1, "completion_tokens": 7, "episode_tokens_engines": 9, "episode_tokens_lost_aborted": 2}' > metrics
mv metrics runs/test/metrics.jsonl
until [ "$(wc -l < starts)" -gt 1 ]; do sleep 0.1; done
"""


def config(seed: str, run_id: str) -> dict[str, object]:
    return {"components": {"worker": {"settings": {"seed": seed, "run_id": run_id}}}}


def record(run_dir: Path, step: int, *groups: str) -> None:
    """Write the record of a step that trained on groups."""
    (run_dir / "groups").mkdir(exist_ok=True)
    entries = [{"group_id": group, "weight": 1.0, "is_replayed": False} for group in groups]
    computed: dict[str, object] = {"ranks": 1, "replicas": 1, "device": "cpu", "processor": "AVX2", "threads": 1}
    computed |= {"compute_type": "float32", "torch": "2", "transformers": "5"}
    head = {"step": step, "policy_version": step, "position": 0, "total_steps": 9, "tokenizer": "t", "settings": {}}
    head |= {"computation": computed, "groups": entries}
    (run_dir / "groups" / f"step-{step:06d}").write_bytes(joined([pack_sequences(head, [])]))


@pytest.mark.parametrize(
    ("weights", "groups", "settings", "code", "verdict"),
    [
        ("weights\n", ("one", "two"), "1", 0, "- weights: equal to the bit to those of quiet: model/model.safetensors"),
        ("others\n", ("one", "two"), "1", 1, "- **different from those of quiet: model/model.safetensors**"),
        ("others\n", ("one", "two"), "2", 0, "- weights: not compared, because quiet has other settings: worker seed"),
        ("weights\n", ("one", "one"), "1", 1, "- **groups trained twice: one**"),
    ],
)
def test_a_running_run_gets_its_faults_and_a_certificate(
    tmp_path: Path, weights: str, groups: tuple[str, ...], settings: str, code: int, verdict: str
) -> None:
    quiet = tmp_path / "runs/quiet"
    (quiet / "model").mkdir(parents=True)
    (quiet / "model/model.safetensors").write_text(weights)
    write_json(quiet / "runner.json", {"exit_code": 0, "reason": "done"})
    write_json(quiet / "summary.json", {"device": "cpu"})
    write_json(quiet / "config.json", config(settings, "quiet"))
    (quiet / "metrics.jsonl").touch()
    runner = Runner(
        tmp_path,
        task("main", MAIN, resources=RECOVERS),
        task("worker", "echo >> starts; sleep 600", resources=RECOVERS),
        header="name: group\nexecution: parallel\nprimary_tasks: [main]\n",
    )
    runner.wait_for("runs/test/metrics.jsonl")
    write_json(
        runner.run_dir / "config.json", {"components": {"worker": {"settings": {"seed": "1", "run_id": "test"}}}}
    )
    for step, group in enumerate(groups, start=1):
        record(runner.run_dir, step, group)
    done = chaos(tmp_path, "test", "--every", "1s", "--for", "9m", "--fault", "kill", "--quiet", "quiet")
    ended = runner.end()
    assert (ended.exit_code, done.returncode) == (0, code), done.stdout + done.stderr + ended.output
    assert {verdict, "- tokens in completions: 7", "- tokens lost: aborted 2"} <= {*done.stdout.splitlines()}
    certificate = json.loads((runner.run_dir / "chaos.json").read_text())
    kills = Counter(fault["fault"]["node"] for fault in certificate["faults"])
    assert kills["worker-0"] >= 1
    assert ended.record["restarts"]["worker"] == kills["worker-0"]
    assert certificate["faults"][0]["healthy_after"] > 0


def test_a_stopped_component_runs_on_even_if_the_command_is_killed(tmp_path: Path) -> None:
    runner = Runner(tmp_path, task("ppo-trainer", "echo $$ > number; mv number pid; sleep 600"))
    pid = int(runner.wait_for("pid").read_text())
    program = f"from local_runner.chaos import *; hit(Run(Path({str(runner.run_dir)!r})).nodes, "
    program += "Fault(0.0, 'ppo-trainer-0', 'stop', 2.0))"
    with subprocess.Popen([sys.executable, "-c", program]) as stopping:
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the component is stopped")
        stopping.kill()
    wait_until(lambda: psutil.Process(pid).status() != psutil.STATUS_STOPPED, "the component runs on")
    runner.send(signal.SIGTERM)
    runner.end()
