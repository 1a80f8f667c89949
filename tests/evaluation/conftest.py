"""Fixtures of the evaluation's tests: the command in this process or one of its own, and servers to evaluate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from services.core.endpoints import PROXY_VARIABLES
from services.core.errors import ComponentError
from services.embedded_engine.app import create_app
from services.engines.settings import RolloutSettings
from services.reward_server.app import create_app as create_reward_app
from services.reward_server.settings import RewardSettings
from tests.evaluation.agent_play import Ground, ground_on
from tests.pages import grpo_command
from tests.services.gateway.conftest import make_model
from tests.services.run_page.serving import served_ready
from tests.waiting import LIMIT_SECONDS, bytes_in, wait_until

ROOT = Path(__file__).parents[2]
OURS = ("SKYPILOT_", "JOBGROUP_", "EVAL_")
"""The beginnings of variables that a command must not take from the tests' environment."""

PROXIES = dict.fromkeys(PROXY_VARIABLES, "http://127.0.0.1:9")
"""A proxy that refuses: all servers are on this machine."""

# The tiny model's questions, asked as it was trained on them.
ARITHMETIC = {
    "DATASET": "arithmetic",
    "DATASET_CONFIG": '{"template": "{a}{op}{b}="}',
    "PROMPT_STYLE": "plain",
    "REWARD_FN": "exact_match",
    "MAX_NEW_TOKENS": "4",
    "ENGINE_DTYPE": "float32",
}


@dataclass
class Command:
    """A run of grpo evaluate."""

    process: subprocess.Popen[bytes]
    log: Path
    output: Path

    @property
    def text(self) -> str:
        return self.log.read_text()

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        self._wait_until(lambda: self.process.poll() is not None, "the end")
        return self.process.returncode

    def succeed(self) -> dict[str, Any]:
        """Wait for the end, and return results.json."""
        assert self.wait() == 0, self.text
        return json.loads((self.output / "results.json").read_text())

    def lines(self, directory: str = "") -> list[bytes]:
        """Return the complete lines of samples.jsonl."""
        path = self.output / directory / "samples.jsonl"
        return [x for x in path.read_bytes().splitlines(keepends=True) if x.endswith(b"\n")] if path.exists() else []

    def samples(self, directory: str = "") -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines(directory)]

    def wait_for_samples(self, count: int) -> None:
        def are_there() -> bool:
            assert self.process.poll() is None, self.text
            return len(self.lines()) >= count

        self._wait_until(are_there, f"{count} samples")

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        progress = partial(bytes_in, self.log, self.output)
        wait_until(condition, what, every=0.02, progress=progress, told=lambda: self.text)


Evaluate = Callable[..., Command]


@pytest.fixture
def evaluate(tmp_path: Path) -> Iterator[Evaluate]:
    """``evaluate("--model", ..., NAME=value)``: starts the command; it and what it started end with the test."""
    started: list[Command] = []

    def start(*arguments: str | Path, output: Path | None = None, **variables: str) -> Command:
        log = tmp_path / f"evaluate-{len(started)}.log"
        where = output or tmp_path / "evaluation"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "scripts.grpo", "evaluate", *map(str, arguments), "--output", str(where)],
                cwd=ROOT,
                env={**environment, **PROXIES, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables},
                stdout=stream,
                stderr=stream,
            )
        started.append(Command(process, log, where))
        return started[-1]

    yield start
    for command in started:
        if command.process.poll() is None:
            command.process.send_signal(signal.SIGTERM)
            command.process.wait(LIMIT_SECONDS)


@dataclass
class Outcome:
    """A run of grpo evaluate in this process, which has ended."""

    code: int
    text: str
    output: Path

    @property
    def results(self) -> dict[str, Any]:
        assert self.code == 0, self.text
        content: dict[str, Any] = json.loads((self.output / "results.json").read_text())
        return content

    def samples(self, directory: str = "") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.output / directory / "samples.jsonl").open()]


Here = Callable[..., Outcome]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    """``here("--model", ..., NAME=value)``: runs the command in this process, to its end."""
    monkeypatch.setattr("services.core.logs.configure", lambda *_: None)

    def run(*arguments: str | Path, output: Path | None = None, **variables: str) -> Outcome:
        where = output or tmp_path / "evaluation"
        with patch.dict(os.environ, variables):
            for name in [name for name in os.environ if name.startswith(OURS) and name not in variables]:
                del os.environ[name]
            try:
                words = [*map(str, arguments), "--output", str(where)]
                code, error = grpo_command("evaluate").main(words, standalone_mode=False), ""
            except ComponentError as caught:
                code, error = caught.exit_code, str(caught)
        said = capfd.readouterr()
        return Outcome(code, f"{said.out}{said.err}{error}", where)

    return run


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer and Qwen's chat template."""
    return make_model(tmp_path_factory.mktemp("chat-model"), "qwen2.5")


@pytest.fixture
async def ground(chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ground]:
    """A gateway in front of an engine that answers as the test says."""
    async with ground_on(chat_model, tmp_path / "gateway", monkeypatch) as made:
        yield made


@pytest.fixture(scope="session")
def engine(tiny_model: Path) -> Iterator[str]:
    """The URL of an embedded engine with the tiny model."""
    with served_ready(create_app(RolloutSettings(model_name=str(tiny_model), engine_dtype="float32"))) as url:
        yield url


@pytest.fixture(scope="session")
def rewards() -> Iterator[str]:
    """The URL of a reward-server that compares answers."""
    with served_ready(create_reward_app(RewardSettings(reward_fn="exact_match"))) as url:
        yield url
