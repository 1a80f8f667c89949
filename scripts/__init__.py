"""Commands that a person runs: ``grpo`` and the programs behind it, and makers of small models and documents."""

import sys

FORMER = {
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
"""The command of ``grpo`` by the module that ``python -m`` ran in an earlier version; understood until the next."""


def _answer_former_name() -> None:
    """Run the command of ``grpo`` in place of a module of FORMER, with a warning, if ``python -m`` looks for one."""
    # While `python -m` imports the package, argv has -m in place of the program's name.
    command = FORMER.get(sys.orig_argv[-len(sys.argv)].removeprefix("-m")) if sys.argv[:1] == ["-m"] else None
    if command is None:
        return
    from scripts import grpo

    module = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    print(f"note: python -m {module} is now called grpo {command}", file=sys.stderr)
    sys.argv = ["grpo", command, *sys.argv[1:]]
    grpo.main()


# Installed, this package has another name too, by which grpo.py is found before the project's packages can be.
if __name__ == "scripts":
    import services  # noqa: F401  # first, because it explains missing packages

    _answer_former_name()
