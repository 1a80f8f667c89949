"""Environment-servers for the images of tasks: SkyPilot gives a task's pods one image, so each image is a task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import yaml

from local_runner import skypilot
from local_runner.checks import Loaded
from services.core.endpoints import ENVIRONMENT_SERVERS_VARIABLE, Task
from services.core.errors import ConfigurationError
from services.data_server.harbor import Task as HarborTask
from services.data_server.settings import DataSettings
from services.data_server.task_sets import datasets_of, passed_tasks
from services.environment_server.settings import EnvironmentSettings

NAME = Task.ENVIRONMENT_SERVER.value
HOME_OF_PODS = "/root"
"""The directory in which pods have this project."""
POD = """
config:
  kubernetes:
    # What bubblewrap needs of a pod; remove it where pods run on gVisor.
    pod_config:
      spec:
        hostUsers: false
        containers:
          - securityContext:
              seccompProfile: {type: Unconfined}
              appArmorProfile: {type: Unconfined}
              procMount: Unmasked"""


def tasks_of(loaded: Sequence[Loaded]) -> list[HarborTask]:
    """Return the tasks in Harbor's format that a run trains on or evaluates.

    Raises:
        ConfigurationError: no task of a dataset has passed ``grpo tasks check``.
    """
    data = [settings for _, _, settings in loaded if isinstance(settings, DataSettings)]
    datasets = dict.fromkeys(dataset for settings in data for dataset in datasets_of(settings))
    return [task for dataset in datasets for task in passed_tasks(dataset)[0]]


def images_of(tasks: Sequence[HarborTask], loaded: Sequence[Loaded], text: str, most: int) -> Counter[str]:
    """Return the number of tasks by image, but for the images with a tree of SANDBOX_TREES.

    Args:
        tasks: what ``tasks_of`` returned.
        loaded: the settings of all tasks of the job group.
        text: the job group's YAML.
        most: the images that may have pods.

    Raises:
        ConfigurationError: they are more, or a task has no box in a pod.
    """
    servers = [settings for _, _, settings in loaded if isinstance(settings, EnvironmentSettings)]
    tasks = [task for task in tasks if not any(task.image in own.sandbox_trees for own in servers)]
    if tasks and any(own.sandbox_image for own in servers):
        raise ConfigurationError("SANDBOX_IMAGE follows from the images of the tasks; leave it out")
    if in_home := [task.name for task in tasks if HOME_OF_PODS in task.own_places]:
        raise ConfigurationError(
            f"programs of {', '.join(in_home)} write to {HOME_OF_PODS}, where pods have this project; give them "
            "another working directory, or leave them out by a list file"
        )
    images = Counter(sorted(task.image for task in tasks))
    if (count := len(images)) > most:
        [resources] = [document["resources"] for document in yaml.safe_load_all(text) if document["name"] == NAME]
        cpus, memory = (count * int(resources[key].rstrip("+")) for key in ("cpus", "memory"))
        raise ConfigurationError(
            f"the tasks of DATASET have {count} images, so they need {count} pods of environment-server, with {cpus} "
            f"CPUs and {memory} GB; at most {most} are made: raise --max-images, choose tasks by a list file and check "
            "that, or give images a tree (SANDBOX_TREES)"
        )
    return images


def with_images(text: str, images: Collection[str]) -> str:
    """Return a job group's YAML whose environment-servers are in the images of tasks: a task for each, of one pod.

    The first keeps the name, and with a single image its number of nodes; the others end with a number. Without
    images the text stays as it is.
    """
    if not images:
        return text
    documents = text.split(skypilot.SEPARATOR)
    [place] = [number for number, document in enumerate(documents) if document.startswith(f"name: {NAME}\n")]
    names = [NAME, *(f"{NAME}-{number}" for number in range(2, len(images) + 1))]
    document = documents[place].rstrip("\n") + POD
    documents[place : place + 1] = [document.replace(NAME, name, 1) for name in names]
    edited = skypilot.SEPARATOR.join(documents) + "\n"
    changes = {}
    for name, image in zip(names, images, strict=True):
        changes[name, "resources.image_id"] = skypilot.scalar(f"docker:{image}")
        changes[name, f"{skypilot.ENVS}.SANDBOX_IMAGE"] = skypilot.scalar(image)
    if len(images) > 1:
        changes |= {(name, "num_nodes"): "1" for name in names}
        tasks = [document["name"] for document in list(yaml.safe_load_all(edited))[1:]]
        count = {f"{skypilot.ENVS}.{ENVIRONMENT_SERVERS_VARIABLE}": str(len(images))}
        changes |= {(task, key): value for task in tasks for key, value in count.items()}
    return skypilot.edited(edited, changes)
