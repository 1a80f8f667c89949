from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from services.protocol.ground_truths import Entry


def entry(metadata: Any) -> Entry:
    return Entry("chain_sum", {"min_terms": 2}, {"question": "q", "answer": None, "metadata": metadata})


@pytest.mark.parametrize(
    "metadata",
    [
        {"board": ((1, 2), (3, 4)), "moves": [("a", 1)]},
        {"seen": {3, 1, 2}, "colours": {1: "red", (2, 3): "blue"}},
        {"(tuple)": [1], "large": 2**70, "small": 1e-300, "text": "é", "none": None, "yes": True},
    ],
)
def test_what_json_has_no_form_for_comes_back_as_it_was(metadata: Any) -> None:
    restored = Entry.from_json(entry(metadata).to_json())
    assert restored == entry(metadata)
    assert repr(restored.content["metadata"]) == repr(metadata)


def test_a_set_is_written_the_same_whatever_its_order() -> None:
    assert entry({8, 0, "a"}).to_json() == entry({"a", 0, 8}).to_json()


@pytest.mark.parametrize("metadata", [object(), Fraction(1, 2), {"x": b"1"}])
def test_a_value_without_a_form_is_refused(metadata: Any) -> None:
    with pytest.raises(TypeError, match="has no form in JSON"):
        entry(metadata).to_json()


@pytest.mark.parametrize("text", ["", "72", "{}", "[1]", '{"answer": "1", "generator": "chain_sum"}'])
def test_another_datasets_ground_truth_is_no_entry(text: str) -> None:
    with pytest.raises(ValueError, match=r"not an entry of reasoning-gym.*DATASET=reasoning_gym:NAME"):
        Entry.from_json(text)
