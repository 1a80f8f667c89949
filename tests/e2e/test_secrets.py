"""Secrets of a run are in no process's arguments, in no file and on no page."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from local_runner.directory import read_nodes
from tests.e2e.system import System
from tests.waiting import IDLE_SECONDS

# The limit is for a hang; a run takes about a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SECRETS = {
    "JOBGROUP_TOKEN": "recognisable-token-of-the-job-group",
    "HF_TOKEN": "hf_recognisableTokenOfTheHub",
    "WANDB_API_KEY": "recognisable" + 28 * "0",
}
PAGES = (
    *("/", "/health", "/stats", "/settings", "/metrics", "/docs", "/openapi.json"),
    *("/get_server_info", "/get_model_info", "/workers", "/v1/models"),
)
JOB_GROUP = "jobgroups/environment.yaml"
"""The one with the most kinds of components."""


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("volume")


@pytest.fixture(scope="module")
def run(tiny_model: Path, volume: Path) -> Iterator[System]:
    """A run that has trained its first step and goes on until it is interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        system = System(
            volume,
            tiny_model,
            *("--num-nodes", "rollout-server=1", "--num-nodes", "ppo-trainer=1"),
            *(option for name in SECRETS for option in ("--secret", name)),
            job_group=JOB_GROUP,
            ENVIRONMENT="tests.e2e.agents:Moods",
            DATASET="seeds",
            MAX_NEW_TOKENS="4",
            BATCH_SIZE="2",
            GROUP_SIZE="4",
            # More than it can take while its pages are read.
            MAX_STEPS="1000",
            EVAL_PROMPTS="4",
            LOG_LEVEL="debug",
            WANDB_MODE="offline",
            WANDB_DIR=str(volume),
        )
    with contextlib.ExitStack() as stack:
        stack.callback(system.process.kill)
        system.wait_for_step(1)
        yield system


def found_in(text: str | bytes) -> list[str]:
    """Return the names of the secrets whose values are in ``text``."""
    content = text if isinstance(text, bytes) else text.encode()
    return [name for name, value in SECRETS.items() if value.encode() in content]


def test_no_process_has_a_secret_in_its_arguments(run: System) -> None:
    commands = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            commands.append(" ".join(process.cmdline()))
    assert [command for command in commands if found_in(command)] == []
    assert sum("-m services." in command or "-m trainer" in command for command in commands) >= 5


def test_no_page_shows_a_secret(run: System) -> None:
    nodes = read_nodes(run.run_dir)
    assert nodes is not None
    answers = 0
    for given in ({}, {"Authorization": f"Bearer {SECRETS['JOBGROUP_TOKEN']}"}):
        for address in nodes.endpoints.values():
            with httpx.Client(
                base_url=f"http://{address}", headers=given, timeout=IDLE_SECONDS, trust_env=False
            ) as client:
                for page in PAGES:
                    # A port may be torch's or a router's of a node that has none.
                    with contextlib.suppress(httpx.TransportError):
                        reply = client.get(page)
                        answers += reply.status_code == 200
                        assert found_in(reply.content) == [], f"{address}{page}"
    assert answers > 50


def test_no_file_and_no_output_has_a_secret(run: System, volume: Path) -> None:
    """The last test of the file: it ends the run."""
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text
    files = [path for path in volume.rglob("*") if path.is_file()]
    assert run.output in files
    assert any(path.suffix == ".wandb" for path in files)
    assert [str(path) for path in files if found_in(path.read_bytes())] == []
