"""Write as JSON what SkyPilot's recovery strategies do with a task of this project.

Usage: python ask_recovery.py FILE TASK, in an environment that has SkyPilot, with HOME at an empty directory. The
executors are SkyPilot's; what would reach a cluster is recorded.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

# SkyPilot would fetch its list of known accelerators.
catalog = Path(os.environ["HOME"], ".sky/catalogs/v8/common/accelerators.csv")
catalog.parent.mkdir(parents=True)
names = ["H100", "H200", "A100-80GB", "L40S"]
catalog.write_text("AcceleratorName,Clouds\n" + "".join(f"{name},\"['Kubernetes']\"\n" for name in names))

from sky import backends  # noqa: E402
from sky.jobs import recovery_strategy  # noqa: E402
from sky.utils import dag_utils  # noqa: E402

CODES = [[78], [78, 137], [34, 78], [33], [33, 137], [1], [70], [137, 137], [139], None]


def executor_of(path, name, strategy):
    """Return SkyPilot's executor of a task, with another strategy unless None."""
    group = dag_utils.load_job_group_from_yaml(path)
    [task] = [task for task in group.tasks if task.name == name]
    if strategy:
        recovery = next(iter(task.resources)).job_recovery | {"strategy": strategy}
        task.set_resources(type(task.resources)(one.copy(job_recovery=recovery) for one in task.resources))
    lock = asyncio.Lock()
    made = recovery_strategy.StrategyExecutor.make(
        "cluster", backends.CloudVmRayBackend(), task, 1, 0, None, set(), lock, asyncio.Condition(lock)
    )
    # The second choice of the file was launched.
    made._launched_resources = task.resources[1]
    return made


def recovery_of(path, name, strategy, answers):
    """Return what an executor does to recover a task; ``answers`` are the successes of its launches."""
    executor, done = executor_of(path, name, strategy), []
    answers = iter(answers)

    async def launch(*_, **__):
        done.append(["launch", [str(one.accelerators) for one in executor.dag.tasks[0].resources]])
        return 1.0 if next(answers) else None

    async def cancel():
        done.append("cancel")

    executor._launch, executor._try_cancel_jobs = launch, cancel
    executor._cleanup_cluster = lambda: done.append("delete the pods")
    asyncio.run(executor.recover())
    return done


async def restarts(path, name):
    """Return for each list of exit codes whether a task restarts after it, the first and the tenth time."""
    told = {}
    for codes in CODES:
        executor = executor_of(path, name, None)
        answers = [executor.should_restart_on_failure(codes) for _ in range(10)]
        told[str(codes)] = [answers[0], answers[-1]]
    return told


path, name = sys.argv[1:]
told = {
    "restarts": asyncio.run(restarts(path, name)),
    "healthy": recovery_of(path, name, None, [True]),
    "gone": recovery_of(path, name, None, [False, True]),
    "by default": recovery_of(path, name, "EAGER_NEXT_REGION", [True]),
}
print(json.dumps(told))
