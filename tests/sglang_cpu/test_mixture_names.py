"""SGLang's own ``Qwen3MoeForCausalLM.load_weights`` takes every tensor of a mixture that the trainer publishes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests.services.rollout_server.conftest import check_installed
from tests.services.rollout_server.nodes import SGLANG_PYTHON
from tests.trainer.tiny import FAMILIES, save_model
from tests.waiting import LIMIT_SECONDS
from trainer.config import TrainerSettings
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks
from trainer.model.rounding import Rounding

pytestmark = pytest.mark.sglang

# The names of SGLang's parameters are those of its modules. A model of its own would need a GPU for its experts.
LOAD = """
import json, sys
from types import SimpleNamespace
import torch
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

names, layers, mixtures, experts = json.load(sys.stdin)
loaded = []

def parameter():
    made = torch.nn.Parameter(torch.zeros(1))
    made.weight_loader = lambda parameter, weight, *_, **__: loaded.append(int(weight))
    return made

own = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
for layer in range(layers):
    parts = ["input_layernorm", "post_attention_layernorm", "self_attn.qkv_proj", "self_attn.o_proj"]
    parts += ["self_attn.q_norm", "self_attn.k_norm"]
    parts += ["mlp.gate"] if layer in mixtures else ["mlp.gate_up_proj", "mlp.down_proj"]
    own += [f"model.layers.{layer}.{part}.weight" for part in parts]
    own += [f"model.layers.{layer}.mlp.experts.{part}_weight" for part in ("w13", "w2") if layer in mixtures]
parameters = {name: parameter() for name in own}
model = SimpleNamespace(
    config=SimpleNamespace(num_experts=experts),
    model=SimpleNamespace(),
    named_parameters=lambda: parameters.items(),
)
Qwen3MoeForCausalLM.load_weights(model, [(name, torch.tensor(i)) for i, name in enumerate(names)])
print(json.dumps([names[i] for i in loaded]))
"""


def load_into_sglang(names: list[str], mixtures: list[int], experts: int) -> list[str]:
    """Return the names of the tensors that SGLang loads."""
    given = json.dumps([names, 2, mixtures, experts])
    command = [str(SGLANG_PYTHON), "-c", LOAD]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    loaded: list[str] = json.loads(done.stdout.splitlines()[-1])
    return loaded


def test_every_published_tensor_is_loaded_once(tmp_path: Path) -> None:
    check_installed("sglang")
    model = save_model(tmp_path / "model", FAMILIES["qwen3_moe"])
    with join_ranks() as ranks:
        policy = load_policy(TrainerSettings.load(model_name=str(model)), ranks)
        published = [name for name, _ in policy.full_parameters(Rounding(torch.float32))]
        kept = [name for name, _ in policy.model.named_parameters()]
    assert sorted(load_into_sglang(published, [0], 4)) == sorted(published)
    skipped = set(kept) - set(load_into_sglang(kept, [0], 4))
    assert skipped == {f"model.layers.0.mlp.experts.{part}_proj" for part in ("gate_up", "down")}, "without a word"
