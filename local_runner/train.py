"""A run of a job group on this machine from Python: ``from skypilot_grpo import train``.

The local runner works in a process of its own. Because a user's program may have modules of this project's names, this
module imports none of the project's.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

ROOT = Path(__file__).resolve().parents[1]
GRPO = (sys.executable, "-P", str(ROOT / "scripts/grpo.py"))
"""The command line, which works wherever this module is installed."""
WATCHDOG = (sys.executable, "-m", "local_runner.processes")
STOP_SECONDS = 90.0
"""Longest time that a runner has to end, once this program has ended without it."""


class RunError(RuntimeError):
    """A failed run: the component that ended it, such as ``ppo-trainer-0``, its exit code, and its log."""

    def __init__(self, message: str, exit_code: int, component: str | None = None, log: Path | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.component = component
        self.log = log


@dataclass(frozen=True)
class Run:
    """A run, by its directory, whose files docs/guides/operating.md lists."""

    directory: Path

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json: steps, rewards, accuracy on held-out prompts before and after."""
        content: dict[str, Any] = json.loads((self.directory / "summary.json").read_text("utf-8"))
        return content

    @property
    def metrics(self) -> pandas.DataFrame:
        """The metrics by step: a row a step, a column a metric of docs/metrics.md.

        With matplotlib, ``metrics.plot(y="reward_mean").figure.savefig("reward.png")`` draws one into a file.
        """
        import pandas

        lines = (self.directory / "metrics.jsonl").read_text("utf-8").splitlines()
        return pandas.DataFrame([json.loads(line) for line in lines]).set_index("step")

    @property
    def model(self) -> Path:
        """The directory of the trained model, for ``from_pretrained``."""
        return self.directory / "model"


def train(
    *,
    nodes: Mapping[str, int] | None = None,
    job_group: str | os.PathLike[str] = "jobgroup.yaml",
    run_id: str | None = None,
    shared_dir: str | os.PathLike[str] = "",
    **settings: Any,
) -> Run:
    """Run a job group on this machine to its end, print its progress, and return the run: ``grpo run --small``.

    Ctrl-C ends the run once a checkpoint of the last completed step is written, and then raises KeyboardInterrupt;
    another ends it at once. No process of the run outlives this program by more than STOP_SECONDS.

    Args:
        nodes: the number of nodes of a task, by its name; 1 by default.
        job_group: a job group's YAML, here or among this project's files.
        run_id: the name of the run; that of a former run resumes it.
        shared_dir: the directory in whose ``runs/`` the run is.
        settings: the variables of docs/configuration.md, in lower case. ``dataset`` and ``dataset_test`` may be rows,
            too: dicts, a ``datasets.Dataset``, or a DataFrame of pandas or polars. A setting that takes
            ``module:function``, such as ``reward_fn``, may be a function of a module, or one of this script or notebook
            that imports within itself what it uses.

    Raises:
        ValueError: a setting is unknown or its value is not allowed, or a dataset has no rows.
        RunError: the run failed.
    """
    directory = Path(shared_dir, "runs", run_id or time.strftime("grpo-%Y%m%d-%H%M%S"))
    is_new = not directory.exists()
    inputs = directory / "inputs"
    inputs.mkdir(parents=True, exist_ok=run_id is not None)
    try:
        variables = {name.upper(): _text(name, x, inputs) for name, x in settings.items() if x is not None}
        words = [str(job_group), "--small", "--run-id", directory.name, "--shared-dir", str(directory.parent.parent)]
        words += [f"--num-nodes={task}={count}" for task, count in (nodes or {}).items()]
        # By name alone: everybody on this machine may read a process's arguments.
        words += [f"--env={name}" for name in variables]
        code, errors = _run(words, variables | {"PYTHONPATH": _python_path(inputs)})
    finally:
        if is_new and not (directory / "nodes.json").exists():  # the run has not started
            shutil.rmtree(directory)
    if code == 0:
        return Run(directory)
    if errors:
        raise ValueError(errors[-1])
    raise _failure(directory, code)


def _run(words: list[str], variables: Mapping[str, str]) -> tuple[int, list[str]]:
    """Run ``grpo run``, print its output as it comes, and return its exit code and the errors of its command line."""
    with _watched() as mark, tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        # A notebook asks for the colours of a terminal, which a log does not have. Ctrl-C comes through this program.
        environment = os.environ | variables | mark | {"FORCE_COLOR": "", "PYTHONUNBUFFERED": "1"}
        command = [*GRPO, "run", *words]
        runner = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, errors="replace", env=environment, start_new_session=True
        )
        is_interrupted = False
        while runner.returncode is None:
            try:
                for line in runner.stdout or ():
                    print(line, end="", flush=True)
                runner.wait()
            except KeyboardInterrupt:
                is_interrupted = True
                runner.send_signal(signal.SIGINT)
        errors.seek(0)
        lines = errors.read().splitlines()
    if is_interrupted:
        raise KeyboardInterrupt
    refusals = [line for line in lines if line.startswith("error: ")]
    for line in lines:
        if line not in refusals:
            print(line, file=sys.stderr)
    return runner.returncode, [line.removeprefix("error: ") for line in refusals]


@contextmanager
def _watched() -> Iterator[dict[str, str]]:
    """Yield the variable that marks a process which a watchdog ends if this program ends within the context."""
    mark = f"train-{uuid.uuid4().hex}"
    command = [*WATCHDOG, mark, str(STOP_SECONDS)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True):
        yield {"LOCAL_RUN_MARK": f"{mark}/runner"}


def _failure(directory: Path, code: int) -> RunError:
    """Return the error of a run that has started and failed."""
    record = directory / "runner.json"
    outcome = json.loads(record.read_text("utf-8")) if record.exists() else {}
    reason, failed = outcome.get("reason", f"the runner ended with exit code {code}"), outcome.get("failed")
    if failed is None:
        return RunError(f"run {directory}: {reason}", code)
    log = directory / "logs" / f"{failed}.log"
    errors = [line for line in log.read_text("utf-8", "replace").splitlines() if line.startswith("error: ")]
    reason = ": ".join([reason, *(error.removeprefix("error: ") for error in errors[-1:])])
    return RunError(f"{reason}; see {log}", code, failed, log)


def _text(name: str, value: Any, inputs: Path) -> str:
    """Return the text of a setting; a function or rows are written to ``inputs``, and their name is returned.

    Raises:
        TypeError: the value has no text.
    """
    if isinstance(value, str | os.PathLike):
        return str(value)
    if name in ("dataset", "dataset_test"):
        return str(_write_rows(name, value, inputs))
    if callable(value) and "model" not in name:  # A model can be called, too, and is given by its name.
        return _named(name, value, inputs)
    try:
        return json.dumps(value)
    except TypeError as error:
        raise TypeError(f"{name} is {value!r}; give text or a number") from error


def _write_rows(setting: str, rows: Iterable[Any], inputs: Path) -> Path:
    """Write rows as JSON Lines, and return the file, which has the name of their ``datasets.Dataset``, or ``rows``.

    Raises:
        TypeError: a row is not a dict, or has a value that JSON does not have.
        ValueError: there are no rows, or a row has a number that JSON does not have, such as NaN.
    """
    rows = _records(rows)
    name = getattr(getattr(rows, "info", None), "dataset_name", None) or "rows"
    path = inputs / setting / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise TypeError(f"row {number} of {setting} is {row!r}; give rows as dicts")
            try:
                file.write(json.dumps(dict(row), allow_nan=False) + "\n")
            except (TypeError, ValueError) as error:
                raise type(error)(f"row {number} of {setting}: {error}; give text, numbers, lists and dicts") from error
    if path.stat().st_size == 0:
        raise ValueError(f"{setting} has no rows; give at least one")
    return path


def _records(rows: Any) -> Iterable[Any]:
    """Return the rows of a DataFrame as dicts, in which a missing value is None; other rows as they are."""
    if hasattr(rows, "to_dicts"):  # polars
        rows = rows.to_dicts()
    elif hasattr(rows, "notna"):  # pandas
        rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
    records: Iterable[Any] = rows
    return records


def _named(setting: str, function: Callable[..., Any], inputs: Path) -> str:
    """Return ``module:function``; of a function of this script or notebook the source is written to a module.

    Raises:
        TypeError: components cannot import the function, nor can its source stand alone.
    """
    name = getattr(function, "__name__", "")
    if not (inspect.isfunction(function) and name == function.__qualname__ and name.isidentifier()):
        raise TypeError(f"{setting} is {function!r}; give a function that `def` makes, or its module:function")
    if function.__module__ != "__main__":
        return f"{function.__module__}:{name}"
    used = inspect.getclosurevars(function)
    if outside := sorted({**used.globals, **used.nonlocals}.keys() - {name}):
        problem = f"{setting} uses {', '.join(outside)} of this script"
        raise TypeError(f"{problem}; import or define that within {name}, or put the function into a module")
    source = textwrap.dedent(inspect.getsource(function))
    (inputs / f"given_{setting}.py").write_text(f"from __future__ import annotations\n\n{source}", "utf-8")
    return f"given_{setting}:{name}"


def _python_path(inputs: Path) -> str:
    """Return a PYTHONPATH with ``inputs``, the directory of the script that runs here, and the present PYTHONPATH."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    paths = [str(inputs.resolve()), str(Path(script).resolve().parent) if script else "", os.environ.get("PYTHONPATH")]
    return os.pathsep.join(filter(None, paths))
