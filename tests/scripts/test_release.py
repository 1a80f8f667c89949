"""A release dates its section, sets the version, and tags; what is not ready is refused."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from scripts import release

PROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "sample"
version = "0.1.0"
[project.urls]
Repository = "https://example.org/someone/sample"
[tool.setuptools]
py-modules = []
"""
CHANGELOG = "# Changelog\n\n## 0.2.0 (unreleased)\n\n- It # runs.\n\n## 0.1.0 (2026-01-31)\n\n- It starts.\n"


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "someone")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "someone@example.org")
    # Without a network, pip builds with what is installed.
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / ".gitignore").write_text("dist/\nbuild/\n*.egg-info/\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "all")
    return tmp_path


def released(root: Path, *, dry_run: bool = False) -> int:
    with pytest.raises(SystemExit) as ended:
        release.main(root, dry_run)
    return int(str(ended.value.code))


@pytest.mark.slow
def test_a_release_is_dated_tagged_and_built(checkout):
    assert released(checkout) == 0
    assert f"## 0.2.0 ({time.strftime('%Y-%m-%d')})" in (checkout / "CHANGELOG.md").read_text()
    assert 'version = "0.2.0"' in (checkout / "pyproject.toml").read_text()
    assert (
        git(checkout, "tag", "--list", "--format=%(refname:short) %(contents)").strip()
        == "v0.2.0 0.2.0\n\n- It # runs."
    )
    assert git(checkout, "status", "--porcelain") == ""
    assert [path.name for path in (checkout / "dist").iterdir()] == ["sample-0.2.0-py3-none-any.whl"]


def test_a_dry_run_changes_nothing(checkout, capsys):
    assert released(checkout, dry_run=True) == 0
    assert capsys.readouterr().out == "0.2.0\n\n- It # runs.\n"
    assert git(checkout, "tag") == git(checkout, "status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("CHANGELOG.md", "unreleased", "2026-02-01", "released on 2026-02-01"),
        ("CHANGELOG.md", "- It # runs.\n\n", "", "0.2.0"),
        ("pyproject.toml", "someone", "OWNER", "OWNER"),
        ("pyproject.toml", "0.1.0", "0.1.1", "not committed"),
    ],
)
def test_what_is_not_ready_is_refused(checkout, capfd, file, old, new, named):
    (checkout / file).write_text((checkout / file).read_text().replace(old, new, 1))
    assert released(checkout) == 78
    assert named in capfd.readouterr().err
    assert git(checkout, "tag") == ""
