"""Weights by handles of CUDA IPC on the pretended device, whose memory is the host's: the bytes that SGLang gets."""

from __future__ import annotations

import base64
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from services.core.errors import ConfigurationError
from services.engines.router import GPUS_LABEL, Worker
from services.weights.broadcast_group import flattened
from services.weights.shared_tensors import pack_bucket, unpack_bucket
from tests.trainer.tiny import save_model, with_heads_of
from trainer.config import TrainerSettings
from trainer.model.policy import load_policy
from trainer.model.ranks import Ranks, join_ranks
from trainer.publishing import broadcast
from trainer.publishing.writer import GpuBuckets, VersionWriter, fixed_segments

pytestmark = pytest.mark.cuda

STATE = {
    "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "b": torch.tensor([-1.0], dtype=torch.bfloat16),
    "c": torch.arange(8, dtype=torch.bfloat16).view(8, 1),
}
SGLANG_ALLOWS = {
    ("types", "SimpleNamespace"),
    ("torch", "Tensor"),
    ("torch", "Size"),
    ("torch", "bfloat16"),
    ("torch", "float32"),
    ("torch", "uint8"),
    ("torch.storage", "TypedStorage"),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
}
"""The classes that a bucket may need, of SafeUnpickler.ALLOWED_GLOBALS in SGLang 0.5.23 (srt/utils/common.py)."""


class SafeUnpickler(pickle.Unpickler):
    """Stands in for SGLang's; ``rebuild`` does in its process what CUDA would do in another one."""

    def __init__(self, data: bytes, flat: torch.Tensor) -> None:
        super().__init__(io.BytesIO(data))
        self.flat = flat
        self.arguments: tuple[Any, ...] = ()

    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) in SGLANG_ALLOWS
        return self.rebuild if name == "rebuild_cuda_tensor" else super().find_class(module, name)

    def rebuild(self, *arguments: Any) -> torch.Tensor:
        self.arguments = arguments
        return self.flat.as_strided(arguments[1], arguments[2], arguments[3])


def on_host(value: torch.Tensor) -> torch.Tensor:
    """The tensor behind an address of the pretended device."""
    host = torch.empty(value.shape, dtype=value.dtype)
    return host.copy_(value)


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    return value.flatten().view(torch.uint8)


def read(text: str, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a bucket's tensors as SGLang's FlattenedTensorBucket.reconstruct_tensors does."""
    content = SafeUnpickler(base64.b64decode(text), flat).load()
    whole = content["flattened_tensor"]
    tensors = {}
    for meta in content["metadata"]:
        assert meta.numel == meta.end_idx - meta.start_idx
        tensors[meta.name] = on_host(whole[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape))
    return tensors


def test_a_bucket_names_only_what_sglang_allows_and_has_the_tensors() -> None:
    flat = flattened(list(STATE.values()), torch.device("cuda", 0))
    tensors = read(pack_bucket(flat, STATE), flat)
    assert list(tensors) == list(STATE)
    assert all(torch.equal(tensors[name], value) for name, value in STATE.items())


def test_a_handle_names_the_gpu_by_its_uuid() -> None:
    flat = flattened(list(STATE.values()), torch.device("cuda", 0))
    unpickler = SafeUnpickler(base64.b64decode(pack_bucket(flat, STATE)), flat)
    unpickler.load()
    assert unpickler.arguments[6] == str(torch.cuda.get_device_properties(0).uuid)


def test_the_embedded_engine_opens_a_handle_on_its_own_number_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = flattened(list(STATE.values()), torch.device("cuda", 0))
    devices = []

    def rebuild(*arguments: Any) -> torch.Tensor:
        devices.append(arguments[6])
        return flat

    packed = pack_bucket(flat, STATE)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    tensors = unpack_bucket(packed)
    assert devices == [0]
    assert all(torch.equal(on_host(tensors[name]), value) for name, value in STATE.items())


def worker(gpus: str | None, number: int = 0, engine: str = "sglang") -> Worker:
    labels = {"engine": engine} | ({} if gpus is None else {GPUS_LABEL: gpus})
    return Worker(id=str(number), url=f"http://127.0.0.1:{30001 + number}", is_healthy=True, metadata=labels)


def test_each_worker_gets_the_handles_of_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with join_ranks() as ranks:
        buckets = GpuBuckets(ranks)
    # What the ranks of four GPUs gather.
    buckets.handles = {gpu: [f"{gpu}a", f"{gpu}b"] for gpu in "0123"}
    found = buckets._by_worker([worker("2,3", 1), worker("0,1")])
    assert found["http://127.0.0.1:30002"] == [["2a", "3a"], ["2b", "3b"]]
    assert found["http://127.0.0.1:30001"] == [["0a", "1a"], ["0b", "1b"]]
    for unfit in (
        [worker("4")],
        [worker("0"), worker("0", 1)],
        [worker(None, 0, "embedded"), worker(None, 1, "embedded")],
    ):
        with pytest.raises(ConfigurationError, match="Give both tasks the same GPUs"):
            buckets._by_worker(unfit)
    with pytest.raises(ConfigurationError, match="pipeline or data parallelism"):
        buckets._by_worker([worker(None)])


def test_shared_memory_is_no_expandable_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:128")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    with fixed_segments():
        assert asked == ["max_split_size_mb:128,expandable_segments:False"]
    assert asked[1:] == ["expandable_segments:True,max_split_size_mb:128"]


def test_gpus_of_several_nodes_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    two = Ranks(0, 2, torch.device("cuda", 0), mesh=None)  # type: ignore[arg-type]  # nothing is computed
    with pytest.raises(ConfigurationError, match="set num_nodes of ppo-trainer to 1"):
        GpuBuckets(two)


def test_a_version_is_on_the_gpu_in_buckets_until_it_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 1 << 12)
    settings = TrainerSettings.load(
        model_name=str(save_model(tmp_path / "model", with_heads_of(16, "qwen2"))),
        shared_dir=tmp_path,
        run_id="r",
        publish_type="float32",  # rounding to bfloat16 would call cuBLAS, which is not pretended
        publish_transport="local",
    )
    with join_ranks() as ranks:
        writer = VersionWriter(settings, load_policy(settings, ranks), ranks)
        before = torch.cuda.memory_allocated()
        writer.write(1)
        assert writer.on_gpus is not None
        state = writer.state
        (found,) = writer.on_gpus._by_worker([worker("0")]).values()
        assert len(found) > 2
        size = sum(value.nbytes for value in state.values())
        assert size <= torch.cuda.memory_allocated() - before <= size + 512 * len(found)
        tensors: dict[str, torch.Tensor] = {}
        for (packed,), flat in zip(found, writer.on_gpus._flat, strict=True):
            tensors |= read(packed, flat)
        assert tensors.keys() == state.keys()
        # As bytes, because no kernel has run, and numbers may be none.
        assert all(torch.equal(as_bytes(tensors[name]), as_bytes(value)) for name, value in state.items())
        writer.close()
        writer.release()
        assert not writer.on_gpus.handles
