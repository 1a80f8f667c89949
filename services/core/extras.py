"""Which extra of pyproject.toml each program needs, and what to run where a package of it is missing.

Imports the standard library only, since anything else may be what is missing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

from services.core.errors import EXIT_CONFIGURATION

OWN = ("services", "trainer", "evaluation", "benchmarks", "local_runner", "scripts")
"""The project's own packages, which no extra brings."""

EXTRAS: dict[str, tuple[str, ...]] = {
    "services.data_server": ("data",),
    "services.environment_server": ("environment",),
    "services.evaluation_head": ("head",),
    "services.replay_buffer": ("replay",),
    "services.reward_server": ("reward",),
    "services.rollout_server": ("rollout",),
    "trainer": ("trainer",),
    "trainer.collector": ("collector",),
    "scripts.cartpole_policy": ("head",),
    "scripts.clean": ("local",),
    "scripts.evaluate": ("data", "evaluation", "local"),
    "scripts.logs": ("local",),
    "scripts.prepare_demo_model": ("demo", "local", "rollout"),
    "scripts.run_local": ("local",),
    "scripts.status": ("local",),
    "scripts.tiny_model": ("local", "rollout"),
    "scripts.view": ("local",),
    "local_runner": ("local",),
    # Generators of documents, and benchmarks, need what `make test` installs.
    "scripts": ("demo", "test"),
    "benchmarks": ("demo", "test"),
}
"""Extras by program, as in ``python -m services.data_server``; of several that match, the longest name counts."""


def extras_of(program: str) -> tuple[str, ...]:
    """Return the extras that ``program``, a module's name, needs; none for what is not a program of the project."""
    parts = program.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((EXTRAS[name] for name in names if name in EXTRAS), ())


def install_command(*extras: str) -> str:
    """Return the command that installs extras into this environment, to be run in the project's directory."""
    python = Path(sys.executable)
    shown = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    return f"{shown} -m pip install --constraint constraints.txt --editable '.[{','.join(extras)}]'"


def explain_missing_packages() -> None:
    """Let a program that lacks a package end with one line and EXIT_CONFIGURATION instead of a traceback."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        program = getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "").removesuffix(".__main__")
        extras = extras_of(program)
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if not extras or missing is None or missing.partition(".")[0] in OWN:
            previous(kind, error, trace)
            return
        sys.stderr.write(f"error: {program} needs {missing}, which is not installed; run: {install_command(*extras)}\n")
        # Python takes the exit code of a hook that ends so.
        raise SystemExit(EXIT_CONFIGURATION)

    sys.excepthook = hook
