"""The preflight takes the fastest way that fits, and refuses what cannot fit with the settings that help."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
import yaml
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from local_runner.spec import JOB_GROUPS
from services.core.errors import ConfigurationError
from services.core.models import attention_option
from tests.trainer.processes import run_on_ranks
from tests.trainer.rank_jobs import make_learner
from tests.trainer.runs import Outside, train
from tests.trainer.tiny import FAMILIES, plain_model, random_groups, save_model
from trainer.capacity.check import REMEDIES, check, compare_asleep, engine_beside, preflight
from trainer.capacity.need import GIB, EngineBeside, Work, needed, stored_bytes
from trainer.capacity.shape import CONFIGS, ModelShape
from trainer.capacity.work import Limits, Machine, choose, find_limits, plan_records, work_of
from trainer.config import TrainerSettings
from trainer.model.critic import CriticLearner
from trainer.model.ranks import Ranks
from trainer.model.saving import DiskFullError

ROOT = Path(__file__).parents[3]
SHAPES = {label: ModelShape.of(CONFIGS[label][1]) for label in ("0.5B", "8B")}
ROOM = Limits(device=80 * 10**9, host=512 * GIB, shm=64 * GIB, volume=1000 * GIB)


LONG = {"max_new_tokens": 131_072 - 512, "batch_size": 16}
"""Sequences of 128k tokens."""


def settings(**given: Any) -> TrainerSettings:
    return TrainerSettings.load(**({"batch_size": 128, "group_size": 16, "max_new_tokens": 2048} | given))


def chosen(label: str, nodes: int, gpus: int, limits: Limits = ROOM, **given: Any) -> Work:
    return check(settings(**given), SHAPES[label], Machine(nodes, gpus, 2, limits))


@pytest.mark.parametrize(
    ("label", "nodes", "gpus", "given", "expected"),
    [
        ("0.5B", 2, 8, {}, (2, False, False)),
        ("0.5B", 1, 8, {"activation_checkpointing": True, "shard_parameters": True}, (1, True, True)),
        ("8B", 2, 8, {}, (2, "selective", True)),
        ("8B", 4, 2, {}, (1, "selective", True)),
    ],
    ids=["a small model gathers once", "what the user said", "a large model", "a state that one node cannot hold"],
)
def test_replicas_recomputation_and_gathering_are_those_of_model_and_machine(
    label: str, nodes: int, gpus: int, given: dict[str, Any], expected: Any
) -> None:
    work = chosen(label, nodes, gpus, **given)
    assert (work.replicas, work.checkpointing, work.frees_parameters) == expected


@pytest.mark.parametrize(
    ("gigabytes", "given", "expected"),
    [
        (141, {}, (False, 16_384)),
        (80, {}, ("selective", 16_384)),
        (60, {}, ("selective", 8192)),
        (60, {"micro_batch_tokens": 16_384}, (True, 16_384)),
        (40, {}, (True, 16_384)),
    ],
    ids=["nothing", "a part", "a part of halves", "tokens that are set", "everything"],
)
def test_recomputation_grows_as_memory_shrinks(gigabytes: int, given: dict[str, Any], expected: Any) -> None:
    work = chosen("8B", 1, 8, replace(ROOM, device=gigabytes * 10**9), **given)
    assert (work.checkpointing, work.micro_batch_tokens) == expected


def test_a_run_has_the_micro_batches_that_the_preflight_chose(
    alone: Ranks, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halve(*arguments: Any) -> Work:
        return replace(choose(*arguments), micro_batch_tokens=8192)

    monkeypatch.setattr("trainer.capacity.check.choose", halve)
    found, _, _ = preflight(TrainerSettings.load(model_name=str(model), shared_dir=tmp_path), alone)
    assert found.micro_batch_tokens == 8192


def test_a_cpu_cannot_recompute_what_a_compiler_chooses() -> None:
    laptop = Limits(device=0, host=32 * GIB, shm=8 * GIB, volume=100 * GIB)
    with pytest.raises(ConfigurationError, match="ACTIVATION_CHECKPOINTING"):
        chosen("0.5B", 1, 1, laptop, activation_checkpointing="selective")


def test_a_state_that_no_gpu_holds_is_kept_in_host_memory() -> None:
    """32B on a node of eight: 16 bytes a parameter, and a checkpoint's copy of 12."""
    shape, node = ModelShape.of(CONFIGS["32B"][1]), Machine(1, 8, 2, replace(ROOM, host=2000 * GIB, volume=8000 * GIB))
    with structlog.testing.capture_logs() as logged:
        work = check(settings(), shape, node)
    [warning] = [line for line in logged if line["log_level"] == "warning"]
    assert "CPU_OFFLOAD" in warning["event"]
    assert (work.has_offload, work.frees_parameters) == (True, True)
    need = needed(shape, work)
    assert need.host["offloaded state"] == pytest.approx(16 * shape.parameters, rel=1e-6)
    assert (
        need.total("device") < 0.94 * ROOM.device < sum(needed(shape, replace(work, has_offload=False)).device.values())
    )
    assert not chosen("8B", 1, 8).has_offload, "a state that fits stays on the GPUs"


@pytest.mark.parametrize(("compute", "publish", "kept"), [(2, 2, 0), (4, 2, 2), (4, 4, 0)])
def test_passes_in_float32_keep_half_of_the_masters_of_rounded_weights(compute: int, publish: int, kept: int) -> None:
    work = replace(chosen("0.5B", 1, 8), compute_bytes=compute, published_bytes=publish)
    of_rank = needed(SHAPES["0.5B"], work).device
    assert of_rank.get("lower halves of masters", 0) == kept * SHAPES["0.5B"].parameters // 8


def test_a_cpu_with_little_memory_for_long_micro_batches_is_warned_and_may_run() -> None:
    laptop = Limits(device=0, host=32 * GIB, shm=8 * GIB, volume=100 * GIB)
    for given, warnings in (({}, 1), ({"micro_batch_tokens": 1024}, 0)):
        with structlog.testing.capture_logs() as logged:
            chosen("0.5B", 1, 1, laptop, max_new_tokens=256, **given)
        assert (
            sum("MICRO_BATCH_TOKENS" in line["event"] for line in logged if line["log_level"] == "warning") == warnings
        )


CARD = Limits(device=22 * GIB, host=512 * GIB, shm=64 * GIB, volume=1000 * GIB)
SLEEPING = {"engine_sleeps": True, "lora_rank": 0, "batch_size": 8, "group_size": 8, "max_new_tokens": 512}
MANY = EngineBeside(gpus=1, tokens=2_000_000)
REFUSED: list[tuple[str, str, int, int, Limits, dict[str, Any], EngineBeside | None]] = [
    ("device", "8B", 1, 1, replace(ROOM, host=128 * GIB), {}, None),
    ("device", "8B", 1, 1, ROOM, {"cpu_offload": False}, None),
    ("device", "0.5B", 1, 1, replace(ROOM, device=15 * 10**9, host=16 * GIB), {}, None),
    ("device", "8B", 1, 8, ROOM, {"activation_checkpointing": False}, None),
    ("device", "8B", 1, 8, ROOM, LONG, None),
    ("generating", "0.5B", 1, 1, CARD, SLEEPING, MANY),
    ("host", "8B", 2, 8, replace(ROOM, host=64 * GIB), {}, None),
    ("shm", "8B", 2, 8, replace(ROOM, shm=64 << 20), {}, None),
    ("volume", "8B", 2, 8, replace(ROOM, volume=200 * GIB), {}, None),
    ("volume", "8B", 2, 8, ROOM, {"record_groups": 15_000}, None),
]


def test_what_cannot_fit_is_refused_with_the_place_and_what_helps() -> None:
    for place, label, nodes, gpus, limits, given, engine in REFUSED:
        with pytest.raises(ConfigurationError) as refused:
            check(settings(**given), SHAPES[label], Machine(nodes, gpus, 2, limits, engine))
        assert str(refused.value).endswith(REMEDIES[place]), (place, label, given)


def test_an_engine_on_the_same_gpu_may_have_the_keys_that_fit_beside_the_trainer() -> None:
    given, unset = settings(**SLEEPING, cpu_offload=False), Machine(1, 1, 2, CARD, EngineBeside(gpus=1, tokens=0))
    with pytest.raises(ConfigurationError, match="ENGINE_MAX_TOTAL_TOKENS") as refused:
        check(given, SHAPES["0.5B"], unset)
    tokens = max(int(word) for word in str(refused.value).replace(",", "").split() if word.isdecimal())
    for transport in ("disk", "local"):
        machine = replace(unset, engine=EngineBeside(gpus=1, tokens=tokens if transport == "disk" else 65_536))
        check(given.model_copy(update={"publish_transport": transport}), SHAPES["0.5B"], machine)
    with pytest.raises(ConfigurationError, match="ENGINE_MAX_TOTAL_TOKENS"):
        check(given, SHAPES["0.5B"], replace(unset, engine=EngineBeside(gpus=1, tokens=tokens + 2048)))


def test_a_sequence_of_128k_tokens_fits_eight_gpus_together() -> None:
    work = chosen("8B", 1, 8, **LONG, context_parallel_size=8)
    assert (work.tokens, work.context) == (16_384, 8)


def test_a_context_group_divides_ranks_and_heads() -> None:
    for label, gpus, size, allowed in (("8B", 8, 3, "1, 2, 4, 8"), ("8B", 4, 8, "1, 2, 4"), ("0.5B", 8, 4, "1, 2")):
        with pytest.raises(ConfigurationError, match=f"CONTEXT_PARALLEL_SIZE is {size}, .* {allowed}$"):
            chosen(label, 1, gpus, context_parallel_size=size)


def test_a_volume_that_had_room_before_may_have_it_again(tmp_path: Path) -> None:
    """The error of a run with a checkpoint is recoverable: somebody else has filled the volume."""
    tiny, full = ModelShape.of(FAMILIES["qwen2"]), Limits(device=0, host=32 * GIB, shm=0, volume=1 << 17)
    given = settings(shared_dir=tmp_path, run_id="r")
    with pytest.raises(ConfigurationError, match="RECORD_GROUPS"):
        check(given, tiny, Machine(1, 1, 4, full))
    (given.checkpoint_dir / "step-000002").mkdir(parents=True)
    with pytest.raises(DiskFullError, match="RECORD_GROUPS"):
        check(given, tiny, Machine(1, 1, 4, full))
    with pytest.raises(ConfigurationError, match="host memory"):
        check(given, tiny, Machine(1, 1, 4, replace(full, host=1 << 20)))


@pytest.mark.parametrize(
    ("given", "checkpoints"),
    [
        ({"checkpoint_every": 0}, 1),
        ({"checkpoint_every": 0, "eval_every": 5}, 4),
        ({"checkpoint_every": 0, "eval_every": 5, "eval_prompts": 0}, 1),
        ({"checkpoint_every": 0, "eval_every": 5, "max_steps": 10}, 2),
        ({"checkpoint_every": 5}, 4),
        ({"checkpoint_every": 5, "max_steps": 10}, 2),
    ],
)
def test_the_volume_has_room_for_the_checkpoints_of_evaluations(given: dict[str, Any], checkpoints: int) -> None:
    assert chosen("0.5B", 1, 1, **given).checkpoints == checkpoints


STEP_BYTES = 128 * (512 + 16 * 2048) * 16
"""Bytes of a step's record: prompts, each with its tokens and 16 completions, of 16 bytes a token."""


@pytest.mark.parametrize(
    ("given", "room", "kept", "files"),
    [
        ({}, 10**6, 1000, 1025),
        ({}, 1000, 75, 100),
        ({}, 200, 10, 20),
        ({}, 10, "off", 0),
        ({"max_steps": 100}, 1000, "all", 100),
        ({"max_steps": 101}, 1000, 75, 100),
        ({"replay_groups": 8}, 1000, 67, 100),
        ({"checkpoint_every": 0}, 1000, 50, 100),
        ({"record_groups": 30, "max_steps": 40}, 10, 30, 40),
        ({"record_groups": 30}, 10, 30, 55),
        ({"record_groups": "all", "max_steps": 40}, 10, "all", 40),
        ({"record_groups": "off"}, 1000, "off", 0),
    ],
)
def test_records_take_a_tenth_of_the_volumes_room_unless_set(
    given: dict[str, Any], room: int, kept: Any, files: int
) -> None:
    assert plan_records(settings(**given), room * STEP_BYTES) == (kept, files * STEP_BYTES)


def test_the_preflight_says_which_steps_are_recorded(alone: Ranks, model: Path, tmp_path: Path) -> None:
    given = TrainerSettings.load(model_name=str(model), shared_dir=tmp_path, max_steps=2)
    found, _, room = preflight(given, alone)
    assert found.record_groups == "all"
    assert room.run_dir == given.run_dir
    assert room.needed > 0


@pytest.mark.parametrize("file", JOB_GROUPS)
def test_the_job_groups_have_what_their_model_needs(file: str) -> None:
    trainer = next(d for d in yaml.safe_load_all((ROOT / file).read_text()) if d["name"] == "ppo-trainer")
    host = int(str(trainer["resources"]["memory"]).rstrip("+")) * GIB
    volume = int(yaml.safe_load((ROOT / "jobgroups" / "volume.yaml").read_text())["size"].removesuffix("Gi")) * GIB
    # The smallest GPU that they name is an L40S.
    limits = Limits(device=45 * GIB, host=host, shm=64 * GIB, volume=volume)
    check(TrainerSettings.load(), SHAPES["0.5B"], Machine(trainer.get("num_nodes", 1), 1, 2, limits))


@pytest.mark.parametrize(("rank", "versions"), [(0, 2), (8, 1)])
def test_a_broadcast_has_one_version_in_memory_while_another_is_written(rank: int, versions: int) -> None:
    by = [chosen("8B", 1, 8, publish_transport=transport, lora_rank=rank) for transport in ("disk", "broadcast")]
    disk, broadcast = (needed(SHAPES["8B"], work).total("host") for work in by)
    assert broadcast - disk == pytest.approx((versions - 1) * 2 * SHAPES["8B"].parameters)


@pytest.mark.parametrize(("memory", "shared"), [(0, 2), (80 * GIB, 0)], ids=["processor", "GPU"])
def test_on_processors_a_shared_version_takes_room_in_shared_memory(memory: int, shared: int) -> None:
    given = settings(publish_transport="local")
    work = work_of(given, SHAPES["0.5B"], Machine(1, 1, 2, Limits(memory, 0, 0, 0)))
    assert needed(SHAPES["0.5B"], work).total("shm") == shared * SHAPES["0.5B"].parameters


def test_lora_needs_no_gradients_and_moments_of_the_model() -> None:
    whole, adapters = (needed(SHAPES["8B"], chosen("8B", 1, 8, lora_rank=rank)) for rank in (0, 32))
    assert adapters.device["moments"] < whole.device["moments"] / 20
    assert adapters.volume["versions"] < whole.volume["versions"] / 20


@pytest.mark.parametrize("frees", [True, False])
def test_reference_and_critic_stay_gathered_while_the_policy_is_updated(alone: Ranks, model: Path, frees: bool) -> None:
    settings = {"kl_coef": 0.1, "advantage": "gae", "shard_parameters": frees}
    learner, groups = make_learner(alone, model, **settings), random_groups(1)
    critic = CriticLearner(learner)
    critic.values(groups)
    learner.update(groups, 0)
    assert learner.reference is not None
    gathered = sum(
        parameter.numel()
        for module in (learner.reference, critic.module)
        for name, parameter in module.named_parameters()
        if not isinstance(parameter, DTensor) and not name.startswith("value_head.")
    )
    work = chosen("0.5B", 1, 1, replace(ROOM, device=0), shard_parameters=frees)
    shape, both = ModelShape.of(learner.policy.config), replace(work, has_reference=True, has_critic=True)
    found = [needed(shape, each).device["gathered parameters"] // work.compute_bytes for each in (work, both)]
    assert found[1] - found[0] == gathered


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model(tmp_path: Path, family: str) -> None:
    shape = ModelShape.of(FAMILIES[family])
    model = plain_model(save_model(tmp_path, FAMILIES[family]))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.root_parameters == shape.parameters - sum(p.numel() for p in model.base_model.layers.parameters())


def test_a_resumed_run_counts_the_files_that_it_has(alone: Ranks, tmp_path: Path) -> None:
    before = find_limits(alone.device, tmp_path).volume
    file = tmp_path / "checkpoints" / "step-000001" / "weights"
    file.parent.mkdir(parents=True)
    with file.open("wb") as stream:
        stream.truncate(10 * before)
    assert find_limits(alone.device, tmp_path).volume > 10 * before


def test_on_a_cpu_nothing_is_recomputed_and_the_ranks_stay_as_they_are(
    alone: Ranks, model: Path, tmp_path: Path
) -> None:
    given = TrainerSettings.load(model_name=str(model), shared_dir=tmp_path)
    found, ranks, _ = preflight(given, alone)
    assert (found.activation_checkpointing, found.shard_parameters) == (False, True)
    assert ranks is alone


def test_a_model_beyond_this_machine_is_refused(
    alone: Ranks, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.capacity.work.host_memory", lambda: 10**6)
    with pytest.raises(ConfigurationError, match="of host memory of a node"):
        preflight(TrainerSettings.load(model_name=str(model), shared_dir=tmp_path), alone)


def replicas_and_settings(ranks: Ranks, model: Path, directory: Path) -> tuple[int, str]:
    found, chosen, _ = preflight(TrainerSettings.load(model_name=str(model), shared_dir=directory), ranks)
    return chosen.mesh.ndim, f"{found.activation_checkpointing} {found.shard_parameters}"


def context(ranks: Ranks, model: Path, directory: Path) -> list[int]:
    given = TrainerSettings.load(model_name=str(model), shared_dir=directory, context_parallel_size=2)
    _, chosen, _ = preflight(given, ranks)
    return [chosen.context.rank, chosen.context.size, chosen.share, chosen.n_shares]


def test_ranks_form_the_context_groups_that_are_asked(model: Path, tmp_path: Path) -> None:
    assert run_on_ranks(2, context, model, tmp_path) == [[0, 2, 0, 1], [1, 2, 0, 1]]


def test_all_ranks_choose_alike(model: Path, tmp_path: Path) -> None:
    assert run_on_ranks(2, replicas_and_settings, model, tmp_path) == [(1, "False True")] * 2


def test_a_version_on_the_gpu_and_the_woken_engine_are_there_at_once() -> None:
    shape, engine = SHAPES["8B"], EngineBeside(gpus=2, tokens=1024)
    work = work_of(settings(publish_transport="local"), shape, Machine(1, 4, 2, CARD, engine))
    need = needed(shape, work).generating
    assert need["version"] == 2 * shape.parameters, "whole on each rank"
    assert need["weights of the engine"] == shape.parameters, "two bytes each, over two GPUs"
    assert need["keys and values"] == 1024 * 2 * 2 * 36 * 4 * 128, "a GPU has four of eight heads"
    assert need["moments"] == 8 * shape.parameters // 4


def test_the_engine_beside_the_trainer_is_that_of_the_variables(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("MODEL_NAME", str(model))
    monkeypatch.setenv("ENGINE_DTYPE", "auto")
    given, shape = settings(**SLEEPING, model_name=str(model)), SHAPES["0.5B"]
    assert engine_beside(given, shape, 4, 0) is None, "without GPUs"
    assert engine_beside(given.model_copy(update={"engine_sleeps": False}), shape, 4, 22 * GIB) is None
    assert engine_beside(given, shape, 1, 22 * GIB) == EngineBeside(gpus=1, tokens=0)
    monkeypatch.setenv("ENGINE_MAX_TOTAL_TOKENS", "4096")
    assert engine_beside(given, shape, 1, 22 * GIB) == EngineBeside(gpus=1, tokens=4096)
    monkeypatch.setenv("ROLLOUT_ENGINE", "embedded")
    assert engine_beside(given, shape, 1, 22 * GIB) == EngineBeside(gpus=1, tokens=4096, keeps_weights=True)
    beside = EngineBeside(gpus=2, tokens=4096)
    kept = replace(beside, keeps_weights=True).asleep(shape) - beside.asleep(shape)
    assert kept == beside.weights(shape) == shape.parameters, "two bytes each, over two GPUs"
    monkeypatch.delenv("ENGINE_MAX_TOTAL_TOKENS")
    for context, tokens in (4096, 65536), (100_000, 100_000):
        monkeypatch.setenv("ENGINE_CONTEXT_LENGTH", str(context))
        assert engine_beside(given, shape, 1, 22 * GIB) == EngineBeside(gpus=1, tokens=tokens, keeps_weights=True)


def test_graphs_of_more_than_256_sequences_are_counted_while_an_engine_sleeps_and_wakes(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setenv("BATCH_SIZE", "64")
    monkeypatch.setenv("ENGINE_MAX_TOTAL_TOKENS", "4096")
    shape = SHAPES["0.5B"]
    engines = []
    for group in ("4", "16"):
        monkeypatch.setenv("GROUP_SIZE", group)
        engines.append(engine_beside(settings(**SLEEPING, model_name=str(model)), shape, 1, 22 * GIB))
    few, many = engines
    assert few is not None
    assert many is not None
    assert (few.graph_bytes, many.graph_bytes) == (0, 768 * 2 * 2**20), "1,024 sequences"
    work = chosen("0.5B", 1, 1, CARD, **SLEEPING)
    for place in ("device", "generating"):
        more, less = (needed(shape, replace(work, engine=engine)).total(place) for engine in (many, few))
        assert more - less == many.graph_bytes, place


@pytest.mark.parametrize(("gigabytes", "level"), [(3.4, "info"), (3.6, "warning")])
def test_what_a_sleeping_engine_keeps_is_compared_with_what_was_assumed(
    alone: Ranks, model: Path, monkeypatch: pytest.MonkeyPatch, gigabytes: float, level: str
) -> None:
    """Assumed are 2 GiB of CUDA and 1.5 GiB of SGLang; the trainer's own tensors do not count."""
    given = settings(**SLEEPING, model_name=str(model))
    with structlog.testing.capture_logs() as logged:
        compare_asleep(given, alone)
    assert logged == [], "without GPUs"
    own, total = 5 * GIB, 24 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total - own - int(gigabytes * GIB), total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: own)
    with structlog.testing.capture_logs() as logged:
        compare_asleep(given, replace(alone, device=torch.device("cuda", 0)))
    [line] = logged
    assert (line["log_level"], line["held"], line["assumed"]) == (level, f"{gigabytes} GiB", "3.5 GiB")


class Engines(Outside):
    """Engines that sleep once in each of two steps."""

    def __init__(self) -> None:
        super().__init__("", prompts=2)
        self.seen: list[str] = []

    def free_engines_memory(self) -> None:
        self.seen.append("asleep")


def test_a_run_measures_its_engines_when_they_sleep_for_the_first_time(
    alone: Ranks, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = Engines()
    monkeypatch.setattr("trainer.rank_calls.compare_asleep", lambda *_: outside.seen.append("measured"))
    assert train(alone, model, tmp_path, outside, engine_sleeps=True).error is None
    assert outside.seen == ["asleep", "measured", "asleep"]


def test_rows_are_counted_without_a_compiler() -> None:
    shape, machine = replace(SHAPES["0.5B"], obstacle="gpt2 is not known"), Machine(1, 1, 2, ROOM)
    assert check(settings(), shape, machine).is_uncompiled
    assert not chosen("0.5B", 1, 1).is_uncompiled
    rows, trees = (work_of(settings(layout=layout), shape, machine) for layout in ("rows", "tree"))
    assert stored_bytes(shape, rows) > stored_bytes(shape, trees)
    with pytest.raises(ConfigurationError, match="ACTIVATION_CHECKPOINTING is selective"):
        check(settings(activation_checkpointing="selective"), shape, machine)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "qwen2"])
def test_scores_of_rows_are_counted_where_attention_writes_them(family: str) -> None:
    """They are the part of what a forward pass keeps that grows with the square of a row."""
    config = FAMILIES[family]
    shape = ModelShape.of(config)
    work = [work_of(settings(layout=layout), shape, Machine(1, 1, 4, ROOM)) for layout in ("rows", "tree")]
    counted = [needed(shape, one).device.get("scores of attention", 0) for one in work]
    assert counted[1] == 0
    model = AutoModelForCausalLM.from_config(config, **attention_option(config)).eval().base_model
    lengths = (64, 128, 256)
    kept = [kept_bytes(model, torch.ones(1, length, dtype=torch.long)) for length in lengths]
    scores = float(np.polyfit(lengths, kept, 2)[0]) * (512 + 2048) * work[0].tokens
    one_layer = shape.heads * work[0].scored_keys * work[0].tokens * (8 + 3 * 4)
    if family == "qwen2":
        assert counted[0] == 0
        assert scores == pytest.approx(0, abs=1)
    else:
        assert scores < counted[0] < 2 * scores + one_layer
        recomputed = needed(shape, replace(work[0], checkpointing=True)).device["scores of attention"]
        assert recomputed == one_layer


def kept_bytes(model: PreTrainedModel, ids: torch.Tensor) -> int:
    """The bytes that autograd keeps of a forward pass of rows."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    del output
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(("obstacle", "remedy"), [("", "set LAYOUT=auto"), ("x is not known", "lower MAX_NEW_TOKENS")])
def test_rows_whose_scores_do_not_fit_are_refused_with_the_setting(obstacle: str, remedy: str) -> None:
    shape = replace(SHAPES["0.5B"], writes_scores=True, obstacle=obstacle)
    long = settings(layout="rows", max_new_tokens=30_000)
    with pytest.raises(ConfigurationError, match=f"scores of attention .*{remedy}"):
        check(long, shape, Machine(1, 1, 2, ROOM))
    check(long, replace(shape, writes_scores=False), Machine(1, 1, 2, ROOM))


def test_a_family_that_does_not_say_the_width_of_its_mlp_has_four_times_the_hidden_size() -> None:
    assert ModelShape.of(AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2)).intermediate == 4 * 32


@pytest.mark.parametrize(("family", "intermediate", "norms"), [("gpt_oss", 2 * 48, 2), ("gemma2", 48, 4)])
def test_widths_of_experts_and_norms_of_a_layer_are_counted(family: str, intermediate: int, norms: int) -> None:
    shape = ModelShape.of(FAMILIES[family])
    assert (shape.intermediate, shape.norms, shape.obstacle) == (intermediate, norms, "")
    assert shape.inner_states == (6 if family == "gpt_oss" else 3)


def test_recurrent_layers_are_counted_with_what_they_keep() -> None:
    """A delta net's mixer keeps float32 copies of queries, keys and values, and 64 numbers a head, several times."""
    heads, width = 8, 64
    config = AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=32,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    shape, machine = ModelShape.of(config), Machine(1, 1, 2, ROOM)
    assert shape.recurrent_layers == 3
    assert 10 * 4 * heads * width < shape.mixer_bytes < 50 * 4 * heads * width
    work = work_of(settings(layout="tree"), shape, machine)
    assert work.is_uncompiled
    without = replace(shape, recurrent_layers=0, mixer_bytes=0)
    more = {
        has: needed(shape, now).total("device") - needed(without, now).total("device")
        for has, now in ((False, work), (True, replace(work, checkpointing=True)))
    }
    assert more == {False: 3 * work.tokens * shape.mixer_bytes, True: work.tokens * shape.mixer_bytes}
