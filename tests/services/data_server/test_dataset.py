from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.chat.tokenizers import load_tokenizer
from services.core.errors import ConfigurationError
from services.data_server.dataset import PromptMaker, load
from services.data_server.dataset_rows import INSTRUCTIONS, Row
from services.data_server.settings import DataSettings, GroundTruthFormat
from tests.rows import write_rows
from tests.services.data_server.conftest import save_ending_tokenizer

EXAMPLES = [Row(0, "1 + 1?", "It is #### 2", "2", None), Row(1, "2 + 2?", "It is #### 4", "4", None)]


def maker(model: str | None, form: str = "plain", examples: list[Row] | None = None, **options: Any) -> PromptMaker:
    settings = DataSettings(dataset="x", model_name=model, **options)
    tokenizer = None if model is None else load_tokenizer(model)
    return PromptMaker(settings, INSTRUCTIONS.get(GroundTruthFormat(form)), tokenizer, examples or [])


def test_chat_prompts_are_the_template_with_system_turn_instruction_and_generation_marker(chat_model: str) -> None:
    renderer = maker(chat_model, system_prompt="Be brief.", instruction="Answer in words.")
    text = "<system>Be brief.</s><user>3 + 4?\nAnswer in words.</s><assistant>"
    assert renderer.text("3 + 4?") == text
    tokenizer: Any = load_tokenizer(chat_model)
    ids = renderer.token_ids(["3 + 4?"])[0]
    assert tokenizer.decode(ids) == text
    # The template writes the special tokens; a second begin token must not come before it.
    assert ids[0] == tokenizer.convert_tokens_to_ids("<system>")
    assert renderer.messages("3 + 4?") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "3 + 4?\nAnswer in words."},
    ]


def test_arguments_of_the_chat_template_reach_it_and_make_other_prompts(chat_model: str) -> None:
    tokenizer: Any = load_tokenizer(chat_model)
    tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking is false %} /no_think{% endif %}"
    settings = DataSettings(dataset="x", model_name=chat_model, chat_template_args={"enable_thinking": False})
    renderer, other = (
        PromptMaker(settings, None, tokenizer, []),
        PromptMaker(DataSettings(dataset="x"), None, tokenizer, []),
    )
    assert renderer.text("3 + 4?") == "3 + 4? /no_think"
    assert other.text("3 + 4?") == "3 + 4?"
    assert renderer.digest() != other.digest()


def test_plain_prompts_are_the_text_with_the_tokenizers_begin_token(base_model: str) -> None:
    renderer = maker(base_model, prompt_style="plain", system_prompt="Sums.")
    assert renderer.text("3 + 4?") == "Sums.\n\n3 + 4?"
    tokenizer: Any = load_tokenizer(base_model)
    assert tokenizer.decode(renderer.token_ids(["3 + 4?"])[0]) == "<s>Sums.\n\n3 + 4?"


@pytest.mark.parametrize("style", ["plain", "few_shot"])
def test_no_end_token_stands_behind_a_prompt(tmp_path: Path, base_model: str, style: str) -> None:
    (Path(base_model) / "config.json").write_text("{}")
    options: dict[str, Any] = {"prompt_style": style, "examples": EXAMPLES if style == "few_shot" else None}
    questions = [f"{i} + 4?" for i in range(200)] + ["ends </s>"]
    ending = maker(save_ending_tokenizer(tmp_path / "ending", base_model), **options)
    plain = maker(base_model, **options)
    assert ending.token_ids(questions) == plain.token_ids(questions)
    assert [ending.token_ids([question]) for question in questions] == [plain.token_ids([q]) for q in questions]
    assert ending.digest() != plain.digest()


@pytest.mark.parametrize(
    ("template", "system", "said"),
    [
        (
            "{{ raise_exception('System role not supported') }}",
            "Be brief.",
            ["System role not supported", "INSTRUCTION"],
        ),
        ("{{ raise_exception('Roles must\nalternate') }}", None, ["Roles must", "PROMPT_STYLE=plain"]),
        ("{{ messages[5].content.text }}", None, ["no element 5"]),
        ("{{ 1 // 0 }}", None, ["by zero"]),
        ("{% for %}", None, ["MODEL_NAME"]),
    ],
)
def test_a_template_that_raises_is_an_error_of_configuration_in_one_line(
    tmp_path: Path, chat_model: str, template: str, system: str | None, said: list[str]
) -> None:
    tokenizer: Any = load_tokenizer(chat_model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "model")
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ConfigurationError) as error:
        load(DataSettings(dataset=str(path), model_name=str(tmp_path / "model"), system_prompt=system))
    assert all(part in str(error.value) for part in said), str(error.value)
    assert "\n" not in str(error.value)


def test_few_shot_examples_are_turns_with_a_chat_template_and_text_without(chat_model: str, base_model: str) -> None:
    chat = maker(chat_model, prompt_style="few_shot", examples=EXAMPLES)
    assert chat.text("3 + 4?") == (
        "<user>1 + 1?</s><assistant>It is #### 2</s><user>2 + 2?</s><assistant>It is #### 4</s>"
        "<user>3 + 4?</s><assistant>"
    )
    text = maker(base_model, prompt_style="few_shot", examples=EXAMPLES)
    assert text.text("3 + 4?") == (
        "Question: 1 + 1?\nAnswer: It is #### 2\n\nQuestion: 2 + 2?\nAnswer: It is #### 4\n\nQuestion: 3 + 4?\nAnswer:"
    )


def test_the_instruction_asks_for_the_form_of_the_ground_truths() -> None:
    for form, part in (("hash", '"####"'), ("boxed", "\\boxed{}"), ("plain", "3 + 4?")):
        assert part in maker(None, form).user_turn("3 + 4?")
        assert maker(None, form, instruction="none").user_turn("3 + 4?") == "3 + 4?"
    assert maker(None, "plain").user_turn("3 + 4?") == "3 + 4?"


def test_without_a_model_there_are_no_token_ids(chat_model: str) -> None:
    assert maker(None).token_ids(["a", "b"]) == [[], []]


def test_a_chat_style_without_a_template_is_refused(base_model: str) -> None:
    with pytest.raises(ConfigurationError, match="PROMPT_STYLE=plain"):
        maker(base_model)


ROWS = [{"question": f"{a}+{a}=", "answer": str(2 * a)} for a in range(40)]


@pytest.fixture
def fingerprint(tmp_path: Path, chat_model: str) -> Any:
    """The fingerprint with some settings; by default of ROWS in a file."""

    def of(**settings: Any) -> dict[str, str]:
        values = {"dataset": str(write_rows(tmp_path / "rows.jsonl", ROWS)), "model_name": chat_model} | settings
        return load(DataSettings.load(**values)).fingerprint

    return of


def test_the_fingerprint_does_not_depend_on_where_and_how_the_rows_are_stored(fingerprint: Any, tmp_path: Path) -> None:
    expected = fingerprint()
    for name in ("elsewhere/rows.jsonl", "other-name.jsonl", "rows.parquet"):
        assert fingerprint(dataset=str(write_rows(tmp_path / name, ROWS))) == expected


def test_the_fingerprint_shows_which_part_a_setting_changes(fingerprint: Any) -> None:
    before = fingerprint()
    for settings, changed in (
        ({"data_seed": 1}, {"training prompts", "held-out prompts", "order"}),
        ({"curriculum": "source"}, {"order"}),
        ({"curriculum": "balanced"}, {"order"}),
        ({"dataset_held_out": 0.5}, {"training prompts", "held-out prompts"}),
        ({"system_prompt": "Be brief."}, {"form"}),
        ({"instruction": "Think."}, {"form"}),
        ({"prompt_style": "plain"}, {"form"}),
        ({"max_prompt_tokens": 100}, {"form"}),
        ({"prompt_style": "few_shot"}, {"training prompts", "form"}),
    ):
        after = fingerprint(**settings)
        assert {part for part in before if before[part] != after[part]} == changed, settings


def test_the_fingerprint_shows_a_changed_row_and_an_added_row(fingerprint: Any, tmp_path: Path) -> None:
    changed = [[*ROWS[:-1], ROWS[-1] | {column: "99"}] for column in ("question", "answer")]
    before = fingerprint()
    for rows in (*changed, [*ROWS, {"question": "1+2=", "answer": "3"}]):
        after = fingerprint(dataset=str(write_rows(tmp_path / "changed.jsonl", rows)))
        assert after["training prompts"] != before["training prompts"]
