"""The reward of recipes/reverse-text.env: likeness of the answer to the reversed text."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

_TAGGED = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


def likeness(response: str, ground_truth: str) -> float:
    """Return the share of characters in matching blocks of the tagged answer and of ``ground_truth`` reversed, 0 to 1.

    Without tags the answer is the empty text.
    """
    match = _TAGGED.search(response)
    return SequenceMatcher(None, match[1].strip() if match else "", ground_truth[::-1]).ratio()
