"""A run of a job group on this machine from Python: ``from skypilot_grpo import train``.

The local runner is a process of its own, because a notebook has an event loop already, and because a user's program may
have modules of this project's names. So this module imports none of the project's.
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
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    import pandas

ROOT = Path(__file__).resolve().parents[1]
REFUSAL = "error: "
"""The beginning of the line in which the local runner refuses a setting."""
GRPO = (sys.executable, "-P", str(ROOT / "scripts/grpo.py"))
"""The command line, which works wherever this module is installed."""
SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|AUTHORIZATION)$", re.IGNORECASE)
"""The names of variables that are secrets; equal to that of services.core.settings, which this module cannot import."""
RECORD = "runner.json"
"""The file of a run directory in which the local runner records how the run ended."""


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
        name = run_id or f"{self.directory.name}-at-{at}"
        changes = [f"--env={key.upper()}={_plain(key, value)}" for key, value in settings.items()]
        command = [*GRPO, "fork", str(self.directory), "--at", str(at), "--run-id", name, "--by-program", *changes]
        exit_code, last_line = _execute(command, self._environment)
        directory = self.directory.with_name(name)
        if exit_code and last_line.startswith(REFUSAL):
            raise RunError(last_line.removeprefix(REFUSAL), exit_code)
        if exit_code:
            raise _failure(directory, exit_code, last_line)
        return Run(directory)

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
        words = [f"--{name.replace('_', '-')}" for name in options for _ in _listed(options[name])]
        values = [str(value) for name in options for value in _listed(options[name])]
        pairs = [word for pair in zip(words, values, strict=True) for word in pair]
        self._answer("evaluate", "--model", str(self.model), "--output", str(directory), *pairs)
        results: dict[str, Any] = json.loads((directory / "results.json").read_text("utf-8"))
        return results

    def compare(self, other: Run) -> pandas.DataFrame:
        """Return the metrics of this run minus those of ``other``, by step, where both have numbers."""
        ours, theirs = (run.metrics.select_dtypes("number") for run in (self, other))
        return (ours - theirs).dropna(how="all").dropna(axis="columns", how="all")

    @property
    def _environment(self) -> dict[str, str]:
        """The variables of a program that imports the run's functions."""
        return {**os.environ, "PYTHONPATH": _python_path(self.directory / "inputs"), "FORCE_COLOR": ""}

    def _answer(self, *arguments: str) -> str:
        """Return what a command of ``grpo`` prints."""
        done = subprocess.run([*GRPO, *arguments], env=self._environment, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or ["no output"]
            reason = next((line for line in reversed(lines) if line.startswith(REFUSAL)), lines[-1])
            raise RunError(f"grpo {arguments[0]}: {reason.removeprefix(REFUSAL)}", done.returncode)
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

    Ctrl-C ends the run once a checkpoint of the last completed step is written; another ends it at once. The end of
    this program, even by SIGKILL, ends the run as the first Ctrl-C does, because its pipe to the runner closes.

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
    return _run_here(
        directory, _command(job_group, directory, shared_dir, nodes or {}), settings, is_named=run_id is not None
    )


def _run_here(directory: Path, command: list[str], settings: Mapping[str, Any], *, is_named: bool) -> Run:
    """Run a job group on this machine; see ``train``. A run that ``is_named`` may exist already."""
    is_new = not directory.exists()
    inputs = directory / "inputs"
    inputs.mkdir(parents=True, exist_ok=is_named)
    try:
        variables = {name.upper(): _text(name, value, inputs) for name, value in settings.items() if value is not None}
    except Exception:
        if is_new:
            shutil.rmtree(directory)
        raise
    (directory / RECORD).unlink(missing_ok=True)
    # A notebook asks for the colours of a terminal, upon which the runner would redraw its view four times a second.
    fixed = {"PYTHONPATH": _python_path(inputs), "FORCE_COLOR": ""}
    # The variables' values are in the environment, which no other user sees.
    words = [*command, *(f"--env={name}" for name in variables)]
    exit_code, last_line = _execute(words, os.environ | variables | fixed)
    if exit_code and last_line.startswith(REFUSAL):
        if is_new:
            shutil.rmtree(directory)
        raise ValueError(last_line.removeprefix(REFUSAL))
    if exit_code:
        raise _failure(directory, exit_code, last_line)
    return Run(directory)


def _launch(infra: str, gpus: str | None, nodes: Mapping[str, int], settings: Mapping[str, Any]) -> Job:
    """Launch a job group on a cluster; see ``train``.

    Raises:
        ValueError: an argument cannot be used there, or the launch was refused.
        TypeError: a setting is a function or rows, which the cluster's nodes do not have.
        RunError: SkyPilot has launched nothing.
    """
    if infra != "kubernetes" or gpus is None:
        raise ValueError(f"infra is {infra!r} with gpus {gpus!r}; give infra='kubernetes' and gpus, such as 'H100:8'")
    options = {"ppo-trainer": "--trainer-nodes", "rollout-server": "--rollout-nodes"}
    if unknown := nodes.keys() - options.keys():
        raise ValueError(f"nodes names {', '.join(sorted(unknown))}; on a cluster it may name {' and '.join(options)}")
    variables = {name.upper(): _plain(name, value) for name, value in settings.items() if value is not None}
    sizes = [word for task, count in nodes.items() for word in (options[task], str(count))]
    # The values of secrets are in the environment, which no other user sees.
    secrets = [name for name in variables if SECRET.search(name)]
    env = [f"--env={name}={value}" for name, value in variables.items() if name not in secrets]
    command = [*GRPO, "launch", "--yes", "--gpus", gpus, *sizes, *env, *(f"--secret={name}" for name in secrets)]
    exit_code, last_line = _execute(command, os.environ | {name: variables[name] for name in secrets})
    if last_line.startswith(REFUSAL):
        raise ValueError(last_line.removeprefix(REFUSAL))
    if exit_code or not (launched := re.match(r"job (\d+);", last_line)):
        raise RunError(f"nothing was launched: {last_line}", exit_code)
    return Job(int(launched[1]))


def _command(
    job_group: str | os.PathLike[str], directory: Path, shared_dir: str | os.PathLike[str], nodes: Mapping[str, int]
) -> list[str]:
    """Return the local runner's command, without settings."""
    return [
        *(*GRPO, "run", str(job_group), "--small", "--by-program"),
        *("--run-id", directory.name, "--shared-dir", str(Path(shared_dir))),
        *(f"--num-nodes={task}={count}" for task, count in nodes.items()),
    ]


def _text(name: str, value: Any, inputs: Path) -> str:
    """Return the value of a variable; rows and functions are written to ``inputs``, and their names returned."""
    if isinstance(value, str | os.PathLike):
        return str(value)
    if callable(value):
        return _write_function(name, value, inputs)
    if name in ("dataset", "dataset_test"):
        return str(_write_rows(name, value, inputs))
    try:
        return json.dumps(value)
    except TypeError as error:
        functions = ", or one function, or text such as exact_match=1,module:function=0.5" * (name == "reward_fn")
        raise TypeError(f"{name} is {value!r}; give text or a number{functions}") from error


def _plain(name: str, value: Any) -> str:
    """Return the text of a setting that needs no file.

    Raises:
        TypeError: it is a function or rows.
    """
    if callable(value) or not isinstance(value, str | int | float | bool | os.PathLike):
        raise TypeError(
            f"{name} is {value!r}; give text or a number, of a function its module:function, of rows a file"
        )
    return str(value) if isinstance(value, str | os.PathLike) else json.dumps(value)


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


def _python_path(inputs: Path) -> str:
    """Return a PYTHONPATH with ``inputs``, the directory of the script that runs here, and the present PYTHONPATH."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    paths = [str(inputs.resolve()), str(Path(script).resolve().parent) if script else "", os.environ.get("PYTHONPATH")]
    return os.pathsep.join(filter(None, paths))


def _execute(command: list[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run the local runner, print what it prints, except for a refusal, and return its exit code and last line.

    A refusal, which may have several lines, is returned in place of the last line.
    """
    line = refusal = ""
    # A session of its own keeps an interrupt of this process from reaching it twice.
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as runner:
        assert runner.stdout is not None
        try:
            for line in runner.stdout:
                # A refusal is the message of the error that is raised.
                if refusal or line.startswith(REFUSAL):
                    refusal += line
                else:
                    print(line, end="", flush=True)
        except BaseException:
            try:
                # Closes its standard input, upon which it stops in order.
                print(runner.communicate()[0], end="", flush=True)
            except KeyboardInterrupt:
                runner.send_signal(signal.SIGINT)
            raise
    return runner.returncode, (refusal or line).strip()


def _failure(directory: Path, exit_code: int, last_line: str) -> RunError:
    """Return the error of a failed run, by the record that the runner has left of it."""
    path = directory / RECORD
    record = (
        json.loads(path.read_text("utf-8")) if path.exists() else {"reason": f"the local runner failed: {last_line}"}
    )
    component = record.get("failed")
    if component is None:
        return RunError(f"run {directory}: {record['reason']}", exit_code)
    log = directory / "logs" / f"{component}.log"
    lines = log.read_text("utf-8", errors="replace").splitlines() if log.exists() else []
    cause = next((line for line in reversed(lines) if line.startswith("error: ")), "")
    message = "; ".join(filter(None, [f"{component} failed with exit code {exit_code}", cause, f"see {log}"]))
    return RunError(message, exit_code, component, log)
