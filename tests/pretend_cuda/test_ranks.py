"""A rank on the pretended device: its GPU, and what the log says of it."""

from __future__ import annotations

import pytest
import torch
from structlog.testing import capture_logs

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
