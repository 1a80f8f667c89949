"""The fenced blocks of the documents, and grpo's own reading of the commands in them."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import typer

from scripts import grpo

ROOT = Path(__file__).parents[1]
SKILL = ROOT / "skills/grpo/SKILL.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), SKILL])
_FENCE = re.compile(r"^```(\w+)?(?: ([\w. ]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


UsageError: Any = typer.BadParameter.__bases__[0]
"""An option or a command that does not exist; typer has it from a click of its own."""


class Block(NamedTuple):
    """A fenced block: its language, the words behind it, its text."""

    language: str
    words: set[str]
    text: str

    @property
    def file(self) -> str | None:
        """The file to write the block to, if any."""
        return next((word for word in self.words if "." in word), None)


def blocks(page: Path) -> list[Block]:
    return [Block(language, set(words.split()), text) for language, words, text in _FENCE.findall(page.read_text())]


def commands(page: Path, *words: str) -> list[list[str]]:
    """Return the commands in the page's blocks of shell, or in those of its blocks that have one of the words.

    A command is a list of words, without variables set for it, redirections and the rest of a pipe.
    """
    texts = [block.text for block in blocks(page) if block.language == "bash" and (not words or block.words & {*words})]
    return [command for text in texts for line in text.replace("\\\n", " ").splitlines() for command in _split(line)]


def _split(line: str) -> list[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    is_file = False
    for word in lexer:
        if set(word) <= set("();<>|&"):
            is_file = set(word) <= set("<>&") and bool(set(word) & set("<>"))
            if not is_file:
                found.append([])
        elif is_file:
            is_file = False
        elif found[-1] or not re.match(r"[A-Z_]+=", word):
            found[-1].append(word)
    return [command for command in found if command]


@functools.cache
def grpo_command(name: str) -> Any:
    """Return the command line of a subcommand of grpo."""
    return grpo.load_command(name)


def check_grpo(command: list[str]) -> None:
    """Assert that grpo, or Python, has what a command calls, and that grpo's own parser takes its options."""
    program, *words = command
    if program.endswith("grpo") and words[0] in grpo.COMMANDS:
        grpo_command(words[0]).make_context(words[0], words[1:])
    elif program.endswith("grpo"):
        assert words[0].startswith("-"), command
    elif words[:1] == ["-m"] and words[1].split(".")[0] in ("services", "scripts", "trainer", "local_runner"):
        assert importlib.util.find_spec(words[1]) is not None, command
