"""Updates and steps with a teacher: as computed by hand, on one rank and on two, and in a run that was cut off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from services.core.errors import ConfigurationError
from services.protocol.groups import TEACHER
from tests.sequences import changed
from tests.toy_models import byte_tokenizer
from tests.trainer import rank_jobs
from tests.trainer.processes import run_on_ranks
from tests.trainer.rank_jobs import UNCLIPPED, make_learner
from tests.trainer.runs import Outside, resumed_run, train
from tests.trainer.tiny import FAMILIES, plain_forward, plain_logprobs, plain_model, random_trees, save_model
from trainer.algorithm.packing import TrainingGroup
from trainer.algorithm.training_groups import scatter
from trainer.config import TrainerSettings
from trainer.config.objective import Objective
from trainer.model.ranks import Ranks
from trainer.model.teachers import check_teachers


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another architecture than the student's, with its tokenizer."""
    return save_model(tmp_path_factory.mktemp("teacher"), FAMILIES["llama"], seed=5)


def scored(groups: list[TrainingGroup], numbers: Any) -> list[TrainingGroup]:
    """Return groups with a teacher's log-probabilities."""
    return [
        replace(g, sequences=[changed(s, **{TEACHER: scatter(s, x)}) for s, x in zip(g.sequences, of, strict=True)])
        for g, of in zip(groups, numbers, strict=True)
    ]


def teach_and_update(ranks: Ranks, model: Path, settings: dict[str, Any], groups: list[TrainingGroup]) -> Any:
    """Have the teachers score groups, and make an update; return the scores and what the update did."""
    numbers = make_learner(ranks, model, **settings).teacher_logprobs(groups)
    with_scores = [g if n is None else scored([g], [n])[0] for g, n in zip(groups, numbers, strict=True)]
    objective = Objective(TrainerSettings.load(model_name=str(model), **UNCLIPPED | settings))
    return numbers, rank_jobs.update(ranks, model, settings, objective.with_advantages(with_scores))


def options(teacher: Path, beta: float | None, **others: Any) -> dict[str, Any]:
    return {"teacher_model": str(teacher), "teacher_coef": 0.7, "teacher_jsd_beta": beta, "temperature": 0.8} | others


def distance_by_hand(
    model: Path, teacher: Path, groups: list[TrainingGroup], beta: float | None, numbers: Any
) -> dict[str, Tensor]:
    """Return the gradients of the distance from the teacher, by one forward pass a completion and autograd.

    ``numbers`` are the teacher's log-probabilities, for the baseline of each completion's sampled tokens.
    """
    student, frozen = plain_model(model), plain_model(teacher)
    losses, count = [], 0
    gaps_of = {
        id(s): np.clip(s.logprobs[s.mask] - x, -10, 10)
        for group, of_group in zip(groups, numbers, strict=True)
        for s, x in zip(group.sequences, of_group, strict=True)
    }
    for group in groups:
        for sequence in group.sequences:
            one = replace(group, sequences=[sequence])
            mask = torch.tensor(sequence.mask)
            ids = torch.tensor([group.prompt_ids + sequence.completion_ids.tolist()])
            places = slice(len(group.prompt_ids) - 1, -1)
            log_p, log_t = ((m(input_ids=ids).logits[0, places] / 0.8).log_softmax(-1)[mask] for m in (student, frozen))
            log_t = log_t.detach()
            count += len(log_p)
            if beta is None:
                logprobs, logprobs_t = (plain_forward(m, one, 0.8)[0][0][mask] for m in (student, frozen))
                behaviour = torch.tensor(sequence.logprobs)[mask].float()
                w = (logprobs.detach() - behaviour).exp().clamp(max=2)
                d = (logprobs - logprobs_t).detach().clamp(-10, 10)
                others = np.concatenate([x for key, x in gaps_of.items() if key != id(sequence)])
                losses.append((w * (d - others.mean()) * logprobs).sum())
            else:
                log_m = ((1 - beta) * log_p.exp() + beta * log_t.exp()).log()
                kls = beta * log_t.exp() * (log_t - log_m) + (1 - beta) * log_p.exp() * (log_p - log_m)
                losses.append(kls.sum())
    (torch.stack(losses).sum() * 0.7 / count).backward()
    return {name: p.grad for name, p in student.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("beta", [None, 0.5], ids=["sampled tokens", "vocabulary"])
def test_an_update_is_the_distance_computed_by_hand(
    alone: Ranks, model: Path, teacher: Path, beta: float | None
) -> None:
    """Of agents' sequences with branches and masks, in several micro-batches, by a teacher of another architecture."""
    groups = random_trees(1)
    settings = options(teacher, beta, reward_weight=0, micro_batch_tokens=90)
    numbers, trained = teach_and_update(alone, model, settings, groups)
    plain = plain_model(teacher)
    for group, of_group in zip(groups, numbers, strict=True):
        for s, given, wanted in zip(group.sequences, of_group, plain_logprobs(plain, group, 0.8), strict=True):
            np.testing.assert_allclose(given, wanted.detach().numpy()[s.mask], atol=2e-5)
    for name, gradient in distance_by_hand(model, teacher, groups, beta, numbers).items():
        difference = np.linalg.norm(trained.gradients[name] - gradient.numpy()) / gradient.norm()
        assert difference < 1e-4, name
    assert trained.result.metrics["teacher_loss"] > 0
    assert trained.result.metrics["loss"] == pytest.approx(0.7 * trained.result.metrics["teacher_loss"])


def test_two_ranks_with_two_teachers_by_source_make_the_update_of_one(
    model: Path, teacher: Path, tmp_path: Path, alone: Ranks
) -> None:
    other = save_model(tmp_path / "other", FAMILIES["qwen3"], seed=6)
    file = tmp_path / "sources.yaml"
    file.write_text(f"- {{name: a, teacher_model: {teacher}}}\n- {{name: b, teacher_model: {other}}}\n- name: c\n")
    settings = options(teacher, 0.5, sources=str(file), max_steps=3, micro_batch_tokens=90) | {"teacher_model": None}
    groups = [replace(g, source="abc"[i % 3]) for i, g in enumerate(random_trees(2, n_groups=4))]
    numbers, expected = teach_and_update(alone, model, settings, groups)
    assert [n is None for n in numbers] == [False, False, True, False]
    for place, name in ((0, teacher), (1, other), (3, teacher)):
        wanted = plain_logprobs(plain_model(name), groups[place], 0.8)
        for s, given, want in zip(groups[place].sequences, numbers[place], wanted, strict=True):
            np.testing.assert_allclose(given, want.detach().numpy()[s.mask], atol=2e-5)
    for also, trained in run_on_ranks(2, teach_and_update, model, settings, groups):
        for one, two in zip(numbers, also, strict=True):
            assert (one is None) == (two is None)
            for x, y in zip(one or (), two or (), strict=True):
                np.testing.assert_allclose(y, x, atol=1e-5)
        for name, gradient in expected.gradients.items():
            difference = np.linalg.norm(trained.gradients[name] - gradient) / np.linalg.norm(gradient)
            assert difference < 1e-4, name
        assert trained.result.metrics == pytest.approx(expected.result.metrics, rel=1e-3)


def test_adapters_are_distilled_and_the_teacher_has_none(alone: Ranks, model: Path, teacher: Path) -> None:
    groups = random_trees(3)
    learner = make_learner(alone, model, **options(teacher, 0.5, reward_weight=0, lora_rank=4))
    before = learner.teacher_logprobs(groups)
    assert learner.teacher_overlap(groups, 3) is not None
    losses = [learner.update(scored(groups, before), step).metrics["teacher_loss"] for step in range(12)]
    assert losses[-1] < 0.9 * losses[0]
    for one, two in zip(before, learner.teacher_logprobs(groups), strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(one or (), two or (), strict=True))


# --- runs ------------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "publish_type": "float32"}


def test_a_run_that_was_cut_off_ends_with_the_very_weights_of_the_undisturbed_one(
    alone: Ranks, model: Path, teacher: Path, tmp_path: Path
) -> None:
    settings = SETTINGS | {"teacher_coef": 0.5, "lora_rank": 4}
    run = resumed_run(alone, model, tmp_path, "publish", teacher_model=str(teacher), **settings)
    for line in run.metrics:
        assert {"teacher_k1", "teacher_k3", "teacher_k1_from_0", "teacher_loss", "seconds_teach"} <= line.keys()
    assert 0 < run.metrics[0]["teacher_overlap"] <= 1


def test_another_teacher_cannot_continue_a_run(alone: Ranks, model: Path, teacher: Path, tmp_path: Path) -> None:
    train(alone, model, tmp_path, Outside("publish"), teacher_model=str(teacher))
    other = save_model(tmp_path / "other", FAMILIES["llama"], seed=7)
    for changed_teacher in ({"teacher_model": str(other)}, {}):
        with pytest.raises(ConfigurationError, match=r"the teacher: .*another RUN_ID"):
            train(alone, model, tmp_path, **changed_teacher)


# --- what cannot teach -----------------------------------------------------------------------------------------------


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigurationError) as refused:
        check_teachers(TrainerSettings.load(**settings))
    return str(refused.value)


def test_what_cannot_teach_is_refused_in_a_sentence(model: Path, teacher: Path, tmp_path: Path, alone: Ranks) -> None:
    check_teachers(TrainerSettings.load(model_name=str(model), teacher_model=str(teacher), max_new_tokens=64))
    other = save_model(tmp_path / "other", FAMILIES["llama"])
    byte_tokenizer(["<pad>", "<end>"], eos_token="<end>").save_pretrained(other)
    said = refusal(model_name=str(model), teacher_model=str(other), max_new_tokens=64)
    assert "has another tokenizer" in said
    assert "tokens have other ids" in said
    said = refusal(model_name=str(model), teacher_model=str(teacher), max_new_tokens=256)
    assert "has a context of 256 tokens, but an answer may have 256 besides its prompt" in said
    assert "cannot be loaded" in refusal(model_name=str(model), teacher_model=str(tmp_path / "absent"))
    copy = save_model(tmp_path / "copy", FAMILIES["qwen2"])
    with pytest.raises(ConfigurationError, match="has the weights of the student"):
        make_learner(alone, model, **UNCLIPPED | {"teacher_model": str(copy)})
    assert AutoTokenizer.from_pretrained(copy).eos_token == "<end>"
