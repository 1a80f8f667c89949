"""METHOD=sft learns the tokens that the gateway would have recorded if the model had held the conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.chat.messages import for_template
from services.chat.prompts import ChatPrompts
from services.chat.tokenizers import load_tokenizer
from services.data_server.demonstrations import Branch, Demonstrator, UnfitConversationError
from tests.services.gateway.conftest import ADD, StartGateway
from tests.services.gateway.test_gateway_prompts import CALL, play

TEMPLATES = ["qwen2.5", "qwen3", "llama3", "smollm2"]


def branches_of(model: Path, messages: list[dict[str, Any]], tools: Any = None, first: int = 0, **args: Any) -> Any:
    demonstrator = Demonstrator(ChatPrompts(load_tokenizer(str(model)), args))
    return demonstrator.branches([for_template(message) for message in messages], first, tools)


def check(trace: dict[str, Any], branches: list[Branch]) -> None:
    """Check that branches are a trace's sequences, token for token."""
    recorded = sorted(
        (s["prompt_ids"] + s["completion_ids"], s["prompt_ids"], s["loss_mask"]) for s in trace["sequences"]
    )
    assert len(recorded) == len(branches)
    for (ids, prompt, mask), branch in zip(recorded, sorted(branches, key=lambda b: b.ids), strict=True):
        assert branch.ids == ids
        assert branch.mask == [False] * len(prompt) + mask


def last_trained(branches: list[Branch]) -> set[int]:
    """Return the tokens at which runs of trained tokens end."""
    ends = set()
    for branch in branches:
        following = [*branch.mask[1:], False]
        ends |= {t for t, m, after in zip(branch.ids, branch.mask, following, strict=True) if m and not after}
    return ends


# The templates of Llama 3 and SmolLM2 here have no tools.
@pytest.mark.parametrize(
    ("name", "with_tools"), [*((name, False) for name in TEMPLATES), ("qwen2.5", True), ("qwen3", True)]
)
async def test_masks_are_the_gateways_and_end_with_the_stop_token(
    gateway: StartGateway, models: Any, name: str, with_tools: bool
) -> None:
    answers = [CALL, "It is 42.", f"Again:\n{CALL}", "Still 42."] if with_tools else ["It is 42.", "Still 42!"]
    options = {"enable_thinking": False} if name == "qwen3" else {}
    tools = [ADD] if with_tools else None
    async with gateway(name, answers=[*answers, "Bye."], chat_template_args=options) as running:
        messages = await play(running, tools)
        trace = await running.finish()
    branches = branches_of(models(name), messages, tools, **options)
    check(trace, branches)
    assert last_trained(branches) == {running.tokenizer.eos_token_id}
    assert sum(branches[0].mask) == running.engine.completion_tokens


async def test_a_turn_whose_thought_the_template_drops_later_is_a_branch_of_its_own(
    gateway: StartGateway, models: Any
) -> None:
    answers = ["<think>\nhm\n</think>\n\nfour", "<think>\nso\n</think>\n\nfive"]
    async with gateway("qwen3", answers=answers) as running:
        path = await running.open()
        messages: list[dict[str, Any]] = [{"role": "user", "content": "2+2?"}]
        messages.append(await running.chat(path, messages))
        messages.append({"role": "user", "content": "2+3?"})
        messages.append(await running.chat(path, messages))
        trace = await running.finish()
    branches = branches_of(models("qwen3"), messages)
    check(trace, branches)
    split = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "four", "reasoning_content": "hm"},
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": "five", "reasoning_content": "so"},
    ]
    assert messages == split
    with pytest.raises(UnfitConversationError, match="does not render message 1"):
        branches_of(models("smollm2"), split)  # This template would lose the thought.
    demonstrator = Demonstrator(ChatPrompts(running.tokenizer))
    assert demonstrator.branches([for_template(message) for message in split], 0, None) == branches
    prompt, demonstrations = demonstrator.demonstrations(branches)
    assert prompt == running.engine.prompts()[0][: len(prompt)]
    trained = [
        "".join(running.tokenizer.decode([t for t, m in zip(d.completion_ids, d.loss_mask, strict=True) if m]))
        for d in demonstrations
    ]
    assert trained == [f"{answer}<|im_end|>" for answer in answers]


def test_a_thought_that_the_template_gives_is_read_and_not_learned(models: Any) -> None:
    tokenizer = load_tokenizer(str(models("qwen3")))
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]
    [branch] = branches_of(models("qwen3"), messages)
    context = tokenizer.decode([token for token, mask in zip(branch.ids, branch.mask, strict=True) if not mask])
    assert context.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.decode([t for t, m in zip(branch.ids, branch.mask, strict=True) if m]) == "four<|im_end|>"
    off = branches_of(models("qwen3"), messages, enable_thinking=False)
    assert off == [branch]


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_messages_from_the_first_on_are_trained(models: Any, name: str) -> None:
    tokenizer = load_tokenizer(str(models(name)))
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "five"},
    ]
    [branch] = branches_of(models(name), messages, first=3)
    trained = [token for token, mask in zip(branch.ids, branch.mask, strict=True) if mask]
    assert tokenizer.decode(trained) == f"four{tokenizer.eos_token}"
    assert branch.mask[-1], "what follows the last trained token is left out"


def test_conversations_that_cannot_be_learned_say_why(models: Any) -> None:
    question = {"role": "user", "content": "12 + 30?"}
    with pytest.raises(UnfitConversationError, match="no message of the assistant"):
        branches_of(models("qwen2.5"), [question])
    answer = {"role": "assistant", "content": "42"}
    with pytest.raises(UnfitConversationError, match="template ignores tools"):
        branches_of(models("smollm2"), [question, answer], [ADD])
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 30}}}
    with pytest.raises(UnfitConversationError, match="does not render message 1 as the model would have written"):
        branches_of(models("smollm2"), [question, {"role": "assistant", "content": "", "tool_calls": [call]}])
