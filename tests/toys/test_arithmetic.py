"""The tiny model is what the end-to-end tests count on: small, repeatable, neither right nor wrong all the time."""

import hashlib
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from toys import arithmetic


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    directory = tmp_path_factory.mktemp("tiny")
    return directory, arithmetic.make(directory)


def test_the_tiny_model_is_right_often_enough_to_learn_and_wrong_often_enough_to_improve(made):
    assert arithmetic.WARM_ACCURACY < made[1] < 0.7


def test_the_tiny_model_loads_as_a_hugging_face_model_and_reads_every_character(made):
    directory, _ = made
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.encode(arithmetic.ALPHABET)
    assert ids == list(range(2, 17))
    assert tokenizer.decode(ids) == arithmetic.ALPHABET
    assert 350_000 < model.num_parameters() < 450_000
    assert model.config.eos_token_id == tokenizer.eos_token_id == model.generation_config.eos_token_id


def test_the_chat_template_leaves_the_question_as_it_is(made):
    tokenizer = AutoTokenizer.from_pretrained(made[0])
    turns = [{"role": "user", "content": "3+4="}]
    assert tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == "3+4="
    turns.append({"role": "assistant", "content": "7"})
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "3+4=7<end>"


@pytest.mark.slow
def test_the_same_seed_makes_the_same_weights(made, tmp_path):
    arithmetic.make(tmp_path / "again")
    digests = [
        hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
        for directory in (made[0], tmp_path / "again")
    ]
    assert digests[0] == digests[1]
