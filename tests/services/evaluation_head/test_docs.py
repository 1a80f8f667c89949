"""The examples of docs/evaluation_head.md run, and its variables are settings."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from services.environment_server.settings import EnvironmentSettings
from services.evaluation_head import torch_policy
from services.evaluation_head.settings import HeadSettings
from tests.services.evaluation_head.policies import Lean

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/evaluation_head.md").read_text()
FENCES = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_python_example_publishes_a_policy(tmp_path: Path) -> None:
    [text] = [text for language, _, text in FENCES if language == "python" and "publish_policy" in text]
    exec(compile(text, "evaluation_head.md", "exec"), {"module": Lean(), "directory": tmp_path})
    loaded = torch_policy.load(torch_policy.find(tmp_path), torch.device("cpu"))
    assert loaded.source.version == 2


def test_the_named_variables_are_settings() -> None:
    named = set(re.findall(r"\b((?:HEAD|ENVIRONMENT|GAME|DISCOVERY|EVAL)_[A-Z_]+[A-Z])\b", PAGE))
    known = {name.upper() for settings in (HeadSettings, EnvironmentSettings) for name in settings.model_fields}
    assert len(named) > 10
    assert named <= known
