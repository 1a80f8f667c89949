"""SGLang's own ranks of two engines of tensor parallel size 2 meet the trainer and receive what it broadcasts."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
import torch

from services.core.endpoints import ENDPOINTS_VARIABLE, WEIGHTS_BROADCAST_PORT
from services.engines import engine
from tests.ports import free_ports
from tests.services.rollout_server.conftest import check_installed
from tests.services.rollout_server.nodes import SGLANG_PYTHON
from tests.waiting import LIMIT_SECONDS
from trainer.config import TrainerSettings
from trainer.model.ranks import join_ranks
from trainer.publishing.broadcast import Broadcaster, WorkerGroup

pytestmark = pytest.mark.sglang

TENSOR_PARALLEL = 2
SENT = {"embed": torch.arange(6.0).view(2, 3), "norm": torch.full((3,), 7.0)}

# Reads an engine's request a line, and forks the engine's ranks, as importing SGLang takes long.
RANKS = """
import json, os, sys
import torch
import torch.distributed as dist
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

tensor_parallel, names, shapes = json.loads(sys.argv[1])
print("ready", flush=True)
unused = dict.fromkeys(("model_config", "custom_weight_loaders", "get_model", "update_model_fields",
                        "recapture_cuda_graph", "get_model_runner"))
for _ in range(2):
    request = json.loads(sys.stdin.readline())
    for tp_rank in range(tensor_parallel):
        if os.fork():
            continue
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        updater = WeightUpdater(tp_rank=tp_rank, device="cpu", gpu_id=0, **unused)
        joined, message = updater.init_weights_update_group(**request)
        assert joined, message
        received = []
        for load_format in ("flattened_bucket", None):
            received.append({name: tensor.tolist() for name, tensor in updater.receive_weights_from_distributed(
                names=names, dtypes=["float32"] * len(names), shapes=shapes,
                group_name=request["group_name"], load_format=load_format)})
        group = updater._model_update_group[request["group_name"]]
        sys.stdout.write(json.dumps([request["rank_offset"], group.rank(), received]) + "\\n")
        sys.stdout.flush()
        os._exit(0)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


class Ranks:
    """An engine whose ranks are those of a process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def tensor_parallel_size(self) -> int:
        return TENSOR_PARALLEL

    async def join_group(self, *request: Any) -> None:
        names = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dict(zip(names, request, strict=True))).encode() + b"\n")


async def test_the_ranks_of_every_engine_receive_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed("sglang")
    (port,) = free_ports(1)
    monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps({f"ppo-trainer-0:{WEIGHTS_BROADCAST_PORT}": f"127.0.0.1:{port}"}))
    given = json.dumps([TENSOR_PARALLEL, list(SENT), [list(tensor.shape) for tensor in SENT.values()]])
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(str(SGLANG_PYTHON), "-c", RANKS, given, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(LIMIT_SECONDS):
            while await process.stdout.readline() != b"ready\n":
                assert not process.stdout.at_eof(), "its error is above"
            with join_ranks() as ranks:
                broadcaster = Broadcaster(TrainerSettings.load(run_id="r"), ranks.device, LIMIT_SECONDS)
                group = WorkerGroup("group", set())
                await broadcaster._join(
                    group, [cast(engine.Engine, Ranks(process)), cast(engine.Engine, Ranks(process))]
                )
                for broadcaster.flattens in (True, False):
                    await broadcaster._broadcast(group, [list(SENT.values())])
                told = [json.loads(line) for line in (await process.stdout.read()).splitlines() if line[:1] == b"["]
                await group.leave()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    assert sorted((offset, rank) for offset, rank, _ in told) == [(1, 1), (1, 2), (3, 3), (3, 4)]
    wanted = {name: tensor.tolist() for name, tensor in SENT.items()}
    assert all(received == [wanted, wanted] for _, _, received in told)
