"""The ranks' meeting at a TCP store, before the first collective: each says what it computes on.

Ranks on different devices would join process groups of different backends and then wait for each other for ever. A
store needs no process group, so here they end with a message instead.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta

import orjson
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from services.core import machine
from services.core.errors import ConfigurationError
from services.core.logs import get_logger

log = get_logger(__name__)

MEETING_SECONDS = 900.0
"""Longest wait for the other ranks, whose nodes start together but may install for different times."""

Facts = Mapping[str, str | None]


def choose_device() -> torch.device:
    """Return this rank's device: its GPU where torch sees any, else the processor.

    Raises:
        ConfigurationError: torch sees fewer GPUs than the node has.
    """
    machine.check_cuda(torch.cuda.device_count(), torch.version.cuda)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def log_device(device: torch.device, rank: int) -> None:
    """Log the device of this rank with its name, memory and driver."""
    facts: Facts = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = f"{properties.total_memory / 2**30:.1f} GiB"
        facts = {
            "name": properties.name,
            "memory": memory,
            "driver": machine.driver_version(),
            "cuda": torch.version.cuda,
        }
    log.info("device", rank=rank, device=str(device), **facts, torch=torch.__version__)


def meet(rank: int, world_size: int, device: torch.device, backend: str) -> Store:
    """Join the store that torchrun's variables name, and check that all ranks can compute together.

    Raises:
        ConfigurationError: the ranks differ in device, backend or torch.
        DistError: other ranks did not come within MEETING_SECONDS; the message names them.
    """
    limit = timedelta(seconds=MEETING_SECONDS)
    store: Store = next(rendezvous("env://", rank, world_size, timeout=limit))[0]
    own: Facts = {"device": device.type, "backend": backend, "torch": torch.__version__, "host": socket.gethostname()}
    compare(store, rank, world_size, own)
    return store


def compare(store: Store, rank: int, world_size: int, own: Facts) -> None:
    """Say ``own`` facts to the other ranks and compare theirs; ``host`` may differ. See ``meet`` for the errors."""
    keys = [f"facts/{other}" for other in range(world_size)]
    store.set(keys[rank], orjson.dumps(own).decode())
    try:
        store.wait(keys, timedelta(seconds=MEETING_SECONDS))
    except dist.DistStoreError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise dist.DistStoreError(f"ranks {missing} did not come within {MEETING_SECONDS:g} s") from error
    everyone: list[Facts] = [orjson.loads(store.get(key)) for key in keys]
    for name in ("device", "backend", "torch"):
        if any(facts[name] != own[name] for facts in everyone):
            found = ", ".join(f"rank {other} on {facts['host']}: {facts[name]}" for other, facts in enumerate(everyone))
            raise ConfigurationError(
                f"the ranks differ in their {name} ({found}); give all nodes of ppo-trainer the same GPUs, driver and "
                "image"
            )
