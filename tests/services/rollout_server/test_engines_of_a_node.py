"""Several engines on one node, each with GPUs, a port and a registration of its own, around engines without a model."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor, nn

from services.core.endpoints import ENDPOINTS_VARIABLE, WEIGHTS_BROADCAST_PORT
from services.core.tasks import ServiceThread
from services.engines.sglang_command import EngineKernels
from tests.ports import free_ports
from tests.prometheus_targets import relabel, scrape_jobs
from tests.services.rollout_server.fake_nodes import FakeNodes, Traffic, fake_nodes
from tests.services.rollout_server.nodes import TOKEN
from tests.waiting import IDLE_SECONDS
from trainer.config import TrainerSettings, Transport
from trainer.model.policy import Policy
from trainer.model.ranks import join_ranks
from trainer.model.rounding import Rounding
from trainer.publishing import broadcast
from trainer.publishing import writer as writer_module
from trainer.publishing.publisher import Publisher
from trainer.publishing.writer import VersionWriter

pytestmark = pytest.mark.slow

KERNELS = ("activation", "norm")
CONFIG = {"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeNodes]:
    """A node that pretends to have eight GPUs too small for the model, so that four engines have two each."""
    directory = tmp_path_factory.mktemp("node")
    programs = {"nvidia-smi": "for gpu in 0 1 2 3 4 5 6 7; do echo 81920; done"}
    for name in ("nvidia-smi", "gcc", "c++", "ninja", "bin/nvcc"):
        program = directory / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{programs.get(name, 'exit 0')}\n")
        program.chmod(0o755)
    if not Path(sysconfig.get_paths("posix_prefix")["include"], "Python.h").exists():
        pytest.skip("needs Python.h; on Debian: apt-get install python3-dev")
    nodes = fake_nodes(
        directory,
        SKYPILOT_NUM_GPUS_PER_NODE="8",
        SGLANG_EXTRA_FLAGS="",
        PATH=f"{directory}:/usr/bin:/bin",
        CUDA_HOME=str(directory),
        SGLANG_JIT_CACHE_DIR=str(directory / "kernels"),
        ROLLOUT_MAX_RESTARTS="50",
    )
    nodes.model.joinpath("config.json").write_text(json.dumps(CONFIG))
    size = {"metadata": {"total_size": 60 * 2**30}}
    nodes.model.joinpath("model.safetensors.index.json").write_text(json.dumps(size))
    kernels(nodes, "of-another-pod", KERNELS[0]).keep()
    kernels(nodes, "kernels", KERNELS[1])
    try:
        nodes.start()
        wait_registered(nodes)
        yield nodes
    finally:
        nodes.stop()


def kernels(node: FakeNodes, name: str, *compiled: str) -> EngineKernels:
    """A pod's kernels, besides the given ones that it has compiled."""
    directory = node.directory / name
    for kernel in compiled:
        path = directory / "9.0a" / kernel / "build-1" / "deps-2" / "kernel.so"
        path.parent.mkdir(parents=True)
        path.touch()
    return EngineKernels(node.directory / "runs/test/engine-kernels-0", TOKEN, directory)


def wait_registered(nodes: FakeNodes, engines: int = 4) -> None:
    wanted = sorted(nodes.worker(0, engine).url for engine in range(engines))
    nodes.wait_until(lambda: nodes.registered() == wanted, f"workers {wanted}")


def test_every_engine_has_gpus_of_its_own_and_is_registered_by_itself(node: FakeNodes) -> None:
    assert told(node, "/server_info", "visible") == ["0,1", "2,3", "4,5", "6,7"]
    assert told(node, "/server_info", "tp_size") == [2] * 4


def test_engines_begin_with_the_kernels_of_the_pod_before_and_leave_theirs(node: FakeNodes) -> None:
    own, next_pod = kernels(node, "kernels"), kernels(node, "next")
    assert {path.name for path in own.directory.glob("*/*")} == {*KERNELS}

    def has_all() -> bool:
        next_pod.load()
        return {path.name for path in next_pod.directory.glob("*/*")} == {*KERNELS}

    node.wait_until(has_all, "kernels of both pods")


def test_prometheus_gets_the_metrics_of_every_engine_from_the_router(node: FakeNodes) -> None:
    [job] = [job for job in scrape_jobs() if job["job_name"] == "grpo-engines"]
    families = text_string_to_metric_families(node.get(node.router, job["metrics_path"]).text)
    samples = [{"__name__": one.name, **one.labels} for family in families for one in family.samples]
    found = [relabel(sample, job["metric_relabel_configs"]) or {} for sample in samples]
    workers = (node.worker(0, engine) for engine in range(4))
    assert {one["instance"] for one in found if one["__name__"] == "sglang:num_running_reqs"} == {
        f"{worker.host}:{worker.port}" for worker in workers
    }


class NumberPolicy:
    """A policy of two tensors, all of whose weights are one number."""

    def __init__(self) -> None:
        self.number = 0
        self.model = nn.Module()
        self.masters = SimpleNamespace(rounding=None)

    def full_parameters(self, rounding: Rounding) -> Iterator[tuple[str, Tensor]]:
        yield "first", torch.full((2, 3), self.number, dtype=rounding.dtype)
        yield "second", torch.full((4,), self.number, dtype=rounding.dtype)


@pytest.fixture
def publish(node: FakeNodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[int, float]]]:
    """A trainer that broadcasts the weights v as version v, and returns v and the number of workers that took it."""
    (port,) = free_ports(1)
    addresses = node.endpoints | {f"ppo-trainer-0:{WEIGHTS_BROADCAST_PORT}": f"127.0.0.1:{port}"}
    monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps(addresses))
    monkeypatch.setenv("SKYPILOT_JOBGROUP_NAME", "test")
    # Torch, which the engines import for their first group, takes long on a busy machine.
    monkeypatch.setattr(broadcast, "FORM_SECONDS", IDLE_SECONDS)

    def write(policy: Any, state: dict[str, Tensor], directory: Path, dtype: torch.dtype) -> None:
        number, *_ = (int(tensor.flatten()[0]) for tensor in state.values())
        directory.joinpath("weights.txt").write_text(str(number))

    monkeypatch.setattr(writer_module, "write_model", write)
    settings = TrainerSettings.load(
        model_name=str(node.model),
        shared_dir=node.directory,
        run_id="test",
        jobgroup_token=TOKEN,
        publish_transport=Transport.BROADCAST,
        publish_type="float32",
    )
    policy = NumberPolicy()
    with join_ranks() as ranks, ServiceThread() as thread:
        publisher = Publisher(settings, thread, VersionWriter(settings, cast("Policy", policy), ranks))

        def publish_next() -> tuple[int, float]:
            policy.number = (node.store.newest_begun() or 0) + 1
            return policy.number, publisher.publish(policy.number)["workers"]

        yield publish_next
        publisher.writer.close()


def told(node: FakeNodes, path: str, field: str) -> list[Any]:
    return [node.get(node.worker(0, engine), path).json()[field] for engine in range(4)]


def test_a_broadcast_reaches_every_rank_of_every_engine_and_counts_the_engines(
    node: FakeNodes, publish: Callable[[], tuple[int, float]]
) -> None:
    wait_registered(node)
    with Traffic(node) as traffic:
        version, workers = publish()
        assert workers == 4
        before = len(traffic.groups)
        traffic.wait_for_groups(12)
        assert told(node, "/model_info", "weight_version") == [str(version)] * 4
    assert version in traffic.versions(since=before)
    ranks = told(node, "/server_info", "group_ranks")
    assert sorted(rank for of_engine in ranks for rank in of_engine) == list(range(1, 9))
    # Each engine counts its tensor-parallel ranks on from its first one.
    assert all(last == first + 1 for first, last in ranks)
