"""An engine's own process imports torch and little else of what torch and transformers could import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from services.embedded_engine.model import _rotary_frequencies

ROOT = Path(__file__).parents[3]
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE = SCALED | {"original_max_position_embeddings": 64}
START = f"""
import sys
from services.embedded_engine.__main__ import import_application
import_application(sys.argv[1])
import torch
from transformers import LlamaConfig
from services.embedded_engine.model import _rotary_frequencies
print([name for name in ("torch._dynamo", "torch.distributed.tensor", "sympy", "accelerate") if name in sys.modules])
print(_rotary_frequencies(LlamaConfig(rope_parameters={ROPE}))[0].tolist())
"""


@pytest.mark.slow
def test_an_engine_starts_without_compilers_and_computes_scaled_rotations(tmp_path: Path) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    command = [sys.executable, "-c", START, str(tmp_path)]
    told = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    heavy, frequencies = told.splitlines()
    assert heavy == "[]"
    assert torch.equal(torch.tensor(json.loads(frequencies)), _rotary_frequencies(LlamaConfig(rope_parameters=ROPE))[0])
