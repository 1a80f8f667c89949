"""Release the version on top of CHANGELOG.md: ``python -m scripts.release``.

It dates the version's section, writes the version to pyproject.toml, commits, tags the commit with the section as its
message, and builds the distributions in dist/. It does not push or publish.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from services.core.errors import ConfigurationError, exit_code_of

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^## (\d+\.\d+\.\d+) \(([^)]*)\)$", re.MULTILINE)
UNRELEASED = "unreleased"
PLACEHOLDER = "OWNER"


def main(
    root: Annotated[Path, typer.Option(help="The checkout.")] = ROOT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, show the section, and change nothing.")] = False,
) -> None:
    """Commit, tag and build the version on top of CHANGELOG.md."""

    def work() -> None:
        changelog, project = root / "CHANGELOG.md", root / "pyproject.toml"
        version, section = unreleased(changelog.read_text("utf-8"))
        text = project.read_text("utf-8")
        if any(PLACEHOLDER in url for url in tomllib.loads(text)["project"]["urls"].values()):
            raise ConfigurationError(f"{project} has {PLACEHOLDER} in its URLs; give the repository's address")
        if _git(root, "status", "--porcelain"):
            raise ConfigurationError(f"{root} has changes that are not committed; commit them first")
        if _git(root, "tag", "--list", f"v{version}"):
            raise ConfigurationError(f"the tag v{version} is there already; begin a section in {changelog}")
        print(f"{version}\n\n{section}")
        if dry_run:
            return
        today = time.strftime("%Y-%m-%d")
        changelog.write_text(
            changelog.read_text("utf-8").replace(f"## {version} ({UNRELEASED})", f"## {version} ({today})")
        )
        project.write_text(re.sub(r'^version = ".*"$', f'version = "{version}"', text, count=1, flags=re.MULTILINE))
        _git(root, "commit", "--quiet", "--message", f"Version {version}", "CHANGELOG.md", "pyproject.toml")
        _git(root, "tag", "--annotate", f"v{version}", "--cleanup=verbatim", "--message", f"{version}\n\n{section}")
        _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(root / "dist"), str(root))
        print(f"built in {root / 'dist'}; to publish the tag: git push --follow-tags")

    sys.exit(exit_code_of(work))


def unreleased(changelog: str) -> tuple[str, str]:
    """Return the version on top of the changelog, and the text of its section.

    Raises:
        ConfigurationError: the section is dated already, or empty.
    """
    first, *others = HEADING.finditer(changelog)
    if first[2] != UNRELEASED:
        raise ConfigurationError(
            f"CHANGELOG.md begins with {first[1]}, which was released on {first[2]}; begin a section "
            f"`## VERSION ({UNRELEASED})` above it"
        )
    section = changelog[first.end() : others[0].start() if others else None].strip()
    if not section:
        raise ConfigurationError(f"CHANGELOG.md says nothing about {first[1]}")
    return first[1], section


def _git(root: Path, *arguments: str) -> str:
    return _run("git", "-C", str(root), *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigurationError(f"{' '.join(command[:4])} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    typer.run(main)
