"""The data-server says by content which prompts it has, so that no run goes on with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.data_server.dataset import load
from services.data_server.settings import DataSettings
from tests.rows import write_rows

ROWS = [{"question": f"{a}+{a}=", "answer": str(2 * a)} for a in range(40)]


@pytest.fixture
def fingerprint(tmp_path: Path, chat_model: str) -> Any:
    """The fingerprint with some settings; by default of ROWS in a file."""

    def of(**settings: Any) -> dict[str, str]:
        given = {"dataset": str(write_rows(tmp_path / "rows.jsonl", ROWS)), "model_name": chat_model} | settings
        return load(DataSettings.load(**given)).fingerprint

    return of


@pytest.mark.parametrize("name", ["elsewhere/rows.jsonl", "other-name.jsonl", "rows.parquet"])
def test_it_is_the_same_wherever_and_however_the_rows_are_stored(fingerprint: Any, tmp_path: Path, name: str) -> None:
    assert fingerprint(dataset=str(write_rows(tmp_path / name, ROWS))) == fingerprint()


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"data_seed": 1}, {"training prompts", "held-out prompts", "order"}),
        ({"curriculum": "source"}, {"order"}),
        ({"curriculum": "balanced"}, {"order"}),
        ({"dataset_held_out": 0.5}, {"training prompts", "held-out prompts"}),
        ({"system_prompt": "Be brief."}, {"form"}),
        ({"instruction": "Think."}, {"form"}),
        ({"prompt_style": "plain"}, {"form"}),
        ({"max_prompt_tokens": 100}, {"form"}),
        ({"prompt_style": "few_shot"}, {"training prompts", "form"}),
    ],
)
def test_it_shows_what_a_setting_changes(fingerprint: Any, settings: dict[str, Any], changed: set[str]) -> None:
    before, after = fingerprint(), fingerprint(**settings)
    assert {part for part in before if before[part] != after[part]} == changed


@pytest.mark.parametrize("column", ["question", "answer"])
def test_it_shows_one_changed_row_and_one_more(fingerprint: Any, tmp_path: Path, column: str) -> None:
    changed = [*ROWS[:-1], ROWS[-1] | {column: "99"}]
    more = [*ROWS, {"question": "1+2=", "answer": "3"}]
    before = fingerprint()
    for rows in (changed, more):
        after = fingerprint(dataset=str(write_rows(tmp_path / "changed.jsonl", rows)))
        assert after["training prompts"] != before["training prompts"]


@pytest.mark.parametrize(
    "settings",
    [{"arithmetic_operations": "-"}, {"arithmetic_digits": "1,2"}, {"arithmetic_template": "{a} {op} {b} = ?"}],
)
def test_it_shows_other_arithmetic(fingerprint: Any, settings: dict[str, str]) -> None:
    before, after = fingerprint(dataset="arithmetic"), fingerprint(dataset="arithmetic", **settings)
    assert after["training prompts"] != before["training prompts"]
    assert after["held-out prompts"] != before["held-out prompts"]


def test_it_shows_another_chat_template(fingerprint: Any, base_model: str) -> None:
    before, after = fingerprint(prompt_style="few_shot"), fingerprint(prompt_style="few_shot", model_name=base_model)
    assert {part for part in before if before[part] != after[part]} == {"form"}
