"""Runs the SkyPilot scheduler with SkyPilot's own classes, in an environment that has it; prints JSON.

Usage: python skypilot_script.py OUT, with HOME at a temporary directory. What would reach an API server is recorded.
"""

import json
import os
import sys
from pathlib import Path

# SkyPilot would fetch its list of known accelerators.
catalog = Path(os.environ["HOME"], ".sky/catalogs/v8/common/accelerators.csv")
catalog.parent.mkdir(parents=True)
names = ["H100", "H200", "A100-80GB", "L40S"]
catalog.write_text("AcceleratorName,Clouds\n" + "".join(f"{name},\"['Kubernetes']\"\n" for name in names))

import sky  # noqa: E402
from sky import exceptions, jobs  # noqa: E402
from sky.utils import dag_utils  # noqa: E402

from evaluation import skypilot  # noqa: E402
from services.core.errors import (  # noqa: E402
    ConfigurationError,
    DependencyLostError,
)

told = {"lines": [], "errors": {}}
launched = []


def launch(task, name=None):
    dag_utils.fill_default_config_in_dag_for_job_launch(task)
    task.validate()
    launched.append((task, name))
    return "request"


def tail_logs(job_id=None, task=None, follow=True, output_stream=None):
    told["followed"] = [job_id, task, follow]
    output_stream.write('(evaluate, rank=0) starting\n(evaluate) results.json: {"metr')
    output_stream.write('ics": {}}\n(evaluate) bye\n')
    return 0


jobs.launch, jobs.tail_logs = launch, tail_logs
sky.stream_and_get = lambda request: ([17], None)

loaded = skypilot.load(
    3,
    2,
    {"MODEL_NAME": "some/model", "EVAL_SAMPLES": "8", "DATASET": "arithmetic"},
    {"HF_TOKEN": "secret"},
    {"/models/mine": os.environ["HOME"]},
)
told["results"] = skypilot.launch("evaluate-mine", loaded, told["lines"].append)
group, told["name"] = launched[0]
told["group"] = {
    "name": group.name,
    "primary": group.primary_tasks,
    "tasks": {
        t.name: {
            "nodes": t.num_nodes,
            "envs": t.envs,
            "secrets": sorted(t.secrets),
            "mounts": t.file_mounts,
            "gpus": [one.accelerators for one in t.resources],
        }
        for t in group.tasks
    },
}


def error_of(name, work):
    try:
        work()
    except (ConfigurationError, DependencyLostError) as error:
        told["errors"][name] = f"{type(error).__name__}: {error}"


def refuse(request):
    raise exceptions.ApiServerConnectionError("http://api")


jobs.tail_logs = lambda **_: 1
error_of("no results", lambda: skypilot.launch("evaluate-mine", loaded, lambda _: None))
jobs.tail_logs = lambda **_: (_ for _ in ()).throw(OSError("http://api went away"))
error_of("log", lambda: skypilot.launch("evaluate-mine", loaded, lambda _: None))
sky.stream_and_get = refuse
error_of("no server", lambda: skypilot.launch("evaluate-mine", loaded, lambda _: None))

Path(sys.argv[1]).write_text(json.dumps(told))
