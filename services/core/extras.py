"""The extras of pyproject.toml that each program needs, and the command that installs them.

This module imports the standard library only, because any other package may be missing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

from services.core.errors import EXIT_CONFIGURATION

PROJECT_PACKAGES = ("services", "trainer", "evaluation", "benchmarks", "local_runner", "recipes", "scripts", "toys")
"""The packages of this project, which no extra installs."""

EXTRAS: dict[str, tuple[str, ...]] = {
    "services.data_server": ("data",),
    "services.environment_server": ("environment",),
    "services.evaluation_head": ("head",),
    "services.gateway": ("gateway",),
    "services.replay_buffer": ("replay",),
    "services.reward_server": ("reward",),
    "services.rollout_server": ("rollout",),
    "trainer": ("trainer",),
    "trainer.collector": ("collector",),
    "scripts": ("local",),
    "scripts.chat": ("local", "rollout"),
    "scripts.evaluate": ("data", "evaluation", "local"),
    "scripts.groups": ("data", "local"),
    "evaluation.trajectories": ("environment", "head", "local"),
    "scripts.launch": ("local", "trainer"),
    "scripts.models": ("demo", "local", "rollout"),
    "scripts.tasks": ("environment", "local"),
    "scripts.rehearse": ("local", "rollout", "trainer"),
    "local_runner": ("local",),
    "toys.arithmetic": ("rollout",),
    "toys.cartpole": ("head",),
    # Generators of documents, and benchmarks, need what `make test` installs.
    "scripts.reference": ("demo", "test"),
    "benchmarks": ("demo", "test"),
}
"""Extras by program (``python -m services.data_server``) or package; the longest matching name counts."""


def extras_of(program: str) -> tuple[str, ...]:
    """Return the extras that the module ``program`` needs; empty for a program of another project."""
    parts = program.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((EXTRAS[name] for name in names if name in EXTRAS), ())


def install_command(*extras: str) -> str:
    """Return the command that installs extras into this environment, in a checkout from the project's directory."""
    python = Path(sys.executable)
    interpreter = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    if (Path(__file__).parents[3] / "skypilot_grpo").is_dir():
        # Only here, because every program imports this module.
        import json
        from importlib import metadata

        # pip's record of a wheel or directory that was installed by its address; an index leaves none.
        record = metadata.distribution("skypilot-grpo").read_text("direct_url.json")
        address = f" @ {json.loads(record)['url']}" if record else ""
        return f"{interpreter} -m pip install 'skypilot-grpo[{','.join(extras)}]{address}'"
    return f"{interpreter} -m pip install --constraint constraints.txt --editable '.[{','.join(extras)}]'"


def explain_missing_packages(command: str = "", module: str = "") -> None:
    """Install an exception hook: a missing package ends the program with one line and EXIT_CONFIGURATION.

    Args:
        command: what the line calls the program. Default: the name of its module.
        module: the program's module. Default: that of ``__main__``.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        program = module or getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "")
        program = program.removesuffix(".__main__")
        extras = extras_of(program)
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if not extras or missing is None or missing.partition(".")[0] in PROJECT_PACKAGES:
            previous(kind, error, trace)
            return
        sys.stderr.write(
            f"error: {command or program} needs {missing}, which is not installed; run: {install_command(*extras)}\n"
        )
        # Python exits with the code of a SystemExit that a hook raises.
        raise SystemExit(EXIT_CONFIGURATION)

    sys.excepthook = hook
