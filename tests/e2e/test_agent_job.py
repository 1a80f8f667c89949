"""A job group that trains an agent, whole: jobgroups/agent.yaml's tasks as real processes."""

from __future__ import annotations

import math
import re
import sqlite3
import sys
from pathlib import Path

import orjson
import pytest

from tests.e2e.system import System

# The limit is for a hang; a run takes about a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS, BATCH, GROUP = 3, 4, 4
FUNCTION = {"MODE": "sync", "AGENT": "tests.e2e.agents:moody"}
PROGRAM = {
    "MODE": "async",
    "ROLLOUT": "program",
    "AGENT": "",
    "AGENT_COMMAND": f"{sys.executable} -S {Path(__file__).with_name('program.py')}",
    "LORA_RANK": "4",
}


@pytest.fixture(
    scope="module", params=[FUNCTION, pytest.param(PROGRAM, marks=pytest.mark.slow)], ids=["function", "program"]
)
def finished(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> System:
    system = System(
        tmp_path_factory.mktemp("volume"),
        tiny_model,
        *("--num-nodes", "rollout-server=1", "--num-nodes", "ppo-trainer=1"),
        job_group="jobgroups/agent.yaml",
        # The agent does not have it: its key is its session.
        JOBGROUP_TOKEN="of-the-job-group",
        BATCH_SIZE=str(BATCH),
        GROUP_SIZE=str(GROUP),
        MAX_STEPS=str(STEPS),
        EVAL_PROMPTS="8",
        REPLAY_GROUPS="1",
        PUBLISH_TYPE="float32",
        # Groups of equal rewards, which teach nothing, are computed for their entropy, so that the ratios have them.
        ENTROPY_COEF="1e-12",
        **request.param,
    )
    assert system.wait() == 0, system.text
    return system


def test_an_agent_is_trained_to_the_end(finished: System) -> None:
    assert finished.summary()["status"] == "succeeded"
    records = finished.metrics()
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(record["completions"] <= BATCH * GROUP for record in records)
    assert all(record["grad_norm"] > 0 for record in records)
    assert finished.summary()["accuracy_after"] is not None
    assert finished.processes() == []


def test_every_step_is_computed_again_to_the_bit(finished: System) -> None:
    [line] = finished.verify()
    assert line.startswith("equal to the bit: "), line
    assert f"steps 1 to {STEPS} and the " in line


def test_the_trainer_agrees_with_the_engine_on_every_token_of_the_newest_policy(finished: System) -> None:
    fresh = [record for record in finished.metrics() if record["staleness_max"] == 0]
    assert fresh
    for record in fresh:
        assert abs(math.log(record["ratio_max"])) < 1e-4
        assert abs(math.log(record["ratio_min"])) < 1e-4


def test_the_run_records_the_gateway_and_the_masks(finished: System) -> None:
    components = orjson.loads((finished.run_dir / "config.json").read_bytes())["components"]
    assert "gateway" in components
    samples = [orjson.loads(line) for line in (finished.run_dir / "samples.jsonl").read_bytes().splitlines()]
    assert any(sample["trained_tokens"] < sample["tokens"] for sample in samples)
    failed = [sample for sample in samples if sample["reward"] is None]
    known = re.compile("ValueError: not one digit|code 1.*not one digit|no mood")
    assert all(known.search(sample["result"]["reason"]) for sample in failed)


def test_every_token_that_the_engine_sampled_is_in_a_trace_or_counted_as_lost(
    finished: System, request: pytest.FixtureRequest
) -> None:
    for record in finished.metrics():
        lost = sum(value for name, value in record.items() if name.startswith("episode_tokens_lost_"))
        kept = record["episode_tokens_traces"] + record["episode_tokens_open"]
        assert record["episode_tokens_engines"] == kept + lost > 0
    # As the engine itself counted, when it had ended.
    [generated] = re.findall(r"engine stopped.*?generated_tokens\D+(\d+)", finished.log("rollout-server-0"))
    with sqlite3.connect(finished.run_dir / "gateway" / "gateway.sqlite") as db:
        account = dict(db.execute("SELECT name, tokens FROM account"))
        [(left,)] = db.execute("SELECT COUNT(*) FROM sessions WHERE finished")
    assert left == 0, "the collector deletes a session when it has the trace"
    last = finished.metrics()[-1]
    if request.node.callspec.params["finished"] is FUNCTION:
        assert last["episode_tokens_open"] == 0
        assert last["episode_tokens_engines"] == sum(account.values()) - account["traced"] == int(generated)
    else:  # The collector goes on after the last step, and is then ended in the midst of calls.
        assert last["episode_tokens_engines"] <= sum(account.values()) - account["traced"] <= int(generated)


def test_the_run_page_has_the_episodes_conversations_tokens_and_figures(finished: System) -> None:
    samples = [orjson.loads(line) for line in (finished.run_dir / "samples.jsonl").read_bytes().splitlines()]
    for sample in samples:
        *_, last = sample["messages"]
        assert (last["sampled"], last.get("content", "")) == (True, sample["completion"])
        sampled = [span for span in sample["spans"] if "tokens" in span]
        assert sum(len(span["tokens"]) for span in sampled) == sample["trained_tokens"]
        assert all((span["advantages"] is None) == (sample["reward"] is None) for span in sampled)
    for record in finished.metrics():
        assert 1 <= record["turns_mean"] <= record["turns_max"] == 2
        failed = sum(value for name, value in record.items() if name.startswith("episodes_failed_"))
        assert record["episodes_failed"] == failed >= record["unscorable"]
