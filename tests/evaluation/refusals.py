"""Runs the command with each of some arguments, in one process, since most of a run that is refused is importing.

Reads a JSON list of {"arguments", "variables"} and writes one of {"code", "text"}; used by test_evaluate.py.
"""

from __future__ import annotations

import json
import os
import sys

import typer
from typer.testing import CliRunner

from evaluation import launchers
from scripts.evaluate import main
from services.core.errors import ComponentError


def run() -> None:
    app = typer.Typer()
    app.command()(main)
    launchers.START_SECONDS = 1.0
    told, environment = [], dict(os.environ)
    for case in json.load(sys.stdin):
        os.environ.clear()
        os.environ.update(environment | case["variables"])
        result = CliRunner().invoke(app, case["arguments"])
        error = None if isinstance(result.exception, SystemExit) else result.exception
        code, text = result.exit_code, result.output
        if isinstance(error, ComponentError):
            code, text, error = error.exit_code, f"{text}error: {error}\n", None
        told.append({"code": code, "text": text, "unexpected": error and repr(error)})
    print(json.dumps(told))


if __name__ == "__main__":
    run()
