"""The run of a planned evaluation: model by model, from the servers' start to the results."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from evaluation import examples, report, schedulers, servers, skypilot
from evaluation.checkpoints import Checkpoint
from evaluation.evaluation import Evaluation, score
from evaluation.plan import Plan
from evaluation.samples import SampleStore
from evaluation.schedulers import Say, Servers
from evaluation.servers import Discover, ServerPool
from evaluation.settings import SchedulerName
from evaluation.view import View
from evaluation.workflows import AgentWorkflow, Score, SingleTurn, Workflow
from services.clients.reward import RewardClient
from services.core.settings import Settings
from services.core.tasks import run_until_first_ends
from services.core.vocabulary import vocabulary_size

START_SECONDS = 60.0
"""The wait for the first of servers that run already."""
JOB_GROUP_START_SECONDS = 3600.0
"""The same wait in a job group, where images are pulled and models loaded at the same time."""
SECRETS = ("HF_TOKEN", "JOBGROUP_TOKEN")


def run_until_signal(plan: Plan, *, live: bool | None) -> int:
    """Evaluate until done, or until Ctrl-C, SIGTERM or a hang-up, which end the servers in order; return the exit code.

    ``live`` says whether progress is a bar; None: on a terminal only.

    Raises:
        ConfigurationError: a model, dataset or server cannot be had.
        DependencyLostError: servers do not answer. Finished samples are kept.
        ScoringLostError: the reward-server does not answer. Finished samples are kept.
    """
    # Without a terminal rich assumes 80 columns, too few for the tables.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    received: list[int] = []

    async def work() -> None:
        task = asyncio.ensure_future(evaluate(plan, console, live=console.is_terminal if live is None else live))

        def stop(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        await task

    try:
        asyncio.run(work())
    except asyncio.CancelledError:
        if not received:
            raise
        name = signal.Signals(received[0]).name
        print(f"evaluate: stopped by {name}; the same command goes on from {plan.output}", file=sys.stderr)
        return 128 + received[0]
    return 0


async def evaluate(plan: Plan, console: Console, *, live: bool) -> None:
    """Evaluate each model of the plan, and show and write the results; raises as ``run_until_signal`` does."""
    everything = []
    for checkpoint in plan.checkpoints:
        if plan.scheduler is SchedulerName.SKYPILOT:
            results = await _evaluate_on_cluster(plan, checkpoint, console)
        else:
            results = await _evaluate_here(plan, checkpoint, console, live=live)
        report.write_json(plan.directory(checkpoint) / report.RESULTS, results.model_dump())
        everything.append(results)
    content: Mapping[str, Any] = everything[0].model_dump()
    if len(everything) > 1:
        content = {"checkpoints": [results.model_dump() for results in everything]}
        report.write_json(plan.output / report.RESULTS, content)
        report.write_curve(plan.output, everything)
    report.show(console, everything)
    console.print(f"written to {plan.output}", highlight=False, soft_wrap=True)
    if plan.print_results:
        print(skypilot.RESULTS_MARK + json.dumps(content), flush=True)


async def _evaluate_on_cluster(plan: Plan, checkpoint: Checkpoint, console: Console) -> report.Results:
    settings = plan.settings
    # The job has its own output directory and shared volume.
    ours = {*Settings.model_fields, "eval_output", "model_name"}
    given = settings.model_dump(mode="json", include=settings.model_fields_set - ours)
    variables = {
        **plan.variables,
        **{name.upper(): str(value) for name, value in given.items()},
        "DATASET": plan.dataset,
        "MODEL_NAME": checkpoint.model,
    }
    secrets = {name: os.environ[name] for name in SECRETS if os.environ.get(name)}
    content = await asyncio.to_thread(
        skypilot.launch,
        f"evaluate-{checkpoint.name.lower()}"[:40].rstrip("-._"),
        plan.num_servers,
        {name: value for name, value in variables.items() if name not in secrets},
        secrets,
        _printer(console),
    )
    return report.Results.model_validate(content)


async def _evaluate_here(plan: Plan, checkpoint: Checkpoint, console: Console, *, live: bool) -> report.Results:
    settings = plan.settings
    directory = plan.directory(checkpoint)
    say = _printer(console)
    found = examples.load(settings.eval_split, checkpoint.model, settings.eval_prompts)
    identity = plan.identity(checkpoint, found)
    start_seconds = JOB_GROUP_START_SECONDS if schedulers.in_job_group() else START_SECONDS
    with SampleStore(directory, identity) as store:
        if store.resumed:
            say(f"{directory} has {store.resumed} samples already")
        async with (
            _servers(plan, checkpoint, directory, say) as started,
            ServerPool(started.urls, settings, vocabulary_size(checkpoint.model, "--model"), started.discover) as pool,
            RewardClient(started.reward, settings.token, deadline=servers.LOST_SECONDS) as rewards,
        ):
            await run_until_first_ends(pool.wait_ready(start_seconds), started.watch())
            scorer: Score = partial(score, rewards)
            workflow: Workflow = SingleTurn(settings)
            if plan.agent is not None:
                workflow = AgentWorkflow(plan.agent, settings, scorer, checkpoint.model)
            evaluation = Evaluation(found.prompts, settings.eval_samples, workflow, pool, scorer, store)
            with View(console, checkpoint.name, pool, live=live) as view:
                await run_until_first_ends(evaluation.run(view.show), started.watch())
            progress = evaluation.progress
            for reason, detail in progress.examples.items():
                say(f"left out ({reason}), for example {detail}")
            return report.results_of(
                checkpoint,
                found.prompts,
                store.samples,
                settings,
                left_out={**progress.left_out, **({"prompt too long": found.too_long} if found.too_long else {})},
                dataset=plan.dataset,
                throughput=report.throughput(progress),
                servers={"urls": list(pool.servers), "deaths": pool.deaths, "work_moved": pool.moved},
                identity=identity,
            )


def _printer(console: Console) -> Say:
    return lambda line: console.print(line, highlight=False, soft_wrap=True, markup=False)


def _servers(plan: Plan, checkpoint: Checkpoint, directory: Path, say: Say) -> AbstractAsyncContextManager[Servers]:
    if plan.scheduler is SchedulerName.LOCAL:
        return schedulers.local(checkpoint.model, plan.num_servers, directory, plan.variables, say)
    return schedulers.running(plan.urls, _discovery(plan.discover), plan.reward_url, directory, plan.variables, say)


def _discovery(where: str | None) -> Discover | None:
    if where is None:
        return None
    return schedulers.local_run(Path(where)) if Path(where).is_dir() else skypilot.discovery(where)
