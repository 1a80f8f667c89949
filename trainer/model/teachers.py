"""The frozen teachers of a run in the trainer: loading, and the checks that they can teach this student."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from services.core.errors import ConfigurationError
from services.core.models import context_length
from trainer.config import TrainerSettings
from trainer.model.loading import PROBE, load_config
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
        with _naming_the_teacher():
            teachers[name] = load_policy(as_model(settings, name), ranks, trainable=False, is_described=True)
    ranks.on_main(partial(_check_weights, settings, policy, teachers), ConfigurationError)
    return teachers


def load_teacher_config(settings: TrainerSettings, name: str) -> PretrainedConfig:
    """Load the configuration of a teacher.

    Raises:
        ConfigurationError: it cannot be loaded, or its architecture is not supported.
    """
    with _naming_the_teacher():
        return load_config(as_model(settings, name))


@contextmanager
def _naming_the_teacher() -> Iterator[None]:
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
        longest = max(s.way.longest_answer for s in settings.by_source().values() if s.teacher_model == name)
        check_context(f"TEACHER_MODEL={name}", context_length(name, "TEACHER_MODEL"), longest)
        student, teacher = (_tokenizer(settings, model) for model in (settings.model_name, name))
        if difference := tokenizer_difference(student, teacher):
            raise ConfigurationError(
                f"TEACHER_MODEL={name} has another tokenizer than MODEL_NAME={settings.model_name}: {difference}; a "
                "teacher scores the student's token ids, so name a model of the same family"
            )


def check_context(teacher: str, context: int, longest: int) -> None:
    """Check that a teacher's context holds an answer of ``longest`` tokens and a prompt of one token at least.

    Raises:
        ConfigurationError: it does not.
    """
    if context <= longest:
        raise ConfigurationError(
            f"{teacher} has a context of {context} tokens, but an answer may have {longest} besides its prompt; lower "
            "MAX_NEW_TOKENS (of an agent AGENT_MAX_TOKENS), or name a teacher with a longer context"
        )


def _tokenizer(settings: TrainerSettings, name: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{name} has no tokenizer that can be read: {str(error).splitlines()[0]}") from error
    return tokenizer


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
    return probe_difference(student(PROBE)["input_ids"], teacher(PROBE)["input_ids"])


def probe_difference(ours: list[int], theirs: list[int]) -> str | None:
    """Return how two encodings of PROBE differ; None if they are equal."""
    return None if ours == theirs else f"it splits a text into {len(theirs)} tokens, the student's into {len(ours)}"
