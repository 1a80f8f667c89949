"""Agents whole: programs, and functions that speak each API of the gateway, trained asynchronously and evaluated."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.system import SETTINGS, System, grpo, one_each

# The limit is for a hang; the run takes about a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 3
SOURCES = f"""
- name: apis
  ratio: 3
  rollout: agent
  agent: tests.e2e.apis:each_api
- name: programs
  ratio: 1
  rollout: program
  agent: ""
  agent_command: {sys.executable} -S {Path(__file__).with_name("program.py")}
"""


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> System:
    sources = tmp_path_factory.mktemp("sources") / "sources.yaml"
    sources.write_text(SOURCES)
    system = System(
        tmp_path_factory.mktemp("volume"),
        tiny_model,
        *one_each("rollout-server", "ppo-trainer"),
        job_group="jobgroups/agent.yaml",
        # The agents do not have it: their key is their session.
        JOBGROUP_TOKEN="of-the-job-group",
        MODE="async",
        SOURCES=str(sources),
        AGENT_MAX_TOKENS="32",
        BATCH_SIZE="8",
        GROUP_SIZE="4",
        MAX_STEPS=str(STEPS),
        EVAL_PROMPTS="8",
        PUBLISH_TYPE="float32",
    )
    assert system.wait() == 0, system.text
    return system


def samples_of(finished: System, source: str) -> list[dict[str, Any]]:
    samples = [sample for sample in finished.samples() if sample["source"] == source]
    assert samples
    return samples


def test_they_are_trained_to_the_end(finished: System) -> None:
    assert finished.summary()["status"] == "succeeded"
    assert [record["step"] for record in finished.metrics()] == list(range(1, STEPS + 1))
    assert finished.processes() == []
    assert finished.verify() == list(range(1, STEPS + 1))


def test_programs_give_rewards_and_fail_with_their_reasons(finished: System) -> None:
    samples = samples_of(finished, "programs")
    assert any(sample["trained_tokens"] < sample["tokens"] for sample in samples)
    known = re.compile("code 1.*not one digit|no mood")
    assert all(known.search(sample["result"]["reason"]) for sample in samples if sample["reward"] is None)


def test_an_agent_is_evaluated_by_the_settings_of_its_run(finished: System, tmp_path: Path) -> None:
    trained = samples_of(finished, "apis")
    settings = SETTINGS | {"AGENT": "tests.e2e.apis:each_api", "AGENT_MAX_TOKENS": "32", "EVAL_PROMPTS": "8"}
    env_file, output = tmp_path / "run.env", tmp_path / "evaluation"
    lines = [f"{name}={value}\n" for name, value in (settings | {"ENGINE_DTYPE": "float32"}).items()]
    env_file.write_text("".join(lines))
    model = finished.run_dir / "model"
    grpo("evaluate", "--model", model, "--env-file", env_file, "--output", output, "--samples", "2")
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert {sample["turns"] for sample in samples} == {sample["turns"] for sample in trained} == {2}
    conversations = [{tuple(m["role"] for m in one["messages"]) for one in some} for some in (samples, trained)]
    assert conversations == [{("user", "assistant", "user", "assistant")}] * 2
    results = json.loads((output / "results.json").read_text())
    accuracy = results["metrics"]["greedy pass@1"]["value"]
    assert accuracy == finished.metrics()[-1]["accuracy/apis"], "the run measured the same model on the same prompts"
