"""Proofs of SGLang's engines by stand-ins for its routes: checksums are of its own layout, a shard for each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from services.core.errors import ConfigurationError
from services.engines.proof import Evidence, unlike_the_change
from services.weights.digests import digest
from tests.fake_service import fake_service
from tests.trainer.publishing.test_proof import STEP
from tests.trainer.publishing.test_proof import Run as Embedded

RANKS = 2
NORM = "model.norm.weight"
GATE_UP = "model.layers.0.mlp.gate_up_proj.weight"
NOISE = 1e-3


class StandIn:
    """The routes of an SGLang server: it fuses and shards what it loads, and answers as the trainer, but for noise."""

    def __init__(self, model: Path) -> None:
        self.evidence = Evidence()
        self.tensors = self.loaded(model)
        self.version = self.served = 0
        self.spoil: Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]] = lambda _, new: new
        """Returns what is computed with, given the tensors before and the loaded ones."""
        self.has_checksums = True
        ok = "pause_generation", "continue_generation", "begin_weight_update", "end_weight_update"
        self.routes: dict[str, Callable[[dict[str, Any]], Any]] = {f"POST /{route}": lambda _: {} for route in ok} | {
            "POST /update_weights_from_disk": self.update,
            "POST /weights_checker": self.check,
            "POST /generate": self.generate,
            "GET /model_info": lambda _: {"weight_version": str(self.version)},
            "GET /server_info": lambda _: {"quantization": None},
        }

    @staticmethod
    def loaded(directory: Path) -> dict[str, Tensor]:
        tensors = {name: tensor.bfloat16() for name, tensor in load_file(directory / "model.safetensors").items()}
        for prefix in {name.partition("mlp")[0] for name in tensors if "gate_proj" in name}:
            parts = [tensors.pop(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up")]
            tensors[f"{prefix}mlp.gate_up_proj.weight"] = torch.cat(parts)
        return tensors

    def update(self, request: dict[str, Any]) -> dict[str, Any]:
        new = self.loaded(Path(request["model_path"]))
        spoiled = self.spoil(self.tensors, new)
        self.version = int(request["weight_version"])
        self.served = self.served if spoiled is self.tensors else self.version
        self.tensors = spoiled
        return {"success": True}

    def check(self, request: dict[str, Any]) -> Any:
        assert request == {"action": "checksum"}
        if not self.has_checksums:
            return 400, {"success": False, "message": "Torch not compiled with CUDA enabled"}
        ranks = []
        for rank in range(RANKS):
            shards = {n: t if t.dim() == 1 else t.chunk(RANKS)[rank] for n, t in self.tensors.items()}
            sums = {n: digest(t) for n, t in shards.items()}
            ranks.append({"checksums": sums, "parallelism_info": {"tp_rank": rank, "dp_rank": 0, "pp_rank": 0}})
        return {"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": "0"}

    def generate(self, request: dict[str, Any]) -> Any:
        answers = self.evidence.answers[self.served]
        assert len(request["input_ids"]) == len(answers) + 1
        noisy = [score + NOISE * (-1) ** place for place, score in enumerate(answers)]
        return {"meta_info": {"input_token_logprobs": [[score, 1, None] for score in (None, *noisy)]}}


class Run(Embedded):
    """A trainer with stand-ins for workers."""

    label: ClassVar[dict[str, str]] = {}

    def engines(self, stack: ExitStack, model: Path, count: int, fields: dict[str, Any]) -> list[str]:
        """Start stand-ins, and return their URLs."""
        self.stand_ins = [StandIn(model) for _ in range(count)]
        return [stack.enter_context(fake_service(each.routes)).endpoint.url for each in self.stand_ins]

    def publish(self, version: int, step: float = STEP) -> dict[str, float]:
        """See the other run."""
        for each in self.stand_ins:
            each.evidence = self.writer.evidence
        return super().publish(version, step)


@pytest.fixture
def start(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    with ExitStack() as stack:
        yield lambda count, published="bfloat16": Run(
            stack, monkeypatch, model, tmp_path, count, compute_type="float32", publish_type=published
        )


RENAMED = {
    "model.layers.0.self_attn.qkv_proj.weight": ["model.layers.0.self_attn.q_proj.weight"],
    "model.layers.0.self_attn.k_proj.weight": ["model.layers.0.self_attn.k_proj.weight"],  # by transformers' layers
    "model.layers.0.mlp.experts.w13_weight": [
        f"model.layers.0.mlp.experts.7.{each}_proj.weight" for each in ("gate", "up")
    ],
    "model.layers.0.mlp.experts.w2_weight_bias": ["model.layers.0.mlp.experts.down_proj_bias"],
    "model.layers.1.qkv_proj.weight": ["model.language_model.layers.1.self_attn.v_proj.weight"],
    "model.layers.1.k_norm.weight": ["model.layers.1.self_attn.k_norm.weight"],
    "model.layers.1.linear_attn.in_proj_ba.weight": [
        f"model.layers.1.linear_attn.in_proj_{each}.weight" for each in "ab"
    ],
    "language_model.layers.1.moe.experts.w13_weight": ["model.language_model.layers.1.experts.gate_up_proj"],
    "model.layers.2.block_sparse_moe.gate.weight": ["model.layers.2.block_sparse_moe.router.layer.weight"],
    "model.layers.3.conv.conv_weight": ["model.layers.3.conv.conv.weight"],
}
"""Tensors of SGLang, and the parts of a checkpoint that it keeps in them."""


@pytest.mark.parametrize("whole", RENAMED)
def test_a_tensor_is_compared_with_its_parts_under_the_names_of_the_checkpoint(whole: str) -> None:
    """A part that changes must change SGLang's tensor, and nothing else may."""
    old = {name: ["old"] for names in RENAMED.values() for name in names} | {NORM: ["old"]}
    before = {"tp_rank 0": dict.fromkeys([*RENAMED, NORM], "old")}
    for part in RENAMED[whole]:
        new, after = old | {NORM: ["new"]}, {"tp_rank 0": before["tp_rank 0"] | {NORM: "new"}}
        moved = {"tp_rank 0": after["tp_rank 0"] | {whole: "new"}}
        assert unlike_the_change(before, moved, old, new | {part: ["new"]}, is_quantized=False) == []
        assert unlike_the_change(before, after, old, new | {part: ["new"]}, is_quantized=False) == [whole]
        assert unlike_the_change(before, moved, old, new, is_quantized=False) == [whole]


def test_a_change_that_vanishes_when_sglang_adds_one_is_no_fault_of_gemma() -> None:
    norm = torch.tensor([0.25, -0.2]).bfloat16()
    changed = norm.clone()
    changed[0] += 2**-9
    old, new = ({NORM: [digest(x)], GATE_UP: [version]} for version, x in (("old", norm), ("new", changed)))
    before, after = (
        {"tp_rank 0": {NORM: digest(x + 1), GATE_UP: each[GATE_UP][0]}} for x, each in ((norm, old), (changed, new))
    )
    assert unlike_the_change(before, after, old, new, is_quantized=False, kind="gemma") == []
    assert unlike_the_change(before, after, old, new, is_quantized=False, kind="gemma2") == [NORM]
    kept = {"tp_rank 0": before["tp_rank 0"] | {NORM: "new"}}
    assert unlike_the_change(before, kept, old, new, is_quantized=False, kind="gemma") == [GATE_UP]


@pytest.mark.parametrize(("published", "at_first"), [("bfloat16", 0), ("float32", 2)])
def test_checksums_that_follow_the_trainers_changes_prove_a_version(
    start: Callable[..., Run], published: str, at_first: int
) -> None:
    """The model's file has float32 numbers, which a first publication in bfloat16 rounds otherwise than the engine."""
    run = start(2, published)
    assert [run.publish(version)["workers_proven"] for version in range(3)] == [at_first, 2, 2]
    assert not run.refusals


def test_a_first_publication_that_changes_a_tensor_ends_the_run(start: Callable[..., Run]) -> None:
    run = start(1, "float32")
    run.stand_ins[0].spoil = one_shard
    with pytest.raises(ConfigurationError):
        run.publish(0)
    assert [(each["confirmed"], each["tensors"]) for each in run.refusals] == [(0, [GATE_UP])]


def test_an_engine_without_checksums_is_consistent_and_not_proven(start: Callable[..., Run]) -> None:
    run = start(1)
    run.stand_ins[0].has_checksums = False
    metrics = [run.publish(version) for version in range(3)]
    assert [each["workers_proven"] for each in metrics] == [0, 0, 0]
    assert [each.get("served_version") for each in metrics] == [None, 1, 2]
    run.stand_ins[0].spoil = lambda before, _: before
    with pytest.raises(ConfigurationError):
        run.publish(3)
    assert (run.refusals[0]["confirmed"], run.refusals[0]["served"]) == (3, 2)


def kept(name: str) -> Any:
    """Return a fault: an engine keeps a tensor as it was."""
    return lambda before, new: new | {name: before[name]}


def one_shard(before: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a fault: the second rank's shard of a matrix is lost."""
    half = new[GATE_UP].clone()
    half.chunk(RANKS)[1].zero_()
    return new | {GATE_UP: half}


@pytest.mark.parametrize(
    ("spoil", "tensors", "served"),
    [(lambda before, _: before, None, 0), (kept(GATE_UP), [GATE_UP], None), (kept(NORM), [NORM], None)],
    ids=["stale", "a matrix kept", "a vector kept"],
)
def test_an_engine_whose_tensors_stay_ends_the_run(
    start: Callable[..., Run], spoil: Any, tensors: list[str] | None, served: int | None
) -> None:
    run = start(1)
    run.publish(0)
    run.stand_ins[0].spoil = spoil
    with pytest.raises(ConfigurationError):
        run.publish(1)
    [record] = run.refusals
    assert record["served"] == served
    assert tensors is None or record["tensors"] == tensors


def test_an_engine_that_differs_from_two_others_by_a_shard_leaves_the_routing(start: Callable[..., Run]) -> None:
    run = start(3)
    run.publish(0)
    run.stand_ins[1].spoil = one_shard
    metrics = run.publish(1)
    assert (metrics["workers"], metrics["workers_refused"]) == (2, 1)
    assert [record["tensors"] for record in run.refusals] == [[GATE_UP]]


def test_two_engines_that_differ_from_each_other_end_the_run(start: Callable[..., Run]) -> None:
    run = start(2)
    run.publish(0)
    run.stand_ins[1].spoil = one_shard
    with pytest.raises(ConfigurationError):
        run.publish(1)
