"""A restarted trainer finds its kernels in the run directory, and compiles again where their file is damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.compiler._cache import CacheArtifactManager
from torch.nn.attention.flex_attention import flex_attention

from tests.pretend_cuda.learner import packed_sequences
from trainer.config import TrainerSettings
from trainer.model.attention import KERNELS
from trainer.rank_calls import KeptKernels

pytestmark = pytest.mark.cuda

TOKENS = 512
Restart = Callable[[Callable[[], object]], tuple[int, int]]


@pytest.fixture
def kept(tmp_path: Path) -> KeptKernels:
    settings = TrainerSettings.load(shared_dir=tmp_path, run_id="one", jobgroup_token="secret")
    settings.checkpoint_dir.mkdir(parents=True)
    found = KeptKernels.of(settings, torch.device("cuda"))
    assert found is not None
    return found


@pytest.fixture
def restarted(kept: KeptKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Restart:
    """Return a function that computes something on a new pod and returns how many graphs it found and compiled."""
    pods = iter(range(9))

    def run(compute: Callable[[], object]) -> tuple[int, int]:
        pod = tmp_path / f"pod-{next(pods)}"
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(pod / "inductor"))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(pod / "triton"))
        torch._dynamo.reset()
        CacheArtifactManager.clear()
        counters.clear()
        kept.load()
        with config.patch(compile_threads=1):
            compute()
        return counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]

    return run


def attention() -> None:
    mask = packed_sequences(TOKENS, 256).layout.each(Tensor.cuda).prepared()[None]
    shape = (1, 2, TOKENS, 16)
    factors = [torch.zeros(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    attend = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    attend(*factors, block_mask=mask, kernel_options=KERNELS["triton"]).sum().backward()


def exponentials() -> Tensor:
    return torch.compile(torch.exp)(torch.zeros(8, device="cuda"))


def test_a_restart_compiles_nothing_that_is_kept(restarted: Restart, kept: KeptKernels) -> None:
    assert restarted(attention) == (0, 2), "the forward and the backward pass"
    kept.keep()
    assert restarted(attention) == (2, 0)
    kept.keep()
    assert restarted(attention) == (2, 0), "what was loaded is kept, too"


def test_a_file_that_cannot_be_used_is_a_warning_and_a_compilation(restarted: Restart, kept: KeptKernels) -> None:
    restarted(exponentials)
    kept.keep()
    whole = kept.file.read_bytes()
    damaged = whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:]
    replace(kept, token="other").keep()
    for content in (damaged, whole[:50], b"", kept.file.read_bytes()):
        kept.file.write_bytes(content)
        with structlog.testing.capture_logs() as logs:
            assert restarted(exponentials) == (0, 1)
        assert [(entry["log_level"], "damaged" in entry["reason"]) for entry in logs] == [("warning", True)]
    kept.file.write_bytes(whole)
    assert restarted(exponentials) == (1, 0)


def test_without_a_token_nothing_is_read_from_the_volume_that_could_run() -> None:
    assert KeptKernels.of(TrainerSettings.load(), torch.device("cuda")) is None


def test_a_volume_that_cannot_be_written_ends_nothing(restarted: Restart, kept: KeptKernels, tmp_path: Path) -> None:
    restarted(exponentials)
    (tmp_path / "file").touch()
    with structlog.testing.capture_logs() as logs:
        replace(kept, file=tmp_path / "file" / kept.file.name).keep()
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert "Not a directory" in logs[0]["reason"]
