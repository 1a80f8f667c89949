"""The guides, and the skill for coding agents, are true: their commands run, in order.

The word after a block's language gives its kind:

    bash            commands, run one after the other
    bash terminal   a service that runs on while the blocks below it are run
    bash long       trains or evaluates: its jobs are checked by dry runs
    bash reasoning  needs reasoning-gym: left out where its package is missing
    bash gpu        needs a GPU: its jobs are checked by dry runs
    bash cluster    for SkyPilot: its options are checked (tests/test_documents.py)
    bash kubectl    for Kubernetes: not checked
    bash install    installs an extra that `make demo` does not: checked (tests/test_packaging.py), not run
    jinja           a part of a prompt, not checked
    python          run; with a file's name (as other languages), written to that file
    text            an excerpt of what the commands above print, not checked
    yaml            a part of a file to edit; parsed
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.local_runner.in_process import asks_here
from tests.pages import ROOT, SKILL, Block, blocks, grpo_command
from tests.ports import free_port
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, bytes_in, wait_until
from trainer.config import TrainerSettings

__all__ = ["asks_here"]

GUIDES = {page.stem: page for page in (*sorted((ROOT / "docs/guides").glob("*.md")), ROOT / "docs/gpus.md")}
GUIDES |= {"skill": SKILL}
DEMO_MODEL = ".cache/models/smollm2-135m"
# Ports in the pages, which each run of a page replaces by free ports.
PORT = re.compile(r"\b(?:30000|80[08][0-5])\b")


class Desk:
    """A folder to run a page in: a checkout after `make demo`, but with the tiny model instead of the demo's."""

    def __init__(self, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.ports: dict[str, str] = {}
        for entry in ROOT.iterdir():
            if not entry.name.startswith(".") and entry.name not in ("runs", "shared-volume", "tests", "build"):
                (folder / entry.name).symlink_to(entry)
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / DEMO_MODEL).parent.mkdir(parents=True)
        (folder / DEMO_MODEL).symlink_to(model)
        monkeypatch.chdir(folder)
        # The template is what the tiny model can read.
        monkeypatch.setenv("DATASET_CONFIG", '{"template": "{a}{op}{b}="}')
        # As `source .venv/bin/activate` does.
        monkeypatch.setenv("PATH", str(folder / ".venv/bin"), prepend=os.pathsep)

    def given(self, text: str) -> str:
        """Return ``text`` with ports that are free here."""
        text = re.sub(r"(?<=-m services\.rollout_server)\b", f" --engine-port {free_port()}", text)
        return PORT.sub(lambda found: self.ports.setdefault(found[0], str(free_port())), text)

    def run(self, block: Block) -> None:
        """Run commands to their end."""
        command = ["bash", "-euo", "pipefail", "-c", self.given(block.text)]
        if block.language == "python":
            command = ["python", "-c", block.text]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_SECONDS
        )
        assert done.returncode == 0, f"{block.text}\n{done.stdout}"

    def check_jobs(self, block: Block) -> None:
        """Make a dry run of each of the block's jobs, with the tiny model in place of a run's that was not made."""
        for line in self.given(block.text).splitlines():
            if "grpo run" not in line:
                continue
            for name in re.findall(r"(?:MODEL_NAME|TEACHER_MODEL)=(runs/\S+)", line):
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).symlink_to(self.folder / DEMO_MODEL)
            words = shlex.split(line.partition(" > ")[0].partition("grpo run")[2])
            grpo_command("run").main([*words, "--dry-run"], standalone_mode=False)

    @contextmanager
    def running(self, block: Block) -> Iterator[None]:
        """Run a service within the context, entered when it is healthy."""
        found = re.search(r"--port (\d+)", block.text)
        assert found is not None, block.text
        log = self.folder / f"terminal-{found[1]}.txt"
        command = ["bash", "-euo", "pipefail", "-c", self.given(block.text)]
        with log.open("w") as output:
            shell = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        url = f"http://127.0.0.1:{self.ports[found[1]]}/health"

        def is_up() -> bool:
            assert shell.poll() is None, log.read_text()
            with suppress(httpx.TransportError):
                return httpx.get(url, timeout=5, trust_env=False).status_code == 200
            return False

        try:
            wait_until(is_up, f"{url} healthy", every=0.1, progress=lambda: bytes_in(log), told=log.read_text)
            yield
        finally:
            end(shell)


def end(shell: subprocess.Popen[bytes]) -> None:
    """End the processes of a terminal, as closing it does."""
    with suppress(psutil.NoSuchProcess):
        processes = [*psutil.Process(shell.pid).children(recursive=True), psutil.Process(shell.pid)]
        os.killpg(shell.pid, signal.SIGTERM)
        for process in psutil.wait_procs(processes, IDLE_SECONDS)[1]:
            process.kill()
    shell.wait(IDLE_SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", GUIDES)
def test_a_guides_commands_run_and_its_jobs_are_accepted(
    page: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, asks_here: None
) -> None:
    desk = Desk(tmp_path, tiny_model, monkeypatch)
    remaining = iter(blocks(GUIDES[page]))

    def rest() -> None:
        for block in remaining:
            if block.words & {"cluster", "kubectl", "install"} or block.language in ("jinja", "text"):
                continue
            if "reasoning" in block.words and importlib.util.find_spec("reasoning_gym") is None:
                continue
            if "SOURCES=" in block.text:
                # Sources with datasets of their own refuse the run's.
                monkeypatch.delenv("DATASET_CONFIG")
            if block.file is not None:
                (desk.folder / block.file).write_text(desk.given(block.text))
            elif block.language == "yaml":
                yaml.safe_load(block.text)
            elif block.words & {"gpu", "long"} or re.fullmatch(r"grpo run .* --dry-run\n?", block.text):
                desk.check_jobs(block)
            elif "terminal" in block.words:
                with desk.running(block):
                    rest()
            else:
                assert block.language in ("bash", "python"), block.language
                desk.run(block)

    rest()
    for metrics in tmp_path.glob("runs/*/metrics.jsonl"):
        steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
        assert steps == list(range(1, len(steps) + 1))


def test_the_guides_agent_is_that_of_the_demo() -> None:
    [shown] = [block.text for block in blocks(GUIDES["agents"]) if block.file == "my_agent.py"]
    assert shown == (ROOT / "evaluation/multiplying_agent.py").read_text()


def test_no_guide_overwrites_the_file_of_another() -> None:
    """A reader follows one guide after the other in one folder."""
    texts: dict[str, set[str]] = {}
    for page in GUIDES.values():
        for block in blocks(page):
            if block.file is not None:
                texts.setdefault(block.file, set()).add(block.text)
    assert len(texts) > 8
    assert [file for file, contents in texts.items() if len(contents) > 1] == []


def test_settings_of_the_larger_model_are_the_trainers() -> None:
    [_, section] = GUIDES["gpus"].read_text().split("\n## A larger model\n")
    rows = re.findall(r"^\| [^|]+ \| [^|]*?`([A-Z_]+)=(\w+)`", section.partition("\n## ")[0], re.MULTILINE)
    assert len(rows) >= 4
    for name, value in rows:
        TrainerSettings.model_validate({name.lower(): value})
