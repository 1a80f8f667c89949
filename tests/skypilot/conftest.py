"""SkyPilot's own API server and jobs controller, against a Kubernetes API that keeps what it is asked for."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn
import yaml

from services.http.server import listen
from tests.ports import free_port
from tests.skypilot.kubernetes_api import KubernetesApi, node, storage_class
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, T, bytes_in, wait_until

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("SKYPILOT_PYTHON", ROOT / ".venv-sky/bin/python"))
TOOLS = {"kubectl": "kubernetes-client", "socat": "socat", "nc": "netcat-openbsd", "rsync": "rsync"}
"""The programs that SkyPilot calls, and the Debian packages that have them."""
CONTEXT = "test"
NODES = [node("cpu-1"), *(node(f"gpu-{number}", "H100", 8) for number in range(4))]
MARK = "SKYPILOT_TEST"


def why_not() -> str | None:
    """Why SkyPilot cannot run here; None when it can."""
    if not PYTHON.exists():
        return f"no SkyPilot at {PYTHON}; `make test-skypilot` installs it"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        packages = " ".join(TOOLS[tool] for tool in missing)
        return f"SkyPilot needs {', '.join(missing)}; on Debian: apt-get install {packages}"
    return None


class SkyPilot:
    """A home of its own, an API server in it, and its command line."""

    def __init__(self, home: Path, kubernetes_url: str) -> None:
        self.home = home
        self._port = free_port()
        self.environment = {
            "HOME": str(home),
            "PATH": os.pathsep.join([str(PYTHON.parent), os.environ["PATH"]]),
            "LANG": "C.UTF-8",
            "COLUMNS": "300",
            "KUBECONFIG": str(home / ".kube/config"),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "SKYPILOT_API_SERVER_LOCAL_PORT": str(self._port),
            # It starts as many controllers as it believes to have memory for.
            "SKYPILOT_POD_MEMORY_GB_LIMIT": "4",
            # Nothing outside this machine is asked. Not HTTP_PROXY, with which the Kubernetes client ignores NO_PROXY.
            "ALL_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1,localhost",
            # The server builds a wheel of itself with the setuptools that SkyPilot depends on; pip would fetch another.
            # pip reads the variable as "build isolation: 0".
            "PIP_NO_BUILD_ISOLATION": "0",
            MARK: str(home),
        }
        self._write("kube/config", kubeconfig(kubernetes_url))
        # The controller runs within the API server; pods that stay pending are waited for.
        config = {"kubernetes": {"provision_timeout": -1}, "jobs": {"controller": {"consolidation_mode": True}}}
        self._write("sky/config.yaml", config)
        catalog = home / ".sky/catalogs/v8"
        for name, text in CATALOG.items():
            (catalog / name).parent.mkdir(parents=True, exist_ok=True)
            (catalog / name).write_text(text)

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        path = self.home / f".{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(dict(content)))

    @contextmanager
    def serving(self) -> Iterator[SkyPilot]:
        """Within it the API server runs, and after it no process of it is left."""
        command = [PYTHON, "-m", "sky.server.server", "--port", str(self._port), "--metrics-port", str(free_port())]
        environment = self.environment | {"IS_SKYPILOT_SERVER": "true"}
        with (self.home / "server.log").open("wb") as log:
            server = subprocess.Popen(
                command, cwd=self.home, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self.wait_until(self._healthy, "the API server answers")
            yield self
        finally:
            server.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                server.wait(IDLE_SECONDS)
            # Controllers and workers outlive the server.
            left = self.processes()
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=IDLE_SECONDS)

    def processes(self) -> list[psutil.Process]:
        """The processes of this server; those that renamed themselves have overwritten their environment."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                is_below_home = Path(process.cwd()).is_relative_to(self.home)
                if is_below_home or process.environ().get(MARK) == str(self.home):
                    found.append(process)
        return found

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def sky(self, *arguments: str) -> str:
        """What the command line prints."""
        command = [PYTHON.with_name("sky"), *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.told()}"
        return done.stdout + done.stderr

    def wait_until(self, condition: Callable[[], T], what: str) -> T:
        """Waits until ``condition`` returns something true, and returns it; lines in the logs are progress."""
        return wait_until(condition, what, every=0.5, progress=lambda: bytes_in(*self._logs()), told=self.told)

    def told(self, lines: int = 40) -> str:
        """The ends of all logs: for a failed assertion."""
        return "\n".join(
            line
            for log in self._logs()
            for line in (f"--- {log}", *log.read_text(errors="replace").splitlines()[-lines:])
        )

    def _logs(self) -> list[Path]:
        return [self.home / "server.log", *(self.home / "sky_logs").rglob("*.log")]


CATALOG = {
    "common/accelerators.csv": "AcceleratorName,Clouds\n"
    + "".join(f"{name},\"['Kubernetes']\"\n" for name in ("H100", "H200", "A100-80GB", "L40S")),
    "kubernetes/images.csv": "Tag,Region,OS,OSVersion,ImageId,CreationDate\n"
    + "".join(f"skypilot:{kind}-ubuntu-2004,,ubuntu,20.04,none/{kind},20260101\n" for kind in ("cpu", "gpu")),
}


def kubeconfig(url: str) -> dict[str, Any]:
    """How SkyPilot reaches the API."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": CONTEXT,
        "clusters": [{"name": CONTEXT, "cluster": {"server": url}}],
        "users": [{"name": CONTEXT, "user": {}}],
        "contexts": [{"name": CONTEXT, "context": {"cluster": CONTEXT, "user": CONTEXT}}],
    }


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Within it an application answers at the URL that it gives."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(IDLE_SECONDS)


@pytest.fixture(scope="session")
def kubernetes() -> KubernetesApi:
    """The cluster."""
    return KubernetesApi(NODES, storage_class("nfs"))


@contextmanager
def skypilot_on(cluster: KubernetesApi, home: Path) -> Iterator[SkyPilot]:
    """SkyPilot's server in a home of its own, for a cluster; no process is left after it."""
    if reason := why_not():
        pytest.fail(reason, pytrace=False)
    with served(cluster.app) as url:
        with SkyPilot(home, url).serving() as sky:
            yield sky
        assert sky.processes() == []


@pytest.fixture(scope="session")
def skypilot(kubernetes: KubernetesApi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyPilot]:
    """SkyPilot, serving."""
    with skypilot_on(kubernetes, tmp_path_factory.mktemp("home")) as sky:
        yield sky
