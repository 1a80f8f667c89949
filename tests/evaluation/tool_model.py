"""Make a model that answers arithmetic by calling tools only: ``python -m tests.evaluation.tool_model DIR``.

A Qwen2 of about 0.2M parameters that writes a call of ``add`` or ``multiply`` for a question such as ``3*4=``, and then
the tool's result as its answer. So tests run an agent's whole loop against a real engine, with a known outcome.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import Qwen2ForCausalLM

from toys.arithmetic import build_tokenizer
from toys.models import Example, batch, qwen2, random_model, train

TOOLS = {"+": ("add", lambda a, b: a + b), "*": ("multiply", lambda a, b: a * b)}
PIECES = [
    *(f'<tool_call>{{"name": "{name}", "arguments": {{"a": ' for name, _ in TOOLS.values()),
    ', "b": ',
    "}}</tool_call>",
]
# A turn of the user or of a tool ends with "=".
TEMPLATE = """{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% elif m.role == 'tool' %}\
{{ m.content }}={% elif m.role == 'assistant' %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{"name": "\
{{ c.function.name }}", "arguments": {"a": {{ c.function.arguments.a }}, "b": {{ c.function.arguments.b }}}}\
</tool_call>{% endfor %}<end>{% endif %}{% endfor %}"""


def questions() -> list[dict[str, str]]:
    """Return every question that the model can answer."""
    return [
        {"question": f"{a}{op}{b}=", "answer": str(compute(a, b))}
        for op, (_, compute) in TOOLS.items()
        for a in range(2, 10)
        for b in range(2, 10)
    ]


def conversation(question: str) -> list[dict[str, Any]]:
    """Return the conversation that the model learns for a question."""
    # Imports the Agents SDK, for which those who only want the questions need not wait.
    from evaluation.math_agent import INSTRUCTIONS, SOLVED

    a, op, b = int(question[0]), question[1], int(question[2])
    name, compute = TOOLS[op]
    call = {"type": "function", "id": "1", "function": {"name": name, "arguments": {"a": a, "b": b}}}
    return [
        {"role": "system", "content": INSTRUCTIONS},
        *SOLVED,
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(compute(a, b))},
        {"role": "assistant", "content": str(compute(a, b))},
    ]


def make(directory: Path) -> None:
    """Train the model until it knows every conversation, and write it."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in PIECES])
    tokenizer.chat_template = TEMPLATE
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = random_model(qwen2(vocab_size=len(tokenizer), **sizes, **heads))
    rows = [_row(tokenizer, conversation(q["question"])) for q in questions()]
    draw = random.Random(0)
    losses = train(model, lambda: draw.sample(rows, 32), learning_rate=2e-3, steps=2000)
    for step, loss in enumerate(losses, start=1):
        if step % 50 == 0 and _knows(model, rows):
            tokenizer.save_pretrained(directory)
            model.save_pretrained(directory)
            print(json.dumps({"steps": step, "loss": loss}))
            return
    raise RuntimeError("the model did not learn its conversations within 2,000 steps")


def _row(tokenizer: Any, messages: list[dict[str, Any]]) -> Example:
    """Return the ids of a conversation; the model learns what it says after the solved example."""

    def ids_of(count: int) -> list[int]:
        ids: list[int] = tokenizer.apply_chat_template(messages[:count], tokenize=True, return_dict=False)
        return ids

    total = len(messages)
    ids = ids_of(total)
    labels = [-100] * len(ids)
    for turn in (total - 3, total - 1):
        start, end = len(ids_of(turn)), len(ids_of(turn + 1))
        labels[start:end] = ids[start:end]
    return ids, labels


@torch.no_grad()
def _knows(model: Qwen2ForCausalLM, rows: list[Example]) -> bool:
    """Return whether the model chooses the right token, and clearly, at every place of its turns."""
    ids, labels = batch(rows)
    chances = model(input_ids=ids, attention_mask=(ids != 0).long()).logits[:, :-1].softmax(-1)
    wanted = labels[:, 1:]
    said = wanted != -100
    return bool((chances[said].gather(1, wanted[said][:, None]) > 0.9).all())


if __name__ == "__main__":
    make(Path(sys.argv[1]))
