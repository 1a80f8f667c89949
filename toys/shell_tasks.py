"""Tasks in Harbor's format that a line of shell solves (``make demo-harbor``): ``python -m toys.shell_tasks DIR``."""

from __future__ import annotations

import random
import sys
from pathlib import Path

TASKS = 24
TOML = """schema_version = "1.4"

[verifier]
timeout_sec = 30.0

[environment]
network_mode = "no-network"
workdir = "/app"
"""
TEST = """#!/bin/sh
cd /app
some=0; named=0; right=0
for file in *.txt; do [ -s "$file" ] && some=1; done
[ -s {name}.txt ] && named=1
[ "$(cat {name}.txt 2>/dev/null)" = {total} ] && right=1
reward=$(awk "BEGIN {{print 0.1 * $some + 0.1 * $named + 0.8 * $right}}")
form='{{"reward": %s, "some": %s, "named": %s, "right": %s}}'
printf "$form" "$reward" $some $named $right > /logs/verifier/reward.json
"""
"""A file, its name and its content are rewarded, so that there is something to learn before the first right answer."""


def main(directory: Path) -> None:
    """Write TASKS tasks about the sum of two numbers of two digits, always the same ones."""
    draw = random.Random(0)
    for number in range(TASKS):
        first, second, name = draw.randint(11, 99), draw.randint(11, 99), draw.choice("abcdefgh")
        files = {
            "task.toml": TOML,
            "instruction.md": f"Write {first} plus {second} to {name}.txt.\n",
            "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\n",
            "solution/solve.sh": f"#!/bin/sh\necho $(({first} + {second})) > {name}.txt\n",
            "tests/test.sh": TEST.format(name=name, total=first + second),
        }
        for path, text in files.items():
            file = directory / f"{number:02}" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
            file.chmod(0o755 if file.suffix == ".sh" else 0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
