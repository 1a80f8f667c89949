"""The run of a planned evaluation: model by model, from the servers' start to the results."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from evaluation import launchers, report, skypilot
from evaluation.checkpoints import Checkpoint
from evaluation.clusters import Watch
from evaluation.evaluation import AgentWorkflow, Evaluation, Progress, SingleTurn, Workflow, score
from evaluation.plan import Examples, Plan, load_examples
from evaluation.pool import LOST_SECONDS, ServerPool
from evaluation.report import View
from evaluation.samples import open_store
from evaluation.server import OpenAIServer, RolloutServer, Server, parse_url, prompt_seconds
from evaluation.settings import Api, SchedulerName
from services.agents import EPISODES_AT_ONCE
from services.clients.agent_episodes import EpisodePlayer
from services.clients.player import Score
from services.clients.reward import RewardClient
from services.core.files import write_json
from services.core.models import vocabulary_size
from services.core.settings import Settings
from services.core.tasks import in_background, run_until_first_ends
from services.data_server.settings import DataSettings
from services.gateway.settings import GatewaySettings
from services.programs import Program, programs_at_once
from services.relay import Relay
from services.reward_server.settings import RewardSettings

AT_ONCE = 1024
"""The most samples of a prompt that a rollout server is asked for at once, so that it computes the prompt once."""
UPLOADED = "/models"
"""The directory of a job's nodes for models of this machine."""


async def evaluate(plan: Plan) -> None:
    """Evaluate each model of the plan, and show and write the results.

    Raises:
        ConfigurationError: a model or dataset cannot be loaded, or a server refuses requests.
        DependencyLostError: servers do not answer. Finished samples are kept.
        ScoringLostError: the reward-server does not answer. Finished samples are kept.
    """
    # Without a terminal rich assumes 80 columns, too few for the tables.
    width = None if sys.stdout.isatty() else 160
    console = Console(width=width, soft_wrap=True, highlight=False, markup=False)
    everything = []
    for checkpoint in plan.checkpoints:
        if plan.scheduler is SchedulerName.SKYPILOT:
            results = await _evaluate_on_cluster(plan, checkpoint, console)
        else:
            results = await _evaluate_here(plan, checkpoint, console)
        directory = plan.directory(checkpoint)
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / report.RESULTS, results.model_dump())
        everything.append(results)
    content: Mapping[str, Any] = everything[0].model_dump()
    if len(everything) > 1:
        content = {"checkpoints": [results.model_dump() for results in everything]}
        write_json(plan.output / report.RESULTS, content)
        report.write_curve(plan.output, everything)
    report.show(console, everything)
    console.print(f"written to {plan.output}")
    if launchers.in_job_group():
        # A launcher elsewhere reads them from the log.
        print(skypilot.RESULTS_MARK + json.dumps(content), flush=True)


async def _evaluate_on_cluster(plan: Plan, checkpoint: Checkpoint, console: Console) -> report.Results:
    # Also those that are only in this process's environment, which no node sees.
    settings = (DataSettings.load(), RewardSettings.load(), GatewaySettings.load(), plan.settings)
    variables = {
        **plan.variables,
        **{name: value for one in settings for name, value in _variables_of(one).items()},
        "DATASET": DataSettings.load().dataset,
        "MODEL_NAME": checkpoint.model,
    }
    uploads: dict[str, str] = {}
    if checkpoint.is_here:
        # The name tells the samples of two models on the volume apart.
        variables["MODEL_NAME"] = f"{UPLOADED}/{checkpoint.name}-{checkpoint.fingerprint()[:8]}"
        uploads[variables["MODEL_NAME"]] = checkpoint.model
    secrets = launchers.secrets()
    launch = partial(
        skypilot.launch,
        f"evaluate-{checkpoint.name.lower()}"[:40].rstrip("-._"),
        plan.servers.allocation,
        {name: value for name, value in variables.items() if name not in secrets},
        secrets,
        uploads,
        console.print,
    )
    # Not asyncio.to_thread, because Ctrl-C would then wait for the end of the job.
    content = await in_background(launch)
    identified = {"model": checkpoint.model, "name": checkpoint.name, "step": checkpoint.step}
    return report.Results.model_validate(content | identified)


def _variables_of(settings: Settings) -> dict[str, str]:
    """Return the variables that give a job's nodes the same settings; the job has its own model, output and volume."""
    ours = {*Settings.model_fields, "eval_output", "model_name", "gateway_dir"}
    values = settings.model_dump(mode="json", include=settings.model_fields_set - ours, exclude_none=True)
    return {name.upper(): value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


async def _evaluate_here(plan: Plan, checkpoint: Checkpoint, console: Console) -> report.Results:
    settings = plan.settings
    directory = plan.directory(checkpoint)
    say = console.print
    examples = _examples(plan, checkpoint, say)
    too_long = sum(of_source.too_long for of_source in examples.values())
    identity = plan.identity(checkpoint, examples)
    with open_store(directory, identity) as store:
        if store.samples:
            say(f"{directory} has {len(store.samples)} samples already")
        await _check_endpoints(plan, checkpoint)
        async with (
            launchers.servers_for(plan, checkpoint.model, directory, say) as started,
            ServerPool(
                started.urls,
                _connector(plan, checkpoint),
                places=settings.eval_concurrency,
                discover=started.discover,
            ) as pool,
            RewardClient(started.reward, settings.token, deadline=LOST_SECONDS) as rewards,
        ):
            await run_until_first_ends(pool.wait_ready(started.start_seconds), started.watch())
            await run_until_first_ends(rewards.wait_healthy(LOST_SECONDS), started.watch())
            scorer: Score = partial(score, rewards)
            progress = Progress()
            for source, own in plan.sources.items():
                prompts, questions = examples[source].prompts, own.eval_session_questions
                async with _workflow(plan, source, checkpoint, pool, scorer, directory, say) as (workflow, watch):
                    evaluation = Evaluation(
                        prompts, own.eval_samples, workflow, scorer, store, questions, progress=progress
                    )
                    with View(console, f"{checkpoint.name} {source}".rstrip(), pool) as view:
                        await run_until_first_ends(evaluation.run(view.show), started.watch(), pool.watch(), watch())
            for reason, detail in progress.examples.items():
                say(f"left out ({reason}), for example {detail}")
            return report.results_of(
                checkpoint,
                [prompt for of_source in examples.values() for prompt in of_source.prompts],
                store.samples,
                settings,
                left_out={**progress.left_out, **({"prompt too long": too_long} if too_long else {})},
                dataset=plan.dataset,
                available=sum(of_source.available for of_source in examples.values()),
                throughput=progress.throughput,
                servers={"urls": list(pool.servers), "deaths": pool.deaths, "work_moved": pool.moved},
                not_given=sorted({name for server in pool.servers.values() for name in server.shortcomings}),
                identity=identity,
            )


def _examples(plan: Plan, checkpoint: Checkpoint, say: Callable[[str], None]) -> dict[str, Examples]:
    """Return the prompts of each source, with token ids if its servers take them; say which sources are left out."""
    if plan.left_out:
        say(f"left out, because this command plays no environments: {', '.join(plan.left_out)}")
    needs_ids = not plan.servers.is_foreign or plan.servers.openai_api is Api.COMPLETIONS
    model = checkpoint.model if needs_ids else None
    return load_examples(plan.settings.eval_split, model, plan.settings.eval_prompts, plan.sources)


async def _check_endpoints(plan: Plan, checkpoint: Checkpoint) -> None:
    """Refuse endpoints that do not serve the model, before a reward-server is started in vain."""
    if plan.servers.endpoints and not launchers.in_job_group():
        urls = [parse_url(url, is_api=True).url for url in plan.servers.endpoints]
        async with ServerPool(urls, _connector(plan, checkpoint), places=1) as endpoints:
            await endpoints.wait_ready(launchers.START_SECONDS)


@asynccontextmanager
async def _workflow(
    plan: Plan,
    source: str,
    checkpoint: Checkpoint,
    pool: ServerPool,
    scorer: Score,
    directory: Path,
    say: Callable[[str], None],
) -> AsyncIterator[tuple[Workflow, Watch]]:
    """Yield the way to answer a source's prompts, and what raises an error once a program of its own has failed.

    An agent gets a gateway in front of the servers, as in training.
    """
    settings, agent = plan.sources[source], plan.agents[source]
    if agent is None:
        yield SingleTurn(settings, pool, at_once=1 if plan.servers.is_foreign else AT_ONCE), launchers.wait_forever
        return
    servers = max(len(pool.servers), plan.servers.allocation.data)
    at_once = min(
        programs_at_once() if isinstance(agent, Program) else EPISODES_AT_ONCE, settings.eval_concurrency * servers
    )
    async with (
        pool.engine(settings.token) as engine,
        launchers.gateway_for(plan, checkpoint.model, engine, directory, say) as (gateway, watch),
        Relay(agent) if isinstance(agent, Program) else nullcontext(agent) as answering,
    ):
        player = EpisodePlayer(
            gateway,
            checkpoint.model,
            scorer,
            settings,
            patience=gateway.deadline,
        )
        yield AgentWorkflow(settings, pool, player, answering, asyncio.Semaphore(at_once)), watch


def _connector(plan: Plan, checkpoint: Checkpoint) -> Callable[[str], Server]:
    """Return the maker of a pool's servers."""
    # Requests of the source with the longest answers take longest.
    settings, options = max(plan.sources.values(), key=lambda own: own.max_new_tokens), plan.servers
    if options.is_foreign:
        key = plan.key or settings.token

        def connect(url: str) -> OpenAIServer:
            places, seconds = settings.eval_concurrency, prompt_seconds(settings)
            server = OpenAIServer(url, checkpoint.model, options.openai_api, key, places, seconds)
            server.template_args = settings.chat_template_args
            return server

        return connect
    size = vocabulary_size(checkpoint.model, "--model")
    return lambda url: RolloutServer(url, settings, checkpoint.model, size)
