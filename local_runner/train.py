"""A run of a job group on this machine from Python: ``from skypilot_grpo import train``.

The local runner works in the caller's process, whose signals, environment and modules it leaves as they were. Because a
user's program may have modules of this project's names, this module imports the project's within ``_project`` alone.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    import pandas

    from local_runner.supervisor import Outcome

ROOT = Path(__file__).resolve().parents[1]
GRPO = (sys.executable, "-P", str(ROOT / "scripts/grpo.py"))
"""The command line, which works wherever this module is installed."""
_OWN_MODULES: dict[str, ModuleType] = {}
"""The project's modules of an installed package, which the caller does not see between two calls."""


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

        ``metrics.plot(y="reward_mean").figure.savefig("reward.png")`` draws one into a file, in a script or a notebook.
        """
        import pandas

        lines = (self.directory / "metrics.jsonl").read_text("utf-8").splitlines()
        return pandas.DataFrame([json.loads(line) for line in lines]).set_index("step")

    @property
    def model(self) -> Path:
        """The directory of the trained model, for ``from_pretrained``."""
        return self.directory / "model"

    def fork(self, at: int, *, run_id: str | None = None, **settings: Any) -> Run:
        """Train a new run from step ``at`` of this one to its end, print its progress, and return it: ``grpo fork``.

        Args:
            at: the last step that both have in common.
            run_id: the name of the new run; by default that of this one with ``-at-<step>``.
            settings: the variables that differ, in lower case, as text or numbers.

        Raises:
            RunError: the fork is refused, or its run failed.
        """
        changes = [f"{key.upper()}={_text(key, value)}" for key, value in settings.items()]
        with _project(self.directory / "inputs"):
            from local_runner.fork import Fork
            from services.core.errors import ComponentError
            from services.run_page.directory import find_run

            console = _console()
            try:
                fork = Fork(find_run(str(self.directory.resolve())), at, changes, run_id)
                launched = fork.describe(console)
                assert launched is not None  # describe refuses a run without its command line
                fork.write()
                outcome = fork.train(*launched, console, hints=False)
            except ComponentError as error:
                raise RunError(str(error), error.exit_code) from error
            return _ended(self.directory.with_name(fork.new.name), outcome)

    def explain(self, step: int) -> dict[str, Any]:
        """Compute a step again, to the bit, and return what moved the weights, as ``grpo explain --json`` prints it.

        Raises:
            RunError: the step has no record, or cannot be computed here.
        """
        explained: dict[str, Any] = json.loads(
            self._answer("explain", str(self.directory), "--step", str(step), "--json")
        )
        return explained

    def evaluate(self, output: str | os.PathLike[str] | None = None, **options: Any) -> dict[str, Any]:
        """Evaluate the trained model on held-out prompts, and return the content of results.json: ``grpo evaluate``.

        Args:
            output: the directory of the results, which continues what is there; by default ``evaluation`` of the run.
            options: the options of the command, such as ``dataset="gsm8k"``, ``samples=8`` or ``env=["SEED=1"]``.

        Raises:
            RunError: an option is wrong, or no prompt could be evaluated.
        """
        directory = self.directory / "evaluation" if output is None else Path(output)
        words = [f"--{name.replace('_', '-')}={one}" for name in options for one in _listed(options[name])]
        self._answer("evaluate", "--model", str(self.model), "--output", str(directory), *words)
        results: dict[str, Any] = json.loads((directory / "results.json").read_text("utf-8"))
        return results

    def compare(self, other: Run) -> pandas.DataFrame:
        """Return the metrics of this run minus those of ``other``, by step, where both have numbers."""
        ours, theirs = (run.metrics.select_dtypes("number") for run in (self, other))
        return (ours - theirs).dropna(how="all").dropna(axis="columns", how="all")

    def _answer(self, *arguments: str) -> str:
        """Return what a command of ``grpo`` prints."""
        with _project(self.directory / "inputs"):
            done = subprocess.run([*GRPO, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunError(f"grpo {arguments[0]}: {(done.stderr or done.stdout).strip()}", done.returncode)
        return done.stdout


@dataclass(frozen=True)
class Job:
    """A job that SkyPilot runs on a cluster, by its number; docs/guides/kubernetes.md follows one to its model."""

    number: int

    def follow(self, component: str = "ppo-trainer") -> int:
        """Print the log of a component until it ends, and return the exit code of ``sky jobs logs``."""
        return subprocess.call([_sky(), "jobs", "logs", str(self.number), component])

    def cancel(self) -> None:
        """End the job, whose trainer first saves a checkpoint."""
        subprocess.run([_sky(), "jobs", "cancel", "--yes", str(self.number)], check=True)


def _sky() -> str:
    """Return the command of SkyPilot, which has an environment of its own where it is not on the path."""
    return shutil.which("sky") or str(ROOT / ".venv-sky/bin/sky")


@overload
def train(
    *, infra: Literal["kubernetes"], gpus: str, nodes: Mapping[str, int] | None = None, **settings: Any
) -> Job: ...


@overload
def train(
    *,
    infra: None = None,
    nodes: Mapping[str, int] | None = None,
    job_group: str | os.PathLike[str] = "jobgroup.yaml",
    run_id: str | None = None,
    shared_dir: str | os.PathLike[str] = "",
    **settings: Any,
) -> Run: ...


def train(
    *,
    infra: str | None = None,
    gpus: str | None = None,
    nodes: Mapping[str, int] | None = None,
    job_group: str | os.PathLike[str] = "jobgroup.yaml",
    run_id: str | None = None,
    shared_dir: str | os.PathLike[str] = "",
    **settings: Any,
) -> Run | Job:
    """Run a job group on this machine to its end, print its progress, and return the run.

    Ctrl-C or SIGTERM ends the run once a checkpoint of the last completed step is written, and then acts on this
    program; another ends it at once. No process of the run outlives this program, even if SIGKILL ends it.

    With ``infra="kubernetes"`` it is launched on a cluster instead, as ``grpo launch --yes`` does.

    Args:
        infra: ``kubernetes``, or None for this machine.
        gpus: of a node on the cluster, such as ``H100:8``.
        nodes: the number of nodes of a task, by its name; 1 by default, on a cluster chosen by model and GPUs.
        job_group: a job group's YAML, here or among this project's files.
        run_id: the name of the run; that of a former run resumes it.
        shared_dir: the directory in whose ``runs/`` the run is.
        settings: the variables of docs/configuration.md, in lower case. ``dataset`` and ``dataset_test`` may be rows,
            too: dicts, a ``datasets.Dataset``, or a DataFrame of pandas or polars. A setting that takes
            ``module:function``, such as ``reward_fn``, may be a function, also of a notebook or a script.

    Raises:
        ValueError: a setting is unknown or its value is not allowed, or a dataset has no rows.
        RunError: the run failed.
    """
    if infra is not None:
        return _launch(infra, gpus, nodes or {}, settings)
    directory = Path(shared_dir, "runs", run_id or time.strftime("grpo-%Y%m%d-%H%M%S"))
    is_new = not directory.exists()
    inputs = directory / "inputs"
    inputs.mkdir(parents=True, exist_ok=run_id is not None)
    try:
        env = [f"{name.upper()}={_text(name, x, inputs)}" for name, x in settings.items() if x is not None]
        with _project(inputs):
            outcome = _run_here(Path(job_group), directory, env, [f"{task}={n}" for task, n in (nodes or {}).items()])
            return _ended(directory, outcome)
    except Exception:
        if is_new and not (directory / "nodes.json").exists():  # the run has not started
            shutil.rmtree(directory)
        raise


def _run_here(job_group: Path, directory: Path, env: list[str], num_nodes: list[str]) -> Outcome:
    """Run a job group on this machine to its end, and return its outcome; a refusal is a ValueError; see ``train``."""
    from local_runner import checks, run, spec
    from local_runner.launch import Launch
    from services.core.errors import ConfigurationError

    try:
        shared_dir = directory.parent.parent
        launch = Launch(spec.find(job_group), env, num_nodes=num_nodes, small=True, shared_dir=shared_dir)
        console = _console()
        with run.planned(launch, directory.name) as planned:
            run.check(planned, console)
            return run.start(planned, launch, console, hints=False)
    except ConfigurationError as error:
        names = [assignment.partition("=")[0] for assignment in env]
        raise ValueError(checks.as_keywords(str(error), names)) from error


def _ended(directory: Path, outcome: Outcome) -> Run:
    """Return a run that succeeded; a run that a signal stopped passes the signal on to this program.

    Raises:
        RunError: the run failed.
    """
    from services.run_page import directory as directories

    if outcome.exit_code == 0:
        return Run(directory)
    if outcome.failed is None:
        with contextlib.suppress(ValueError):  # another thread than the main one has no signals
            signal.raise_signal(outcome.exit_code - 128)
        raise RunError(f"run {directory}: {outcome.reason}", outcome.exit_code)
    log = directory / "logs" / f"{outcome.failed}.log"
    raise RunError(f"{directories.Run(directory).error}; see {log}", outcome.exit_code, outcome.failed, log)


@contextlib.contextmanager
def _project(inputs: Path | None = None) -> Iterator[None]:
    """Import the project's modules, and have their processes import them and ``inputs``, within the context.

    It leaves import path, environment and logging as they were, and the modules of an installed package hidden.
    """
    path, environment, root = sys.path[:], dict(os.environ), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    names = {package.parent.name for package in ROOT.glob("*/__init__.py")}

    def modules() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}

    is_installed = __name__.partition(".")[0] not in names
    theirs = modules() if is_installed else {}
    for name in theirs:
        del sys.modules[name]
    sys.modules.update(_OWN_MODULES)
    try:
        # A notebook asks for the colours of a terminal, which a log does not have.
        os.environ |= {"PYTHONPATH": _python_path(inputs), "FORCE_COLOR": ""}
        sys.path.insert(0, str(ROOT))
        from scripts.grpo import prefer_own_packages

        prefer_own_packages()
        yield
    finally:
        if is_installed:
            _OWN_MODULES.update(modules())
            for name in _OWN_MODULES:
                sys.modules.pop(name, None)
            sys.modules.update(theirs)
        sys.path[:] = path
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        root.handlers[:], root.level = handlers, level


def _console() -> Any:
    """Return a console that prints plain lines where the caller prints."""
    from rich.console import Console

    return Console(file=sys.stdout, force_terminal=False, force_jupyter=False, color_system=None)


def _launch(infra: str, gpus: str | None, nodes: Mapping[str, int], settings: Mapping[str, Any]) -> Job:
    """Launch a job group on a cluster; see ``train``.

    Raises:
        ValueError: an argument cannot be used there, or the launch was refused.
        TypeError: a setting is a function or rows, which the cluster's nodes do not have.
    """
    if infra != "kubernetes" or gpus is None:
        raise ValueError(f"infra is {infra!r} with gpus {gpus!r}; give infra='kubernetes' and gpus, such as 'H100:8'")
    options = {"ppo-trainer": "--trainer-nodes", "rollout-server": "--rollout-nodes"}
    if unknown := nodes.keys() - options.keys():
        raise ValueError(f"nodes names {', '.join(sorted(unknown))}; on a cluster it may name {' and '.join(options)}")
    variables = {name.upper(): _text(name, value) for name, value in settings.items() if value is not None}
    sizes = [word for task, count in nodes.items() for word in (options[task], str(count))]
    with _project():
        from click import ClickException

        from scripts.grpo import load_command
        from services.core.errors import ComponentError
        from services.core.settings import SECRET

        kinds = {name: "secret" if SECRET.search(name) else "env" for name in variables}
        words = [f"--{kinds[name]}={name}={value}" for name, value in variables.items()]
        command = ["--yes", "--gpus", gpus, *sizes, *words]
        try:
            job = load_command("launch").main(command, prog_name="grpo launch", standalone_mode=False)
        except (ClickException, ComponentError) as error:
            raise ValueError(getattr(error, "message", str(error))) from error
    return Job(job)


def _text(name: str, value: Any, inputs: Path | None = None) -> str:
    """Return the text of a setting; a function or rows are written to ``inputs``, and their name is returned.

    Raises:
        TypeError: the value has no text, or it is a function or rows, and there is no place for them.
    """
    if isinstance(value, str | os.PathLike):
        return str(value)
    is_rows = name in ("dataset", "dataset_test")
    is_function = callable(value) and "model" not in name  # A model can be called, too, and is given by its name.
    if inputs is not None and (is_function or is_rows):
        return str(_write_rows(name, value, inputs)) if is_rows else _write_function(name, value, inputs)
    try:
        if not is_rows:
            return json.dumps(value)
    except TypeError:
        pass
    raise TypeError(f"{name} is {value!r}; give text or a number, of a function its module:function, of rows a file")


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


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


def _write_function(setting: str, function: Callable[..., Any], inputs: Path) -> str:
    """Write a module with the function, pickled by value, and return ``module:function``.

    By value, because components cannot import a notebook or script; the modules that these import, they can.
    """
    import cloudpickle

    home = inspect.getmodule(function)
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    by_value = home is not None and not (getattr(home, "__file__", None) or installed[0]).startswith(installed)
    if by_value:
        cloudpickle.register_pickle_by_value(home)
    try:
        pickled = cloudpickle.dumps(function)
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(home)
    name = getattr(function, "__name__", "")
    name = name if name.isidentifier() else "function"
    module = f"given_{setting}"
    text = f"import pickle\n\n{_stub(name, function)}\n\n{name} = pickle.loads({pickled!r})\n"
    (inputs / f"{module}.py").write_text(text, "utf-8")
    return f"{module}:{name}"


def _stub(name: str, function: Callable[..., Any]) -> str:
    """Return a ``def`` with the function's parameters, which tells readers of the source which columns it needs."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    plain = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None)
        for p in signature.parameters.values()
    ]
    header = signature.replace(parameters=plain, return_annotation=signature.empty)
    return f"def {name}{header}:\n    return [{', '.join(signature.parameters)}]\n"


def _python_path(inputs: Path | None) -> str:
    """Return a PYTHONPATH with ``inputs``, the directory of the script that runs here, and the present PYTHONPATH."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    first = [str(inputs.resolve())] if inputs is not None else []
    paths = [*first, str(Path(script).resolve().parent) if script else "", os.environ.get("PYTHONPATH")]
    return os.pathsep.join(filter(None, paths))
