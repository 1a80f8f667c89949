"""Hosts on one machine: Linux network namespaces, joined by a bridge that is in a namespace of its own.

Each has an address, a link that can be cut, and files that it sees in place of /etc/hosts and /etc/resolv.conf:
``ip netns exec`` binds those of /etc/netns/NAME over them. This machine's own network is left alone.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.waiting import IDLE_SECONDS

ROOT = Path(__file__).parents[2]
PREFIX = "grpo-test"
FILES = Path("/etc/netns")
BRIDGE = "bridge0"

_NUMBERS = itertools.count(1)


@functools.cache
def why_not() -> str | None:
    """Why this machine cannot have such hosts; None when it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if missing := [tool for tool in ("ip", "ss", "unshare", "chroot") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed (Debian has them in iproute2, util-linux and coreutils)"
    name = f"{PREFIX}-{os.getpid()}-probe"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no network namespace can be made: {tried.stderr.strip()}"
    try:
        # Containers may allow the namespace and neither a bridge nor a mount in it.
        for command in (
            ["ip", "-n", name, "link", "add", BRIDGE, "type", "bridge"],
            ["ip", "netns", "exec", name, "unshare", "--mount", "mount", "-t", "tmpfs", "probe", "/mnt"],
        ):
            tried = subprocess.run(command, capture_output=True, text=True, check=False)
            if tried.returncode:
                return f"{' '.join(command)}: {tried.stderr.strip()}"
    finally:
        _run("ip", "netns", "del", name)
    return None


@dataclass(frozen=True)
class Host:
    """A namespace with one interface, eth0."""

    name: str
    """What it calls itself, such as ``rollout-server-1``."""
    namespace: str
    address: str
    link: str
    """The bridge's end of its link."""


class Network:
    """A bridge and the hosts on it. A context manager that leaves nothing behind."""

    def __init__(self) -> None:
        self._id = f"{PREFIX}-{os.getpid()}-{next(_NUMBERS)}"
        self._switch = f"{self._id}-switch"
        self._hosts: dict[str, Host] = {}
        self._names = 0

    def __enter__(self) -> Network:
        # It holds the other end of our pipe, so it clears up whatever becomes of this process.
        command = [sys.executable, "-m", "tests.cluster.network", self._id]
        self._cleaner = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, start_new_session=True)
        try:
            _run("ip", "netns", "add", self._switch)
            self._batch(f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up", namespace=self._switch)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._cleaner.stdin is not None
        self._cleaner.stdin.close()
        self._cleaner.wait(IDLE_SECONDS)

    @property
    def hosts(self) -> dict[str, Host]:
        """The hosts there are, by name."""
        return dict(self._hosts)

    def add(self, name: str, names: dict[str, str]) -> Host:
        """A host with an address that none had before, which resolves ``names``: address by name."""
        self._names += 1
        number = self._names
        address = f"10.77.{number // 250}.{number % 250 + 1}"
        host = Host(name, f"{self._id}-{number}", address, f"link{number}")
        self._hosts[name] = host
        files = FILES / host.namespace
        files.mkdir(parents=True)
        (files / "resolv.conf").write_text("# Nobody to ask: a name is in the hosts file or does not exist.\n")
        (files / "hosts").touch()
        self.write_names(host, names)
        _run("ip", "netns", "add", host.namespace)
        self._batch(
            f"link add eth0 type veth peer name {host.link} netns {self._switch}",
            f"address add {address}/16 dev eth0",
            "link set lo up",
            "link set eth0 up",
            namespace=host.namespace,
        )
        self._batch(f"link set {host.link} master {BRIDGE}", f"link set {host.link} up", namespace=self._switch)
        return host

    def remove(self, name: str) -> None:
        """Destroys a host: its link goes first, so nobody hears a word of its end."""
        host = self._hosts.pop(name)
        subprocess.run(["ip", "-n", self._switch, "link", "del", host.link], capture_output=True, check=False)
        _delete(host.namespace)

    def write_names(self, host: Host, names: dict[str, str]) -> None:
        """What ``host`` resolves from now on. In place: the file is mounted where the host looks."""
        lines = ["127.0.0.1 localhost", f"{host.address} {host.name}"]
        lines += [f"{address} {name}" for name, address in names.items()]
        path = FILES / host.namespace / "hosts"
        with path.open("r+") as file:
            file.write("\n".join(lines) + "\n")
            file.truncate()

    def cut(self, name: str) -> None:
        """Takes the link of a host down; nothing passes and nobody is told."""
        self._batch(f"link set {self._hosts[name].link} down", namespace=self._switch)

    def mend(self, name: str) -> None:
        """Takes it up again."""
        self._batch(f"link set {self._hosts[name].link} up", namespace=self._switch)

    def run(
        self, name: str, *command: str, said: str = "", seconds: float = IDLE_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host, with ``said`` for its input, and returns how it ended."""
        line = ["ip", "netns", "exec", self._hosts[name].namespace, *command]
        return subprocess.run(line, input=said, capture_output=True, text=True, timeout=seconds, check=False)

    def _batch(self, *commands: str, namespace: str) -> None:
        _run("ip", "-n", namespace, "-batch", "-", said="\n".join(commands) + "\n")


def _run(*command: str, said: str | None = None) -> None:
    done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=IDLE_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}\n{said or ''}")


def _delete(namespace: str) -> None:
    """Ends every process in a namespace, and the namespace."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    processes = []
    for pid in listed.stdout.split():
        try:
            process = psutil.Process(int(pid))
            process.kill()
        except psutil.NoSuchProcess:
            continue
        processes.append(process)
    psutil.wait_procs(processes, timeout=IDLE_SECONDS)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
    shutil.rmtree(FILES / namespace, ignore_errors=True)


def clear_up(prefix: str) -> None:
    """Removes every host and bridge of a network, with all processes on them."""
    for path in [*Path("/run/netns").glob(f"{prefix}-*"), *FILES.glob(f"{prefix}-*")]:
        _delete(path.name)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    clear_up(sys.argv[1])
