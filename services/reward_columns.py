"""The columns of a dataset's row that a reward function reads: its parameters, also as they stand in its source.

The data-server does not import the user's modules, which may need packages and memory of the reward-server's node. It
reads their source, which says before a run which columns a function needs, and whether it reads a ground truth.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from inspect import Parameter
from pathlib import Path

from services.core.errors import ConfigurationError
from services.protocol.rewards import ARGUMENTS

BATCHED = {"prompt": "prompts", "response": "completions"}
"""The parameters of a reward function of TRL's form, which takes lists and returns a list."""
RESERVED = frozenset({*ARGUMENTS, *BATCHED.values(), "messages", "group"})
"""Names of parameters that never mean a column; ``row`` has the columns of these names, too."""
JUDGES = ("judge", "judge_group")
"""The rewards that a judge gives: by a rubric, and relative to the group."""
_WITHOUT_TRUTH = frozenset({"format", "reward_model", "code", *JUDGES})
"""The built-in rewards that need no ground truth: `code` reads tests in other columns, too, and a judge's rubric may
name the ground truth."""
PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")
"""A field of the row in a rubric's text, ``{name}``, or a brace, which is doubled."""
RUBRIC_FIELDS = ("prompt", "ground_truth")
"""The placeholders that every answer has; the others are columns of the dataset."""


@dataclass(frozen=True)
class Reads:
    """The columns that a function reads of a row."""

    needed: tuple[str, ...]
    """Columns that it cannot be called without: parameters without a default. ``row`` is among them, if it has none."""
    has_row: bool
    """True if it gets any column."""
    has_truth: bool
    """True if it gets the ground truth."""

    @classmethod
    def of(cls, parameters: Mapping[str, Parameter]) -> Reads:
        """Return what a function of these parameters reads."""
        takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
        others = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
        columns = [p for n, p in parameters.items() if p.kind not in others and (n not in RESERVED or n == "row")]
        needed = tuple(p.name for p in columns if p.default is p.empty)
        return cls(needed, takes_all or bool(columns), takes_all or "ground_truth" in parameters)


_EVERYTHING = Reads((), True, True)
"""The columns of a function whose source does not say what it reads."""


def reads(reward_fn: str, rubric: Path | None = None) -> dict[str, Reads]:
    """Return what each part of REWARD_FN reads, by its name, without an import of the user's modules.

    A judge reads what its ``rubric`` names, the file of JUDGE_RUBRIC; one that cannot be read is the reward-server's to
    refuse.
    """
    names: Sequence[str] = [part.partition("=")[0].strip() for part in reward_fn.split(",")]
    return {name: _of_part(name, rubric) for name in names}


def _of_part(name: str, rubric: Path | None) -> Reads:
    if ":" in name:
        return _of_source(name)
    if name in JUDGES and rubric is not None:
        return _of_rubric(rubric)
    return Reads((), name == "code", name not in _WITHOUT_TRUTH)


def _of_rubric(path: Path) -> Reads:
    try:
        fields = set(PLACEHOLDER.findall(path.read_text("utf-8"))) - {""}
    except (OSError, UnicodeDecodeError):
        return _EVERYTHING
    columns = sorted(fields.difference(RUBRIC_FIELDS))
    return Reads(tuple(columns), bool(columns), "ground_truth" in fields)


def check_columns(reward_fn: str, names: Sequence[str], where: str, rubric: Path | None = None) -> None:
    """Check that the rows of ``where`` have the columns that the parts of REWARD_FN cannot be without.

    Raises:
        ConfigurationError: they lack one; the message has those that are there.
    """
    for function, part in reads(reward_fn, rubric).items():
        if missing := [name for name in part.needed if name not in names and not (name == "row" and names)]:
            known = [*ARGUMENTS, *names]
            near = next(iter(difflib.get_close_matches(missing[0], known, 1)), None)
            remedy = f"The nearest is {near}. " if near else ""
            remedy += f"Name the parameter like a column or {', '.join(ARGUMENTS)}, or give it a default"
            if function in JUDGES:
                remedy = f"Name columns in JUDGE_RUBRIC {rubric}, and write {{{{x}}}} for text in braces"
            raise ConfigurationError(
                f"REWARD_FN {function!r} needs {', '.join(missing)}, which {where} lacks; {describe(names)}. {remedy}"
            )


def describe(names: Sequence[str]) -> str:
    """Return a sentence on the columns that are there."""
    return f"its columns are {', '.join(names)}" if names else "it has no rows with columns"


def _of_source(name: str) -> Reads:
    """Return what the user's function ``module:function`` reads; all if its module has no plain ``def`` of it."""
    module, _, function = name.partition(":")
    path: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    origin = None
    for part in module.split("."):
        # By its own name within its folder: by the whole name, packages would have to be imported.
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return _EVERYTHING
        path, origin = list(spec.submodule_search_locations or ()), spec.origin
    try:
        body = ast.parse(Path(str(origin)).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return _EVERYTHING
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == function]
    return _EVERYTHING if not found or found[-1].decorator_list else Reads.of(_parameters(found[-1]))


def _parameters(function: ast.FunctionDef) -> Mapping[str, Parameter]:
    """Return a function's parameters, every default None; without ``**others`` if its body never names them."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + [*given.defaults, *given.kw_defaults]
    parameters = {
        argument.arg: Parameter(
            argument.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None
        )
        for argument, default in zip([*positional, *given.kwonlyargs], defaults, strict=True)
    }
    used = {node.id for part in function.body for node in ast.walk(part) if isinstance(node, ast.Name)}
    if given.kwarg is not None and given.kwarg.arg in used:
        parameters[given.kwarg.arg] = Parameter(given.kwarg.arg, Parameter.VAR_KEYWORD)
    return parameters
