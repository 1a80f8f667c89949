"""``grpo``: its list of commands, which imports none of them, and a command that does not exist."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest

from scripts.grpo import COMMANDS, _application
from tests.pages import ROOT, UsageError, grpo_command


def test_grpo_lists_its_commands_and_imports_none_for_it() -> None:
    start = "import sys; sys.argv = ['grpo']; from scripts.grpo import main\ntry: main()\nexcept SystemExit: "
    start += "sys.exit(str([name for name in sys.modules if name in ('torch', 'local_runner.run', 'psutil')] or ''))"
    done = subprocess.run([sys.executable, "-c", start], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
    assert re.findall(r"^│ ([a-z][a-z-]+)  +[A-Z]", done.stdout, re.MULTILINE) == list(COMMANDS)


def test_grpo_refuses_other_commands_and_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    for word, command in {"stauts": "status", "train": "grpo run", "set": "grpo fork RUN"}.items():
        with pytest.raises(UsageError, match=f"{word}.*{command}"):
            _application()([word], prog_name="grpo", standalone_mode=False)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    _application()(["--version"], prog_name="grpo", standalone_mode=False)
    assert capsys.readouterr().out == f"grpo {version}\n"
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version


def test_the_help_of_every_command_shows_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        grpo_command(name).main(["--help"], prog_name=f"grpo {name}", standalone_mode=False)
        said = capsys.readouterr().out
        assert f"Usage: grpo {name} " in said
        assert "Examples:" in said
