"""Run this project's programs by short names: ``grpo run``, ``grpo status``; ``grpo`` alone lists them.

``grpo NAME`` is ``python -m`` of the module that COMMANDS gives for the name, with the same options. It also works
where these modules cannot be imported, because a wheel installs them inside the package skypilot_grpo.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The directory of the project's packages: a checkout, or site-packages/skypilot_grpo."""

COMMANDS = {
    "run": "scripts.run_local",
    "status": "scripts.status",
    "logs": "scripts.logs",
    "view": "scripts.view",
    "evaluate": "scripts.evaluate",
    "trajectories": "scripts.generate_trajectories",
    "chat": "scripts.chat",
    "launch": "scripts.launch.__main__",
    "fetch": "scripts.fetch",
    "clean": "scripts.clean",
}


def main() -> None:
    """Run the program that the first argument names."""
    _prefer_own_packages()
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        # Ends silently when the reader has read enough, as in `grpo | head -3`.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        print(_usage(), flush=True)
        return
    if name not in COMMANDS:
        print(f"grpo: there is no command {name}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)
    # As `python -m` does: what explains a missing package, and what starts processes, find the program's name there.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec(COMMANDS[name])
    program = importlib.import_module(COMMANDS[name])
    import typer

    app = typer.Typer(add_completion=False)
    app.command(cls=getattr(program, "Command", None))(program.main)
    app(arguments, prog_name=f"grpo {name}")


def _prefer_own_packages() -> None:
    """Have this process and those that it starts import the project's packages, whatever the current directory has.

    The current directory comes next, as with ``python -m``, because it has people's own rewards and agents.
    """
    sys.path[:0] = [str(ROOT), os.getcwd()]
    former = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], *([former] if former else [])])
    packages = [path.parent.name for path in ROOT.glob("*/__init__.py")]
    hiding = [path for name in packages for path in (Path(name, "__init__.py"), Path(f"{name}.py")) if path.exists()]
    if hiding and not ROOT.samefile("."):
        # `python -m` would put the current directory first.
        os.environ["PYTHONSAFEPATH"] = "1"


def _usage() -> str:
    """Return the list of the commands, read from the docstrings so that no program is imported for it."""
    lines = ["Usage: grpo COMMAND [OPTION]...", "", "`grpo COMMAND --help` shows a command's options.", ""]
    for name, module in COMMANDS.items():
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
        [docstring] = [ast.get_docstring(function) or "" for function in functions if function.name == "main"]
        lines.append(f"  {name:12}  {docstring.splitlines()[0]}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
