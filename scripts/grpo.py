"""``grpo``: the command line of this project; ``grpo --help`` lists its commands.

It also works where the project's modules cannot be imported, because a wheel installs them inside the package
skypilot_grpo. The module of a command is imported only when the command is called.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
"""The directory of the project's packages: a checkout, or site-packages/skypilot_grpo."""

TRAINING, QUESTIONS, EVALUATION = "Runs on this machine", "Questions to a run", "Evaluation"
CLUSTER, MODELS = "On a cluster", "Models"


@dataclass(frozen=True)
class Program:
    """A command: the module whose ``function`` it calls, its heading in the list, and examples for its help."""

    module: str
    heading: str
    examples: tuple[str, ...]
    function: str = "main"

    @property
    def summary(self) -> str:
        """The first line of the function's docstring, read from the file so that nothing is imported for it."""
        tree = ast.parse((ROOT / f"{self.module.replace('.', '/')}.py").read_text("utf-8"))
        [found] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == self.function]
        return (ast.get_docstring(found) or "").splitlines()[0]


COMMANDS = {
    "run": Program(
        "local_runner.run",
        TRAINING,
        (
            "grpo run --env-file examples/demo.env --small",
            "grpo run --env-file examples/demo.env --env MAX_STEPS=40 --env LEARNING_RATE=5e-6 --dry-run",
            "grpo run jobgroups/agent.yaml --env-file examples/demo-agent.env --env AGENT=my_agent:solve",
        ),
    ),
    "rehearse": Program("scripts.rehearse", TRAINING, ("grpo rehearse --model Qwen/Qwen3-8B --env-file my.env",)),
    "status": Program("local_runner.status", TRAINING, ("grpo status", "grpo status grpo-20260131-120000")),
    "logs": Program("local_runner.status", TRAINING, ("grpo logs --follow", "grpo logs RUN ppo-trainer -n 50"), "logs"),
    "view": Program("scripts.view", TRAINING, ("grpo view --open", "grpo view runs/")),
    "chat": Program("scripts.chat", TRAINING, ("grpo chat", "grpo chat grpo-20260131-120000 --temperature 1")),
    "groups": Program("scripts.groups", TRAINING, ("grpo groups RUN 'reward >= 1 and tokens < 400' --out my.groups",)),
    "clean": Program("local_runner.clean", TRAINING, ("grpo clean", "grpo clean --keep 3 --keep-model")),
    "tasks": Program(
        "scripts.tasks", TRAINING, ("grpo tasks check examples/tasks", "grpo tasks check tasks.txt --jobs 8")
    ),
    "doctor": Program("local_runner.doctor", TRAINING, ("grpo doctor",)),
    "diagnose": Program(
        "local_runner.status", QUESTIONS, ("grpo diagnose", "grpo diagnose grpo-20260131-120000 --json"), "diagnose"
    ),
    "fork": Program("local_runner.fork", QUESTIONS, ("grpo fork grpo-20260131-120000 --at 40 --env LOSS=cispo",)),
    "explain": Program("scripts.explain", QUESTIONS, ("grpo explain grpo-20260131-120000 --step 57",)),
    "verify": Program("scripts.explain", QUESTIONS, ("grpo verify grpo-20260131-120000",), "verify"),
    "evaluate": Program(
        "scripts.evaluate",
        EVALUATION,
        (
            "grpo evaluate --dataset gsm8k --samples 8",
            "grpo evaluate --model Qwen/Qwen2.5-0.5B-Instruct --dataset my/questions.jsonl --limit 100",
        ),
    ),
    "evaluate-policy": Program(
        "evaluation.trajectories",
        EVALUATION,
        ("grpo evaluate-policy --policies mine=policy.pt2 --save-to results",),
        "evaluate_policy",
    ),
    "trajectories": Program(
        "evaluation.trajectories", EVALUATION, ("grpo trajectories --policies mine=policy.pt2 --save-to trajectories",)
    ),
    "launch": Program(
        "scripts.launch.__main__",
        CLUSTER,
        ("grpo launch --model Qwen/Qwen3-8B --rollout-nodes 4 --trainer-nodes 2 --gpus H100:8 --dry-run",),
    ),
    "fetch": Program("scripts.fetch", CLUSTER, ("grpo fetch grpo-17-20260131-120000",)),
    "merge-adapter": Program(
        "scripts.models", MODELS, ("grpo merge-adapter runs/RUN/policy/v000012 merged",), "merge_adapter"
    ),
    "demo-model": Program("scripts.models", MODELS, ("grpo demo-model",)),
}


OTHER_WORDS = {
    "train": "grpo run",
    "start": "grpo run",
    "resume": "grpo run --run-id",
    "eval": "grpo evaluate",
    "set": "grpo fork RUN --at STEP --env NAME=VALUE",
    "push": "hf upload ORG/NAME RUN/model",
}
"""Commands of other programs and former ones of ours, and what does the same."""


def main() -> None:
    """Run the command that the first argument names."""
    prefer_own_packages()
    from services.core.errors import exit_code_of
    from services.core.extras import explain_missing_packages

    name = next((word for word in sys.argv[1:] if word in COMMANDS), "")
    # As `python -m` does: what explains a missing package, and what starts processes, find the program's name there.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec(COMMANDS[name].module if name else "scripts.grpo")
    explain_missing_packages(f"grpo {name}".strip())
    arguments = sys.argv[1:] or ["--help"]
    if arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    sys.exit(exit_code_of(lambda: _application()(arguments, prog_name="grpo")))


def _application() -> Any:
    """Return the command line, whose commands import their modules when they are called."""
    import typer
    from typer.core import TyperCommand, TyperGroup

    class Lazy(TyperCommand):
        """A command of which the list shows the summary; the rest is in its module."""

        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            """Import the command's module, and parse its arguments."""
            assert self.name is not None
            return load_command(self.name).make_context(info_name, args, parent=parent, **extra)

    class Group(TyperGroup):
        """The commands of COMMANDS."""

        def __init__(self, **options: Any) -> None:
            commands = {
                name: Lazy(name, callback=None, help=program.summary, rich_help_panel=program.heading)
                for name, program in COMMANDS.items()
            }
            super().__init__(**options | {"commands": commands})

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            """Return the command that the first argument names; name that of a usual other word for it."""
            if args and args[0] in OTHER_WORDS:
                ctx.fail(f"No such command: {args[0]}; `{OTHER_WORDS[args[0]]}` does it")
            return super().resolve_command(ctx, args)

    app = typer.Typer(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})

    @app.callback(help="Train language models and agents on rewards that a program can check.", epilog=_HELP_END)
    def options(
        version: bool = typer.Option(False, "--version", help="Print the version.", callback=_version, is_eager=True),
    ) -> None: ...

    return typer.main.get_command(app)


_HELP_END = "`grpo COMMAND --help` shows a command's options, with examples."


def load_command(name: str) -> Any:
    """Import a command's module, and return its command line."""
    import typer

    from services.core.imports import pause_collection

    with pause_collection():
        program = importlib.import_module(COMMANDS[name].module)
    app = typer.Typer(add_completion=False)
    examples = "\n\n".join(["Examples:", *COMMANDS[name].examples])
    app.command(name, epilog=examples)(getattr(program, COMMANDS[name].function))
    return typer.main.get_command(app)


def _version(wanted: bool) -> None:
    import typer

    if wanted:
        print(f"grpo {metadata.version('skypilot-grpo')}")
        raise typer.Exit


def prefer_own_packages() -> None:
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


if __name__ == "__main__":
    main()
