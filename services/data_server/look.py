"""Read the rows as the data-server will, and print their numbers as JSON: ``python -m services.data_server.look``.

With ``--items FILE`` it also writes what a reward gets of each training row, with the ground truth as the answer, and
the number of the prompt's tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from services.core import logs, models
from services.core.errors import exit_code_of
from services.core.sources import Source
from services.data_server.dataset import Dataset, load
from services.data_server.settings import DataSettings, is_on_hub
from services.data_server.tables import hub_name
from services.protocol.prompts import Split
from services.protocol.rewards import RewardItem

FIRST_ROWS = 1000
"""Rows of each split of a dataset on the hub that are read, without a download of the others."""


def main() -> None:
    """Print the numbers of rows, with SOURCES by source; without numbers if the hub does not answer.

    With ``--rows`` no prompts are rendered.

    Raises:
        ConfigurationError: the data-server would refuse the dataset.
    """
    logs.configure("data-server", "error")
    found = DataSettings.load().of_sources(_look)
    print(json.dumps(found.get("", {"sources": found})))


def _look(settings: DataSettings, source: Source) -> dict[str, Any]:
    """Return the numbers of rows of a source; empty if the hub does not answer."""
    if "--rows" in sys.argv or not Path(settings.model_name or "").expanduser().is_dir():
        settings = settings.model_copy(update={"model_name": None})
    on_hub = is_on_hub(settings.dataset)
    if on_hub and not models.is_dataset_listed(hub_name(settings)[0]):
        return {}
    dataset = load(settings, source, own_process=True, first=FIRST_ROWS if on_hub else None)
    train, held_out = (len(dataset.catalogues[split]) for split in (Split.TRAIN, Split.TEST))
    first = dataset.rows.first_refused
    left_out = {reason: count for reason, count in dataset.left_out.items() if count}
    refused = {f"{r} (first row {first[r]})" if r in first else r: count for r, count in left_out.items()}
    if "--items" in sys.argv:
        _write_items(dataset, source.name, Path(sys.argv[sys.argv.index("--items") + 1]))
    return {"train": train, "held_out": held_out, "refused": refused, "is_whole": not on_hub}


def _write_items(dataset: Dataset, source: str, path: Path) -> None:
    """Write a line for each prompt: its id, what a reward gets of the ground truth as its answer, and its tokens."""
    catalogue = dataset.catalogues[Split.TRAIN]
    with path.open("a", encoding="utf-8") as file:
        for place in range(len(catalogue)):
            if (prompt := catalogue.record(place)) is not None:
                truth, row = prompt["ground_truth"], catalogue.row(place).get("row")
                item = RewardItem(prompt=prompt["prompt"], response=truth, ground_truth=truth, row=row, source=source)
                file.write(json.dumps([prompt["id"], item.model_dump(mode="json"), len(prompt["prompt_ids"])]) + "\n")


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
