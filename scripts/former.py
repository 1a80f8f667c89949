"""Names of an earlier version, which answer with the present ones until the next version."""

from __future__ import annotations

import sys

PROGRAMS = {
    "scripts.run_local": "run",
    "scripts.status": "status",
    "scripts.logs": "logs",
    "scripts.view": "view",
    "scripts.chat": "chat",
    "scripts.clean": "clean",
    "scripts.evaluate": "evaluate",
    "scripts.evaluate_policy": "evaluate-policy",
    "scripts.generate_trajectories": "trajectories",
    "scripts.launch": "launch",
    "scripts.fetch": "fetch",
    "scripts.merge_adapter": "merge-adapter",
    "scripts.prepare_demo_model": "demo-model",
}
"""The command of ``grpo`` by the module that ``python -m`` ran."""


def answer() -> None:
    """Run the command of ``grpo`` in place of a module of PROGRAMS, with a warning, if ``python -m`` looks for one."""
    # While `python -m` imports the package, argv has -m in place of the program's name.
    command = PROGRAMS.get(sys.orig_argv[-len(sys.argv)].removeprefix("-m")) if sys.argv[:1] == ["-m"] else None
    if command is None:
        return
    from scripts import grpo

    module = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    print(f"note: python -m {module} is now called grpo {command}", file=sys.stderr)
    sys.argv = ["grpo", command, *sys.argv[1:]]
    grpo.main()
