"""Starts some tasks of a job group as the local runner would, without the others, and ends them."""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from local_runner import nodes, processes, spec, watchdog
from local_runner.environment import Run, node_environment

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 15.0
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Group:
    """A job group of which some tasks run."""

    run: Run

    def environment(self, task: str, rank: int = 0) -> dict[str, str]:
        """The variables of a node, whether it runs or not."""
        return node_environment(self.run, self._task(task), rank)

    def log(self, task: str, rank: int = 0) -> Path:
        """The log of a node."""
        return self.run.log(self._task(task), rank)

    def _task(self, name: str) -> spec.TaskSpec:
        return next(task for task in self.run.group.tasks if task.name == name)


@contextmanager
def started(
    directory: Path, tasks: Sequence[str], settings: Mapping[str, object], num_nodes: Mapping[str, int]
) -> Iterator[Group]:
    """Runs the named tasks of jobgroup.yaml with ``settings``; nothing of them is left afterwards."""
    texts = {name: str(value) for name, value in settings.items()}
    group = spec.load(ROOT / "jobgroup.yaml", spec.Overrides(environment=texts, num_nodes=num_nodes))
    mark = f"benchmark-{uuid.uuid4().hex}"
    with ExitStack() as stack:
        addresses = stack.enter_context(nodes.allocate(group))
        run = Run(group, "benchmark", directory, addresses, mark=mark)
        stack.enter_context(watchdog.guard(mark))
        stack.callback(processes.end, [mark], END_SECONDS)
        for task in group.tasks:
            for rank in range(task.num_nodes if task.name in tasks else 0):
                log = run.log(task, rank)
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("wb") as output:
                    subprocess.Popen(
                        ["bash", "-c", task.run],
                        cwd=ROOT,
                        env=node_environment(run, task, rank),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
        yield Group(run)


def output_of(command: Sequence[str], environment: Mapping[str, str], seconds: float, logs: Sequence[Path]) -> str:
    """Standard output of a command that works with running nodes.

    Raises:
        SystemExit: it failed or took longer than ``seconds``; the message has the ends of ``logs``.
    """
    end = time.monotonic() + seconds
    with subprocess.Popen(command, cwd=ROOT, env=dict(environment), stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate(timeout=end - time.monotonic())
        except subprocess.TimeoutExpired:
            output = ""
        finally:
            # Also when this process is interrupted.
            if process.poll() is None:
                process.kill()
    if process.returncode:
        tails = "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in logs if log.exists())
        raise SystemExit(f"{tails}\nerror: {' '.join(command[1:4])} ended with {process.returncode}")
    return output
