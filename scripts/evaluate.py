"""Evaluates checkpoints: ``python -m scripts.evaluate --model PATH_OR_NAME --dataset gsm8k --split test``.

With the rollout client and the reward code of training, over inference servers that it starts here, that run already,
or that SkyPilot starts. A killed evaluation goes on when the same command is given again. docs/evaluation.md says more.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from evaluation import run
from evaluation.settings import EvaluationSettings, SchedulerName, WorkflowName
from evaluation.workflows import ScoringLostError
from local_runner import spec
from services.core import logs
from services.core.errors import EXIT_CONFIGURATION, EXIT_RECOVERABLE, ConfigurationError, DependencyLostError

# In order of the help page.
Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="Hugging Face name or directory; several make a curve. Default MODEL_NAME."),
]


def main(
    model: Models = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run", help="A run's directory: evaluates each model that it keeps.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="gsm8k, arithmetic, a Hugging Face dataset, a .jsonl or .parquet file.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="test, train, all, or another split on the hub.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples of each prompt, for avg@k, pass@k and maj@k.")] = None,
    k: Annotated[str | None, typer.Option(help="Each k, with commas; default powers of two up to --samples.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the samples; default 1.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest completion; default 512.")] = None,
    workflow: Annotated[WorkflowName | None, typer.Option(help="How an answer comes about.")] = None,
    agent: Annotated[str | None, typer.Option(help="The agent, as module:function; default a math agent.")] = None,
    scheduler: Annotated[
        SchedulerName | None, typer.Option(help="Default: endpoints where some are given, else local.")
    ] = None,
    num_servers: Annotated[int, typer.Option(min=1, help="Rollout nodes to start.")] = 1,
    url: Annotated[
        list[str] | None, typer.Option(help="A running router or engine, such as http://127.0.0.1:30000. Repeatable.")
    ] = None,
    discover: Annotated[
        str | None,
        typer.Option(help="Use servers of SkyPilot whose name begins so, or of a local run, by its directory."),
    ] = None,
    reward_url: Annotated[str | None, typer.Option(help="A running reward-server; default one of our own.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Prompts in flight at one server; default 64.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling and bootstrap; default 0.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to write; default below runs/evaluations/. Resumes what is there.")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for us and the servers. Repeatable.")] = None,
    env_file: Annotated[
        list[Path] | None, typer.Option(help="File of NAME=VALUE lines, such as a training run's. Repeatable.")
    ] = None,
    live: Annotated[bool | None, typer.Option("--live/--plain", help="A bar or plain lines.")] = None,
    print_results: Annotated[bool, typer.Option("--print-results", help="Also print results.json, on a line.")] = False,
) -> None:
    """Evaluates checkpoints over many inference servers. Writes results.json and samples.jsonl."""
    # Elsewhere than on a terminal rich assumes 80 columns, too few for the tables.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    try:
        files = {name: value for file in env_file or [] for name, value in spec.env_file(file).items()}
        variables = files | spec.assignments(env or [], "--env")
        if dataset is not None:
            variables["DATASET"] = dataset
        os.environ.update(variables)
        settings = EvaluationSettings.load(
            eval_split=split,
            eval_prompts=limit,
            eval_samples=samples,
            eval_k=k,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            eval_workflow=workflow,
            eval_agent=agent,
            eval_concurrency=concurrency,
            seed=seed,
        )
        logs.configure("evaluate", "warning")
        plan = run.Plan.make(
            settings,
            models=model or [],
            run_dir=run_dir,
            scheduler=scheduler,
            num_servers=num_servers,
            urls=url or [],
            discover=discover,
            reward_url=reward_url,
            output=output,
            variables=variables,
            print_results=print_results,
        )
        shows_bar = console.is_terminal if live is None else live
        code = _with_signals(run.evaluate(plan, console, live=shows_bar), plan)
    except ConfigurationError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_CONFIGURATION) from error
    except (DependencyLostError, ScoringLostError) as error:
        print(f"evaluate: {error}; the same command goes on from what is done", file=sys.stderr)
        raise typer.Exit(EXIT_RECOVERABLE) from error
    raise typer.Exit(code)


def _with_signals(work: Coroutine[Any, Any, None], plan: run.Plan) -> int:
    """Runs ``work`` so that Ctrl-C and SIGTERM end it in order; returns the exit code."""
    stopped: list[int] = []

    async def guarded() -> None:
        task = asyncio.ensure_future(work)

        def stop(number: int) -> None:
            stopped.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        await task

    try:
        asyncio.run(guarded())
    except asyncio.CancelledError:
        if not stopped:
            raise
        name = signal.Signals(stopped[0]).name
        print(f"evaluate: stopped by {name}; the same command goes on from {plan.output}", file=sys.stderr)
        return 128 + stopped[0]
    return 0


if __name__ == "__main__":
    typer.run(main)
