"""Nodes of some tasks of a job group, without the other tasks."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.harness import END_SECONDS, ROOT
from local_runner import gpus, nodes, processes, spec, watchdog
from local_runner.environment import Run, node_environment


@dataclass(frozen=True)
class Group:
    """A job group of which one task runs."""

    run: Run

    def environment(self, task: str) -> dict[str, str]:
        """Return the environment variables of the first node of a task, whether it runs or not."""
        return node_environment(self.run, self._task(task), 0)

    def logs(self, task: str) -> list[Path]:
        """Return the logs of a task's nodes."""
        found = self._task(task)
        return [self.run.log(found, rank) for rank in range(found.num_nodes)]

    def _task(self, name: str) -> spec.TaskSpec:
        return next(task for task in self.run.group.tasks if task.name == name)


@contextmanager
def running(
    directory: Path, task_name: str, settings: Mapping[str, object], num_nodes: Mapping[str, int]
) -> Iterator[Group]:
    """Run a task of jobgroup.yaml as the local runner would, and stop all its processes when the context ends."""
    texts = {name: str(value) for name, value in settings.items()}
    group = spec.load(ROOT / "jobgroup.yaml", spec.Overrides(environment=texts, num_nodes=num_nodes))
    task = next(task for task in group.tasks if task.name == task_name)
    mark = f"benchmark-{uuid.uuid4().hex}"
    with ExitStack() as stack:
        addresses = stack.enter_context(nodes.allocate(group))
        run = Run(group, "benchmark", directory, addresses, gpus.visible(), mark)
        stack.enter_context(watchdog.guard(mark))
        stack.callback(processes.end, [mark], END_SECONDS)
        for rank in range(task.num_nodes):
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
