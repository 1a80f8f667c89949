"""Job groups for SkyPilot: edits of their YAML as text, which keep comments and the order of lines, and the launch.

SkyPilot needs older versions of some of this project's dependencies, so it usually has an environment of its own, in
which ``python -m local_runner.skypilot`` runs. The program reads a request from stdin, because the secrets in it must
not be among any process's arguments, and writes its answer to stdout, both as JSON.
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

import yaml

ROOT = Path(__file__).parents[1]
INSTALL = "python -m venv .venv-sky && .venv-sky/bin/pip install 'skypilot[kubernetes]==0.14.1'"
SEPARATOR = "\n---\n"
ENVS = "envs"


def edited(text: str, changes: Mapping[tuple[str, str], str]) -> str:
    """Return a job group's YAML with other values.

    Args:
        text: the YAML.
        changes: the values, as YAML, by the name of a task and a key such as ``num_nodes`` or ``resources.memory``.
            A key that the file lacks is added.
    """
    header, *documents = text.split(SEPARATOR)
    for number, document in enumerate(documents):
        lines = document.split("\n")
        for (task, key), value in changes.items():
            if lines[0] == f"name: {task}":
                _set(lines, key, value)
        documents[number] = "\n".join(lines)
    return SEPARATOR.join([header, *documents])


def values(text: str) -> dict[tuple[str, str], str]:
    """Return the values of a job group's YAML by task and key, in the form of ``edited``'s ``changes``."""
    by_key = {}
    for document in list(yaml.safe_load_all(text))[1:]:
        for key, value in document.items():
            for name, one in value.items() if isinstance(value, dict) else [(None, value)]:
                by_key[document["name"], f"{key}.{name}" if name else key] = scalar(one)
    return by_key


def scalar(value: object) -> str:
    """Return a value as YAML on one line; a text of a number stays bare, as the files have it."""
    if isinstance(value, str) and value.isdecimal() and str(int(value)) == value:
        return value
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return yaml.safe_dump([value], default_flow_style=True, width=10**6)[1:-2]


def _set(lines: list[str], key: str, value: str) -> None:
    """Set a key of a task's document, whose first line is its name."""
    section, _, name = key.rpartition(".")
    start, indent = 0, ""
    if section:
        if f"{section}:" not in lines:
            lines.append(f"{section}:")
        start, indent = lines.index(f"{section}:"), "  "
    end = start + 1
    while end < len(lines) and (not section or lines[end].startswith(" ")):
        if lines[end].startswith(f"{indent}{name}:"):
            lines[end] = f"{indent}{name}: {value}"
            return
        end += 1
    lines.insert(end if section else 1, f"{indent}{name}: {value}")


def interpreter() -> Path | None:
    """Return the Python that has SkyPilot: this one, that of ``sky`` on PATH, or that of .venv-sky."""
    if importlib.util.find_spec("sky") is not None:
        return Path(sys.executable)
    command = shutil.which("sky")
    candidates = [Path(command).resolve().with_name("python")] if command else []
    return next((python for python in [*candidates, ROOT / ".venv-sky/bin/python"] if python.exists()), None)


def ask(python: Path, files: Sequence[Path], secrets: Mapping[str, str], *, launch: bool) -> tuple[int | None, str]:
    """Have SkyPilot load and validate a job group and, with ``launch``, create its volumes and launch it.

    Args:
        python: what ``interpreter`` returned.
        files: the YAMLs of the job group and of the volumes to create.
        secrets: values of the job group's secrets.
        launch: False to validate only.

    Returns:
        The number of the job, if one was launched, and the error, empty if there was none.
    """
    request = {"files": [str(file.resolve()) for file in files], "secrets": dict(secrets), "launch": launch}
    done = subprocess.run(
        [python, "-m", "local_runner.skypilot"],
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
    from sky import jobs, sky_logging, volumes
    from sky.utils import dag_utils

    job = None
    try:
        path, *created = request["files"]
        with sky_logging.silent():  # else it marks up its progress for the client of its server
            group = dag_utils.load_job_group_from_yaml(path)
            give_secrets(group.tasks, request["secrets"])
            dag_utils.fill_default_config_in_dag_for_job_launch(group)
            group.validate()
        for volume in created if request["launch"] else ():
            claim = volumes.Volume.from_yaml_config(yaml.safe_load(Path(volume).read_text(encoding="utf-8")))
            claim.validate(skip_cloud_compatibility=True)
            sky.stream_and_get(volumes.apply(claim))
        if request["launch"]:
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
