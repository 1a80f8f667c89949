"""The tiny model is what the end-to-end tests count on: small, repeatable, neither right nor wrong all the time."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from toys import arithmetic


def test_the_tiny_model_loads_as_a_hugging_face_model_and_reads_every_character(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer.encode(arithmetic.ALPHABET)
    assert ids == list(range(2, 17))
    assert tokenizer.decode(ids) == arithmetic.ALPHABET
    assert 350_000 < model.num_parameters() < 450_000
    assert model.config.eos_token_id == tokenizer.eos_token_id == model.generation_config.eos_token_id


def test_the_chat_template_leaves_the_question_as_it_is(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    turns = [{"role": "user", "content": "3+4="}]
    assert tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == "3+4="
    turns.append({"role": "assistant", "content": "7"})
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "3+4=7<end>"


@pytest.mark.slow
def test_the_same_seed_makes_the_same_weights_which_are_right_often_but_not_always(tiny_model, tmp_path):
    """Often enough to learn, and wrong often enough to improve."""
    accuracy = arithmetic.make(tmp_path)
    assert arithmetic.WARM_ACCURACY < accuracy < 0.7
    assert (tmp_path / "model.safetensors").read_bytes() == (tiny_model / "model.safetensors").read_bytes()
