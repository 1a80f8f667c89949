"""A digest of a run's prompts: the same wherever the files lie, and another once a prompt differs."""

from __future__ import annotations

from services.data_server.prompts import PromptMaker
from services.data_server.settings import DataSettings
from services.data_server.sources import Rows


def fingerprint(settings: DataSettings, train: Rows, test: Rows, maker: PromptMaker) -> dict[str, str]:
    """Return a line for each part of what a run's place in the prompts refers to; equal lines mean equal prompts."""
    shuffled = "shuffled" if settings.data_shuffle else "as in the source"
    return {
        "training prompts": f"{len(train)} (digest {train.digest()})",
        "held-out prompts": f"{len(test)} (digest {test.digest()})",
        "order": f"{shuffled}, DATA_SEED {settings.data_seed}, CURRICULUM {settings.curriculum.value}",
        "form": f"PROMPT_STYLE {settings.prompt_style.value}, at most {settings.max_prompt_tokens} tokens "
        f"(digest {maker.digest()})",
    }
