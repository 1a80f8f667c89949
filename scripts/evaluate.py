"""``grpo evaluate``: the accuracy of checkpoints on a data set, over many inference servers.

Prompts, rollout client and reward code are those of training. The inference servers are started here, run already, or
are started by SkyPilot. A killed evaluation continues when the command is repeated; see docs/evaluation.md.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from evaluation import launchers
from evaluation.node import Allocation, parse_allocation
from evaluation.plan import Plan, ServerOptions
from evaluation.run import evaluate
from evaluation.samples import SAMPLES, SampleStore
from evaluation.settings import MATH_AGENT, Api, Backend, EvaluationSettings, SchedulerName, WorkflowName
from local_runner import spec
from services.core import logs
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.tasks import run_until_signal
from services.run_page.directory import find_run, named_run

Models = Annotated[
    list[str] | None,
    Option("--model", help="Hugging Face name or directory; several make a curve."),
]
RunName = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="Id or directory of a run: its kept models are evaluated. Default, where neither a model nor a server is "
        "named: the newest run below runs/.",
    ),
]
Dataset = Annotated[
    str | None, Option(help="gsm8k, arithmetic, reasoning_gym:NAME, a Hugging Face dataset, a .jsonl or .parquet file.")
]
Split = Annotated[str | None, Option(help="test, train or all.")]
Limit = Annotated[int | None, Option(help="Only this many prompts, the first ones.")]
Samples = Annotated[int | None, Option(help="Samples of each prompt, for avg@k, pass@k and maj@k.")]
Ks = Annotated[str | None, Option(help="Each k, with commas; default powers of two up to --samples.")]
Temperature = Annotated[float | None, Option(help="Of the samples; default 1.")]
MaxNewTokens = Annotated[int | None, Option(help="Longest completion; default 512.")]
Workflow = Annotated[WorkflowName | None, Option(help="One completion, or an agent's episode.")]
AgentName = Annotated[
    str | None, Option(help="The agent, as module:function; default AGENT of the settings, else a math agent.")
]
AgentCommand = Annotated[
    str | None, Option(help="The agent as a shell command: task as JSON on its input, endpoint in OPENAI_BASE_URL.")
]
SessionQuestions = Annotated[
    int | None, Option(min=1, help="Questions that an agent answers in one conversation; default 1.")
]
Scheduler = Annotated[SchedulerName | None, Option(help="Default: endpoints where some are given, else local.")]
BackendOption = Annotated[Backend, Option(help="What serves the model on this machine: a rollout node, or vLLM.")]
NumServers = Annotated[int | None, Option(min=1, help="Servers to start; default 1.")]
AllocationOption = Annotated[
    str | None,
    Option("--allocation", help="Servers in shorthand: d12p1t2 is 12, each on 1 x 2 GPUs (pipeline x tensor)."),
]
Urls = Annotated[
    list[str] | None, Option(help="A running router or engine, such as http://127.0.0.1:30000. Repeatable.")
]
Check = Annotated[
    bool, Option("--check", help="Only answer the first prompt, such as by an agent before its run, and print it.")
]
DryRun = Annotated[bool, Option("--dry-run", help="Print the batch file of --scheduler slurm, and start nothing.")]
Endpoints = Annotated[
    list[str] | None,
    Option("--endpoint", help="Any OpenAI-compatible server, such as http://127.0.0.1:8000/v1. Repeatable."),
]
ApiOption = Annotated[
    Api | None, Option(help="How an --endpoint is asked: conversations, or completions of token ids; default chat.")
]
ApiKeyEnv = Annotated[str | None, Option(help="The variable that has the key of --endpoint.")]
Discover = Annotated[str | None, Option(help="Use servers of SkyPilot whose name begins so.")]
RewardUrl = Annotated[str | None, Option(help="A running reward-server; by default this command starts one.")]
Stop = Annotated[
    list[str] | None, Option(help="A text that ends a completion, such as Question: after examples. Repeatable.")
]
Concurrency = Annotated[int | None, Option(help="Prompts in flight at one server; default 64.")]
Seed = Annotated[int | None, Option(help="Of the sampling; default 0.")]
Output = Annotated[Path | None, Option(help="Where to write; default below runs/evaluations/. Resumes what is there.")]
Env = Annotated[list[str] | None, Option(help="NAME=VALUE for us and the servers. Repeatable.")]
EnvFiles = Annotated[list[Path] | None, Option(help="File of NAME=VALUE lines, such as a training run's. Repeatable.")]


SETTINGS = {
    "split": "eval_split",
    "limit": "eval_prompts",
    "samples": "eval_samples",
    "k": "eval_k",
    "temperature": "temperature",
    "max_new_tokens": "max_new_tokens",
    "stop": "eval_stop",
    "session_questions": "eval_session_questions",
    "concurrency": "eval_concurrency",
    "seed": "seed",
}
"""The setting that an option of the command line overrides."""


def main(
    context: typer.Context,
    run: RunName = None,
    model: Models = None,
    dataset: Dataset = None,
    split: Split = None,
    limit: Limit = None,
    samples: Samples = None,
    k: Ks = None,
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    stop: Stop = None,
    workflow: Workflow = None,
    agent: AgentName = None,
    agent_command: AgentCommand = None,
    session_questions: SessionQuestions = None,
    scheduler: Scheduler = None,
    backend: BackendOption = Backend.ROLLOUT,
    num_servers: NumServers = None,
    allocation: AllocationOption = None,
    check: Check = False,
    dry_run: DryRun = False,
    url: Urls = None,
    endpoint: Endpoints = None,
    api: ApiOption = None,
    api_key_env: ApiKeyEnv = None,
    discover: Discover = None,
    reward_url: RewardUrl = None,
    concurrency: Concurrency = None,
    seed: Seed = None,
    output: Output = None,
    env: Env = None,
    env_file: EnvFiles = None,
) -> None:
    """Evaluate checkpoints over many inference servers. Writes results.json and samples.jsonl."""
    variables = spec.env_files(env_file or []) | spec.assignments(env or [], "--env")
    variables |= {} if dataset is None else {"DATASET": dataset}
    os.environ.update(variables)
    settings, servers = _settings(context.params), _servers(context.params)
    logs.configure("evaluate", "warning")
    run_dir = run_directory(run, is_named=bool(model or url or endpoint or discover))
    with tempfile.TemporaryDirectory(prefix="check-") as scratch:
        output = Path(scratch) if check else output
        plan = Plan(settings, models=model or [], run_dir=run_dir, servers=servers, output=output, variables=variables)
        code = _run(plan, show_samples=check)
    raise typer.Exit(code)


def _settings(options: Mapping[str, Any]) -> EvaluationSettings:
    """Return the settings: those of the environment, over which the options of the command line win.

    Raises:
        ConfigurationError: the options contradict each other, or a value is not allowed.
    """
    workflow, agent, command = (options[name] for name in ("workflow", "agent", "agent_command"))
    overrides = {setting: options[option] for option, setting in SETTINGS.items()}
    overrides |= _agent(workflow, agent, command)
    overrides |= {"eval_prompts": 1, "eval_samples": 0} if options["check"] else {}
    settings = EvaluationSettings.load(**overrides)
    if settings.workflow is WorkflowName.AGENT and (workflow, agent, command) == (None, None, None):
        name = f"AGENT={settings.agent}" if settings.agent else f"AGENT_COMMAND={settings.agent_command}"
        print(f"evaluate: {name} is set and answers; --workflow single-turn leaves it out", file=sys.stderr)
    return settings


def _servers(options: Mapping[str, Any]) -> ServerOptions:
    return ServerOptions(
        scheduler=options["scheduler"],
        backend=options["backend"],
        allocation=_allocation(options["num_servers"], options["allocation"]),
        urls=options["url"] or (),
        discover=options["discover"],
        endpoints=options["endpoint"] or (),
        api=options["api"],
        api_key_env=options["api_key_env"] or "",
        reward_url=options["reward_url"],
        is_dry_run=options["dry_run"],
    )


def _run(plan: Plan, *, show_samples: bool) -> int:
    """Run a planned evaluation, or print its batch file for a dry run; return the exit code.

    Raises:
        DependencyLostError: servers do not answer; the message says how to continue.
    """
    if plan.servers.is_dry_run:
        print(launchers.slurm_script(plan, plan.checkpoints[0].model, plan.output), end="")
        return 0
    continues = f"the same command continues from {plan.output}"
    if plan.scheduler is SchedulerName.SKYPILOT:
        continues = "a job that was launched continues; see sky jobs queue"
    try:
        code = asyncio.run(run_until_signal(evaluate(plan), f"evaluate: stopped by {{}}; {continues}"))
    except DependencyLostError as error:
        raise DependencyLostError(f"{error}; the same command continues from what is done") from error
    if show_samples and not code:
        _show_samples(plan.output)
    return code


def _show_samples(output: Path) -> None:
    """Print the conversations below ``output`` with their figures and rewards."""
    for path in output.rglob(SAMPLES):
        with path.open("rb+") as file:
            samples = SampleStore(file).samples.values()
        for sample in samples:
            answered = {"role": "assistant", "content": sample.completion}
            for message in sample.messages or [{"role": "user", "content": sample.prompt}, answered]:
                calls = [call["function"] for call in message.get("tool_calls") or []]
                print(f"\n{message['role']}: {message.get('content') or ''}", *calls)
            result = sample.result
            reward = None if result is None else result.reason if result.reward is None else result.reward
            print(f"\nturns {sample.turns}, tokens {sample.completion_tokens}, reward {reward}")


def run_directory(run: str | None, *, is_named: bool) -> Path | None:
    """Return the directory of the run; None where options or MODEL_NAME name a model or a server instead."""
    if run is not None:
        return Path(run) if named_run(run) is None and Path(run).is_dir() else find_run(run).path
    return None if is_named or os.environ.get("MODEL_NAME") else find_run(None).path


def _allocation(num_servers: int | None, text: str | None) -> Allocation:
    if text is None:
        return Allocation(data=num_servers or 1)
    if num_servers is not None:
        raise ConfigurationError("--allocation and --num-servers are both given; d of the allocation is the number")
    return parse_allocation(text)


def _agent(workflow: WorkflowName | None, agent: str | None, command: str | None) -> dict[str, str | None]:
    """Return the values that the options give AGENT and AGENT_COMMAND; None leaves one to the environment.

    Raises:
        ConfigurationError: the options contradict each other.
    """
    if workflow is WorkflowName.SINGLE_TURN:
        if agent or command:
            raise ConfigurationError("--workflow single-turn has no agent; leave out that option, or the agent")
        agent, command = "", ""
    elif agent is not None:
        command = command or ""
    elif command is not None:
        agent = ""
    elif workflow is WorkflowName.AGENT and not (os.environ.get("AGENT") or os.environ.get("AGENT_COMMAND")):
        agent = MATH_AGENT
    return {"agent": agent, "agent_command": command}
