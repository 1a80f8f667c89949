"""Loads jobgroup.yaml and volume.yaml with SkyPilot's own code, in an environment that has it; prints JSON.

Usage: python skypilot_loader.py JOBGROUP VOLUME, with HOME at a temporary directory. Needs neither cloud nor network.
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

import yaml  # noqa: E402
from sky.utils import dag_utils  # noqa: E402
from sky.volumes.volume import Volume  # noqa: E402

jobgroup, volume = sys.argv[1:]
dag = dag_utils.load_job_group_from_yaml(
    jobgroup, env_overrides=[("MODEL_NAME", "given"), ("NEW", "1")], secrets_overrides=[("WANDB_API_KEY", "key")]
)
dag_utils.fill_default_config_in_dag_for_job_launch(dag)
dag.validate()
claim = Volume.from_yaml_config(yaml.safe_load(Path(volume).read_text()))
tasks = [
    {
        "name": task.name,
        "num_nodes": task.num_nodes,
        "envs": task.envs,
        "secrets": sorted(task.secrets),
        "volumes": task.volumes,
        "run": task.run,
        "setup": task.setup,
        "accelerators": sorted({name for option in task.resources for name in option.accelerators or {}}),
        "images": sorted({str(option.image_id) for option in task.resources}),
        "recovery": next(option.job_recovery for option in task.resources),
        "delay": dag.get_termination_delay_secs(task.name),
    }
    for task in dag.tasks
]
result = {
    "is_job_group": dag.is_job_group(),
    "name": dag.name,
    "primary_tasks": dag.primary_tasks,
    "auxiliary_tasks": dag.get_auxiliary_task_names(),
    "inter_connection": dag.inter_connection,
    "tasks": tasks,
    "volume": {"name": claim.name, "type": str(claim.type), "config": claim.config},
}
Path(os.environ["LOADED"]).write_text(json.dumps(result, default=str))
