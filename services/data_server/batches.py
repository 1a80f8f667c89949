"""Batches of prompts from a cursor on: the dataset, the order of its prompts, and the cursors of its consumers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge

from services.data_server.dataset import Dataset, load
from services.data_server.order import EpochOrder, walk
from services.data_server.settings import Curriculum, DataSettings
from services.data_server.state import ServerState
from services.http.problems import ProblemError
from services.protocol.prompts import Cursor, DataStats, Split

SERVED = Counter("data_prompts_served", "Prompts given out.", ["split"])
EPOCH = Gauge("data_epoch", "The epoch of the last prompt given out.", ["split"])
REFUSED_ROWS = Gauge("data_rows_refused", "Rows of the source that were left out.", ["reason"])
TOO_LONG = Gauge("data_prompts_too_long", "Prompts met that have more than MAX_PROMPT_TOKENS tokens.")

_RENDERED_AHEAD = 2048
"""Prompts rendered before the first request, because the first requests of a run come all at once."""


@dataclass(frozen=True)
class Batches:
    """The prompts of a dataset in the order of their epochs."""

    dataset: Dataset
    orders: dict[Split, EpochOrder]
    state: ServerState
    curriculum: Curriculum

    @classmethod
    def load(cls, settings: DataSettings, *, own_process: bool = False) -> Batches:
        """Load dataset and state. In a process of the data-server's ``own`` the state lies in the run directory.

        Raises:
            ConfigurationError: the dataset, the tokenizer or the state cannot be loaded.
        """
        dataset = load(settings, own_process=own_process)
        train, test = dataset.catalogues[Split.TRAIN], dataset.catalogues[Split.TEST]
        seed, curriculum = settings.data_seed, settings.curriculum
        # Each dataset and order that a run was ever given has its own state.
        identity = f"{settings.dataset} ({len(train)} prompts, DATA_SEED {seed}, {curriculum.value})"
        digest = hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()
        state = ServerState(settings.run_dir / "data" / digest if own_process else None)
        orders = {
            Split.TRAIN: EpochOrder(
                len(train),
                seed=seed,
                curriculum=curriculum,
                rates_at_start=lambda epoch: state.rates_at_start(epoch, len(train)),
            ),
            Split.TEST: EpochOrder(len(test), seed=0, curriculum=Curriculum.SOURCE),
        }
        train.prefetch(orders[Split.TRAIN].of(0)[:_RENDERED_AHEAD].tolist())
        for reason, count in dataset.refused.items():
            REFUSED_ROWS.labels(reason).set(count)
        return cls(dataset, orders, state, curriculum)

    def batch(self, split: Split, cursor: Cursor, batch_size: int) -> tuple[list[dict[str, Any]], Cursor]:
        """Return the prompts from ``cursor`` on and the cursor after them.

        Raises:
            ProblemError: 422, the cursor is beyond the split, or a whole epoch has no prompt that qualifies.
        """
        catalogue, order = self.dataset.catalogues[split], self.orders[split]
        self.check(split, cursor)
        catalogue.prefetch(order.of(cursor.epoch)[cursor.position : cursor.position + batch_size].tolist())
        found, after = walk(
            order,
            cursor,
            batch_size,
            lambda place: catalogue.record(place) is not None,
            # Held-out prompts are for evaluation, each once: a batch never runs on into a second round.
            ends_with_epoch=split is Split.TEST,
        )
        if not found and split is Split.TRAIN:
            raise ProblemError(
                422,
                f"no prompt of {split.value} qualifies: all are skipped or longer than MAX_PROMPT_TOKENS",
            )
        prompts = [
            {**record, "epoch": epoch, "position": position}
            for place, epoch, position in found
            if (record := catalogue.record(place)) is not None
        ]
        SERVED.labels(split.value).inc(len(prompts))
        EPOCH.labels(split.value).set(after.epoch)
        TOO_LONG.set(self.dataset.too_long)
        return prompts, after

    def check(self, split: Split, cursor: Cursor) -> None:
        """Raise ProblemError 422 if a cursor is beyond its split."""
        size = len(self.orders[split])
        if cursor.position > size:
            raise ProblemError(422, f"position {cursor.position} is beyond the {size} prompts of {split.value}")

    def stats(self) -> dict[str, Any]:
        """Return the content of GET /stats."""
        # Success rates change nothing in the source's own order, which is "off" on the wire.
        curriculum = Curriculum.OFF if self.curriculum is Curriculum.SOURCE else self.curriculum
        return DataStats(
            source=self.dataset.name,
            train_prompts=len(self.orders[Split.TRAIN]),
            test_prompts=len(self.orders[Split.TEST]),
            rows=self.dataset.rows,
            refused={**self.dataset.refused, "too long": self.dataset.too_long},
            cursors=self.state.cursors(),
            curriculum=curriculum.value,
            fingerprint=self.dataset.fingerprint,
        ).model_dump()
