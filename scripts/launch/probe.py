"""Try in a pod what a job group needs of a cluster: ``python -m scripts.launch.probe``, as check.yaml runs it.

Two pods try the driver of their GPU, the registries of the images, the hub, and the volume and the network that they
share. Nothing is installed in them, so this module imports the standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.error import HTTPError

from services.core import machine
from services.core.errors import EXIT_CONFIGURATION
from services.core.run_ids import job_id

DRIVERS = {"12": 525, "13": 580}
"""The oldest driver by the CUDA version that an image is built for."""
TORCH_CUDA = "13"
"""The CUDA version of the torch that trainer nodes install."""
PORT = 8004
PEER_SECONDS = 900.0
"""The time that the other pod has to come up; SkyPilot itself waits ten minutes for the pods of a group."""
REQUEST_SECONDS = 30.0
MANIFESTS = "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json"


class CheckError(Exception):
    """A check that failed; the message says what to do."""


def check_driver(images: Sequence[str]) -> str:
    """Compare this node's driver with the CUDA versions of the images and of torch."""
    cuda = max([TORCH_CUDA, *(version[1] for image in images if (version := re.search(r"-cu(\d\d)\d\b", image)))])
    driver = machine.driver_version()
    if driver is None or not machine.visible_gpus():
        raise CheckError(
            f"nvidia-smi lists no GPU (driver {driver or 'not found'}); install NVIDIA's driver and container toolkit "
            "on the node, or give --env LD_LIBRARY_PATH=/usr/local/nvidia/lib64 on GKE"
        )
    if int(driver.partition(".")[0]) < DRIVERS[cuda]:
        raise CheckError(f"driver {driver} is too old: CUDA {cuda} needs {DRIVERS[cuda]} or newer; take other nodes")
    return f"driver {driver} is new enough for CUDA {cuda}"


def check_image(image: str) -> str:
    """Ask the registry of an image for its manifest, and pull nothing."""
    name, _, tag = image.removeprefix("docker:").rpartition(":")
    registry, _, repository = name.partition("/")
    if not re.search(r"[.:]|^localhost$", registry):
        registry, repository = "registry-1.docker.io", name if "/" in name else f"library/{name}"
    scheme = "http" if registry.startswith(("localhost", "127.")) else "https"
    ask = partial(_get, f"{scheme}://{registry}/v2/{repository}/manifests/{tag}", Accept=MANIFESTS)
    try:
        try:
            ask()
        except HTTPError as error:
            header = error.headers.get("WWW-Authenticate", "")
            challenge = dict(re.findall(r'(\w+)="([^"]*)"', header))
            if not header.lower().startswith("bearer") or "realm" not in challenge:
                raise
            scope = f"service={challenge.get('service', '')}&scope=repository:{repository}:pull"
            reply = json.loads(_get(f"{challenge['realm']}?{scope}"))
            token = reply.get("token") or reply.get("access_token", "")
            ask(Authorization=f"Bearer {token}")
    except HTTPError as error:
        if error.code == 404:
            raise CheckError(f"{image}: its registry has no such tag; name another image") from error
        return f"{image} was not checked, because its registry wants a login ({error}); so do nodes that pull it"
    except OSError as error:
        return f"{image} was not checked, because pods do not reach its registry ({error}); nodes must"
    return f"{image} is in its registry"


def check_hub(model: str) -> str:
    """Ask the hub for the configuration of a model, unless the model is a directory."""
    if model.startswith("/") or os.environ.get("HF_HUB_OFFLINE", "0") != "0":
        return f"{model} was not looked for: it is a directory, or HF_HUB_OFFLINE is set"
    hub, token = os.environ.get("HF_ENDPOINT") or "https://huggingface.co", os.environ.get("HF_TOKEN")
    try:
        _get(f"{hub}/{model}/resolve/main/config.json", **({"Authorization": f"Bearer {token}"} if token else {}))
    except HTTPError as error:
        remedy = "accept its licence and give --secret HF_TOKEN" if error.code in (401, 403) else "check the name"
        raise CheckError(f"{hub} does not give {model} ({error}); {remedy}") from error
    except OSError as error:
        remedy = "copy the model to the volume and give --env HF_HUB_OFFLINE=1"
        raise CheckError(f"{hub} cannot be reached ({error}); {remedy}") from error
    return f"{hub} gives {model}"


def check_volume(folder: Path, me: str, peer: str) -> str:
    """Rename on the volume, see the other pod's file, and try whether the lock of one pod binds the other."""
    here, there, tried = (folder / name for name in (f"{me}.here", f"{peer}.here", f"{max(me, peer)}.tried"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f".{me}").open("w"), (folder / "lock").open("a") as lock:
            if me < peer:
                fcntl.lockf(lock, fcntl.LOCK_EX)
            (folder / f".{me}").rename(here)
            if not _waited(there.exists):
                raise CheckError(
                    f"no file of {peer} appeared in {folder}; see whether its pod runs, and whether the storage class "
                    "of jobgroups/volume.yaml offers ReadWriteMany"
                )
            if me < peer:
                _waited(tried.exists)
                shutil.rmtree(folder, ignore_errors=True)
                return "each pod sees the other's files, and renames work"
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return "each pod sees the other's files, and renames and locks work"
            finally:
                tried.touch()
            raise CheckError(f"the lock of {peer} does not bind this pod; take a storage class with locks, as NFS 4 is")
    except OSError as error:
        raise CheckError(f"{error}; pods must be able to write, rename and lock on the volume") from error


def check_network(peer: str, bind: str = "") -> str:
    """Connect to the other pod by its name, and wait until it has connected here."""
    failure: list[OSError] = []
    heard = threading.Event()

    def listen() -> None:
        with contextlib.suppress(OSError):  # closed
            listener.accept()
            heard.set()

    def connects() -> bool:
        try:
            # Resolved each time: SkyPilot writes the names into /etc/hosts once the pods are up.
            socket.create_connection((peer, PORT), REQUEST_SECONDS).close()
        except OSError as error:
            failure[:] = [error]
            return False
        return True

    with socket.create_server((bind, PORT)) as listener:
        threading.Thread(target=listen, daemon=True).start()
        if not _waited(connects):
            remedy = "its pod must run and be in /etc/hosts, and no NetworkPolicy may part the pods of a job"
            raise CheckError(f"{peer} port {PORT} cannot be reached ({failure[0]}); {remedy}")
        if not _waited(heard.is_set):
            raise CheckError(f"{peer} did not reach this pod; see its log, and the cluster's NetworkPolicies")
    return f"{peer} has a name, and each pod reaches the other"


def main() -> None:
    """Run all checks of this pod, as its environment says, print a line of each, and exit with 78 if one failed."""
    group, me, peer = (os.environ[name] for name in ("SKYPILOT_JOBGROUP_NAME", "CHECK_TASK", "CHECK_PEER"))
    images = os.environ["CHECK_IMAGES"].split()
    folder = Path(os.environ["SHARED_DIR"], ".check", (job_id() or "job").replace(" ", "-"))
    checks: list[tuple[str, Callable[[], str]]] = [
        ("driver", partial(check_driver, images)),
        *(("image", partial(check_image, image)) for image in images),
        ("hub", partial(check_hub, os.environ["MODEL_NAME"])),
        ("volume", partial(check_volume, folder, me, peer)),
        ("network", partial(check_network, f"{peer}-0.{group}")),
    ]
    failures = 0
    for name, check in checks:
        try:
            print(f"ok      {name}: {check()}", flush=True)
        except CheckError as error:
            failures += 1
            print(f"FAILED  {name}: {error}", flush=True)
    print(f"{failures} of {len(checks)} checks failed", flush=True)
    sys.exit(EXIT_CONFIGURATION if failures else 0)


def _get(url: str, **headers: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=REQUEST_SECONDS) as reply:
        return bytes(reply.read())


def _waited(condition: Callable[[], bool]) -> bool:
    """Return whether the condition holds within PEER_SECONDS."""
    deadline = time.monotonic() + PEER_SECONDS
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return holds


if __name__ == "__main__":
    main()
