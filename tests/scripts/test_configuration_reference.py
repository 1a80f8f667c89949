"""docs/configuration.md says what the settings classes say."""

import re
from pathlib import Path

from local_runner.checks import READERS
from scripts.reference import configuration

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_classes_say():
    assert configuration.main(["--check"]) == 0


def test_every_settings_class_has_a_table():
    sources = [path for part in ("services", "trainer", "evaluation") for path in (ROOT / part).rglob("*.py")]
    found = [
        class_
        for path in sources
        for class_ in re.findall(r"^class (\w+(?:Settings|Section))\(([^)]*)\)", path.read_text(), re.M)
    ]
    bases = {base for _, listed in found for base in re.findall(r"\w+", listed)}
    assert {reader.name for reader in READERS} == {name for name, _ in found} - bases


def test_every_setting_is_explained():
    for reader in READERS:
        for field, information in reader.settings_class().model_fields.items():
            assert information.description, f"{reader.name}.{field}"


def test_check_finds_a_page_that_is_out_of_date(tmp_path, monkeypatch, capsys):
    page = tmp_path / "configuration.md"
    page.write_text("Written by hand.\n\n## Old tables\n")
    monkeypatch.setattr(configuration, "TARGET", page)
    assert configuration.main([]) == 0
    assert configuration.main(["--check"]) == 0
    assert page.read_text().startswith("Written by hand.\n\n## All components\n")
    page.write_text(page.read_text().replace("| `MAX_STEPS` | `0` |", "| `MAX_STEPS` | `7` |"))
    assert configuration.main(["--check"]) == 1
    assert "make docs" in capsys.readouterr().err
