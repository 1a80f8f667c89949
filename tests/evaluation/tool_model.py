"""Makes a model that answers arithmetic by calling tools only: ``python -m tests.evaluation.tool_model DIR``.

A Qwen2 of some 0.2M parameters that writes a call of ``add`` or ``multiply`` for a question such as ``3*4=``, and then
what the tool said as its answer. So an agent's whole loop can be run against a real engine, and must come out right.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import Qwen2Config, Qwen2ForCausalLM

from scripts.tiny_model import build_tokenizer

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
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            use_sliding_window=False,
        )
    )
    rows = [_row(tokenizer, conversation(q["question"])) for q in questions()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    draw = random.Random(0)
    for step in range(1, 2001):
        ids, labels = _batch(draw.sample(rows, 32))
        logits = model(input_ids=ids, attention_mask=(ids != 0).long()).logits[:, :-1]
        wanted = labels[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 and _knows(model, rows):
            break
    else:
        raise RuntimeError(f"the model did not learn within {step} steps; the loss is {loss.item():.3f}")
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    print(json.dumps({"steps": step, "loss": loss.item()}))


def _row(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Ids, and labels that are -100 but for what the model says after the solved example."""

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


def _batch(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    return ids, torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])


@torch.no_grad()
def _knows(model: Qwen2ForCausalLM, rows: list[tuple[list[int], list[int]]]) -> bool:
    """Return whether the model chooses the right token, and clearly, at every place of its turns."""
    ids, labels = _batch(rows)
    chances = model(input_ids=ids, attention_mask=(ids != 0).long()).logits[:, :-1].softmax(-1)
    wanted = labels[:, 1:]
    said = wanted != -100
    return bool((chances[said].gather(1, wanted[said][:, None]) > 0.9).all())


if __name__ == "__main__":
    make(Path(sys.argv[1]))
