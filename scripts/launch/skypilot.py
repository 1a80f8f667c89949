"""SkyPilot's side of a launch, which runs in the environment that has SkyPilot: ``python -m scripts.launch.skypilot``.

SkyPilot needs older versions of some of this project's dependencies, so it usually has an environment of its own. The
program reads a request from stdin, because the secrets in it must not be among any process's arguments, and writes its
answer to stdout, both as JSON.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
INSTALL = "python -m venv .venv-sky && .venv-sky/bin/pip install 'skypilot[kubernetes]==0.14.1'"


def interpreter() -> Path | None:
    """Return the Python that has SkyPilot: this one, that of ``sky`` on PATH, or that of .venv-sky."""
    if importlib.util.find_spec("sky") is not None:
        return Path(sys.executable)
    command = shutil.which("sky")
    candidates = [Path(command).resolve().with_name("python")] if command else []
    return next((python for python in [*candidates, ROOT / ".venv-sky/bin/python"] if python.exists()), None)


def ask(python: Path, files: tuple[Path, Path], secrets: Mapping[str, str], *, launch: bool) -> tuple[int | None, str]:
    """Have SkyPilot load and validate a job group and, with ``launch``, create its volume and launch it.

    Args:
        python: what ``interpreter`` returned.
        files: the YAMLs of the job group and of the volume.
        secrets: values of the job group's secrets.
        launch: False to validate only.

    Returns:
        The number of the job, if one was launched, and the error, empty if there was none.
    """
    request = {"files": [str(file.resolve()) for file in files], "secrets": dict(secrets), "launch": launch}
    done = subprocess.run(
        [python, "-m", "scripts.launch.skypilot"],
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        text=True,
        # `workdir: .` of the tasks is relative to the directory of the launch.
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    if done.returncode:
        return None, f"{python} ended with exit code {done.returncode}"
    answer = json.loads(done.stdout)
    return answer["job"], answer["error"]


def give_secrets(tasks: Sequence[Any], secrets: Mapping[str, str]) -> None:
    """Give each task the secrets that its file declares, where ``sky jobs launch --secret`` gives every task all.

    A secret that no task declares goes to every task, because only the user's own code can know it.
    """
    declared = {name for task in tasks for name in task.secrets}
    for task in tasks:
        of_task = {name: value for name, value in secrets.items() if name in task.secrets or name not in declared}
        task.update_secrets(of_task)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request of ``ask``."""
    import sky
    import yaml
    from sky import jobs, sky_logging, volumes
    from sky.utils import dag_utils

    job = None
    try:
        path, volume = request["files"]
        with sky_logging.silent():  # else it marks up its progress for the client of its server
            group = dag_utils.load_job_group_from_yaml(path)
            give_secrets(group.tasks, request["secrets"])
            dag_utils.fill_default_config_in_dag_for_job_launch(group)
            group.validate()
        if request["launch"]:
            claim = volumes.Volume.from_yaml_config(yaml.safe_load(Path(volume).read_text(encoding="utf-8")))
            claim.validate(skip_cloud_compatibility=True)
            sky.stream_and_get(volumes.apply(claim))
            job_ids, _ = sky.stream_and_get(jobs.launch(group, name=group.name))
            job = job_ids[0]
    # SkyPilot raises a dozen kinds of errors: no such cluster, a refused login, no storage class, ...
    except Exception as error:  # noqa: BLE001
        return {"job": None, "error": f"{type(error).__name__}: {error}"}
    return {"job": job, "error": ""}


if __name__ == "__main__":
    # SkyPilot writes its progress to stdout.
    with contextlib.redirect_stdout(sys.stderr):
        reply = answer(json.load(sys.stdin))
    print(json.dumps(reply))
