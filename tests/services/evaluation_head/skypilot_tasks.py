"""Loads task YAMLs with SkyPilot's own classes, in an environment that has it; prints JSON.

Usage: python skypilot_tasks.py YAML ..., with HOME at a temporary directory. Needs neither cloud nor network.
"""

import json
import os
import sys
from pathlib import Path

# SkyPilot would fetch its list of known accelerators.
catalog = Path(os.environ["HOME"], ".sky/catalogs/v8/common/accelerators.csv")
catalog.parent.mkdir(parents=True)
catalog.write_text("AcceleratorName,Clouds\nH100,\"['Kubernetes']\"\n")

import sky  # noqa: E402
import yaml  # noqa: E402


def load(path, **secrets):
    config = yaml.safe_load(Path(path).read_text())
    # As with `--infra kubernetes`: where no infrastructure is named, SkyPilot asks which clouds there is access to.
    config["resources"]["infra"] = "kubernetes"
    return sky.Task.from_yaml_config(config, secrets_overrides=list(secrets.items()))


def describe(path):
    task = load(path, JOBGROUP_TOKEN="token")
    task.validate()
    [resources] = task.resources
    service = task.service
    return {
        "must_be_given": sorted(ref.name for ref in load(path).managed_secret_refs),
        "still_to_be_given": [ref.name for ref in task.managed_secret_refs],
        "name": task.name,
        "envs": task.envs,
        "secrets": sorted(task.secrets),
        "setup": task.setup,
        "run": task.run,
        "cpus": resources.cpus,
        "accelerators": resources.accelerators,
        "use_spot": resources.use_spot,
        "ports": resources.ports,
        "image": str(resources.image_id),
        "recovery": resources.job_recovery,
        "service": service
        and {
            "readiness_path": service.readiness_path,
            "initial_delay": service.initial_delay_seconds,
            "min_replicas": service.min_replicas,
            "max_replicas": service.max_replicas,
            "target_qps": service.target_qps_per_replica,
        },
    }


told = {Path(path).stem: describe(path) for path in sys.argv[1:]}
Path(os.environ["LOADED"]).write_text(json.dumps(told, default=str))
