"""``grpo evaluate``: the accuracy of a checkpoint on a data set.

Prompts, player and reward code are those of training. The servers are started here, run already, or are started by
SkyPilot, Slurm or Ray. A killed evaluation continues when the command is repeated; see docs/evaluation.md.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from evaluation.plan import Backend, Plan, Scheduler, ServerOptions
from evaluation.run import evaluate
from evaluation.settings import EvaluationSettings
from local_runner import spec
from services.core import logs
from services.core.errors import DependencyLostError
from services.core.tasks import run_until_signal
from services.run_page.directory import find_run, named_run

Text = str | None
Texts = list[str] | None
Number = int | None
RUN = "Id or directory of a run: its last model is evaluated. Default, without a model or a server: the newest run."
DATASET = "gsm8k, arithmetic, reasoning_gym:NAME, harbor:DIR, a Hugging Face dataset, a .jsonl or .parquet file."
COMMAND = "The agent as a shell command: task as JSON on its input, endpoint in OPENAI_BASE_URL."


def main(
    context: typer.Context,
    run: Annotated[Text, typer.Argument(metavar="[RUN]", help=RUN)] = None,
    model: Annotated[Text, Option(help="Hugging Face name or directory.")] = None,
    dataset: Annotated[Text, Option(help=DATASET)] = None,
    eval_split: Annotated[Text, Option("--split", help="test, train or all.")] = None,
    eval_prompts: Annotated[Number, Option("--limit", help="Only this many prompts, the first ones.")] = None,
    eval_samples: Annotated[Number, Option("--samples", help="Of each prompt, for avg@k, pass@k and maj@k.")] = None,
    eval_k: Annotated[Text, Option("--k", help="Each k, with commas; default powers of two up to --samples.")] = None,
    temperature: Annotated[float | None, Option(help="Of the samples; default 1.")] = None,
    max_new_tokens: Annotated[Number, Option(help="Longest completion; default 512.")] = None,
    eval_stop: Annotated[Texts, Option("--stop", help="A text that ends a completion. Repeatable.")] = None,
    agent: Annotated[Text, Option(help="The agent, as module:function; default AGENT; '' for completions.")] = None,
    agent_command: Annotated[Text, Option(help=COMMAND)] = None,
    scheduler: Annotated[Scheduler | None, Option(help="What starts the servers; default local.")] = None,
    backend: Annotated[Backend, Option(help="What serves the model on this machine.")] = Backend.ROLLOUT,
    num_servers: Annotated[Number, Option(min=1, help="Servers to start; default 1.")] = None,
    url: Annotated[Text, Option(help="A running router or engine, such as http://127.0.0.1:30000.")] = None,
    endpoint: Annotated[Text, Option(help="Any OpenAI-compatible server, as http://127.0.0.1:8000/v1.")] = None,
    api_key_env: Annotated[Text, Option(help="The variable that has the key of --endpoint.")] = None,
    reward_url: Annotated[Text, Option(help="A running reward-server; by default this command starts one.")] = None,
    eval_concurrency: Annotated[Number, Option("--concurrency", help="Prompts in flight a server; default 64.")] = None,
    seed: Annotated[Number, Option(help="Of the sampling; default 0.")] = None,
    output: Annotated[Path | None, Option(help="Where to write; default below runs/evaluations/. Resumes.")] = None,
    env: Annotated[Texts, Option(help="NAME=VALUE for us and the servers. Repeatable.")] = None,
    env_file: Annotated[list[Path] | None, Option(help="File of NAME=VALUE lines. Repeatable.")] = None,
) -> None:
    """Evaluate a checkpoint. Writes results.json and samples.jsonl."""
    raise typer.Exit(_evaluate(context.params))


def _evaluate(options: Mapping[str, Any]) -> int:
    """Evaluate as the options of the command line say; return the exit code.

    Raises:
        DependencyLostError: servers do not answer; the message says how to continue.
    """
    variables = spec.env_files(options["env_file"] or []) | spec.assignments(options["env"] or [], "--env")
    variables |= {} if options["dataset"] is None else {"DATASET": options["dataset"]}
    os.environ.update(variables)
    settings = _settings(options)
    servers = ServerOptions(**{name: options[name] for name in ServerOptions.__dataclass_fields__})
    logs.configure("evaluate", "warning")
    model = options["model"]
    run_dir = run_directory(options["run"], is_named=bool(model or servers.url or servers.endpoint))
    given: dict[str, Any] = {"servers": servers, "output": options["output"], "variables": variables}
    plan = Plan(settings, model=model, run_dir=run_dir, **given)
    continues = f"the same command continues from {plan.output}"
    if plan.servers.starts is Scheduler.SKYPILOT:
        continues = "a job that was launched continues; see sky jobs queue"
    try:
        return asyncio.run(run_until_signal(evaluate(plan), f"evaluate: stopped by {{}}; {continues}"))
    except DependencyLostError as error:
        raise DependencyLostError(f"{error}; the same command continues from what is done") from error


def _settings(options: Mapping[str, Any]) -> EvaluationSettings:
    """Return the settings: those of the environment, over which the options of the command line win.

    Raises:
        ConfigurationError: the options contradict each other, or a value is not allowed.
    """
    overrides = {name: value for name, value in options.items() if name in EvaluationSettings.model_fields}
    agents = {name: options[name] for name in ("agent", "agent_command")}
    if any(agent is not None for agent in agents.values()):
        overrides |= {name: agent or "" for name, agent in agents.items()}
        return EvaluationSettings.load(**overrides)
    settings = EvaluationSettings.load(**overrides)
    if settings.has_agent:
        name = f"AGENT={settings.agent}" if settings.agent else f"AGENT_COMMAND={settings.agent_command}"
        print(f"evaluate: {name} is set and answers; --agent= leaves it out", file=sys.stderr)
    return settings


def run_directory(run: str | None, *, is_named: bool) -> Path | None:
    """Return the directory of the run; None where options or MODEL_NAME name a model or a server instead."""
    if run is not None:
        return Path(run) if named_run(run) is None and Path(run).is_dir() else find_run(run).path
    return None if is_named or os.environ.get("MODEL_NAME") else find_run(None).path
