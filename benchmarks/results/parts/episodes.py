"""Tasks of several turns: an agent with and without its tool, an environment, and self-play."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import demos
from benchmarks.job import Job
from benchmarks.results import job_figures
from benchmarks.results.job_figures import AFTER, Figures
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Result, Results, Run, Settings
from benchmarks.results.tables import paragraph, table
from benchmarks.results.tasks import seeded
from services.environment_server.games import draw_heaps, is_optimal

SEEDS = range(3)
VARIANT = "GRPO"
SHARED: Settings = {"COMPUTE_TYPE": "float32", "MIN_WORKERS": "1", "KEEP_MEMORY": "true"}
PLAYED = demos.ENVIRONMENT_SETTINGS | SHARED | {"ROLLOUT": "environment"}

AGENT, ENVIRONMENT, SELF_PLAY = "tool agent", "guessing game", "Nim against itself"
LEGAL, OPTIMAL = "environment_legal_moves", "environment_optimal_moves"
GREEDY = "eval_"
"""The beginning of the names of figures of greedy games on held-out deals, which only the last step has."""
CALLS, PARSED = "tool_calls_mean", "tool_calls_parsed"


def train_agent(run: Run) -> Result:
    """Run the agent's job group, and evaluate the trained model without agent and tool, too."""
    return job_figures.train(run, job_group=demos.AGENT_JOB_GROUP, columns=(CALLS, PARSED), more=without_tool)


def without_tool(job: Job) -> Figures:
    """Return the trained model's greedy accuracy on the held-out questions without the tool."""
    with TemporaryDirectory() as directory:
        return {f"without_tool{AFTER}": demos.without_tool(job.run_dir / "model", Path(directory))}


train_environment = partial(
    job_figures.train,
    job_group=demos.ENVIRONMENT_JOB_GROUP,
    nodes={"environment-server": 1},
    columns=(LEGAL, OPTIMAL),
    more=lambda job: job_figures.of_last_step(job, [GREEDY + LEGAL, GREEDY + OPTIMAL]),
)
NIM = {"ENVIRONMENT": "nim", "AGENT_MAX_TURNS": "16", "AGENT_MAX_TOKENS": "64"}
BY_TASK = {
    AGENT: Run(AGENT, VARIANT, 0, demos.AGENT_SETTINGS | SHARED | {"ROLLOUT": "agent"}, train_agent),
    ENVIRONMENT: Run(ENVIRONMENT, VARIANT, 0, PLAYED, train_environment),
    SELF_PLAY: Run(SELF_PLAY, VARIANT, 0, PLAYED | NIM, train_environment),
}
RANDOM_GAMES = 5_000


@cache
def random_play() -> float:
    """Return the share of optimal moves of random legal ones, as the figure is taken: by seat and game, over games."""
    rng, shares = random.Random(0), []
    for seed in range(RANDOM_GAMES):
        heaps, seat = draw_heaps(seed), 0
        optimal: list[list[bool]] = [[], []]
        while any(heaps):
            heap, stones = rng.choice([(i, n) for i, size in enumerate(heaps) for n in range(1, size + 1)])
            if (is_right := is_optimal(heaps, heap, stones)) is not None:
                optimal[seat].append(is_right)
            heaps[heap] -= stones
            seat = 1 - seat
        shares += [statistics.fmean(moves) for moves in optimal if moves]
    return statistics.fmean(shares)


RUNS = [replace(run, seed=seed, settings=seeded(run.settings, seed)) for seed in SEEDS for run in BY_TASK.values()]


def show(results: Results) -> str:
    """Return the section: table, figures of the three tasks, and curves."""
    text = f"""
    SmolLM2-135M with the settings of `examples/demo-agent.env` and `examples/demo-environment.env`. The tool agent
    answers products of two numbers of two digits, which the model cannot compute; "without the tool" is the trained
    model's greedy accuracy when it gets the question alone. The guessing game has numbers from 1 to 7 and three
    guesses, which good play always wins. Rewards are means of the last three steps, those of
    [benchmarks.md](benchmarks.md) are of the last step alone and of other questions but for seed 0. In Nim the model
    plays both seats, so its rewards cancel and its accuracy says nothing. What counts is the share of legal moves and,
    among legal moves where one wins, the share that the exact solution plays (Bouton's theorem). In {RANDOM_GAMES:,}
    games of moves drawn at random among the legal ones it is {random_play():.2f}.
    """
    texts = {AGENT: "products, by a tool", ENVIRONMENT: "a number by three guesses", SELF_PLAY: "two or three heaps"}
    shown = [
        ("tool calls an episode, in training", AGENT, CALLS),
        ("accuracy without the tool", AGENT, "without_tool"),
        ("legal moves, in training", SELF_PLAY, LEGAL),
        ("optimal moves, in training", SELF_PLAY, OPTIMAL),
        ("legal moves, greedy", SELF_PLAY, GREEDY + LEGAL),
        ("optimal moves, greedy", SELF_PLAY, GREEDY + OPTIMAL),
    ]
    rows = [(name, task, *job_figures.before_and_after(results, figure)) for name, task, figure in shown]
    plots = [
        curves(f"episodes-{number}", results, task, task)
        for number, task in enumerate((AGENT, ENVIRONMENT))
        if any(result.task == task for result in results)
    ]
    figures = table(("figure", "task", "first step", "last step, or after"), [row for row in rows if row[-1]])
    return "\n\n".join([paragraph(text), job_figures.task_table(results, texts), figures, *plots])


def summary(results: Results) -> list[str]:
    """Return the sentences of the summary."""
    link = "[Tasks of several turns](#tasks-of-several-turns)"
    played = [result for result in results if result.task == SELF_PLAY]
    legal, optimal = (job_figures.before_and_after(played, figure) for figure in (LEGAL, OPTIMAL))
    last = [result.figures[OPTIMAL + AFTER] for result in played if OPTIMAL + AFTER in result.figures]
    chance = random_play()
    place = f"in {sum(figure < chance for figure in last)} of {len(last)} seeds **below** that"
    moves = (
        f"{link}, self-play of Nim, moves in training: legal {' to '.join(legal)}, optimal {' to '.join(optimal)}, "
        f"{place} of random legal moves ({chance:.2f})."
    )
    return [
        *job_figures.sentences([result for result in results if result.task != SELF_PLAY], link),
        *([moves] if played else []),
    ]


PART = Part("episodes", "Tasks of several turns", RUNS, show, summary)
