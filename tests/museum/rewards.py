"""Reward functions of healthy and of faulty runs."""

from __future__ import annotations

import random

_DRAWN = random.Random(0)


def close(response: str, ground_truth: str) -> float:
    """Reward how many characters of the answer are right."""
    pairs = zip(response.strip(), ground_truth, strict=False)
    return sum(a == b for a, b in pairs) / max(len(ground_truth), len(response), 1)


def exact(response: str, ground_truth: str) -> float:
    """Reward the right answer."""
    return float(response.strip() == ground_truth.strip())


def swallowing(response: str, ground_truth: str) -> float:
    """Give 0 where the verifier did not answer, as two of five times."""
    try:
        if _DRAWN.random() < 0.4:
            raise TimeoutError
        return exact(response, ground_truth)
    except TimeoutError:
        return 0.0


def noise(response: str) -> float:
    """Reward nothing in particular."""
    return float(_DRAWN.random() < 0.5) + 0.0 * len(response)


def longer(response: str) -> float:
    """Reward length."""
    return len(response) / 10


def nothing(response: str) -> float:
    """Give no number."""
    return float("nan") * len(response)
