"""Loads task and job group files with SkyPilot's own code and values given at launch; prints JSON, by file.

Usage: python skypilot_overrides.py FILE..., with HOME at a temporary directory. Needs neither cloud nor network.
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
import yaml  # noqa: E402
from sky.utils import dag_utils  # noqa: E402

ENVS = [("MODEL_NAME", "given"), ("NEW", "1")]
SECRETS = [("JOBGROUP_TOKEN", "token"), ("WANDB_API_KEY", "key")]


def tasks_of(file):
    if dag_utils.is_job_group_yaml(file):
        dag = dag_utils.load_job_group_from_yaml(file, env_overrides=ENVS, secrets_overrides=SECRETS)
        dag_utils.fill_default_config_in_dag_for_job_launch(dag)
        dag.validate()
        return dag.tasks
    config = yaml.safe_load(Path(file).read_text())
    # As with `--infra kubernetes`: where no infrastructure is named, SkyPilot asks which clouds there is access to.
    config["resources"]["infra"] = "kubernetes"
    task = sky.Task.from_yaml_config(config, env_overrides=ENVS, secrets_overrides=SECRETS)
    task.validate()
    return [task]


def describe(task):
    return {"envs": task.envs, "secrets": {name: secret.get_secret_value() for name, secret in task.secrets.items()}}


loaded = {
    file: {
        "is_job_group": dag_utils.is_job_group_yaml(file),
        "tasks": {task.name: describe(task) for task in tasks_of(file)},
    }
    for file in sys.argv[1:]
}
print(json.dumps(loaded))
