"""One file of agents is trained by a job group and evaluated by a command, whatever API each agent speaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.e2e.system import ROOT, SETTINGS, System
from tests.waiting import LIMIT_SECONDS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

APIS = ("chat", "responses", "messages")
BATCH = 4


def turns_of(messages: list[dict[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]


@pytest.mark.parametrize("api", APIS)
def test_an_agent_is_evaluated_by_the_settings_of_its_run(api: str, tiny_model: Path, tmp_path: Path) -> None:
    settings = {"MODE": "sync", "AGENT": f"tests.e2e.apis:{api}", "AGENT_MAX_TOKENS": "32", "EVAL_PROMPTS": "8"}
    run = System(
        tmp_path,
        tiny_model,
        *("--num-nodes", "rollout-server=1", "--num-nodes", "ppo-trainer=1"),
        job_group="jobgroups/agent.yaml",
        **{**settings, "BATCH_SIZE": str(BATCH), "GROUP_SIZE": "2", "MAX_STEPS": "1", "PUBLISH_TYPE": "float32"},
    )
    assert run.wait() == 0, run.text
    trained = orjson.loads((run.run_dir / "samples.jsonl").read_bytes().splitlines()[0])
    env_file = tmp_path / "run.env"
    env_file.write_text("".join(f"{name}={value}\n" for name, value in (SETTINGS | settings).items()))
    output = tmp_path / "evaluation"
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "scripts.grpo",
                "evaluate",
                "--model",
                run.run_dir / "model",
                "--env-file",
                env_file,
            ),
            *("--output", output, "--samples", "2"),
        ],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "ENGINE_DTYPE": "float32"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 8 * 3
    assert {sample["turns"] for sample in samples} == {2} == {trained["turns"]}
    conversations = {tuple(turns_of(sample["messages"])) for sample in samples}
    assert conversations == {tuple(turns_of(trained["messages"]))} == {("user", "assistant", "user", "assistant")}
    results = json.loads((output / "results.json").read_text())
    accuracy = results["metrics"]["greedy pass@1"]["value"]
    assert accuracy == run.summary()["accuracy_after"], "the run measured the same model on the same prompts"
