"""A rank on the pretended device: its GPU, what the log says of it, and GPUs that are missing."""

from __future__ import annotations

import pytest
import torch
from structlog.testing import capture_logs

from services.core.errors import ConfigurationError
from trainer.model.ranks import choose_device, log_device

pytestmark = pytest.mark.cuda


def test_a_rank_takes_its_gpu_and_logs_name_memory_driver_and_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", "1")
    device = choose_device()
    assert device == torch.device("cuda", 0)
    with capture_logs() as lines:
        log_device(device, 0)
    [line] = lines
    assert {"device", "name", "memory", "driver", "cuda", "torch"} <= line.keys()
    assert "H100" in line["name"]


def test_a_node_with_fewer_gpus_than_promised_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", "8")
    with pytest.raises(ConfigurationError, match=r"is 8, but torch sees 1 CUDA devices .*built for CUDA 13"):
        choose_device()
