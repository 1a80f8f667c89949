"""Writes tests/evaluation/gsm8k: the first rows of GSM8K (OpenAI, MIT licence), for examples and for questions.

Usage: python -m tests.evaluation.gsm8k_rows, with the hub in reach.
"""

from __future__ import annotations

import json
from pathlib import Path

ROWS = Path(__file__).with_name("gsm8k")
COUNTS = {"train": 4, "test": 60}


def write() -> None:
    """Download the data set and write its first rows, COUNTS of each split, to ``<split>.jsonl``."""
    from datasets import load_dataset

    for split, count in COUNTS.items():
        rows = load_dataset("openai/gsm8k", "main", split=f"{split}[:{count}]")
        text = "".join(json.dumps({"question": row["question"], "answer": row["answer"]}) + "\n" for row in rows)
        (ROWS / f"{split}.jsonl").write_text(text)


if __name__ == "__main__":
    write()
