"""docs/configuration.md says what the settings classes say."""

import re
from pathlib import Path

from scripts import configuration_reference
from scripts.settings_classes import READERS

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_classes_say():
    written = configuration_reference.TARGET.read_text()
    assert written == configuration_reference.page(), "out of date; run: make docs"


def test_every_settings_class_has_a_table():
    sources = [path for part in ("services", "trainer", "scripts") for path in (ROOT / part).rglob("*.py")]
    classes = {
        name for path in sources for name in re.findall(r"^class (\w+)\(Settings\)", path.read_text(), re.MULTILINE)
    }
    assert {reader.name for reader in READERS} == classes


def test_every_setting_is_explained():
    for reader in READERS:
        for field, information in reader.settings_class().model_fields.items():
            assert information.description, f"{reader.name}.{field}"


def test_check_tells_a_page_that_is_out_of_date(tmp_path, monkeypatch, capsys):
    page = tmp_path / "configuration.md"
    monkeypatch.setattr(configuration_reference, "TARGET", page)
    assert configuration_reference.main([]) == 0
    assert configuration_reference.main(["--check"]) == 0
    page.write_text(page.read_text().replace("| `MAX_STEPS` | `0` |", "| `MAX_STEPS` | `7` |"))
    assert configuration_reference.main(["--check"]) == 1
    assert "python -m scripts.configuration_reference" in capsys.readouterr().err
