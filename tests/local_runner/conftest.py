"""Fixtures of the local runner's tests."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from local_runner import run
from local_runner.nodes import node_environment
from local_runner.supervisor import Supervisor
from tests.local_runner.in_process import asks_here, call
from tests.local_runner.machine import Command, Machine
from tests.local_runner.runner import HEADER, task

__all__ = ["asks_here"]


class Here:
    """Runs in this process and in the current directory, whose nodes are coroutines."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.commands: dict[str, Command] = {}
        self.machine = Machine(self.commands)
        self.output = ""
        """What the last run has printed."""

    def run(self, commands: dict[str, Command], *options: str, **fields: dict[str, Any]) -> int:
        """Run tasks of these commands to their end; ``fields`` are those of their YAML by task, with _ for -."""
        code = call("run", self.group(commands, **fields), "--run-id", "test", *options)
        self.printed()
        self.check()
        return code

    def group(self, commands: dict[str, Command], **fields: dict[str, Any]) -> str:
        """Write the job group of tasks of these commands, and return its path."""
        self.commands.clear()
        self.commands.update(commands)
        self.machine.times.clear()
        self.output = ""
        documents = (task(name, "command", **fields.get(name.replace("-", "_"), {})) for name in commands)
        Path("group.yaml").write_text(HEADER + "".join(documents))
        return "group.yaml"

    def check(self) -> None:
        """Raise what a command raised."""
        for node in self.machine.nodes:
            if node.failure is not None:
                raise node.failure

    def printed(self) -> str:
        """Return what the run has printed so far."""
        self.output += "".join(self._capfd.readouterr())
        return self.output

    def supervisor(self, planned: Any, report: Any) -> Supervisor:
        async def start(one: Any, rank: int, log: Any) -> Any:
            return await self.machine.start(one, rank, log, node_environment(planned, one, rank))

        return Supervisor(planned, report, start, self.machine.end)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], asks_here: None) -> Here:
    made = Here(capfd)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "Supervisor", made.supervisor)
    monkeypatch.setattr(run, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(run.processes, "guard", lambda mark: contextlib.nullcontext())
    return made
