"""From the command line to the results: plans an evaluation, and carries it out model by model."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from evaluation import checkpoints, examples, report, schedulers
from evaluation.checkpoints import Checkpoint
from evaluation.evaluation import Evaluation, Scorer
from evaluation.examples import Examples
from evaluation.samples import SampleStore
from evaluation.schedulers import Servers
from evaluation.servers import Discover, ServerPool
from evaluation.settings import EvaluationSettings, SchedulerName, WorkflowName
from evaluation.view import View
from evaluation.workflows import Agent, AgentWorkflow, Sampling, SingleTurn, Workflow, load_agent
from services.clients.reward import RewardClient
from services.core.errors import ConfigurationError
from services.core.tasks import run_until_first_ends
from services.core.vocabulary import vocabulary_size
from services.data_server.settings import DataSettings
from services.reward_server.settings import RewardSettings

RESULTS_MARK = "results.json: "
"""Begins the line by which a job tells its results; skypilot.py reads it."""
VOLUME = "/shared/"
SECRETS = ("HF_TOKEN", "JOBGROUP_TOKEN")


@dataclass(frozen=True)
class Plan:
    """What is to be done."""

    settings: EvaluationSettings
    scheduler: SchedulerName
    checkpoints: Sequence[Checkpoint]
    dataset: str
    output: Path
    num_servers: int
    urls: Sequence[str]
    discover: str | None
    reward_url: str | None
    variables: Mapping[str, str]
    print_results: bool
    agent: Agent | None

    @classmethod
    def make(
        cls,
        settings: EvaluationSettings,
        *,
        models: Sequence[str],
        run_dir: Path | None,
        scheduler: SchedulerName | None,
        urls: Sequence[str],
        discover: str | None,
        output: Path | None,
        **others: Any,
    ) -> Plan:
        """Checks what can be checked before anything starts.

        Raises:
            ConfigurationError: something does not go together.
        """
        if not models and run_dir is None:
            models = [settings.model_name]
        scheduler = scheduler or (SchedulerName.ENDPOINTS if urls or discover else SchedulerName.LOCAL)
        _check(settings, scheduler, urls, discover)
        dataset = DataSettings.load().dataset
        if scheduler is SchedulerName.SKYPILOT:
            # Where these models are is the cluster's affair.
            found = _on_the_cluster(models, run_dir)
        else:
            found = checkpoints.resolve(models, run_dir)
        if scheduler is SchedulerName.ENDPOINTS and len(found) > 1:
            raise ConfigurationError(
                f"running servers have one model, but {len(found)} are given; give one, or --scheduler local"
            )
        is_agent = settings.eval_workflow is WorkflowName.AGENT
        name = found[0].name if len(found) == 1 else (run_dir.resolve().name if run_dir else f"{len(found)}-models")
        parts = [name, Path(dataset).stem, settings.eval_split, *(["agent"] if is_agent else [])]
        return cls(
            settings=settings,
            scheduler=scheduler,
            checkpoints=found,
            dataset=dataset,
            output=(output or settings.eval_output / "-".join(parts)).resolve(),
            urls=urls,
            discover=discover,
            agent=load_agent(settings.eval_agent) if is_agent and scheduler is not SchedulerName.SKYPILOT else None,
            **others,
        )

    def directory(self, checkpoint: Checkpoint) -> Path:
        """Where the samples and results of a model go."""
        return self.output if len(self.checkpoints) == 1 else self.output / checkpoint.name


def _on_the_cluster(models: Sequence[str], run_dir: Path | None) -> list[Checkpoint]:
    here = [model for model in models if Path(model).is_dir() and not model.startswith(VOLUME)]
    if here or run_dir is not None:
        raise ConfigurationError(
            f"--scheduler skypilot: {here[0] if here else run_dir} is a directory of this machine; give a model's name "
            f"on the hub, or a directory of the volume such as {VOLUME}runs/grpo-17/model"
        )
    return [Checkpoint(re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-"), model) for model in models]


def _check(settings: EvaluationSettings, scheduler: SchedulerName, urls: Sequence[str], discover: str | None) -> None:
    too_large = [k for k in settings.ks if k > settings.eval_samples]
    if too_large:
        raise ConfigurationError(
            f"--k {too_large[0]} needs as many samples of each prompt, but --samples is {settings.eval_samples}; give "
            f"--samples {too_large[-1]} or more, or a smaller k"
        )
    if scheduler is not SchedulerName.ENDPOINTS and (urls or discover):
        raise ConfigurationError(
            f"--scheduler {scheduler.value} starts its own servers; leave out --url and --discover"
        )


async def evaluate(plan: Plan, console: Console, *, live: bool) -> None:
    """Carries out a plan, and shows and writes the results.

    Raises:
        ConfigurationError: something cannot be had or does not go together.
        DependencyLostError: servers do not answer. What is done is kept.
    """
    everything = []
    for checkpoint in plan.checkpoints:
        if plan.scheduler is SchedulerName.SKYPILOT:
            results = await _evaluate_by_skypilot(plan, checkpoint, console)
        else:
            results = await _evaluate_here(plan, checkpoint, console, live=live)
        report.write_json(plan.directory(checkpoint) / report.RESULTS, results.as_dict())
        everything.append(results)
    if len(everything) > 1:
        content: Any = {"checkpoints": [results.as_dict() for results in everything]}
        report.write_json(plan.output / report.RESULTS, content)
        report.write_curve(plan.output, everything)
    else:
        content = everything[0].as_dict()
    report.show(console, everything)
    console.print(f"written to {plan.output}", highlight=False, soft_wrap=True)
    if plan.print_results:
        print(RESULTS_MARK + json.dumps(content), flush=True)


async def _evaluate_by_skypilot(plan: Plan, checkpoint: Checkpoint, console: Console) -> report.Results:
    from evaluation import skypilot

    settings = plan.settings
    # Where it writes, and its shared volume, are the job's own.
    ours = {"jobgroup_token", "shared_dir", "run_id", "log_level", "log_format", "eval_output", "model_name"}
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
        lambda line: console.print(line, highlight=False, soft_wrap=True, markup=False),
    )
    return report.Results.from_dict(content)


async def _evaluate_here(plan: Plan, checkpoint: Checkpoint, console: Console, *, live: bool) -> report.Results:
    settings = plan.settings
    directory = plan.directory(checkpoint)
    # A process of its own: transformers is imported without torch, which nothing here needs.
    found = examples.load(None, settings.eval_split, checkpoint.model, settings.eval_prompts, own_process=True)
    with SampleStore(directory, _identity(plan, checkpoint, found)) as store:
        if store.resumed:
            console.print(f"{directory} has {store.resumed} samples already", highlight=False, soft_wrap=True)

        def say(line: str) -> None:
            console.print(line, highlight=False, soft_wrap=True, markup=False)

        async with (
            _servers(plan, checkpoint, directory, say) as servers,
            _pool(plan, checkpoint, servers) as pool,
            RewardClient(servers.reward, settings.token, deadline=settings.eval_prompt_seconds) as rewards,
        ):
            await run_until_first_ends(pool.wait_ready(settings.eval_start_seconds), servers.watch())
            scorer = Scorer(rewards, settings.eval_lost_seconds)
            workflow = _workflow(plan, checkpoint, scorer)
            evaluation = Evaluation(found.prompts, settings.eval_samples, workflow, pool, scorer.score, store)
            with View(console, checkpoint.name, pool, live=live) as view:
                await run_until_first_ends(evaluation.run(view.show), servers.watch())
            for reason, detail in evaluation.progress.examples.items():
                say(f"left out ({reason}), for example {detail}")
            return report.results_of(
                checkpoint,
                found.prompts,
                store.samples,
                settings.ks,
                settings.eval_samples,
                resamples=settings.eval_resamples,
                seed=settings.seed,
                dataset=plan.dataset,
                split=settings.eval_split,
                workflow=settings.eval_workflow.value,
                left_out=dict(evaluation.progress.left_out)
                | ({"prompt too long": found.too_long} if found.too_long else {}),
                throughput=report.throughput(evaluation.progress),
                servers={"urls": list(pool.servers), "deaths": pool.deaths, "work_moved": pool.moved},
                settings=_identity(plan, checkpoint, found),
            )


def _servers(
    plan: Plan, checkpoint: Checkpoint, directory: Path, say: schedulers.Say
) -> AbstractAsyncContextManager[Servers]:
    if plan.scheduler is SchedulerName.LOCAL:
        return schedulers.local(checkpoint.model, plan.num_servers, directory, plan.variables, say)
    return schedulers.running(plan.urls, _discovery(plan.discover), plan.reward_url, directory, plan.variables, say)


def _discovery(where: str | None) -> Discover | None:
    if where is None:
        return None
    if Path(where).is_dir():
        return schedulers.local_run(Path(where))
    from evaluation import skypilot

    return skypilot.discovery(where)


def _pool(plan: Plan, checkpoint: Checkpoint, servers: Servers) -> ServerPool:
    settings = plan.settings
    return ServerPool(
        servers.urls,
        token=settings.token,
        vocab_size=vocabulary_size(checkpoint.model, "--model"),
        places=settings.eval_concurrency,
        prompt_seconds=settings.eval_prompt_seconds,
        lost_seconds=settings.eval_lost_seconds,
        discover=servers.discover,
        seed_each_completion=settings.engine_deterministic,
    )


def _workflow(plan: Plan, checkpoint: Checkpoint, scorer: Scorer) -> Workflow:
    settings = plan.settings
    sampling = Sampling(settings.max_new_tokens, settings.temperature, settings.top_p, settings.seed)
    if plan.agent is None:
        return SingleTurn(sampling)
    return AgentWorkflow(
        plan.agent,
        sampling,
        scorer.score,
        model=checkpoint.model,
        token=settings.token,
        seconds=settings.eval_prompt_seconds,
    )


def _identity(plan: Plan, checkpoint: Checkpoint, found: Examples) -> dict[str, Any]:
    """What samples depend on. How many there are of a prompt, and of how many prompts, may change."""
    settings = plan.settings
    names = {"max_new_tokens", "temperature", "top_p", "seed", "eval_workflow"}
    fields = settings.model_dump(mode="json", include=names)
    return {
        "weights": checkpoint.fingerprint(),
        **fields,
        **({"eval_agent": settings.eval_agent} if plan.agent is not None else {}),
        **{name: value for name, value in found.recipe.items() if value is not None},
        # A reward-server elsewhere has its own.
        **({"reward_fn": RewardSettings.load().reward_fn} if plan.reward_url is None else {}),
    }
