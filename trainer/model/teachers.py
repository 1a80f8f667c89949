"""The frozen teachers of a run in the trainer: loading, and the checks that they can teach this student."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from services.chat.tokenizers import load_tokenizer
from services.clients.teacher import TeacherClient, check_context, probe_distance
from services.core.errors import ConfigurationError
from services.core.models import context_length
from services.protocol.base import PROBE
from trainer.algorithm.packing import text_group
from trainer.algorithm.training_groups import PerToken
from trainer.config import TrainerSettings
from trainer.model.loading import load_config
from trainer.model.policy import Policy, load_policy
from trainer.model.ranks import Ranks

SHOWN = 3
"""Most tokens in a message."""


def as_model(settings: TrainerSettings, teacher: str) -> TrainerSettings:
    """Return the settings of a run whose whole model, without adapters, is ``teacher``."""
    return settings.model_copy(update={"model_name": teacher, "lora_rank": 0})


def load_teachers(settings: TrainerSettings, policy: Policy, ranks: Ranks) -> dict[str, Policy]:
    """Load the frozen teachers, by the name of their model, sharded as the policy is. A collective.

    Raises:
        ConfigurationError: one of them cannot be loaded, or has the student's weights.
    """
    teachers = {}
    for name in settings.teacher_models:
        with naming_the_teacher():
            teachers[name] = load_policy(as_model(settings, name), ranks, trainable=False, is_described=True)
    ranks.on_main(partial(_check_weights, settings, policy, teachers), ConfigurationError)
    return teachers


def load_teacher_config(settings: TrainerSettings, name: str) -> PretrainedConfig:
    """Load the configuration of a teacher.

    Raises:
        ConfigurationError: it cannot be loaded, or its architecture is not supported.
    """
    with naming_the_teacher():
        return load_config(as_model(settings, name))


@contextmanager
def naming_the_teacher() -> Iterator[None]:
    """Let errors within the context name the setting of the teacher in place of the student's."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace("MODEL_NAME", "TEACHER_MODEL")) from error


def _check_weights(settings: TrainerSettings, policy: Policy, teachers: Mapping[str, Policy]) -> None:
    assert policy.description is not None, "rank 0 has it"
    for name, teacher in teachers.items():
        assert teacher.description is not None, "rank 0 has it"
        if teacher.description.weights_digest == policy.description.weights_digest:
            raise ConfigurationError(
                f"TEACHER_MODEL={name} has the weights of the student, MODEL_NAME={settings.model_name}, and teaches "
                "it nothing; name another model, or set KL_COEF to stay near the model that the run starts with"
            )


def check_teachers(settings: TrainerSettings) -> None:
    """Check, before weights are loaded, that each teacher has the student's tokenizer and room for its answers.

    Raises:
        ConfigurationError: a teacher has another tokenizer or too short a context, or its files cannot be read.
    """
    for name in settings.teacher_models:
        longest = max(s.answer_tokens for s in settings.by_source().values() if s.teacher_model == name)
        check_context(f"TEACHER_MODEL={name}", context_length(name, "TEACHER_MODEL"), longest)
        student = load_tokenizer(settings.model_name)
        with naming_the_teacher():
            teacher = load_tokenizer(name)
        if difference := tokenizer_difference(student, teacher):
            raise ConfigurationError(
                f"TEACHER_MODEL={name} has another tokenizer than MODEL_NAME={settings.model_name}: {difference}; a "
                "teacher scores the student's token ids, so name a model of the same family"
            )


LEAST_DISTANCE = 0.02
"""Least mean difference, in nats a token, of a teacher behind an endpoint and the student, which an engine's rounding
may make look different."""


def check_endpoints(
    teachers: Iterable[TeacherClient], student: PreTrainedTokenizerBase, logprobs: Callable[..., list[PerToken]]
) -> None:
    """Check that teachers behind an endpoint have the student's tokenizer, and are not the student itself.

    Args:
        teachers: the clients, which have answered their probes.
        student: the student's tokenizer.
        logprobs: computes the policy's log-probabilities on all ranks; see Learner.logprobs.

    Raises:
        ConfigurationError: one of them splits the probe otherwise, or says of it what the policy says, as the run's own
            engines do.
    """
    for teacher in teachers:
        ids = [int(i) for i in student(PROBE)["input_ids"]]
        if teacher.probe_ids != ids:
            raise ConfigurationError(
                f"TEACHER_URL={teacher.url} has another tokenizer than the student: it splits a text into "
                f"{len(teacher.probe_ids)} tokens, the student's into {len(ids)} or into others; a teacher scores the "
                "student's token ids, so serve a model of the same family"
            )
        (ours,) = logprobs([text_group(teacher.probe_ids)], temperature=1.0)[0]
        distance = probe_distance(ours.tolist(), teacher.probe)
        if distance < LEAST_DISTANCE:
            raise ConfigurationError(
                f"TEACHER_URL={teacher.url} gives a text the student's own log-probabilities, to {distance:.3f} nats a "
                "token, and teaches it nothing; serve another model there"
            )


def tokenizer_difference(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> str | None:
    """Return how a teacher's tokenizer differs from the student's, as far as token ids are concerned; None if not.

    Further tokens of the teacher, and another chat template, do no harm, because prompts are the student's.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if different := sorted(token for token, number in ours.items() if theirs.get(token) != number):
        shown = ", ".join(
            f"{token!r} is {ours[token]} and {theirs.get(token, 'absent')}" for token in different[:SHOWN]
        )
        return f"{len(different)} of {len(ours)} tokens have other ids ({shown})"
    if student.eos_token_id != teacher.eos_token_id:
        return f"the end token is {student.eos_token!r} and {teacher.eos_token!r}"
    ours_split, theirs_split = (tokenizer(PROBE)["input_ids"] for tokenizer in (student, teacher))
    if ours_split != theirs_split:
        return f"it splits a text into {len(theirs_split)} tokens, the student's into {len(ours_split)} or into others"
    return None
