"""Read the rows as the data-server will, and print their numbers as JSON: ``python -m services.data_server.look``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from services.core import logs, models
from services.core.errors import exit_code_of
from services.core.sources import Source
from services.data_server.dataset import load
from services.data_server.settings import DataSettings, is_on_hub
from services.data_server.tables import hub_name
from services.protocol.prompts import Split

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


def _look(settings: DataSettings, source: Source | None) -> dict[str, Any]:
    """Return the numbers of rows of a source; empty if the hub does not answer."""
    if "--rows" in sys.argv or not Path(settings.model_name or "").expanduser().is_dir():
        settings = settings.model_copy(update={"model_name": None})
    on_hub = is_on_hub(settings.dataset)
    if on_hub and not models.is_listed(hub_name(settings)[0], "dataset"):
        return {}
    dataset = load(settings, source, own_process=True, first=FIRST_ROWS if on_hub else None)
    train, held_out = (len(dataset.catalogues[split]) for split in (Split.TRAIN, Split.TEST))
    refused = {reason: count for reason, count in (dataset.refused | {"too long": dataset.too_long}).items() if count}
    return {"train": train, "held_out": held_out, "refused": refused, "is_whole": not on_hub}


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
