"""Kernels that SGLang compiled come back on a new pod, from a file that only the job group's token could sign."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from services.core.files import write_signed
from services.engines.settings import RolloutSettings
from services.engines.sglang_command import EngineKernels

LEAF = Path("9.0a/sgl_kernel_jit_activation/build-1/deps-2")


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[EngineKernels]:
    """Two pods of one node of a run, the first of which has compiled a kernel and is compiling another."""
    found = []
    for name in ("first", "second"):
        monkeypatch.setenv("SGLANG_JIT_CACHE_DIR", str(tmp_path / name))
        given = {"model_name": "m", "shared_dir": tmp_path, "run_id": "r", "jobgroup_token": "secret"}
        kernels = EngineKernels.of(RolloutSettings.load(**given))
        assert kernels is not None
        found.append(kernels)
    for path in (LEAF / "a.so", LEAF.parent / ".staging-3" / "b.so", LEAF.parent / ".lock"):
        (found[0].directory / path).parent.mkdir(parents=True, exist_ok=True)
        (found[0].directory / path).write_text("kernel")
    return found


def files(kernels: EngineKernels) -> dict[str, str]:
    found = (path for path in kernels.directory.rglob("*") if path.is_file())
    return {str(path.relative_to(kernels.directory)): path.read_text() for path in found}


def test_a_new_pod_has_the_kernels_of_the_one_before_it(pods: list[EngineKernels]) -> None:
    first, second = pods
    second.load()
    assert files(second) == {}, "there is no file yet"
    first.keep()
    second.load()
    assert files(second) == {str(LEAF / "a.so"): "kernel"}, "and none that was being built"
    (second.directory / LEAF / "a.so").write_text("loaded by an engine")
    second.load()
    assert files(second) == {str(LEAF / "a.so"): "loaded by an engine"}


def test_a_file_that_others_wrote_is_a_warning_and_no_kernel(pods: list[EngineKernels]) -> None:
    first, second = pods
    first.keep()
    whole = first.file.read_bytes()
    half = len(whole) // 2
    for content in (whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :], whole[:50], b""):
        first.file.write_bytes(content)
        with structlog.testing.capture_logs() as logs:
            second.load()
        assert [line["log_level"] for line in logs] == ["warning"]
    write_signed(first.file, b"no archive", "secret")
    with structlog.testing.capture_logs() as logs:
        second.load()
    assert [line["log_level"] for line in logs] == ["warning"]
    assert files(second) == {}


def test_a_volume_that_cannot_be_written_ends_nothing(pods: list[EngineKernels]) -> None:
    first, _ = pods
    first.file.mkdir(parents=True)
    with structlog.testing.capture_logs() as logs:
        first.keep()
    assert [line["log_level"] for line in logs] == ["warning"]


def test_without_a_token_nothing_is_read_from_the_volume_that_could_run() -> None:
    assert EngineKernels.of(RolloutSettings.load(model_name="m")) is None
