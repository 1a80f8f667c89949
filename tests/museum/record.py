"""Records runs for test_recordings.py: ``python -m tests.museum.record [NAME...]``, by default all that it lacks.

A recording is what the rules read of a run: columns of metrics.jsonl, settings, held-out prompts. A run takes some ten
seconds of a processor.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import orjson

from services.core.endpoints import Task
from services.run_page.directory import Run
from tests.models import ROOT, made_once
from tests.museum.faults import EXHIBITS
from tests.museum.healthy import HEALTHY, chosen
from tests.museum.job import run_job

RECORDINGS = Path(__file__).with_name("recordings.jsonl")
COLUMNS = (
    *(
        "step",
        "reward_mean",
        "reward_counts",
        "failures",
        "kl_behaviour",
        "importance_weight",
        "entropy",
        "entropy_all",
    ),
    *("staleness_max", "truncation_rate", "length_mean", "trained_tokens", "grad_norm", "learning_rate", "workers"),
    *("publish_share", "accuracy", "accuracy_high", "explained_variance", "teacher_k1", "teacher_overlap", "facts"),
    *("workers_refused", "served_version", "policy_version"),
)
"""The columns that rules read, and those of sources."""
SETTINGS = (
    *("updates_per_batch", "epochs_per_batch", "max_new_tokens", "publish_type", "lora_rank", "method", "advantage"),
)
KEY = 6
"""The kept characters of a question's key."""


def recording(name: str, run: Run) -> dict[str, Any]:
    """Return the recording of a run."""
    rows = [orjson.loads(line) for line in (run.path / "metrics.jsonl").read_bytes().splitlines()]
    kept = [{n: v for n, v in row.items() if n in COLUMNS or n.startswith(("groups/", "zero_var"))} for row in rows]
    for row in kept:
        row["facts"]["prompts"] = [[e, p, key[:KEY], source] for e, p, key, source in row["facts"]["prompts"]]
        row["failures"] = [[reason, count, message[:80]] for reason, count, message in row["failures"]]
    settings, names = run.settings(Task.TRAINER), dict.fromkeys(name for row in kept for name in row)
    return {
        "name": name,
        "settings": {name: settings[name] for name in SETTINGS},
        "accuracy_before": run.summary.get("accuracy_before_low"),
        "held_out": [key[:KEY] for key in run.held_out()],
        # Of a share of 1, four digits are not enough to see whether it has changed.
        "rows": {n: [row.get(n) if n == "publish_share" else short(row.get(n)) for row in kept] for n in names},
    }


def short(value: Any) -> Any:
    """Return a value whose numbers have four digits."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(f"{value:.4g}")
    if isinstance(value, list):
        return [short(one) for one in value]
    return {name: short(one) for name, one in value.items()} if isinstance(value, dict) else value


def rows_of(recorded: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a recording, as metrics.jsonl had them."""
    names = list(recorded["rows"])
    for values in zip(*recorded["rows"].values(), strict=True):
        yield {name: value for name, value in zip(names, values, strict=True) if value is not None}


def play(name: str, directory: Path, model: Path, teacher: Path, **changes: str) -> Run:
    """Have the run of a name, with changed settings, trained below a directory, and return it.

    Raises:
        Exception: what ended it.
    """
    exhibit = EXHIBITS.get(name)
    settings = HEALTHY[name] if exhibit is None else {"MAX_STEPS": str(exhibit.steps)} | exhibit.settings
    settings = chosen(settings | changes, directory, teacher)
    with nullcontext() if exhibit is None else exhibit.patch():
        return run_job(directory, model, engines=int(settings.pop("engines", 1)), **settings)


def main(names: list[str]) -> None:
    """Add the recordings of the named runs, or of those that are not there."""
    lines = RECORDINGS.read_bytes().splitlines() if RECORDINGS.exists() else []
    recorded = {one["name"]: one for one in map(orjson.loads, lines)}
    model = made_once("tiny-model", [ROOT / "toys/arithmetic.py"], "toys.arithmetic")
    teacher = made_once("tiny-teacher", [ROOT / "toys/arithmetic.py"], "tests.museum.teacher")
    for name in names or [name for name in (*HEALTHY, *EXHIBITS) if name not in recorded]:
        before = sum(os.times()[:4])
        with tempfile.TemporaryDirectory() as directory:
            try:
                recorded[name] = recording(name, play(name, Path(directory), model, teacher))
            except Exception as error:  # noqa: BLE001  # the others are recorded all the same
                print(f"{name}: not recorded, {error!r}", file=sys.stderr)
                continue
        print(f"{name}: {sum(os.times()[:4]) - before:.1f} s", file=sys.stderr)
        RECORDINGS.write_bytes(b"".join(orjson.dumps(recorded[name]) + b"\n" for name in sorted(recorded)))


if __name__ == "__main__":
    main(sys.argv[1:])
