"""Read the rows as the data-server will, and print their numbers as JSON: ``python -m services.data_server.look``.

The local runner calls it before a run, with ``--rows`` to leave out the prompts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from services.core import logs
from services.core.errors import ConfigurationError, exit_code_of, first_line
from services.data_server.arrow_tables import hub_name
from services.data_server.dataset import load
from services.data_server.files import is_on_hub
from services.data_server.settings import DataSettings
from services.protocol.prompts import Split

FIRST_ROWS = 1000
"""Rows of each split of a dataset on the hub that are read, without a download of the others."""
HUB_SECONDS = 10.0


def main() -> None:
    """Print the numbers of rows, or the reason why the hub was not asked.

    Raises:
        ConfigurationError: the data-server would refuse the dataset.
    """
    logs.configure("data-server", "error")
    settings = DataSettings.load()
    if "--rows" in sys.argv or not Path(settings.model_name or "").expanduser().is_dir():
        settings = settings.model_copy(update={"model_name": None})
    on_hub = is_on_hub(settings.dataset)
    if on_hub and (reason := _unreachable(hub_name(settings)[0])):
        print(json.dumps({"unread": reason}))
        return
    found = load(settings, own_process=True, first=FIRST_ROWS if on_hub else None)
    train, held_out = (len(found.catalogues[split]) for split in (Split.TRAIN, Split.TEST))
    refused = {reason: count for reason, count in (found.refused | {"too long": found.too_long}).items() if count}
    print(json.dumps({"train": train, "held_out": held_out, "refused": refused, "is_whole": not on_hub}))


def _unreachable(dataset: str) -> str | None:
    """Return why the hub does not answer, None if it has the dataset."""
    try:
        HfApi().dataset_info(dataset, timeout=HUB_SECONDS)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigurationError(
            f"DATASET {dataset!r}: the Hugging Face hub has no such dataset, or it is private; check the name, give "
            "--secret HF_TOKEN, or set DATASET to a .jsonl or .parquet file"
        ) from error
    except Exception as error:  # noqa: BLE001  # its own errors, those of its HTTP library, and OSError
        return first_line(error)
    return None


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
