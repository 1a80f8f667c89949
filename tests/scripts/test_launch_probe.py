"""The checks of ``grpo launch --check``: against a directory, a registry, a hub and a stub nvidia-smi."""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from scripts.launch import probe
from scripts.launch.probe import CheckError
from services.core import machine
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
SGLANG = "docker:lmsysorg/sglang:v0.5.23-cu130"
PEERS = ("check-rollout", "check-trainer")


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stub of nvidia-smi on PATH; tests write the driver's version into its file."""
    program, driver = tmp_path / "bin/nvidia-smi", tmp_path / "driver"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\ncase "$1" in *driver_version*) cat {driver};; *index*) echo 0;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.delenv(machine.VISIBLE_GPUS_VARIABLE, raising=False)
    monkeypatch.setattr(machine, "DRIVER_FILE", tmp_path / "no-such-file")
    return driver


def test_a_driver_is_compared_with_the_cuda_of_images_and_torch(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("580.65.06\n")
    assert probe.check_driver([SGLANG]) == "driver 580.65.06 is new enough for CUDA 13"
    nvidia_smi.write_text("570.124.06\n")
    for images in ([SGLANG], ["docker:mine:v1"]):
        with pytest.raises(CheckError, match=r"driver 570\.124\.06 is too old: CUDA 13 needs 580 or newer"):
            probe.check_driver(images)


def test_a_pod_without_a_gpu_says_what_to_install(nvidia_smi: Path) -> None:
    (nvidia_smi.parent / "bin/nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(CheckError, match=r"lists no GPU \(driver not found\); install NVIDIA's driver"):
        probe.check_driver([SGLANG])


class Site(BaseHTTPRequestHandler):
    """A registry with one public image, one behind a token and one behind a login; and a hub."""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        authorization, code, body = self.headers.get("Authorization"), 404, b"{}"
        here = f"http://127.0.0.1:{self.server.server_address[1]}"
        if path == "/v2/team/open/manifests/v1" and "manifest.list" in self.headers["Accept"]:
            code = 200
        elif path == "/v2/team/token/manifests/v1":
            code = 200 if authorization == "Bearer anonymous" else 401
        elif path == "/v2/team/login/manifests/v1":
            code = 401
        elif path == "/token" and query == "service=registry&scope=repository:team/token:pull":
            code, body = 200, json.dumps({"token": "anonymous"}).encode()
        elif path == "/token":
            code = 401
        elif path == "/team/model/resolve/main/config.json":
            code = 200
        elif path == "/team/gated/resolve/main/config.json":
            code = 200 if authorization == "Bearer hub-token" else 403
        elif path == "/v2/team/basic/manifests/v1":
            code = 401
        self.send_response(code)
        if "basic" in path:
            self.send_header("WWW-Authenticate", 'Basic realm="Registry Realm"')
        elif code == 401:
            self.send_header("WWW-Authenticate", f'Bearer realm="{here}/token",service="registry",scope="ignored"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["open", "token"])
def test_an_image_is_found_by_its_manifest(site: str, name: str) -> None:
    assert probe.check_image(f"docker:{site}/team/{name}:v1").endswith(" is in its registry")


def test_an_image_that_is_not_there_fails_and_one_that_cannot_be_seen_is_said(site: str) -> None:
    with pytest.raises(CheckError, match=r"team/open:v2: its registry has no such tag; name another image"):
        probe.check_image(f"docker:{site}/team/open:v2")
    for name in ("login", "basic"):
        assert "because its registry wants a login" in probe.check_image(f"docker:{site}/team/{name}:v1")
    assert "because pods do not reach its registry" in probe.check_image("docker:127.0.0.1:9/team/open:v1")


def test_the_hub_is_asked_for_the_model(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://{site}")
    assert probe.check_hub("team/model") == f"http://{site} gives team/model"
    with pytest.raises(CheckError, match=r"does not give team/modle \(.*404.*\); check the name"):
        probe.check_hub("team/modle")
    with pytest.raises(CheckError, match=r"accept its licence and give --secret HF_TOKEN"):
        probe.check_hub("team/gated")
    monkeypatch.setenv("HF_TOKEN", "hub-token")
    assert probe.check_hub("team/gated").endswith("gives team/gated")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckError, match=r"cannot be reached .* --env HF_HUB_OFFLINE=1"):
        probe.check_hub("team/model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "was not looked for" in probe.check_hub("team/model")


def volume(folder: Path, me: str, *, locks: bool = True, seconds: float = probe.PEER_SECONDS) -> str:
    """Return what a pod's check of the volume says."""
    probe.PEER_SECONDS = seconds
    if not locks:
        probe.fcntl.lockf = lambda *_: None
    try:
        return probe.check_volume(folder, me, next(peer for peer in PEERS if peer != me))
    except CheckError as error:
        return f"error: {error}"


def both(folder: Path, **options: Any) -> dict[str, str]:
    """Return what the checks of both pods say."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {me: pool.submit(volume, folder, me, **options) for me in PEERS}
        return {me: future.result() for me, future in running.items()}


def test_two_pods_see_each_others_files_and_locks(tmp_path: Path) -> None:
    assert both(tmp_path / "check") == {
        "check-rollout": "each pod sees the other's files, and renames work",
        "check-trainer": "each pod sees the other's files, and renames and locks work",
    }
    assert not (tmp_path / "check").exists()


def test_a_volume_without_locks_fails(tmp_path: Path) -> None:
    said = both(tmp_path / "check", locks=False)
    assert said["check-trainer"].startswith("error: the lock of check-rollout does not bind this pod; take a storage")


def test_a_volume_of_one_node_fails(tmp_path: Path) -> None:
    said = volume(tmp_path / "check", "check-trainer", seconds=1.0)
    assert said.startswith("error: no file of check-rollout appeared in ")
    assert "offers ReadWriteMany" in said


def test_a_volume_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "check").touch()
    assert volume(tmp_path / "check", "check-trainer").endswith(
        "pods must be able to write, rename and lock on the volume"
    )


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    if sys.platform != "linux":
        pytest.skip("two pods of one machine need addresses 127.x.y.z of their own, which Linux has")
    block = f"127.{random.randint(1, 254)}.{random.randint(0, 254)}"
    return [f"{block}.2", f"{block}.3"]


def test_two_pods_reach_each_other(addresses: list[str]) -> None:
    said: list[str] = []
    threads = [
        threading.Thread(target=lambda one=one, other=other: said.append(probe.check_network(other, one)))
        for one, other in (addresses, reversed(addresses))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == [f"{one} has a name, and each pod reaches the other" for one in addresses]


def test_a_pod_without_a_peer_fails_with_the_reason(addresses: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PEER_SECONDS", 1.0)
    with pytest.raises(CheckError, match=r"port 8004 cannot be reached \(.*refused\); its pod must run"):
        probe.check_network(addresses[1], addresses[0])
    with pytest.raises(CheckError, match=r"^nowhere\.invalid port 8004 cannot be reached"):
        probe.check_network("nowhere.invalid", addresses[1])


def test_every_check_has_a_line_and_a_failure_the_exit_code(
    tmp_path: Path, nvidia_smi: Path, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As check.yaml runs it, in a Python that has nothing but its standard library."""
    nvidia_smi.write_text("580.65.06\n")
    told = {
        "SKYPILOT_JOBGROUP_NAME": "grpo-check",
        "CHECK_TASK": "check-trainer",
        "CHECK_PEER": "check-rollout",
        "CHECK_IMAGES": f"docker:{site}/team/open:v1 docker:{site}/team/open:v2",
        "SHARED_DIR": str(tmp_path),
        "MODEL_NAME": "team/model",
        "HF_ENDPOINT": f"http://{site}",
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
    }
    start = "import sys; from scripts.launch import probe; probe.PEER_SECONDS = 1.0; "
    start += f"probe.PORT = {free_port()}; probe.main()"
    done = subprocess.run([sys.executable, "-S", "-c", start], env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 78, done.stderr
    lines = [re.split(r"[: ]+", line)[:2] for line in done.stdout.splitlines()]
    failed = [["FAILED", name] for name in ("image", "volume", "network")]
    assert lines[:-1] == [["ok", "driver"], ["ok", "image"], failed[0], ["ok", "hub"], *failed[1:]]
    assert done.stdout.splitlines()[-1] == "3 of 6 checks failed"
