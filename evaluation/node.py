"""A node of an evaluation's servers: the size of its engine, its addresses, and the program that it becomes.

``python -m evaluation.node DIRECTORY`` starts a rollout node where Slurm puts it: a job group of its own, with a router
and an engine on free ports of its machine. It writes the router's URL into a file of DIRECTORY, which every machine
sees. ``python -m evaluation.node vllm`` starts vLLM's server at this node's address of the job group; MODEL_NAME is the
model, and VLLM_FLAGS are further flags of ``vllm serve``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from services.core.endpoints import (
    ENDPOINTS_VARIABLE,
    ENGINE_PORT,
    GPUS_OF_A_NODE,
    PORTS,
    ROUTER_PORT,
    Endpoint,
    Task,
    bind_address,
)
from services.core.errors import ConfigurationError
from services.core.files import atomic_write

MODULE = "evaluation.node"
COMMAND = [sys.executable, "-m", "services.rollout_server"]
SUFFIX = ".url"
VLLM = "vllm"
"""The argument of this module for vLLM's server, and the name of vLLM's program."""

_DIMENSIONS = {"d": "data", "p": "pipeline", "t": "tensor"}


@dataclass(frozen=True)
class Allocation:
    """``data`` engines that share the prompts, each on ``pipeline`` x ``tensor`` GPUs of one node."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return self.pipeline * self.tensor

    def __str__(self) -> str:
        return f"d{self.data}p{self.pipeline}t{self.tensor}"

    def engine_variables(self, user: Mapping[str, str]) -> dict[str, str]:
        """Return the rollout node's variables for engines of this size; ``user`` has the user's variables."""
        if self.gpus == 1:
            return {}
        flags = f"{user.get('SGLANG_EXTRA_FLAGS', '')} --pp-size {self.pipeline}".strip()
        return {"SGLANG_TP_SIZE": str(self.tensor), "SGLANG_EXTRA_FLAGS": flags}

    def vllm_variables(self, user: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of vLLM's node for engines of this size; ``user`` has the user's variables."""
        sizes = f"--tensor-parallel-size {self.tensor} --pipeline-parallel-size {self.pipeline}"
        token = os.environ.get("JOBGROUP_TOKEN")
        return {"VLLM_FLAGS": f"{sizes} {user.get('VLLM_FLAGS', '')}", **({"VLLM_API_KEY": token} if token else {})}

    def check_cluster(self) -> None:
        """Check that a node of a cluster can hold an engine.

        Raises:
            ConfigurationError: it cannot.
        """
        if self.gpus > GPUS_OF_A_NODE:
            raise ConfigurationError(
                f"--allocation {self}: an engine needs {self.gpus} GPUs of one node, which has at most "
                f"{GPUS_OF_A_NODE}; give smaller p or t"
            )

    def check_machine(self, gpus: int) -> None:
        """Check that this machine can hold all engines. Without GPUs each engine is on the processor.

        Raises:
            ConfigurationError: it cannot.
        """
        if gpus == 0 and self.gpus == 1:
            return
        if self.data * self.gpus > gpus:
            raise ConfigurationError(
                f"--allocation {self} needs {self.data * self.gpus} GPUs, and this machine has {gpus}; give smaller "
                "d, p or t, or CUDA_VISIBLE_DEVICES= for engines on the processor"
            )


def parse_allocation(text: str) -> Allocation:
    """Return the allocation of ``d12p1t2``: letters in any order, each at most once; a letter left out is 1.

    Raises:
        ConfigurationError: ``text`` has another form.
    """
    parts = re.findall(r"([dpt])([1-9]\d{0,3})", text)
    letters = [letter for letter, _ in parts]
    if not parts or "".join(letter + number for letter, number in parts) != text or len(set(letters)) < len(letters):
        raise ConfigurationError(
            f"--allocation {text!r} is not an allocation; give data, pipeline and tensor parallelism such as d12p1t2"
        )
    return Allocation(**{_DIMENSIONS[letter]: int(number) for letter, number in parts})


def require_vllm() -> None:
    """Check that vLLM is installed.

    Raises:
        ConfigurationError: it is not.
    """
    if shutil.which(VLLM) is None:
        raise ConfigurationError("--backend vllm: there is no vllm in PATH; install it with pip install vllm")


def placed(host: str) -> tuple[dict[str, str], str]:
    """Return the variables by which a rollout node listens on free ports of ``host``, and its router's URL."""
    with ExitStack() as stack:
        ports = {}
        for port in PORTS[Task.ROLLOUT_SERVER]:
            # All stay bound until the last is found, so that no two are the same.
            probe = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            probe.bind((host, 0))
            ports[port] = probe.getsockname()[1]
    name = f"{Task.ROLLOUT_SERVER.value}-0"
    endpoints = {f"{name}:{port}": f"{host}:{free}" for port, free in ports.items()}
    variables = {
        ENDPOINTS_VARIABLE: json.dumps(endpoints),
        "SKYPILOT_JOBGROUP_NAME": "evaluation",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NODE_IPS": host,
    }
    return variables, Endpoint(host, ports[ROUTER_PORT]).url


def own_address() -> str:
    """Return the address of this machine on its network; 127.0.0.1 without one."""
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Sends nothing, but chooses the interface of the default route.
            probe.connect((elsewhere, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def registered(directory: Path) -> Sequence[str]:
    """Return the URLs of the nodes that have been started with ``directory``."""
    return [path.read_text("utf-8") for path in sorted(directory.glob(f"*{SUFFIX}"))]


def main(directory: Path, environment: Mapping[str, str]) -> None:
    """Become a rollout node."""
    address = own_address()
    variables, url = placed(address)
    atomic_write(directory / f"{address}-{os.getpid()}{SUFFIX}", url)
    os.execve(COMMAND[0], COMMAND, {**environment, **variables})


def serve_with_vllm() -> None:
    """Become ``vllm serve``."""
    address = bind_address(Task.ROLLOUT_SERVER, ENGINE_PORT)
    model, flags = os.environ["MODEL_NAME"], shlex.split(os.environ.get("VLLM_FLAGS", ""))
    command = [VLLM, "serve", model, "--served-model-name", model, "--host", address.host, "--port", str(address.port)]
    os.execvp(command[0], [*command, *flags])


if __name__ == "__main__":
    if sys.argv[1] == VLLM:
        serve_with_vllm()
    else:
        main(Path(sys.argv[1]), os.environ)
