"""The guides, and the skill for coding agents, are true: their commands run, in order, and print what the pages show.

The word after a block's language gives its kind:

    bash            commands, run one after the other
    bash terminal   a service that runs on while the blocks below it are run
    bash long       trains or evaluates: run by the slow tests; the others only check its commands
    bash gpu        needs a GPU: the commands of its jobs are checked, not run
    bash cluster    for SkyPilot: checked, not run
    bash kubectl    for Kubernetes: checked, not run
    bash install    installs an extra that `make demo` does not: checked (tests/test_packaging.py), not run
    jinja           a part of a prompt, not checked
    python          run; with a file's name (as other languages), written to that file
    text            what the commands above printed: each line is in it, with ... for anything
    yaml            a part of a file to edit; parsed
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest
import yaml

from tests.ports import free_port
from tests.skypilot_facts import check_command
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, bytes_in, wait_until
from trainer.config import TrainerSettings

ROOT = Path(__file__).parents[1]
PAGES = {page.stem: page for page in sorted((ROOT / "docs/guides").glob("*.md"))} | {
    "skill": ROOT / "skills/grpo/SKILL.md"
}
FENCE = re.compile(r"^```(\w+)(?: ([\w. ]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEMO_MODEL = ".cache/models/smollm2-135m"
# Ports in the pages, which each run of a page replaces by free ports.
PORT = re.compile(r"\b(?:30000|80[08][0-5])\b")


class Block(NamedTuple):
    """A fenced block: its language, the words behind it, its text."""

    language: str
    words: set[str]
    text: str

    @property
    def file(self) -> str | None:
        """The file to write the block to, if any."""
        return next((word for word in self.words if "." in word), None)


def blocks(page: str) -> list[Block]:
    return [
        Block(language, set(words.split()), text) for language, words, text in FENCE.findall(PAGES[page].read_text())
    ]


class Desk:
    """A folder to run a page in: a checkout after `make demo`, but with the tiny model instead of the demo's."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.printed = ""
        self.ports: dict[str, str] = {}
        for entry in ROOT.iterdir():
            if not entry.name.startswith(".") and entry.name not in ("runs", "shared-volume", "tests", "build"):
                (folder / entry.name).symlink_to(entry)
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / DEMO_MODEL).parent.mkdir(parents=True)
        (folder / DEMO_MODEL).symlink_to(model)
        # The template is what the tiny model can read.
        self.environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "ARITHMETIC_TEMPLATE": "{a}{op}{b}=",
            # As `source .venv/bin/activate` does.
            "PATH": os.pathsep.join([str(folder / ".venv/bin"), os.environ["PATH"]]),
        }

    def given(self, text: str) -> str:
        """Return ``text`` with ports that are free here."""
        text = re.sub(r"(?<=-m services\.rollout_server)\b", f" --engine-port {free_port()}", text)
        return PORT.sub(lambda found: self.ports.setdefault(found[0], str(free_port())), text)

    def run(self, block: Block) -> None:
        """Run commands to their end and keep their output."""
        command = ["bash", "-euo", "pipefail", "-c", self.given(block.text)]
        if block.language == "python":
            command = ["python", "-c", block.text]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        assert done.returncode == 0, f"{block.text}\n{done.stdout}"
        self.printed += done.stdout + "\n"

    def make_models(self, command: str) -> None:
        """Put the tiny model where ``command`` wants that of a run which was not made."""
        for name in re.findall(r"(?:MODEL_NAME|TEACHER_MODEL)=(runs/\S+)", command):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).symlink_to(self.folder / DEMO_MODEL)

    @contextmanager
    def running(self, block: Block) -> Iterator[None]:
        """Run a service within the context, entered when it is healthy."""
        [port] = PORT.findall(re.search(r"--port (\d+)", block.text)[0])
        log = self.folder / f"terminal-{port}.txt"
        command = ["bash", "-euo", "pipefail", "-c", self.given(block.text)]
        with log.open("w") as output:
            shell = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_healthy(f"http://127.0.0.1:{self.ports[port]}", shell, log)
            yield
        finally:
            end(shell)

    def _wait_healthy(self, url: str, shell: subprocess.Popen[bytes], log: Path) -> None:
        def is_up() -> bool:
            assert shell.poll() is None, log.read_text()
            return is_healthy(url)

        wait_until(is_up, f"{url} healthy", every=0.1, progress=lambda: bytes_in(log), told=log.read_text)


def is_healthy(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    return False


def end(shell: subprocess.Popen[bytes]) -> None:
    """End the processes of a terminal, as closing it does."""
    with suppress(psutil.NoSuchProcess):
        processes = [*psutil.Process(shell.pid).children(recursive=True), psutil.Process(shell.pid)]
        os.killpg(shell.pid, signal.SIGTERM)
        for process in psutil.wait_procs(processes, IDLE_SECONDS)[1]:
            process.kill()
    shell.wait(IDLE_SECONDS)


def as_dry_run(text: str) -> list[str]:
    """Return the commands of the local runner as dry runs."""
    commands = (line.partition(" > ")[0] for line in text.splitlines() if "grpo run" in line)
    return [f"{command.replace('.venv-cuda/bin/', '')} --dry-run" for command in commands]


def try_page(page: str, desk: Desk, *, long: bool) -> None:
    """Run the blocks of a page; replace long blocks by dry runs of their jobs, unless they are wanted."""
    if page == "reasoning-gym":
        pytest.importorskip("reasoning_gym", reason="no reasoning-gym, which needs a C compiler")
    remaining = iter(blocks(page))
    skipped = False

    def rest() -> None:
        nonlocal skipped
        for block in remaining:
            if block.words & {"cluster", "kubectl", "install"} or block.language == "jinja":
                continue
            if block.file is not None:
                (desk.folder / block.file).write_text(desk.given(block.text))
            elif block.language == "yaml":
                yaml.safe_load(block.text)
            elif block.language == "text":
                assert skipped or not missing(block.text, desk.printed), missing(block.text, desk.printed)
            elif "gpu" in block.words or ("long" in block.words and not long):
                skipped = True
                for command in as_dry_run(block.text):
                    desk.make_models(command)
                    desk.run(Block("bash", set(), command))
            elif "terminal" in block.words:
                skipped = False
                with desk.running(block):
                    rest()
            else:
                assert block.language in ("bash", "python"), block.language
                skipped = False
                desk.run(block)

    rest()


def missing(shown: str, printed: str) -> list[str]:
    """Return the lines that a page shows but no command printed."""
    patterns = {line: ".*".join(map(re.escape, line.split("..."))) for line in shown.splitlines()}
    return [line for line, pattern in patterns.items() if not re.search(pattern, printed)]


@pytest.fixture
def desk(tmp_path: Path, tiny_model: Path) -> Desk:
    return Desk(tmp_path, tiny_model)


# Half a minute and more each: several dry runs, each of which loads torch, a small training, a model that is served.
NOT_SO_QUICK = {"agent", "asynchronous", "code", "data", "distillation", "environment", "explaining", "larger-model"}
NOT_SO_QUICK |= {"one-gpu", "operating", "own-loss", "reasoning-gym", "rehearsing", "resuming", "reward-model", "rows"}
NOT_SO_QUICK |= {"self-play", "sft", "skill", "sources"}
QUICK = [
    pytest.param(page, marks=[pytest.mark.slow] if page in NOT_SO_QUICK else [])
    for page in sorted(PAGES.keys() - {"evaluation"})  # of which all is long
]


@pytest.mark.parametrize("page", QUICK)
def test_a_guides_quick_commands_run_and_its_jobs_are_accepted(page: str, desk: Desk) -> None:
    try_page(page, desk, long=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if any("long" in block.words for block in blocks(page))])
def test_a_guide_is_run_whole(page: str, desk: Desk) -> None:
    if page == "distillation":
        # Random weights earn no reward with the guide's, and a teacher must have learned something.
        (desk.folder / "parity.py").write_text("def parity(response: str) -> float:\n    return len(response) % 2\n")
        desk.environment["REWARD_FN"] = "parity:parity"
    try_page(page, desk, long=True)
    for metrics in desk.folder.glob("runs/*/metrics.jsonl"):
        steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
        assert steps == list(range(1, len(steps) + 1))


def test_the_guides_agent_is_that_of_the_demo() -> None:
    [shown] = [block.text for block in blocks("agent") if block.file == "my_agent.py"]
    assert shown == (ROOT / "evaluation/multiplying_agent.py").read_text()


def test_no_guide_overwrites_the_file_of_another() -> None:
    """A reader follows one guide after the other in one folder."""
    texts: dict[str, dict[str, str]] = {}
    for page in PAGES:
        for block in blocks(page):
            if block.file is not None:
                texts.setdefault(block.file, {})[page] = block.text
    assert len(texts) > 8
    assert {file: sorted(pages) for file, pages in texts.items() if len(set(pages.values())) > 1} == {}


def test_what_a_page_shows_must_have_been_printed() -> None:
    assert missing('{"reward":...,"status":"scored"\nstep 2/2\n', '{"reward":0.5,"status":"scored"}\n') == ["step 2/2"]


# Variables of other programs, placeholders of pages, and states of SkyPilot.
NO_SETTINGS = {"HF_TOKEN", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"}
NO_SETTINGS |= {"NAME", "TRACKIO_DIR", "MLFLOW_TRACKING_URI", "WANDB_API_KEY"}
NO_SETTINGS |= {"EPISODE", "ADD", "MY_THRESHOLD", "JOB_ID", "NOT_READY", "FAILED_NO_RESOURCE", "FAILED_SETUP"}
NO_SETTINGS |= {
    "OPENAI_BASE_URL",
    "PIP_FIND_LINKS",
    "PIP_NO_INDEX",
    "MY_SHARPNESS",
    "GRPO_REWARD_FD",
    "LOSS_FUNCTIONS",
    "ADVANTAGE_FUNCTIONS",
}


def known_variables() -> set[str]:
    return set(re.findall(r"^\| `([A-Z_0-9]+)` \|", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES)
def test_the_variables_of_a_guide_are_settings(page: str) -> None:
    text = PAGES[page].read_text()
    named = set(re.findall(r"--env (\w+)=", text)) | set(re.findall(r"^([A-Z_]+)=", text, re.MULTILINE))
    named |= set(re.findall(r"`([A-Z]+(?:_[A-Z]+)+)(?:=[^`]*)?`", text))
    assert named - NO_SETTINGS <= known_variables()


def test_skypilot_takes_the_options_of_the_guides() -> None:
    all_blocks = [block for page in PAGES for block in blocks(page)]
    commands = [line for block in all_blocks if "cluster" in block.words for line in block.text.splitlines()]
    assert len(commands) > 8
    for command in commands:
        if command.startswith("sky "):
            check_command(command)
            continue
        program, name, *words = shlex.split(command)
        assert program == "grpo", command
        assert all(word in help_of(name) for word in words if word.startswith("-")), command


@functools.cache
def help_of(name: str) -> str:
    """Return the help text of a subcommand of grpo."""
    command = [sys.executable, "-m", "scripts.grpo", name, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_kubectl_takes_the_commands_of_the_guides() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl")
    lines = [block.text for page in PAGES for block in blocks(page) if "kubectl" in block.words]
    commands = [shlex.split(found) for found in re.findall(r"kubectl ([^|$\")\n]+)", "".join(lines))]
    assert {verb for verb, *_ in commands} >= {"port-forward", "get", "apply"}
    everywhere = subprocess.run(["kubectl", "options"], capture_output=True, text=True, check=True).stdout
    for verb, *words in commands:
        own = subprocess.run(["kubectl", verb, "--help"], capture_output=True, text=True, check=True).stdout
        known = everywhere + own
        for word in words:
            assert not word.startswith("-") or re.search(rf"^\s+(-\w, )?{word}[=,]", known, re.MULTILINE), (verb, word)
            assert not word.endswith(".yaml") or (ROOT / word).exists(), word


def test_settings_of_the_larger_model_are_the_trainers() -> None:
    rows = re.findall(r"^\| [^|]+ \| [^|]*?`([A-Z_]+)=(\w+)`", PAGES["larger-model"].read_text(), re.MULTILINE)
    assert len(rows) >= 4
    for name, value in rows:  # one at a time, because adapters and deltas exclude each other
        TrainerSettings.model_validate({name.lower(): value})
