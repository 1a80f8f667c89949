"""The certificate of a run with faults: what came of each, and whether it trained what an undisturbed run trains."""

from __future__ import annotations

import filecmp
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from services.core.endpoints import Task
from services.core.files import read_object, read_records
from services.run_page.directory import OUTCOME, RUNNING, Run
from services.run_page.progress import failed
from trainer.reporting.group_records import NOT_SETTINGS, GroupRecords

LIMITS = "links between components are not cut, because that needs root and network namespaces"


@dataclass(frozen=True)
class Fault:
    """A planned fault: the seconds after the first step, the node, its kind, and the seconds of a stop."""

    at: float
    node: str
    kind: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.node}" + (f" for {self.seconds} s" if self.seconds else "")


@dataclass(frozen=True)
class Strike:
    """A fault as it came: the seconds after the first step, and those until the task's nodes were healthy again.

    ``healthy_after`` is None if the run ended before, or HEALTHY_SECONDS passed.
    """

    fault: Fault
    at: float
    healthy_after: float | None


def certify(run_dir: Path, strikes: Sequence[Strike], undisturbed: Path | None) -> dict[str, Any]:
    """Return what chaos.json has: the faults, the end of the run, its groups, tokens and weights, and what is wrong."""
    outcome = read_object(run_dir / OUTCOME)
    lines = read_records(run_dir / "metrics.jsonl")
    records, steps = GroupRecords(run_dir), [line["step"] for line in lines]
    heads = [records.head(step) for step in records.steps]
    uses = Counter(entry.group_id for head in heads for entry in head.groups if not entry.is_replayed)
    twice = sorted(group for group, count in uses.items() if count > 1)
    is_running = Run(run_dir).state == RUNNING
    is_equal, weights = (None, "the run is under way") if is_running else compare(run_dir, undisturbed)
    lost = [strike.fault.node for strike in strikes if strike.healthy_after is None]
    wrong = {
        "no fault came before the end of the run; give a shorter --every": not strikes,
        f"not healthy again: {', '.join(lost)}": lost and is_running,
        f"the run did not succeed: {Run(run_dir).error or outcome.get('reason', 'it has no outcome')}": (
            not is_running and outcome.get("exit_code") != 0
        ),
        f"metrics.jsonl lacks steps, or has some twice: {steps}": steps != [*range(1, len(steps) + 1)],
        "no step has a record of its groups (RECORD_GROUPS), so nobody knows which were trained twice": not heads,
        f"groups trained twice: {', '.join(twice)}": twice,
        weights: is_equal is False,
    }
    return {
        "run": str(run_dir),
        "faults": [asdict(strike) for strike in strikes],
        "limits": LIMITS,
        "outcome": outcome or None,
        "steps": len(steps),
        "steps_with_records": len(heads),
        "groups": len(uses),
        "trained_twice": twice,
        "tokens": _tokens(lines),
        "failed_completions": failed(Run(run_dir).steps()),
        "weights_equal": is_equal,
        "weights": weights,
        "problems": [problem for problem, is_so in wrong.items() if is_so],
    }


def compare(run_dir: Path, undisturbed: Path | None) -> tuple[bool | None, str]:
    """Return whether the weights of two runs are equal to the bit, in words, too; None where that says nothing."""
    if undisturbed is None:
        return None, "not compared, because there is no undisturbed run"
    ours, theirs = (_settings(path) for path in (run_dir, undisturbed))
    if ours.get((Task.TRAINER, "mode")) == "async":
        return None, "not compared: asynchronous runs differ in any case, because collectors run ahead of the trainer"
    if changed := sorted({f"{task} {name}" for (task, name), _ in ours.items() ^ theirs.items()}):
        return None, f"not compared, because {undisturbed.name} has other settings: {', '.join(changed)}"
    if (device := read_object(undisturbed / "summary.json").get("device")) != "cpu":
        return None, f"not compared, because training on {device} is not reproducible to the bit"
    weights = [path for folder in ("model", "critic") for path in undisturbed.glob(f"{folder}/*.safetensors")]
    pairs = {str(path.relative_to(undisturbed)): path for path in weights}
    if not pairs:
        return None, f"not compared, because {undisturbed.name} has no weights in model/"
    differing = [
        name
        for name, path in pairs.items()
        if not (run_dir / name).exists() or not filecmp.cmp(run_dir / name, path, shallow=False)
    ]
    what = "different from" if differing else "equal to the bit to"
    return not differing, f"{what} those of {undisturbed.name}: {', '.join(differing or pairs)}"


def as_markdown(certificate: Mapping[str, Any]) -> str:
    """Return a certificate as a page."""
    outcome, tokens = certificate["outcome"] or {"reason": "under way", "restarts": {}}, certificate["tokens"]
    healthy: dict[str, list[str]] = {}
    for strike in certificate["faults"]:
        row = f"| {strike['fault']['node']} | {strike['fault']['kind']} |"
        after = strike["healthy_after"]
        healthy.setdefault(row, []).append("not before the end" if after is None else f"{after} s")
    twice = f"{len(certificate['trained_twice'])} of {certificate['groups']}"
    rows = {
        "run": f"{outcome['reason']}, {certificate['steps']} steps",
        "restarts": _counts(outcome["restarts"]),
        "groups trained twice": f"{twice}, in the {certificate['steps_with_records']} steps that have a record",
        "tokens in completions": f"{tokens['sampled']:.0f}",
        "tokens lost": _counts(tokens["lost"]) if tokens["has_account"] else "counted for episodes only",
        "failed completions": certificate["failed_completions"] or "none",
        "weights": certificate["weights"],
        "limits": certificate["limits"],
    }
    lines = [
        f"# Chaos: {Path(certificate['run']).name} {'FAILED' if certificate['problems'] else 'passed'}",
        "",
        *[f"- **{problem}**" for problem in certificate["problems"]],
        *[f"- {name}: {value}" for name, value in rows.items()],
        "",
        "| component | fault | times | healthy after |",
        "|---|---|---|---|",
        *[f"{row} {len(after)} | {', '.join(after)} |" for row, after in sorted(healthy.items())],
    ]
    return "\n".join(lines)


def _counts(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {count:.0f}" for name, count in counts.items()) or "none"


def _tokens(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tokens in completions, and those that the gateway's account of episodes counts as lost, by reason."""
    start, last = "episode_tokens_lost_", lines[-1] if lines else {}
    return {
        "sampled": sum(line.get("completion_tokens", 0) for line in lines),
        "has_account": "episode_tokens_engines" in last,
        "lost": {name.removeprefix(start): count for name, count in last.items() if name.startswith(start)},
    }


def _settings(run_dir: Path) -> dict[tuple[str, str], str]:
    """Return the settings of all components as JSON, without those on which no step depends."""
    components = read_object(run_dir / "config.json").get("components", {})
    return {
        (task, name): orjson.dumps(value).decode()
        for task, record in components.items()
        for name, value in record["settings"].items()
        if name not in NOT_SETTINGS
    }
