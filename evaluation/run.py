"""The run of a planned evaluation, from the servers' start to the results."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from rich.console import Console

from evaluation import metrics
from evaluation.evaluation import AgentWorkflow, Evaluation, Progress, SingleTurn, Workflow
from evaluation.openai_engine import OpenAIEngine
from evaluation.plan import Plan, Scheduler, in_job_group
from evaluation.servers import Servers, secrets, servers_for
from evaluation.store import open_store
from local_runner import skypilot
from services.agents import EPISODES_AT_ONCE, Program, programs_at_once
from services.clients.agent_episodes import EpisodePlayer
from services.clients.environment import EnvironmentClient
from services.clients.games import BoxedProgram, ToolAgent
from services.clients.gateway import GatewayClient
from services.clients.play import Score
from services.clients.reward import RewardClient
from services.clients.rollout import RolloutClient, generation_seconds
from services.core.endpoints import Endpoint
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.files import write_json
from services.core.models import vocabulary_size
from services.core.settings import Settings
from services.core.tasks import in_background, run_until_first_ends
from services.data_server.settings import DataSettings
from services.gateway.settings import GatewaySettings
from services.http.client import RequestRefusedError
from services.relay import Relay
from services.reward_server.settings import RewardSettings

LOST_SECONDS = 600.0
"""The evaluation gives up after a server has not answered for this long."""
SCORE_TRIES = 3
SCORE_PAUSE_SECONDS = 1.0
AT_ONCE = 1024
"""The most samples of a prompt that engines are asked for at once, so that they compute the prompt once."""
YAML = Path(__file__).with_name("evaluate.yaml")
SERVERS_TASK = "rollout-server"
EVALUATE_TASK = "evaluate"
RESULTS_MARK = "results.json: "
"""The beginning of the line in which a job prints its results."""
UPLOADED = "/models"
"""The directory of a job's nodes for models of this machine."""

Engine = RolloutClient | OpenAIEngine


async def evaluate(plan: Plan) -> None:
    """Evaluate the model of the plan, and show and write the results.

    Raises:
        ConfigurationError: a model or dataset cannot be loaded, or a server refuses requests.
        DependencyLostError: servers do not answer. Finished samples are kept.
    """
    # Without a terminal rich assumes 80 columns, too few for the tables.
    width = None if sys.stdout.isatty() else 160
    console = Console(width=width, soft_wrap=True, highlight=False, markup=False)
    is_elsewhere = plan.servers.starts is Scheduler.SKYPILOT
    results = await (_evaluate_on_cluster if is_elsewhere else _evaluate_here)(plan, console)
    plan.output.mkdir(parents=True, exist_ok=True)
    write_json(plan.output / metrics.RESULTS, results.model_dump())
    metrics.show(console, results)
    console.print(f"written to {plan.output}")
    if in_job_group():
        # A command elsewhere reads them from the log.
        print(RESULTS_MARK + json.dumps(results.model_dump()), flush=True)


async def _evaluate_on_cluster(plan: Plan, console: Console) -> metrics.Results:
    checkpoint = plan.checkpoint
    # Also those that are only in this process's environment, which no node sees.
    settings = (DataSettings.load(), RewardSettings.load(), GatewaySettings.load(), plan.settings)
    ours = {name: value for one in settings for name, value in _variables_of(one).items()}
    variables = {**plan.variables, **ours, "DATASET": DataSettings.load().dataset, "MODEL_NAME": checkpoint.model}
    uploads: dict[str, str] = {}
    name = checkpoint.name.replace(".", "-")
    if checkpoint.is_here:
        # The name tells the samples of two models on the volume apart.
        variables["MODEL_NAME"] = f"{UPLOADED}/{name}-{checkpoint.fingerprint()[:8]}"
        uploads[variables["MODEL_NAME"]] = checkpoint.model
    public = {name: value for name, value in variables.items() if name not in secrets()}
    group = f"evaluate-{name.lower()}"[:40].rstrip("-_")
    text = job_group(group, plan.servers.num_servers or 1, plan.gpus_each, public, uploads)
    # Not asyncio.to_thread, because Ctrl-C would then wait for the end of the job.
    content = await in_background(partial(launch, text, secrets(), console.print))
    identified = {"model": checkpoint.model, "name": checkpoint.name, "step": checkpoint.step}
    return metrics.Results.model_validate(content | identified)


def _variables_of(settings: Settings) -> dict[str, str]:
    """Return the variables that give a job's nodes the same settings; the job has its own model, output and volume."""
    ours = {*Settings.model_fields, "eval_output", "model_name", "gateway_dir"}
    values = settings.model_dump(mode="json", include=settings.model_fields_set - ours, exclude_none=True)
    return {name.upper(): value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


def job_group(name: str, number: int, gpus: int, variables: Mapping[str, str], uploads: Mapping[str, str]) -> str:
    """Return the YAML of an evaluation with ``number`` rollout nodes of ``gpus`` GPUs, and variables in every task.

    ``uploads`` are directories of this machine, by their paths on the nodes that read models.
    """
    text = YAML.read_text("utf-8").replace("\nname: evaluation\n", f"\nname: {name}\n", 1)
    written = skypilot.values(text)
    choices = re.sub(r":\d+", f":{gpus}", written[SERVERS_TASK, "resources.accelerators"])
    changes = {(SERVERS_TASK, "num_nodes"): str(number), (SERVERS_TASK, "resources.accelerators"): choices}
    for task in {task for task, _ in written}:
        given = {f"{skypilot.ENVS}.{variable}": value for variable, value in variables.items()}
        if task in (SERVERS_TASK, EVALUATE_TASK):
            given |= {f"file_mounts.{path}": source for path, source in uploads.items()}
        changes |= {(task, key): skypilot.scalar(value) for key, value in given.items()}
    return skypilot.edited(text, changes)


def launch(text: str, secrets: Mapping[str, str], say: Callable[[str], None]) -> dict[str, Any]:
    """Launch a job group as a managed job, follow the log of its evaluation, and return its results.

    Raises:
        ConfigurationError: SkyPilot is not installed, or does not launch it.
        DependencyLostError: the job ended without results, or its log broke off.
    """
    python = skypilot.interpreter()
    if python is None:
        raise ConfigurationError(f"SkyPilot is not installed: {skypilot.INSTALL}")
    with NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        job, error = skypilot.ask(python, [Path(file.name)], secrets, launch=True)
    if job is None:
        raise ConfigurationError(f"SkyPilot did not launch the evaluation: {error}; try `sky check` and `sky api info`")
    say(f"job {job}; its log: sky jobs logs {job} {EVALUATE_TASK}; to end it: sky jobs cancel {job}")
    command, results = [str(python.with_name("sky")), "jobs", "logs", str(job), EVALUATE_TASK], None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as log:
        for line in log.stdout or ():
            _, mark, rest = line.partition(RESULTS_MARK)
            if mark:
                results = json.loads(rest)
            else:
                say(line.rstrip("\n"))
    if results is None:
        problem = f"the log of job {job} ended with {log.returncode} and no results"
        raise DependencyLostError(f"{problem}; if `sky jobs queue` still has it, first end it by sky jobs cancel {job}")
    found: dict[str, Any] = results
    return found


async def _evaluate_here(plan: Plan, console: Console) -> metrics.Results:
    checkpoint, say = plan.checkpoint, console.print
    if plan.left_out:
        say(f"left out, because this command plays no environments: {', '.join(plan.left_out)}")
    examples = plan.examples()
    identity = plan.identity(examples)
    progress = Progress()
    with open_store(plan.output, identity) as store:
        if store.samples:
            say(f"{plan.output} has {len(store.samples)} samples already")
        async with (
            servers_for(plan, say) as servers,
            _engine(plan, servers.engine) as engine,
            RewardClient(servers.reward, plan.settings.token, deadline=LOST_SECONDS) as rewards,
        ):
            await run_until_first_ends(_admit(engine, servers.start_seconds), servers.watch())
            await run_until_first_ends(rewards.wait_healthy(LOST_SECONDS), servers.watch())
            scorer = partial(rewards.score, tries=SCORE_TRIES, pause_seconds=SCORE_PAUSE_SECONDS)

            async def is_healthy() -> bool:
                return all(await asyncio.gather(engine.is_healthy(), rewards.is_healthy()))

            for source, own in plan.sources.items():
                async with _workflow(plan, source, servers, engine, scorer) as workflow:
                    prompts = examples[source].prompts
                    evaluation = Evaluation(prompts, own.eval_samples, workflow, store, is_healthy, progress)
                    view = metrics.View(console, f"{checkpoint.name} {source}".rstrip())
                    await run_until_first_ends(evaluation.run(view.show), servers.watch())
        for reason, detail in progress.examples.items():
            say(f"left out ({reason}), for example {detail}")
        too_long = sum(of_source.too_long for of_source in examples.values())
        return metrics.results_of(
            checkpoint,
            [prompt for of_source in examples.values() for prompt in of_source.prompts],
            store.samples,
            plan.settings,
            left_out={**progress.left_out, **({"prompt too long": too_long} if too_long else {})},
            dataset=plan.dataset,
            available=sum(of_source.available for of_source in examples.values()),
            throughput=progress.throughput,
            server=servers.engine.url,
            not_given=sorted(engine.shortcomings) if isinstance(engine, OpenAIEngine) else [],
            identity=identity,
        )


def _engine(plan: Plan, address: Endpoint) -> Engine:
    """Return the client of the engines at an address."""
    settings, options, model = plan.settings, plan.servers, plan.checkpoint.model
    places = settings.eval_concurrency * (options.num_servers or 1)
    # Requests of the source with the longest answers take longest.
    seconds = max(LOST_SECONDS, *(generation_seconds(own.max_new_tokens) for own in plan.sources.values()))
    if options.is_foreign:
        key, arguments = options.key or settings.token, settings.chat_template_args
        limits: dict[str, Any] = {"places": places, "seconds": seconds}
        is_chat = options.endpoint is not None
        return OpenAIEngine(address.url, model, key, is_chat=is_chat, **limits, template_args=arguments)
    return RolloutClient(
        address,
        settings.token,
        vocab_size=vocabulary_size(model, "--model"),
        model_name=model,
        max_concurrency=places,
        deadline_seconds=seconds,
        seed_each_completion=settings.engine_deterministic,
    )


async def _admit(engine: Engine, seconds: float) -> None:
    """Wait ``seconds`` for the engines, and check that they take our requests.

    A training run's workers serve the trained adapters and the model; the adapters are used.

    Raises:
        ConfigurationError: they do not.
        DependencyLostError: they do not answer.
    """
    if isinstance(engine, OpenAIEngine):
        await engine.admit(seconds)
        return
    await engine.wait_healthy(seconds)
    try:
        await engine.request("GET", "/v1/models", deadline=seconds)
    except RequestRefusedError as error:
        if error.status in (401, 403):
            raise ConfigurationError(f"{error}; set JOBGROUP_TOKEN to the servers' own") from error
    await engine.use_adapter_if_served()


@asynccontextmanager
async def _workflow(
    plan: Plan, source: str, servers: Servers, engine: Engine, scorer: Score
) -> AsyncIterator[Workflow]:
    """Yield the way to answer a source's prompts."""
    settings, agent = plan.sources[source], plan.agents[source]
    if agent is None and source not in plan.tasks:
        yield SingleTurn(settings, engine, scorer, at_once=1 if isinstance(engine, OpenAIEngine) else AT_ONCE)
        return
    assert servers.gateway is not None
    assert isinstance(engine, RolloutClient)
    at_once = programs_at_once() if isinstance(agent, Program) else EPISODES_AT_ONCE
    places = asyncio.Semaphore(min(at_once, settings.eval_concurrency * (plan.servers.num_servers or 1)))
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(GatewayClient(servers.gateway, settings.token))
        await run_until_first_ends(gateway.wait_healthy(LOST_SECONDS), servers.watch())
        if source in plan.tasks:
            assert servers.environments is not None
            environments = EnvironmentClient([servers.environments], settings.token, deadline=LOST_SECONDS)
            await stack.enter_async_context(environments)
            await run_until_first_ends(environments.wait_healthy(LOST_SECONDS), servers.watch())
            command, limits = settings.agent_command, (settings, settings.max_new_tokens, environments)
            agent = BoxedProgram(command, *limits, patience=gateway.deadline) if command else ToolAgent(environments)
        elif isinstance(agent, Program):
            agent = await stack.enter_async_context(Relay(agent))
        assert agent is not None
        player = EpisodePlayer(gateway, plan.checkpoint.model, scorer, settings, patience=gateway.deadline)
        yield AgentWorkflow(settings, player, agent, places, engine.lora_path)
