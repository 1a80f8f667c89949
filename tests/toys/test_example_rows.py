"""The rows of the demos are those that their script writes."""

from __future__ import annotations

import json

import pytest

from toys.example_rows import DIRECTORY, FILES, functions, text


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_rows_is_what_its_script_writes(name: str) -> None:
    assert (DIRECTORY / name).read_text() == text(FILES[name]())


def test_each_solution_gives_the_values_of_its_hidden_calls() -> None:
    for row in functions():
        scope: dict[str, object] = {}
        exec(row["answer"].removeprefix("```python\n").removesuffix("\n```"), scope)
        tests = json.loads(row["tests"])
        assert [scope["f"](*numbers) for numbers in tests["inputs"]] == tests["outputs"]  # type: ignore[operator]
