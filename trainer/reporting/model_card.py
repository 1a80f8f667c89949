"""The model card of a run, ``model/README.md``: made from the run directory alone, so that it can be made again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from services.core.endpoints import Task
from services.core.files import atomic_write
from services.run_page.directory import Run

CARD = "README.md"
_OF_THIS_RUN = ("shared_dir", "run_id", "log_level", "model_name")
"""Settings that say nothing about the model, or stand elsewhere in the card."""
_SECRET = "**********"


def write_card(run_dir: Path) -> Path:
    """Write the card of a finished run into its ``model`` directory; return the card's path.

    The card has no secret, because config.json has none, and no path of the machine beyond a file's name.
    """
    run = Run(run_dir)
    card = run_dir / "model" / CARD
    atomic_write(card, "\n".join(_card(run)).encode())
    return card


def _card(run: Run) -> Iterator[str]:
    summary, trainer = run.summary, run.components.get(Task.TRAINER.value, {})
    settings = trainer.get("settings", {})
    method = str(settings.get("advantage", "grpo"))
    base, dataset = _named(summary.get("model")), _named(summary.get("dataset"))
    is_on_hub = not Path(str(summary.get("model"))).exists() and base.count("/") <= 1
    data = ModelCardData(
        base_model=base if is_on_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "verifiable-rewards", method],
    )
    yield f"---\n{data.to_yaml()}\n---"
    yield f"# {run.name}\n"
    yield (
        f"{base}, trained for {summary.get('steps', 0)} steps on {dataset} with verifiable rewards "
        f"(`ADVANTAGE={method}`, `LOSS={settings.get('loss', '')}`).\n"
    )
    yield from _table("| | before | after |\n|---|---|---|", _results(summary))
    yield "## Settings\n\nThose that differ from the defaults, by component:\n"
    yield from _table("| component | setting | value |\n|---|---|---|", _changed(run.components))
    yield "## Software\n"
    packages = dict(trainer.get("packages", {}))
    commit = trainer.get("commit")
    yield from _table("| | |\n|---|---|", [("commit", str(commit))] * bool(commit) + sorted(packages.items()))


def _table(head: str, rows: Any) -> Iterator[str]:
    yield head
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
    yield ""


def _results(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield what was measured before and after training; accuracies with their 95% intervals."""
    if summary.get("accuracy_after") is not None:
        prompts = summary.get("accuracy_after_prompts")
        yield (
            f"accuracy, greedy, {prompts} held-out prompts",
            _accuracy(summary, "before"),
            _accuracy(summary, "after"),
        )
    for source, figures in summary.get("sources", {}).items():
        if (accuracies := figures.get("accuracies")) is not None:
            yield f"accuracy of {source}", f"{accuracies[0]:.3f}", f"{accuracies[-1]:.3f}"
    if summary.get("reward_first") is not None and summary.get("reward_last") is not None:
        steps = summary.get("reward_steps", 1)
        yield (
            f"mean training reward, first and last {'step' if steps == 1 else f'{steps} steps'}",
            f"{summary['reward_first']:.3f}",
            f"{summary['reward_last']:.3f}",
        )


def _accuracy(summary: Mapping[str, Any], when: str) -> str:
    low, value, high = (summary.get(f"accuracy_{when}{part}") for part in ("_low", "", "_high"))
    return "" if value is None else f"{value:.3f} ({low:.3f} to {high:.3f})"


def _changed(components: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield component, variable and value of the settings that differ from their defaults."""
    for component, record in components.items():
        for name in record.get("changed", ()):
            value = record.get("settings", {}).get(name)
            if name not in _OF_THIS_RUN and value != _SECRET:
                yield component, f"`{name.upper()}`", f"`{_named(value)}`"


def _named(value: Any) -> str:
    """Return a value as text; of a path on this machine the name alone."""
    text = str(value)
    return Path(text).name if text.startswith(("/", "~", ".")) else text
