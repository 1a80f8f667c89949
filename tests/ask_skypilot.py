"""Write as JSON how SkyPilot itself reads this project's files, and which commands, options and calls it has.

Usage: python ask_skypilot.py OUT VOLUME FILE..., in an environment that has SkyPilot, with HOME at an empty directory.
Needs neither cloud nor network. One process answers for all tests because importing SkyPilot takes seconds.
"""

import copy
import inspect
import json
import os
import sys
from pathlib import Path

# Without this file SkyPilot would fetch its list of known accelerators.
catalog = Path(os.environ["HOME"], ".sky/catalogs/v8/common/accelerators.csv")
catalog.parent.mkdir(parents=True)
names = ["H100", "H200", "A100-80GB", "L40S"]
catalog.write_text("AcceleratorName,Clouds\n" + "".join(f"{name},\"['Kubernetes']\"\n" for name in names))

import click  # noqa: E402
import sky  # noqa: E402
import yaml  # noqa: E402
from sky.client.cli.command import cli  # noqa: E402
from sky.schemas.api.responses import StatusResponse  # noqa: E402
from sky.serve import serve_utils  # noqa: E402
from sky.serve.serve_state import ReplicaStatus  # noqa: E402
from sky.utils import dag_utils  # noqa: E402
from sky.volumes.volume import Volume  # noqa: E402

ENVS = [("MODEL_NAME", "given"), ("NEW", "1")]
BUCKET = ("CHECKPOINT_BUCKET", "s3://bucket")
SECRETS = [("JOBGROUP_TOKEN", "token"), ("WANDB_API_KEY", "key")]


def read_file(path):
    """Return the tasks of a job group or of a single task, loaded and validated with values given at launch."""
    if dag_utils.is_job_group_yaml(path):
        dag = dag_utils.load_job_group_from_yaml(path, env_overrides=ENVS, secrets_overrides=SECRETS)
        dag_utils.fill_default_config_in_dag_for_job_launch(dag)
        dag.validate()
        group = {
            "name": dag.name,
            "is_job_group": dag.is_job_group(),
            "primary_tasks": dag.primary_tasks,
            "auxiliary_tasks": dag.get_auxiliary_task_names(),
            "inter_connection": dag.inter_connection,
        }
        tasks = {task.name: describe(task) | {"delay": dag.get_termination_delay_secs(task.name)} for task in dag.tasks}
        return group | {"tasks": tasks}
    config = yaml.safe_load(Path(path).read_text())
    # As with `--infra kubernetes`: where no infrastructure is named, SkyPilot asks which clouds there is access to.
    config["resources"]["infra"] = "kubernetes"
    # from_yaml_config takes the secrets out of what it is given.
    envs = ENVS + [BUCKET] * (BUCKET[0] in config.get("envs", {}))
    bare = sky.Task.from_yaml_config(copy.deepcopy(config), env_overrides=envs)
    task = sky.Task.from_yaml_config(config, env_overrides=envs, secrets_overrides=SECRETS)
    task.validate()
    needed = {"must_be_given": sorted(reference.name for reference in bare.managed_secret_refs)}
    return {"is_job_group": False, "tasks": {task.name: describe(task) | needed}}


def describe(task):
    """Return what tests look at of a task."""
    service = task.service
    return {
        "num_nodes": task.num_nodes,
        "envs": task.envs,
        "secrets": {name: secret.get_secret_value() for name, secret in task.secrets.items()},
        "still_to_be_given": [reference.name for reference in task.managed_secret_refs],
        "volumes": task.volumes,
        "hooks": next(option.hooks for option in task.resources),
        # A set of resources has no order; SkyPilot tries a list from its beginning.
        "accelerators": [
            f"{name}:{count}" for option in task.resources for name, count in (option.accelerators or {}).items()
        ],
        "is_ordered": isinstance(task.resources, list),
        "cpus": sorted({option.cpus for option in task.resources}),
        "use_spot": [option.use_spot for option in task.resources],
        "autostop": [vars(option.autostop_config) for option in task.resources if option.autostop_config],
        "buckets": {path: str(storage.source) for path, storage in task.storage_mounts.items()},
        "has_api_server_access": task.api_server_access,
        "ports": next(option.ports for option in task.resources),
        "recovery": next(option.job_recovery for option in task.resources),
        "service": service
        and {
            "readiness_path": service.readiness_path,
            "initial_delay": service.initial_delay_seconds,
            "min_replicas": service.min_replicas,
            "max_replicas": service.max_replicas,
            "target_qps": service.target_qps_per_replica,
            "errors": _refusal(task),
        },
    }


def _refusal(task):
    """Return why SkyServe refuses a service; None if it takes it."""
    try:
        serve_utils.validate_service_task(task, pool=False)
    except ValueError as error:
        return str(error)
    return None


def options_of(command, path):
    """Yield each command below ``command`` by its words, with its options."""
    if isinstance(command, click.Group):
        for name, one in command.commands.items():
            yield from options_of(one, [*path, name])
    else:
        options = [o for p in command.params for o in [*p.opts, *p.secondary_opts] if o.startswith("-")]
        yield " ".join(path), options


def read_sdk():
    """Return the parts of the SDK that discovery and the evaluation's scheduler build on."""
    errors = sky.exceptions
    return {
        "parameters": {
            name: list(inspect.signature(function).parameters)
            for name, function in {
                "status": sky.status,
                "endpoints": sky.endpoints,
                "serve.status": sky.serve.status,
                "get": sky.get,
            }.items()
        },
        "runtime_errors": [
            name
            for name in ("ApiServerConnectionError", "ApiServerAuthenticationError", "APIVersionMismatchError")
            if issubclass(getattr(errors, name), RuntimeError)
        ],
        "has_cluster_not_up_error": issubclass(errors.ClusterNotUpError, Exception),
        "up": sky.ClusterStatus.UP.value,
        "ready": ReplicaStatus.READY.value,
        "status_fields": sorted(StatusResponse.model_fields),
    }


out, volume, *files = sys.argv[1:]
claim = Volume.from_yaml_config(yaml.safe_load(Path(volume).read_text()))
facts = {
    "files": {file: read_file(file) for file in files},
    "volume": {"name": claim.name, "type": str(claim.type), "config": claim.config},
    "options": dict(options_of(cli, [])),
    "sdk": read_sdk(),
}
Path(out).write_text(json.dumps(facts, default=str))
