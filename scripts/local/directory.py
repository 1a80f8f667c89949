"""What a run directory says of its runner: whether it runs, and where its nodes are."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from scripts.local.environment import Run
from services.errors import ConfigurationError

FILE = "nodes.json"


@dataclass(frozen=True)
class Nodes:
    """A runner's process, and ``host:port`` of everything that its nodes listen on, as JOBGROUP_ENDPOINTS has it."""

    pid: int
    started: float
    endpoints: dict[str, str]

    def is_running(self) -> bool:
        """Whether the runner is still there, and not another process of the same number."""
        try:
            return psutil.Process(self.pid).create_time() == self.started
        except psutil.NoSuchProcess:
            return False


def record_nodes(run: Run) -> None:
    """Write down that this process runs ``run``, and where.

    Raises:
        ConfigurationError: the run directory cannot be written.
    """
    content = {
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "endpoints": run.addresses.endpoints,
    }
    try:
        write_object(run.run_dir / FILE, content)
    except OSError as error:
        raise ConfigurationError(
            f"the run directory {run.run_dir} cannot be written: {error}; make room there"
        ) from error


def read_nodes(run_dir: Path) -> Nodes | None:
    """What was written down; None of a run that no local runner has run."""
    content = read_object(run_dir / FILE)
    return Nodes(**content) if content else None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    if not path.exists():
        return {}
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def write_object(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object; a file that was there stays whole where the disk is full."""
    partial = path.with_name(f".{path.stem}.partial")
    try:
        partial.write_text(json.dumps(content, indent=2) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def find_run(given: Path | None) -> Path:
    """``given``, or the run below ``runs/`` that was last written to.

    Raises:
        ConfigurationError: there is no such run.
    """
    if given is not None:
        if not given.is_dir():
            raise ConfigurationError(f"{given} is no run directory; give one such as runs/grpo-1")
        return given
    runs = [path for path in Path("runs").glob("*") if path.is_dir()]
    if not runs:
        raise ConfigurationError("there is no run below runs/ here; name the run directory")
    return max(runs, key=_last_written)


def _last_written(run_dir: Path) -> float:
    return max(path.stat().st_mtime for path in [run_dir, *run_dir.glob("*.json*"), *run_dir.glob("logs/*.log")])
